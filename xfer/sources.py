"""Which code this is: digests of xfer's own source files. Two processes that must compute the same thing compare them.

A number that somebody has to raise is forgotten one day. Not here: what they are compared for (plan/subplan.py,
cli/tracing.py).
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


@cache
def digest_of(*parts: str) -> str:
    """Of all Python files of these packages and modules of xfer ("plan", "cli/trace_child.py"), 16 hexadecimal digits.

    A package that was installed without its sources has an equal digest for every version.
    """
    h = hashlib.blake2b(digest_size=8)
    root = resources.files("xfer")
    for part in sorted(parts):
        for name, file in sorted(_files(root.joinpath(part), part)):
            h.update(name.encode() + b"\0" + hashlib.blake2b(file.read_bytes()).digest())
    return h.hexdigest()


def _files(at: Traversable, name: str) -> list[tuple[str, Traversable]]:
    if at.is_dir():
        return [found for inner in at.iterdir() for found in _files(inner, f"{name}/{inner.name}")]
    return [(name, at)] if at.is_file() and name.endswith(".py") else []
