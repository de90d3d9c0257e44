"""Sub-plans on disk, by the digest of their inputs. A cache only ever saves time: whatever is odd about a file, it is
planned anew.

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
from xfer.plan.planner import plan_key, plan_replica
from xfer.plan.subplan import SubPlan

if TYPE_CHECKING:
    from xfer.trace.catalog import Catalog

SUFFIX = ".xferplan"
_MAGIC = b"xferplan\x01"


class PlanCache:
    """At most `max_bytes` of sub-plans in `directory`; the least recently used go first. Thread- and process-safe."""

    def __init__(self, directory: str | os.PathLike[str], max_bytes: int = 1 << 30):
        self.directory, self.max_bytes = Path(directory), max_bytes

    def plan(
        self,
        catalog: Catalog,
        sources: Sequence[Inventory],
        takers: Sequence[Inventory],
        options: PlanOptions | None = None,
    ) -> SubPlan:
        """`plan_replica`, or what it gave for equal inputs before. Raises what plan_replica raises."""
        options = options or PlanOptions()
        key = plan_key(catalog, sources, takers, options)
        found = self.get(key)
        if found is None:
            found = plan_replica(catalog, sources, takers, options)
            self.put(found)
        return found

    def get(self, key: str) -> SubPlan | None:
        """The sub-plan of these inputs, or None: absent, unreadable, cut short, changed, of another version or other
        inputs.
        """
        path = self._path(key)
        try:
            if path.stat().st_size > col.MAX_BYTES:
                return None
            data = path.read_bytes()
        except OSError:
            return None
        head = len(_MAGIC) + 32
        body = memoryview(data)[head:]  # tens of megabytes a replica: looked at where they lie
        if data[: len(_MAGIC)] != _MAGIC or data[len(_MAGIC) : head] != col.digest([body]).encode():
            return None
        try:
            plan = SubPlan.from_bytes(body, whole=True)
        except ProtocolError:  # of another version of the planner
            return None
        if plan.key != key:
            return None
        with suppress(OSError):
            os.utime(path)
        return plan

    def put(self, plan: SubPlan) -> bool:
        """Whether the plan was stored. A full disk, a read-only directory or a plan larger than the cache is no
        error.
        """
        body = plan.to_bytes()
        data = _MAGIC + col.digest([body]).encode() + body
        if len(data) > min(self.max_bytes, col.MAX_BYTES):
            return False
        beside = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            handle, beside = tempfile.mkstemp(dir=self.directory, prefix=".", suffix=".part")
            with os.fdopen(handle, "wb") as f:
                f.write(data)
            os.replace(beside, self._path(plan.key))
        except OSError:
            if beside is not None:
                with suppress(OSError):
                    os.unlink(beside)
            return False
        self._shrink(keep=self._path(plan.key))
        return True

    def _path(self, key: str) -> Path:
        if not key or not all(c in "0123456789abcdef" for c in key):
            raise ValueError(f"{key!r} is no plan key")
        return self.directory / f"{key}{SUFFIX}"

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
