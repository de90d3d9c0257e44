"""The gathers of this process that may still lack parameters. A trainer's adapter finishes them before it sends bytes.

This module knows no adapter and no optimizer. Code that gathers parameters calls `announce`; code that reads them calls
`drain_over`. Only weak references are kept. The model's modules hold the announced object, because gathers that have started go on
after their optimizer is dropped.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Gathers(Protocol):
    """Gathers that can be finished."""

    @property
    def named(self) -> Sequence[tuple[str, torch.Tensor]]:
        """(name, parameter) of all gathered parameters."""

    def drain(self, to_write: bool = True) -> None:
        """Finishes the gathers. Collective over the ranks among which they run; does nothing if all parameters are here.

        Args:
            to_write: Also wait until the parameters may be changed.
        """


_known: list[weakref.ref[Gathers]] = []  # in the order of creation, the same on all ranks


class _IgnoredTensors(threading.local):
    """Ids of the gathers that this thread leaves alone. A drain runs on a thread of its own, and other adapters may read while it is
    stuck there."""

    def __init__(self) -> None:
        self.ids: list[int] = []


_left_alone = _IgnoredTensors()


def announce(gathers: Gathers) -> None:
    """Adds gathers that `drain_over` finishes from now on."""
    _known[:] = [r for r in _known if r() is not None] + [weakref.ref(gathers)]


def forget(gathers: Gathers) -> None:
    """Removes gathers that `announce` added."""
    _known[:] = [r for r in _known if r() not in (None, gathers)]


@contextmanager
def left_alone(gathers: Gathers) -> Iterator[None]:
    """Inside, `drain_over` skips these gathers. For an adapter that reads only parameters that are here already."""
    _left_alone.ids.append(id(gathers))
    try:
        yield
    finally:
        _left_alone.ids.remove(id(gathers))


def known() -> list[Gathers]:
    """Returns the announced gathers that this thread does not leave alone."""
    return [g for g in (r() for r in _known) if g is not None and id(g) not in _left_alone.ids]


def drain_over(tensors: Iterable[torch.Tensor]) -> None:
    """Finishes all gathers whose parameters lie in the memory of these tensors or are read while `tensors` is iterated (copies in
    another dtype, for example). Such copies may have old values, so the caller makes them again. Collective, as `Gathers.drain`.
    """
    some = known()
    if not some:
        return
    memory: set[int] = set()

    def note(t: torch.Tensor) -> None:
        if type(t) in (torch.Tensor, torch.nn.Parameter):  # subclasses are never gathered
            memory.add(t.untyped_storage().data_ptr())

    with OperandWatch(note):
        memory.update({t.untyped_storage().data_ptr() for t in tensors})
    memory.discard(0)  # the address of empty tensors
    for gathers in some:
        if any(p.untyped_storage().data_ptr() in memory for _, p in gathers.named):
            gathers.drain(to_write=False)


class OperandWatch(TorchDispatchMode):
    """Calls `read` with every tensor operand of every operation, before it runs."""

    def __init__(self, read: Callable[[torch.Tensor], None]):
        super().__init__()
        self._read = read

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for x in (*args, *(kwargs or {}).values()):
            for y in x if isinstance(x, list | tuple) else (x,):
                if isinstance(y, torch.Tensor):
                    self._read(y)
        return func(*args, **(kwargs or {}))
