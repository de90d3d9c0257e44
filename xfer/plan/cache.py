"""Parts of sub-plans on disk, by the digest of their inputs and the rank: a cache, which may forget anything at any time.

The digest is `planner.key_of` the inputs, and covers the planner's own code; if that code cannot be read, nothing is kept.
Store only parts on which all ranks have agreed. Not here: the files (file_cache.py), what a part is (part.py).
"""

from __future__ import annotations

import os

from xfer.errors import ProtocolError
from xfer.plan.file_cache import FileCache
from xfer.plan.part import PlanPart
from xfer.plan.subplan import CODE
from xfer.sources import has_sources

SUFFIX = ".xferplan"
KEEPS = has_sources(*CODE)
_MAGIC = b"xferplan\x02"


class PlanCache:
    """At most `max_bytes` of parts in `directory`, which processes may share; the least recently used go first."""

    def __init__(self, directory: str | os.PathLike[str], max_bytes: int = 1 << 30):
        self._files = FileCache(directory, SUFFIX, _MAGIC, max_bytes)

    def get(self, key: str, rank: int) -> PlanPart | None:
        """The stored part of these inputs and this rank; None if there is none, or it is damaged or of another version."""
        body = self._files.get(_name(key, rank)) if KEEPS else None
        if body is None:
            return None
        try:
            part = PlanPart.from_bytes(body)
        except ProtocolError:  # of another version of the planner
            return None
        return part if (part.key, part.program.rank) == (key, rank) else None

    def put(self, part: PlanPart) -> bool:
        """Store a part. Returns whether it was stored; failure raises nothing."""
        return KEEPS and self._files.put(_name(part.key, part.program.rank), part.to_bytes())


def _name(key: str, rank: int) -> str:
    if rank < 0:
        raise ValueError(f"{rank} is no joint rank")
    return f"{key}-{rank}"
