"""Trainer side: which part of each exported tensor lies where in which local parameter, read from the framework's
own export.

The export runs on twins of the parameters that one rank owns, under `ExportWatch`; collectives are answered
symbolically, so no peer takes part and no byte moves. Each exported tensor is noted by name; parts of other ranks
are dropped. The union over ranks is checked elsewhere, from the fragments. Not here: how a framework is made to
export (xfer/trainers).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from xfer.errors import LayoutError, Unsupported, XferError
from xfer.trace import collectives
from xfer.trace.expr import Foreign
from xfer.trace.rules import EMPTY
from xfer.trace.settle import Ledger, spec_of
from xfer.trace.traced import Traced
from xfer.trace.view import contiguous
from xfer.trace.watch import Watch, aten, tensors_among, unseen


def twin(p: torch.Tensor) -> torch.Tensor:
    """The same tensor without bytes: a meta storage of its own, offset 0, p's shape, strides, dtype and plain
    attributes.

    Unsupported for a tensor subclass (quantized, DTensor): its plain twin would skip what the subclass does on
    export, and would claim that its raw bytes may be copied.
    """
    if type(p) not in (torch.Tensor, torch.nn.Parameter):
        raise Unsupported(f"a parameter of class {type(p).__name__}: its bytes are not its values")
    t = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")
    for name, value in vars(p).items():
        setattr(t, name, value)
    return t


class ExportWatch(Watch):
    """Runs an export symbolically. Use as a context manager around the framework's code, `note_export` each result,
    then `result()`.

        with collectives.objects_stay_home(), ExportWatch({name: twin(p) ...}) as watch:
            for name, tensor in framework_export(...):
                watch.note_export(name, tensor)
        traced = watch.result()

    `errors`: what went wrong so far, one line each; the caller may add lines of its own (a task that raised).
    `result` raises them all at once. `ops` counts the operators and collectives that were seen. May be entered
    several times.
    """

    def __init__(self, sources: Mapping[str, torch.Tensor]):
        super().__init__(sources)
        self.sources = dict(sources)
        self._ledger = Ledger({n: spec_of(n, t) for n, t in sources.items()}, checkpoint_is_source=False)
        self._shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}

    @property
    def errors(self) -> list[str]:
        return self._ledger.errors

    def dispatch(self, func, args: tuple, kwargs: dict) -> object:
        if func.namespace == "c10d":
            return collectives.answer(self, func, args, kwargs)
        if func.namespace == "_c10d_functional":
            return collectives.answer_functional(self, func, args, kwargs)
        if func is aten.empty_like.default and not any(kwargs.values()) and _plain(args[0]):
            # A receive buffer of a gather, of which a model with many experts makes tens of thousands. Torch works
            # out its strides in Python, ten times slower than this; for a row-major tensor they are its own.
            out = torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device)
            self.new_store(out)
            return out
        return super().dispatch(func, args, self._on_meta(func, args, kwargs))

    def _on_meta(self, func, args: tuple, kwargs: dict) -> dict:
        """Receive buffers and copies of meta tensors stay on meta, also when another device was asked for.

        Empty buffers of floats have no values yet and become meta tensors; tensors with real values (integers for index
        arithmetic, and `arange` or `tensor` of any dtype) stay real.
        """
        device = kwargs.get("device")
        if device is None and func is not aten.empty.memory_format:
            return kwargs
        if func in EMPTY:
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            if dtype.is_floating_point or (device is not None and torch.device(device).type not in ("cpu", "meta")):
                return {**kwargs, "device": torch.device("meta"), "pin_memory": False}
            return kwargs
        if any(a.device.type == "meta" for a in tensors_among(args)):
            return {**kwargs, "device": torch.device("meta")}
        return kwargs

    def note_export(self, name: str, tensor: torch.Tensor) -> bool:
        """Enter an exported tensor. Returns whether any part of it is this rank's. A name may be entered again, with the
        same shape.
        """
        with unseen():
            seen = (tensor.shape, tensor.dtype)
            if self._shapes.setdefault(name, seen) != seen:
                (first, a), (again, b) = self._shapes[name], seen
                self.errors.append(f"{name}: exported as {a} {list(first)} and as {b} {list(again)}")
                return False
            store = self.store(tensor)
            if store is not None and type(store.origin) is Foreign and tensor.element_size() == store.itemsize:
                return False  # all of another rank's: most names, where there are many experts
            spec = spec_of(name, tensor)
            try:
                pieces = self.flows(contiguous(spec.shape), tensor.dtype, tensor)
                return self._ledger.add(name, pieces, tensor.dtype, spec)
            except (XferError, TypeError) as e:
                self.errors.append(f"{name}: {e}")
                return False

    def result(self, *, strict: bool = True) -> Traced:
        """Return this rank's part of the export. LayoutError with all of `errors` if there are any, unless not
        `strict`.

        Fragment roots are source names; offsets are bytes from each twin's first element. `unread` names the
        sources that no noted tensor reads; `recipes` compute parts of exported tensors from sources.
        """
        lost = [
            f"{r.target}: computed ({', '.join(r.ops)}) from data of several ranks that cannot be gathered again"
            for r in self._ledger.recipes
            if r.foreign
        ]
        if strict and (self.errors or lost):
            raise LayoutError("the export does something that cannot be followed", [*self.errors, *lost])
        traced = self._ledger.close()
        return replace(traced, gathers=tuple(self.gathers)) if self._ledger.computes else traced


def _plain(t: torch.Tensor) -> bool:
    return type(t) is torch.Tensor and t.device.type == "meta" and t.is_contiguous()
