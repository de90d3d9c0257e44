"""Binding tables: which memory a storage number of a program stands for right now, and whether that changed.

Types and comparison only. Reading pointers and allocation ids from a framework's objects is the trainers' and
engines' work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

KINDS = ("local", "same process", "ipc", "vmm", "wire")
"""How a process reaches a storage: its own memory, another rank's in this process, an IPC mapping, imported VMM, not
at all.
"""

Kind = Literal["local", "same process", "ipc", "vmm", "wire"]
Change = Literal["same", "moved", "changed"]


@dataclass(frozen=True, slots=True)
class Binding:
    """One storage. Two bindings are equal only if they are the same memory with the same life behind it.

    A pointer and a size are not enough: memory that was freed and allocated again comes back at its old address, and
    an engine that slept wakes on fresh empty memory there. `allocation` tells allocations apart (0 where memory has
    no id, on CPUs), `generation` counts sleeps and wakes, `allocator` names the kind of memory.
    """

    root: str
    pointer: int
    nbytes: int
    kind: Kind = "local"
    allocation: int = 0
    allocator: str = ""
    generation: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.root}: kind {self.kind!r}, one of {', '.join(KINDS)} is needed")


def compare(old: Sequence[Binding], new: Sequence[Binding]) -> Change:
    """ "same": every number stands for the memory it stood for. "moved": the same storages, by name and size and in
    order, but some lie elsewhere (patch the table, the program holds). "changed": other storages or sizes (plan
    again).
    """
    if [(b.root, b.nbytes) for b in old] != [(b.root, b.nbytes) for b in new]:
        return "changed"
    return "same" if list(old) == list(new) else "moved"


def moved(old: Sequence[Binding], new: Sequence[Binding]) -> tuple[int, ...]:
    """Numbers of the storages whose binding differs; of tables that `compare` does not call "changed"."""
    return tuple(i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
