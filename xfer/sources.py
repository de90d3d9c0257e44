"""Which code this is: digests of xfer's version and its own source files. Two processes that must compute the same thing
compare them.

A version number would have to be raised by hand, and could be forgotten. Not here: the comparisons (plan/subplan.py), and the
files that are kept on disk under digests (plan/cache.py, cli/layouts).
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from xfer import __version__

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


@cache
def digest_of(*parts: str) -> str:
    """Digest of xfer's version and of all Python files of these packages and modules of xfer ("plan", "cli/describe.py"); 16
    hexadecimal digits.

    If xfer was installed without its sources, only the version counts: bytecode contains its Python version and the folder in
    which it was compiled, so the environments of one job would not agree.
    """
    h = hashlib.blake2b(__version__.encode() + b"\0", digest_size=8)
    for part in sorted(parts):
        for name, file in sorted(_files(part)):
            if name.endswith(".py"):
                h.update(name.encode() + b"\0" + hashlib.blake2b(file.read_bytes()).digest())
    return h.hexdigest()


@cache
def has_sources(*parts: str) -> bool:
    """Whether `digest_of` sees all code of these parts. Where it does not, nothing is kept on disk under it: code that was changed
    would read what the code before it had kept.
    """
    for part in parts:
        names = {name for name, _ in _files(part)}
        sources = {n for n in names if n.endswith(".py")}
        if not sources or {n.removesuffix("c") for n in names} != sources:
            return False
    return True


def _files(part: str) -> list[tuple[str, Traversable]]:
    """Sources, and bytecode that Python would run without one."""

    def walk(at: Traversable, name: str) -> list[tuple[str, Traversable]]:
        if at.is_dir():
            inner = (i for i in at.iterdir() if i.name != "__pycache__")
            return [found for i in inner for found in walk(i, f"{name}/{i.name}")]
        return [(name, at)] if at.is_file() and name.endswith((".py", ".pyc")) else []

    return walk(resources.files("xfer").joinpath(part), part)
