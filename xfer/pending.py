"""Which layer-wise optimizers of this process may still lack parameters, so that an adapter that was told of none finishes their
gathers before bytes leave. Knows no adapter and no optimizer: whoever gathers says so, whoever reads asks. Modules hold who
says so, not the optimizer: what is on its way when an optimizer is dropped is on its way all the same.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Gathers(Protocol):
    """`named`: (name, parameter) of all that is gathered. `drain`: bring every one of them here; collective over the ranks
    among which they are gathered, and nothing when they are here. to_write: and wait until they may be changed, too."""

    named: Sequence[tuple[str, torch.Tensor]]

    def drain(self, to_write: bool = True) -> None: ...


_known: list[weakref.ref[Gathers]] = []  # in the order in which they were made, which all ranks share


class _IgnoredTensors(threading.local):
    """Of a thread, not of the process: a drain runs on one of its own, and may be left behind there while other adapters read."""

    def __init__(self) -> None:
        self.ids: list[int] = []


_left_alone = _IgnoredTensors()


def announce(gathers: Gathers) -> None:
    _known[:] = [r for r in _known if r() is not None] + [weakref.ref(gathers)]


def forget(gathers: Gathers) -> None:
    _known[:] = [r for r in _known if r() not in (None, gathers)]


@contextmanager
def left_alone(gathers: Gathers) -> Iterator[None]:
    """For an adapter that reads only what is here already."""
    _left_alone.ids.append(id(gathers))
    try:
        yield
    finally:
        _left_alone.ids.remove(id(gathers))


def drain_over(tensors: Iterable[torch.Tensor]) -> None:
    """Finish the gathers of whatever lies in the memory of one of these tensors, or is read while they are made (copies in another
    dtype): those were made of old values perhaps, so make them again. Collective, as `Gathers.drain`."""
    known = [g for g in (r() for r in _known) if g is not None and id(g) not in _left_alone.ids]
    if not known:
        return
    with _ReadRecorder() as reads:
        memory = ({t.untyped_storage().data_ptr() for t in tensors} | reads.memory) - {0}  # of what has no bytes
    for gathers in known:
        if any(p.untyped_storage().data_ptr() in memory for _, p in gathers.named):
            gathers.drain(to_write=False)


class _ReadRecorder(TorchDispatchMode):
    """Notes the memory of every plain tensor that operations are given. Others are nobody's to gather."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        plain = (x for x in tree_leaves((args, kwargs)) if type(x) in (torch.Tensor, torch.nn.Parameter))
        self.memory.update(x.untyped_storage().data_ptr() for x in plain)
        return func(*args, **(kwargs or {}))
