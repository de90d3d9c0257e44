"""Parameters that TransformerEngine keeps in FP8, with a scale per block of 128 x 128 (`fp8_param_gather`, recipe "blockwise").

Such a parameter is a tensor subclass. Its dtype is the one that it was quantized from, and it consists of several tensors, of which
two are read here: `rowwise_data`, uint8 [M, K] of e4m3, which Megatron-Core may put into a gather's buffer, and
`rowwise_scale_inv`, float32 [ceil M/128, ceil K/128], its rows padded to a multiple of four. The columnwise tensors are transposed
copies for the backward pass. The export is followed on twins of the nominal dtype, as for any other parameter, so fragments come out
in that dtype; `in_fp8` says where the same elements and their scales lie. By attributes, without an import of TransformerEngine.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import is_
from typing import Any, cast

import torch

from xfer.errors import Unsupported
from xfer.trace import export
from xfer.trace.derived import BLOCK, VALUES, block_grid, scales_of
from xfer.trace.fragment import Fragment
from xfer.trace.slots import Slot, SlotPlace
from xfer.trace.traced import Traced

_VALUES, _SCALES = "rowwise_data", "rowwise_scale_inv"
_ONLY = f"of quantized parameters xfer reads those of TransformerEngine's blockwise scaling only, e4m3 with scales per {BLOCK}x{BLOCK}"


def is_scaled(p: object) -> bool:
    """Whether this is a parameter of this kind, readable or not."""
    return isinstance(p, torch.Tensor) and "is_2D_scaled" in _parts(p)


def refused(p: torch.Tensor) -> str:
    """Why a tensor subclass cannot be read; "" if it can."""
    parts, kind = _parts(p), type(p).__name__
    if not is_scaled(p):
        return f"is a {kind}, whose raw bytes are not its values; {_ONLY}"
    values, scales, quantizer = parts.get(_VALUES), parts.get(_SCALES), parts.get("quantizer")
    if values is None or scales is None:
        return f"is a {kind} without {_VALUES} and {_SCALES} now: bring them back before xfer reads them"
    block, dtype = getattr(quantizer, "block_len", None), getattr(parts.get("fp8_dtype"), "name", "no dtype")
    if not parts["is_2D_scaled"] or block != BLOCK or "e4m3" not in dtype.lower():
        form = f"{block}x{block}" if parts["is_2D_scaled"] else f"1x{block}"
        return f"is a {kind} in {dtype} with scales per {form}; {_ONLY}"
    down, across = block_grid(tuple(p.shape)) if p.dim() == 2 else (0, 0)
    padded = scales.dim() == 2 and scales.shape[0] >= down and scales.shape[1] >= across
    if values.shape != p.shape or not down or not padded or not values.is_contiguous():
        return (
            f"is a {kind} of {list(p.shape)} with bytes {list(values.shape)} and scales {list(scales.shape)}; {_ONLY}"
        )
    return ""


def has_pow2_scales(p: torch.Tensor) -> bool:
    """Whether its quantizer makes powers of two of all scales."""
    return bool(getattr(_parts(p)["quantizer"], "force_pow_2_scales", False))


def twin(p: torch.Tensor) -> torch.Tensor:
    """See `export.twin`. The twin of a parameter of this kind has its nominal dtype, and none of its tensors."""
    if not is_scaled(p):
        return export.twin(p)
    t = torch.empty(p.shape, dtype=p.dtype, device="meta")
    own = {f"_{name}" for name in _parts(p)}
    for name, value in vars(p).items():
        if name not in own:
            setattr(t, name, value)
    return t


def slots_of(slot: Slot) -> tuple[Slot, ...]:
    """The slots of the tensors that are read of a slot's parameter: that of its values, under the same name, comes first. See `Seats`."""
    if not is_scaled(slot.get()):
        return (slot,)
    own = vars(slot.tensor())
    return Slot(slot.name, own, f"_{_VALUES}"), Slot(_scales_name(slot.name), own, f"_{_SCALES}")


def in_fp8(
    traced: Traced, scaled: Mapping[str, torch.Tensor], places: Mapping[str, SlotPlace], who: str
) -> tuple[Traced, tuple[Fragment, ...]]:
    """Return the trace with fragments of these parameters in FP8, and where the scales of their blocks lie.

    Args:
        traced: An export; roots are slots.
        scaled: Parameters of this kind by slot.
        places: Where the tensors of `slots_of` lie.
        who: This rank, for errors.

    Raises:
        Unsupported: A tensor is computed from such parameters, or is not made of whole blocks of them. It lists all such tensors.
    """
    shapes = {s.name: s.shape for s in traced.specs}
    bad = [
        f"{r.target}: is computed ({', '.join(r.ops)}) from {', '.join(sorted(scaled.keys() & set(r.sources)))}, in FP8 in the "
        "trainer; keep it in bf16 there"
        for r in traced.recipes
        if scaled.keys() & set(r.sources)
    ]
    roots: dict[str, set[bool]] = {}
    for f in traced.fragments:
        roots.setdefault(f.tensor, set()).add(f.root in scaled)
    bad += [
        f"{name}: lies partly in FP8 parameters, and partly in others"
        for name, kinds in roots.items()
        if len(kinds) > 1
    ]
    fragments, scales = [], []
    for f in traced.fragments:
        p = scaled.get(f.root)
        if p is not None:
            size = p.dtype.itemsize
            f = replace(f, offset=f.offset // size, strides=tuple(s // size for s in f.strides), dtype=VALUES)
            place = places[_scales_name(f.root)]
            try:
                scales.append(scales_of(f, shapes[f.tensor], p.shape[1], place.root, place.offset, place.strides))
            except Unsupported as e:
                bad.append(f"{f.tensor}: {e.message}")
        fragments.append(f)
    if bad:
        raise Unsupported(f"{who}: tensors of which no engine can take what the trainer holds", bad)
    return replace(traced, fragments=tuple(fragments)), tuple(scales)


class Seats:
    """The places of parameters of this kind in their modules. A slot of `slots_of` belongs to one parameter, and does not show that
    another one has taken its place."""

    def __init__(self, slots: Iterable[Slot] = ()):
        found = [slot for slot in slots if is_scaled(slot.get())]
        self._tables, self._keys = [cast(dict[str, Any], slot.table) for slot in found], [slot.key for slot in found]
        self._were = [weakref.ref(slot.tensor()) for slot in found]

    def hold(self) -> bool:
        """Whether the same parameters are there. Without a call of Python for each, since it runs in every refit."""
        return all(map(is_, map(dict.get, self._tables, self._keys), map(weakref.ref.__call__, self._were)))


def _parts(p: object) -> dict[str, Any]:
    """The tensors of which a parameter of this kind, or a similar one, consists; {} for any other."""
    told = getattr(p, "get_metadata", None)
    return told() if told is not None else {}


def _scales_name(slot: str) -> str:
    return f"{slot}:{_SCALES}"
