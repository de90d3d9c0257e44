"""Provenance by numbers: the second source of fragments, for what cannot be followed symbolically, and a witness
for what can.

Every element of every tensor that goes in carries a number (its tensor's id and its offset there); what comes out
is decoded back. Works through any code that moves data, framework kernels included, at the price of real tensors:
meant for single modules and toy sizes. Dtypes too narrow for such numbers carry them digit by digit in several
passes; every digit travels together with its complement, so that a zero fill, an addition or a rescaling cannot be
mistaken for a move.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from xfer.errors import LayoutError, Unsupported
from xfer.trace.boxes import boxes, merge
from xfer.trace.compose import fold
from xfer.trace.fragment import Fragment, TensorSpec
from xfer.trace.traced import Recipe, Traced
from xfer.trace.view import Region

OFFSET_BITS = 40
"""A number is `root id << OFFSET_BITS | element offset`; an int64 holds 2**22 ids."""
NOT_MOVED = -1
"""Decoded where the element is no plain copy of a numbered one."""

_EXACT_BITS = {  # integers 0 .. 2**bits - 1 are exactly representable
    "float8_e4m3fn": 4, "float8_e5m2": 3, "bfloat16": 8, "float16": 11, "float32": 24, "float64": 53, "uint8": 8,
    "int8": 7, "int16": 15, "int32": 31, "int64": 62,
}  # fmt: skip


def numbers(root_id: int, shape: Sequence[int]) -> torch.Tensor:
    """int64 tensor of `shape`: the number of each element of a contiguous tensor with this id."""
    count = int(np.prod(shape, dtype=np.int64))
    if not (0 <= root_id < 1 << 22 and count <= 1 << OFFSET_BITS):
        raise Unsupported(f"a tensor with id {root_id} and {count} elements cannot be numbered")
    return (torch.arange(count, dtype=torch.int64) + (root_id << OFFSET_BITS)).reshape(tuple(shape))


@dataclass(frozen=True, slots=True)
class Digits:
    """How numbers are cut into digits. `bits` per digit, `count` digits for the id and the offset together.

    `offset_bits` of the number in transit are the offset; the rest above is the id.
    """

    bits: int
    count: int
    offset_bits: int

    @staticmethod
    def fit(specs: Iterable[TensorSpec], also: Iterable[str] = ()) -> Digits:
        """Few digits that every dtype on the way (of `specs`, and `also`: the other side's) carries exactly.

        Unsupported lists the dtypes that hold no integers.
        """
        specs = list(specs)
        kinds = {s.dtype for s in specs} | set(also)
        bad = sorted(kinds - set(_EXACT_BITS))
        if bad:
            raise Unsupported("dtypes that cannot carry digits", (f"{k}: trace it symbolically" for k in bad))
        offset_bits = max((int(np.prod(s.shape, dtype=np.int64)) for s in specs), default=1).bit_length()
        bits = min((_EXACT_BITS[k] for k in kinds), default=62)
        need = offset_bits + max(len(specs), 1).bit_length()
        return Digits(bits, -(-need // bits), offset_bits)

    @property
    def passes(self) -> int:
        """How many tensors stand for one: each digit, and its complement."""
        return 2 * self.count

    def digits(self, root_id: int, shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """The tensors that stand for tensor `root_id`, one per pass; each goes through the code under test by
        itself.
        """
        full = numbers(root_id, shape)
        packed = (full >> OFFSET_BITS << self.offset_bits) | (full & ((1 << OFFSET_BITS) - 1))
        out = []
        for k in range(self.count):
            digit = (packed >> (k * self.bits)) & self._top
            out += [digit.to(dtype), (self._top - digit).to(dtype)]
        return out

    def recombine(self, passes: Sequence[torch.Tensor]) -> torch.Tensor:
        """Combine the outputs of all passes into int64 numbers, `NOT_MOVED` where the passes do not agree on a move."""
        if len(passes) != self.passes:
            raise ValueError(f"{len(passes)} passes, expected {self.passes}")
        packed = torch.zeros(passes[0].shape, dtype=torch.int64)
        moved = torch.ones(passes[0].shape, dtype=torch.bool)
        for k in range(self.count):
            a, b = (x.detach().cpu().to(torch.float64) for x in passes[2 * k : 2 * k + 2])
            moved &= (a >= 0) & (b >= 0) & (a + b == self._top) & (a == a.floor())
            packed |= torch.where(moved, a, 0).to(torch.int64) << (k * self.bits)
        offset = packed & ((1 << self.offset_bits) - 1)
        return torch.where(moved, (packed >> self.offset_bits << OFFSET_BITS) | offset, NOT_MOVED)

    @property
    def _top(self) -> int:
        return (1 << self.bits) - 1


def decode(ids: torch.Tensor) -> list[tuple[Region, int, Region]]:
    """(region of the contiguous tensor that came out, id, region of that numbered tensor) for every part that was
    moved.
    """
    flat = ids.detach().cpu().reshape(-1).numpy()
    place = np.flatnonzero(flat >= 0)
    who, offset = flat[place] >> OFFSET_BITS, flat[place] & ((1 << OFFSET_BITS) - 1)
    out = []
    for root in np.unique(who):
        mine = who == root
        out += [(at, int(root), of) for at, of in fold(place[mine], offset[mine])]
    return out


LARGEST = 0x7F7FFFFF
"""Bits of the largest finite float32."""


def moves(traced: Traced, lowest: float) -> Traced:
    """Return the trace with fragments in place of the recipes that move float32 elements of at least `lowest`, positive: a
    limit of 1e-10, say, changes none of them."""
    specs = {s.name: s for s in traced.specs}
    found = [(r, moved_by(r, [specs[n] for n in r.sources], lowest)) for r in traced.recipes]
    return replace(
        traced,
        fragments=(*traced.fragments, *chain.from_iterable(fragments or () for _, fragments in found)),
        recipes=tuple(r for r, fragments in found if fragments is None),
    )


def moved_by(recipe: Recipe, sources: Sequence[TensorSpec], lowest: float) -> list[Fragment] | None:
    """Evaluate an engine's recipe on numbers from `lowest` to the largest: its fragments if it moves these, else None.

    Each element of the sources has a number of its own. A second evaluation, with the numbers in reverse, tells what was moved from
    what was computed. The first one has `lowest`, the second one the largest.
    """
    if not sources or {recipe.dtype, *(s.dtype for s in sources)} != {"float32"}:
        return None
    ends = np.cumsum([0, *(int(np.prod(s.shape, dtype=np.int64)) for s in sources)])
    first = int(torch.tensor(lowest, dtype=torch.float32).view(torch.int32))
    count = int(ends[-1])
    step = (LARGEST - first) // max(count, 1)
    if step < 1:
        return None
    number, out = torch.arange(count), []
    for numbered in (lambda n: n, lambda n: count - n):  # each is its own inverse
        bits = (numbered(number) * step + first).to(torch.int32).view(torch.float32)
        given = {s.name: bits[a:b].view(s.shape) for s, a, b in zip(sources, ends, ends[1:])}
        back = recipe.evaluate(given.__getitem__).reshape(-1).view(torch.int32).to(torch.int64) - first
        out.append(torch.where(back % step == 0, numbered(back // step), NOT_MOVED))
    if not (torch.equal(*out) and bool(((out[0] >= 0) & (out[0] < count)).all())):
        return None
    element, place = out[0].numpy(), _addresses(recipe)
    fragments: list[Fragment] = []
    for spec, a, b in zip(sources, ends, ends[1:]):
        mine = np.flatnonzero((a <= element) & (element < b))
        mine = mine[np.argsort(place[mine])]
        for at, of in fold(place[mine], element[mine] - a):
            fragments += boxes(spec, of, at, recipe.target, recipe.dtype)
    return merge(fragments)


def _addresses(recipe: Recipe) -> np.ndarray:
    """Byte of each element of a recipe's region, in row-major order."""
    out = np.array([recipe.offset], np.int64)
    for n, stride in zip(recipe.shape, recipe.strides):
        out = (out[:, None] + np.arange(n, dtype=np.int64) * stride).reshape(-1)
    return out


def export_fragments(spec: TensorSpec, ids: torch.Tensor, roots: Mapping[int, tuple[str, str]]) -> list[Fragment]:
    """Trainer side: parameters were numbered, `ids` came out under `spec.name`. `roots`: id -> (parameter, dtype).

    Numbers of ids that are not in `roots` belong to others and are left out. LayoutError when the shape is not
    `spec`'s.
    """
    if tuple(ids.shape) != spec.shape:
        raise LayoutError(f"{spec.name}: came out with shape {list(ids.shape)}, expected {list(spec.shape)}")
    out: list[Fragment] = []
    for at, root, of in decode(ids):
        if root in roots:
            name, dtype = roots[root]
            out += boxes(spec, at, of.scaled(getattr(torch, dtype).itemsize), name, dtype)
    return merge(out)
