"""Engine side: where each byte of a model's storages comes from, read from the model's own loader run on meta tensors.

The model's parameters are on meta, the checkpoint tensors are meta tensors of the given specs, and the loader is
whatever the framework calls. Nothing is allocated and nothing is assumed about names. Not here: how to build a
framework's model on meta (xfer/engines), classes of bytes that no loader writes (plan/).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import cast

import torch

from xfer.errors import LayoutError, Unsupported
from xfer.trace.fragment import TensorSpec
from xfer.trace.settle import Ledger, settle
from xfer.trace.traced import Traced
from xfer.trace.watch import PythonData, Watch, framework_line, missing_values, storage_key

PACKED = "with vLLM, connect(route=xfer.Packed()) needs no layout"
"""Advice in errors about layouts that cannot be read."""
Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
Step = tuple[torch.nn.Module, Callable[[], object]]
"""A module, and what the framework does to it after loading."""


def named_storages(model: torch.nn.Module) -> dict[int, tuple[str, torch.Tensor]]:
    """storage key -> (name, tensor) of the first parameter, else buffer, found in it. Ties and views share one
    entry.
    """
    out: dict[int, tuple[str, torch.Tensor]] = {}
    for name, t in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        out.setdefault(storage_key(t), (name, t))
    return out


@torch.no_grad()
def trace_loader(
    model: torch.nn.Module,
    specs: Sequence[TensorSpec],
    load: Loader | None = None,
    *,
    built: Watch | None = None,
    after: Iterable[Step] = (),
    names: Mapping[str, str] = MappingProxyType({}),
) -> Traced:
    """Run `load` (default `model.load_weights`) over meta tensors of `specs` and say where everything ended up.

    `built`: the watch under which the model was built; what its constructor computed is then known to the loader.

    `after`: it runs where the loader has written a parameter of the module, and the result has the places where it leaves
    elements.

    `names`: the names under which the loader gets some of the tensors, by those of their specs.

    Roots are named as in `named_storages`; offsets are bytes in that meta storage. The final state counts: a later
    write hides an earlier one, and `param.data = tensor` is seen by comparing storages. What `load` does in other
    threads is not seen (watch.py). Buffers and parameters that are not on meta are left out.

    LayoutError carries every name that is neither moved, filled nor computed from checkpoint tensors. Unsupported names
    the line of a loader that needs the values of checkpoint tensors.
    """
    twice = [n for n, k in Counter(s.name for s in specs).items() if k > 1]
    if twice:
        raise LayoutError("checkpoint tensors are named twice", (f"{n}: give one spec per name" for n in sorted(twice)))
    tensors = {s.name: torch.empty(s.shape, dtype=getattr(torch, s.dtype), device="meta") for s in specs}
    watch = Watch(tensors, built)
    before = named_storages(model)
    was_meta = {name for name, t in before.values() if t.device.type == "meta"}
    for name, t in before.values():
        if t.device.type == "meta":
            watch.add_destination(name, t)
    try:
        with PythonData(), watch:
            (load or cast(Callable[..., object], model.load_weights))((names.get(n, n), t) for n, t in tensors.items())
            for module, process in after:
                stores = (watch.store(p) for p in module.parameters())
                if any(s is not None and len(s.pieces) > s.built for s in stores):
                    process()
    except Unsupported:
        raise
    except Exception as e:
        if (cause := missing_values(e)) is not None:
            raise Unsupported(
                "the loader of this model goes by the values of weights, which no trace can know",
                [f"{framework_line(cause)}: {type(cause).__name__}: {cause}", PACKED],
            ) from e
        where = [f"raised by {framework_line(e)}"]
        raise LayoutError(f"the loader cannot run on meta tensors: {type(e).__name__}: {e}", where) from e
    ledger = Ledger({s.name: s for s in specs}, checkpoint_is_source=True)
    for name, t in named_storages(model).values():
        if t.device.type != "meta":
            if name in was_meta:
                ledger.errors.append(f"{name}: the loader put a tensor on {t.device} in its place")
            continue
        store = watch.store(t)
        if store is None:
            ledger.errors.append(f"{name}: its storage was replaced by one that holds no checkpoint tensor")
            continue
        written = store.pieces[store.built :]
        if written and t.element_size() != store.itemsize:
            ledger.errors.append(f"{name}: now of {t.dtype}, was written as elements of {store.itemsize} bytes")
            continue
        try:
            ledger.add(name, settle(written), t.dtype)
        except Unsupported as e:
            ledger.errors.append(f"{name}: {e.message}")
    if ledger.errors:
        raise LayoutError("the loader does something that cannot be followed", ledger.errors)
    return ledger.close()
