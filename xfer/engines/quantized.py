"""Which weights an engine serves in block FP8, and where values and scales go: read from its own loader.

A first trace offers the checkpoint as trainers export it. Tensors that land in parameters of an FP8 dtype are wanted in FP8.
The parameter of the scales lies beside that of the values: in the same module, under the same name with a suffix. A second
trace therefore offers values in FP8, and scales under the tensor's name with that suffix, as a quantized checkpoint has them.
It also has the tensors that the engine makes of these after loading. This module uses plain torch and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from xfer.errors import LayoutError, Unsupported
from xfer.kernels.block_fp8 import ScaleRule, scales_of
from xfer.trace.derived import SCALES, block_grid, quantized
from xfer.trace.fragment import TensorSpec
from xfer.trace.loader import named_storages
from xfer.trace.probe import moves
from xfer.trace.traced import Traced

Trace = Callable[[Sequence[TensorSpec], Mapping[str, str]], Traced]
"""Traces the loader of a fresh twin over these tensors: `specs` and `names` of `trace_loader`."""


def with_quantized(first: Traced, twin: torch.nn.Module, retrace: Trace, rule: ScaleRule | None) -> Traced:
    """Return the trace with derived tensors (trace/derived.py) in place of those that the engine serves in block FP8.

    Args:
        first: Trace over the trainers' own tensors.
        twin: The twin of that trace.
        retrace: Makes the second trace.
        rule: How the engine's weights have to be quantized; None if it has none in FP8.

    Raises:
        Unsupported: A tensor that the engine wants in FP8 is no matrix.
        LayoutError: The loader takes no scales for a tensor. It lists all such tensors.
    """
    partners = _partners(twin)
    wanted = {f.tensor: partners[f.root] for f in first.fragments if f.root in partners}
    if not wanted or rule is None:
        return first
    bases = {s.name: s for s in first.specs if s.name in wanted}
    if odd := [f"{s.name}: {list(s.shape)}" for s in bases.values() if len(s.shape) != 2]:
        raise Unsupported("this engine wants tensors in block FP8 that are no matrices", odd)
    derived: list[TensorSpec] = []
    names: dict[str, str] = {}  # derived tensor -> name that is offered
    for name, base in bases.items():
        values, scales = quantized(base, rule.value)
        derived += [values, scales]
        names |= {values.name: name, scales.name: name + wanted[name][1]}
    second = moves(retrace(derived, names), float(scales_of(torch.zeros(1), rule)[0]))
    if untaken := [s for s in derived if s.dtype == SCALES and s.name not in second.reads]:
        lines = [
            f"{s.of} is FP8 in the engine, and its loader took no scale offered as {names[s.name]}" for s in untaken
        ]
        raise LayoutError("weights would be served with the scales of other weights", lines)
    ours = {root for pair in partners.items() for root in (pair[0], pair[1][0])}
    theirs = {name for name, _ in named_storages(twin).values()} - ours  # without tensors made after loading
    return replace(
        first,
        specs=tuple(sorted({*first.specs, *derived})),
        fragments=(
            *(f for f in first.fragments if f.root not in ours),
            *(f for f in second.fragments if f.root not in theirs),
        ),
        fills=(*(f for f in first.fills if f.root not in ours), *(f for f in second.fills if f.root not in theirs)),
        recipes=(
            *(r for r in first.recipes if r.target not in ours),
            *(r for r in second.recipes if r.target not in theirs),
        ),
        casts=tuple(c for c in first.casts if c.root not in ours),
    )


def scale_names(first: Traced, twin: torch.nn.Module, retrace: Trace) -> tuple[dict[str, str], frozenset[str]]:
    """Find the tensors that a loader of whole tensors has to get in block FP8.

    Args:
        first, twin, retrace: As for `with_quantized`.

    Returns:
        Name of each such tensor -> the name under which the loader takes its scales; and the names of all parameters in this form.

    Raises:
        Unsupported, LayoutError: As `with_quantized`; or the loader puts a tensor into other parameters as well.
    """
    with_quantized(first, twin, retrace, ScaleRule.IEEE)
    partners = _partners(twin)
    out = {f.tensor: f.tensor + partners[f.root][1] for f in first.fragments if f.root in partners}
    other = [(f.tensor, f.root) for f in first.fragments if f.root not in partners]
    other += [(name, r.target) for r in first.recipes for name in r.sources]
    if both := [f"{name}: {root}" for name, root in other if name in out]:
        raise LayoutError("tensors land in block FP8, and elsewhere as they are", both)
    return out, frozenset(partners)


def _partners(twin: torch.nn.Module) -> dict[str, tuple[str, str]]:
    """Name of each FP8 parameter with scales -> name of the parameter of its scales, and the suffix of that name."""
    out = {}
    for path, module in twin.named_modules():
        own = dict(module.named_parameters(prefix=path, recurse=False))
        for name, p in own.items():
            grid = (*p.shape[:-2], *block_grid(tuple(p.shape[-2:])))
            found = [
                other
                for other, q in own.items()
                if other != name and other.startswith(name) and q.dtype is torch.float32 and tuple(q.shape) == grid
            ]
            if p.dtype is torch.float8_e4m3fn and p.dim() > 1 and found:
                out[name] = found[0], found[0].removeprefix(name)
    return out
