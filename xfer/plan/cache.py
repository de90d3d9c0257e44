"""Parts of sub-plans on disk, by the digest of their inputs and the rank. A cache only ever saves time: whatever is odd
about a file, it is planned anew.

Here lives the file handling. Several processes may share a directory: files are written beside and renamed into
place, and a reader sees a whole file or none.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from xfer.errors import ProtocolError
from xfer.plan import columns as col
from xfer.plan.inventory import Inventory
from xfer.plan.options import PlanOptions
from xfer.plan.part import Part
from xfer.plan.planner import plan_key, plan_replica

if TYPE_CHECKING:
    from xfer.trace.catalog import Catalog

SUFFIX = ".xferplan"
_MAGIC = b"xferplan\x02"


class PlanCache:
    """At most `max_bytes` of parts in `directory`; the least recently used go first. Thread- and process-safe."""

    def __init__(self, directory: str | os.PathLike[str], max_bytes: int = 1 << 30):
        self.directory, self.max_bytes = Path(directory), max_bytes

    def plan(
        self,
        catalog: Catalog,
        sources: Sequence[Inventory],
        takers: Sequence[Inventory],
        rank: int,
        options: PlanOptions | None = None,
    ) -> Part:
        """Joint rank `rank`'s part of `plan_replica`, or of what it gave for equal inputs before. Raises what
        plan_replica raises.
        """
        options = options or PlanOptions()
        found = self.get(plan_key(catalog, sources, takers, options), rank)
        if found is None:
            found = Part.of(plan_replica(catalog, sources, takers, options), rank)
            self.put(found)
        return found

    def get(self, key: str, rank: int) -> Part | None:
        """The part of these inputs, or None: absent, unreadable, cut short, changed, of another version, other inputs
        or another rank.
        """
        path = self._path(key, rank)
        try:
            if path.stat().st_size > col.MAX_BYTES:
                return None
            data = path.read_bytes()
        except OSError:
            return None
        head = len(_MAGIC) + 32
        body = memoryview(data)[head:]  # megabytes at times: looked at where they lie
        if data[: len(_MAGIC)] != _MAGIC or data[len(_MAGIC) : head] != col.digest([body]).encode():
            return None
        try:
            part = Part.from_bytes(body)
        except ProtocolError:  # of another version of the planner
            return None
        if (part.key, part.program.rank) != (key, rank):
            return None
        with suppress(OSError):
            os.utime(path)
        return part

    def put(self, part: Part) -> bool:
        """Whether the part was stored. A full disk, a read-only directory or a part larger than the cache is no
        error.
        """
        body = part.to_bytes()
        data = _MAGIC + col.digest([body]).encode() + body
        if len(data) > min(self.max_bytes, col.MAX_BYTES):
            return False
        beside, path = None, self._path(part.key, part.program.rank)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            handle, beside = tempfile.mkstemp(dir=self.directory, prefix=".", suffix=".part")
            with os.fdopen(handle, "wb") as f:
                f.write(data)
            os.replace(beside, path)
        except OSError:
            if beside is not None:
                with suppress(OSError):
                    os.unlink(beside)
            return False
        self._shrink(keep=path)
        return True

    def _path(self, key: str, rank: int) -> Path:
        if not key or not all(c in "0123456789abcdef" for c in key) or rank < 0:
            raise ValueError(f"{key!r}, {rank}: no plan key and rank")
        return self.directory / f"{key}-{rank}{SUFFIX}"

    def _shrink(self, keep: Path) -> None:
        files = []
        with suppress(OSError):
            for path in self.directory.glob(f"*{SUFFIX}"):
                with suppress(OSError):  # another process may remove it first
                    stat = path.stat()
                    files.append((path == keep, stat.st_mtime_ns, path.name, stat.st_size, path))
        total = sum(f[3] for f in files)
        for newest, _, _, size, path in sorted(files):
            if total <= self.max_bytes or newest:
                break
            with suppress(OSError):
                path.unlink()
                total -= size
