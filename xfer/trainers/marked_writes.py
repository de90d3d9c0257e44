"""Megatron-Core's distributed optimizer as a writer (kernels/written.py): its copies of masters into parameters mark what they change.

The optimizer's own `_copy_main_params_to_model_params` runs, but its copies go through `write`. So this module needs no list of the
parameters that it copies, of their places, or of those that it leaves to other code (FP8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from xfer.kernels.written import announce, wanted, write

_COPY, _SHARDS, _MASTERS = "_copy_main_params_to_model_params", "shard_float16_groups", "shard_fp32_from_float16_groups"


def mark_writes(optimizer: Any) -> None:
    """Let a distributed optimizer, or those in a chained one, mark their changes from now on. Other optimizers stay as they are."""
    for inner in getattr(optimizer, "chained_optimizers", ()):
        mark_writes(inner)
    if all(hasattr(optimizer, name) for name in (_COPY, _SHARDS, _MASTERS)):
        copy = getattr(optimizer, _COPY)
        if not isinstance(copy, _MarkingCopy):
            marked = _MarkingCopy(optimizer, copy)
            setattr(optimizer, _COPY, marked)  # the optimizer keeps it
            announce(marked)


class _MarkingCopy:
    """The method `copy` of an optimizer, with copies that mark."""

    def __init__(self, optimizer: Any, copy: Callable[[], None]):
        self._optimizer, self._copy = optimizer, copy

    def __call__(self) -> None:
        with _Writes() if wanted() else nullcontext():  # a dispatch mode costs time for each operator
            self._copy()

    def writes(self) -> Iterator[torch.Tensor]:
        """Yield the parts of parameters that this rank has masters of. Without a master the inner optimizer writes them itself."""
        groups = zip(getattr(self._optimizer, _SHARDS), getattr(self._optimizer, _MASTERS), strict=True)
        for shards, masters in groups:
            yield from (s for s, master in zip(shards, masters, strict=True) if s is not None and master is not None)


class _Writes(TorchDispatchMode):
    """Collects copies of masters, since many tensors are written faster at once. It writes them before an operator that is neither a view
    nor such a copy, and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        copies = func is torch.ops.aten.copy_.default
        if not (func.is_view or copies and args[1].dtype == torch.float32):
            self._write()  # the operator may read 16-bit tensors that are not written yet
        if copies:
            self._waiting.append(args[:2])
            return args[0]
        return func(*args, **(kwargs or {}))

    def __exit__(self, *exc):
        super().__exit__(*exc)
        self._write()

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        write(waiting)
