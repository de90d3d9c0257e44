"""One trainer rank's matrices in the FP8 form that engines asked for, in scratch. They are quantized anew before each refit.

To the planner they are ordinary fragments in scratch (trace/derived.py). kernels/quantize.py has the arithmetic. Weights that are
not in bf16 are rounded to bf16 first, since an engine's checkpoint has them so.

A rank quantizes what it holds. Where it has only a part of a block, other ranks have the rest: it measures its part, learns the
largest value of the whole block (coordinator/blocks.py), and quantizes by that. All ranks with a part of a block then have the
same scale for it, and offer it as they offer any part that several of them hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch

from xfer.errors import Unsupported, out_of_memory
from xfer.kernels.block_fp8 import ScaleRule, WeightBox
from xfer.kernels.quantize import Quantizer, quantizer
from xfer.kernels.torch_impl import Space
from xfer.mesh.box import Box, row_major
from xfer.participants.data_plane import PartialBlocks
from xfer.plan.inventory import SCRATCH, Inventory
from xfer.plan.program import ITEMSIZE
from xfer.plan.table import FragmentTable
from xfer.trace.catalog import Catalog
from xfer.trace.derived import BLOCK, SCALES, VALUES, block_grid, quantized
from xfer.trace.fragment import Fragment, Ints, Root, TensorSpec
from xfer.transport.group import wait_for_stream

T = TypeVar("T")
ALIGN = 512
"""Values of a piece and scales of a matrix begin at a multiple of this many bytes, like torch's own allocations."""
FROM = ("bfloat16", "float32")
ROOT = SCRATCH + "fp8"


@dataclass(frozen=True, slots=True)
class _MatrixPart:
    """A box of the matrix that lies in one storage of this rank. `at`: byte in scratch where its quantized values begin. `whole`: the part
    of the box that consists of whole blocks, if any. The rest is measured before it is quantized."""

    box: Box
    source: Fragment
    at: int
    whole: Box | None

    @property
    def cut(self) -> list[tuple[Box, bool]]:
        """Boxes to quantize, and whether they have to be measured first."""
        if self.whole is None:
            return [(self.box, True)]
        return [(self.whole, False), *((rest, True) for rest in self.box.without(self.whole))]


@dataclass(frozen=True, slots=True)
class _InScratch:
    """A matrix in one form.

    Attributes:
        blocks: The part of the grid of which this rank has the scales, at byte `at` of scratch.
        amax: Where the largest values of these blocks begin among those of all matrices, if some part has to be measured.
        shared: int64 [2, n], for the n blocks of which other ranks have parts: number in the catalog; place of the largest value.
    """

    rule: ScaleRule
    pieces: tuple[_MatrixPart, ...]
    blocks: Box
    at: int
    amax: int
    shared: np.ndarray


@dataclass(frozen=True, slots=True)
class _Geometry:
    """How the parts of a matrix that a rank holds lie among the matrix's blocks.

    Attributes:
        pieces: Disjoint boxes, each with the number of the held box that it is cut from, and with its part that has whole blocks.
        blocks: Disjoint boxes of the matrix's grid, which hold all blocks that the pieces touch.
        bounds: A box of the grid around them.
        shared: int64 [2, n], for the n blocks of which the pieces have only a part: number in the grid; number in `bounds`.
    """

    pieces: tuple[tuple[Box, int, Box | None], ...]
    blocks: tuple[Box, ...]
    bounds: Box
    shared: np.ndarray


@lru_cache(maxsize=1024)
def _geometry(shape: Ints, held: tuple[Box, ...]) -> _Geometry:
    """Return how these boxes of a matrix of `shape` lie among its blocks. Kept, since a rank holds thousands of matrices alike."""
    pieces = tuple((box, i, _whole_blocks(box, shape)) for box, i in _disjoint((b, i) for i, b in enumerate(held)))
    blocks = tuple(b for b, _ in _disjoint((_blocks(box), None) for box, *_ in pieces))
    bounds = _bounding(blocks)
    in_part = _held_in_part([box for box, *_ in pieces], bounds, shape)
    down, across = (o + at for o, at in zip(bounds.origin, np.nonzero(in_part)))
    shared = np.stack([down * block_grid(shape)[1] + across, np.flatnonzero(in_part)])
    return _Geometry(pieces, blocks, bounds, shared)


class Quantized:
    """All matrices of one trainer rank that the catalog names in FP8.

    Args:
        catalog: The session's checkpoint tensors.
        fragments: Where this rank holds them.
        device: Where to allocate scratch.
        who: This rank, for errors.

    Attributes:
        fragments: The results, as parts of derived tensors in scratch.
        roots: The scratch storage; () if this rank holds no such matrix.
        rules: Names of the rules in use, sorted.

    Raises:
        Unsupported: A matrix cannot be quantized here, because of its dtype, for example. It lists all of them.
    """

    def __init__(self, catalog: Catalog, fragments: Iterable[Fragment], device: torch.device, who: str):
        self._device, self._who = device, who
        self._storage: torch.Tensor | None = None
        self._quantizers: list[Quantizer] = []
        self._amax: torch.Tensor | None = None
        self._shared_at: torch.Tensor | None = None
        forms = sorted({(s.of, s.rule) for s in catalog.specs if s.of})
        wanted = {name for name, _ in forms}
        specs = {s.name: s for s in catalog.exported if s.name in wanted}
        held: dict[str, list[Fragment]] = {}
        for f in fragments:
            if f.tensor in wanted:
                held.setdefault(f.tensor, []).append(f)
        self._matrices: list[_InScratch] = []
        self._nbytes = self._measured = 0
        first, _ = catalog.blocks
        offered: list[Fragment] = []
        bad: list[str] = []
        for name, rule in forms:
            if name not in held:
                continue
            try:
                offered += self._lay_out(specs[name], ScaleRule(rule), held[name], first[name, rule])
            except Unsupported as e:
                bad += [f"{name}: {e.message}"]
        if bad:
            raise Unsupported(f"{who}: engines ask for weights in FP8 that this rank cannot quantize", bad)
        shared = np.concatenate([np.zeros((2, 0), np.int64), *(m.shared for m in self._matrices)], 1)
        self._numbers, self._places = shared[0].astype("<u4").tobytes(), shared[1]
        self.fragments = tuple(offered)
        self.rules = tuple(sorted({m.rule.value for m in self._matrices}))
        self.roots = (Root(ROOT, self._nbytes),) if self._matrices else ()

    def _lay_out(self, spec: TensorSpec, rule: ScaleRule, held: Sequence[Fragment], first: int) -> list[Fragment]:
        """Give a matrix, whose blocks are numbered from `first`, its place in scratch. Returns the fragments there."""
        if len(spec.shape) != 2 or spec.split or any(f.steps for f in held):
            raise Unsupported(f"has shape {list(spec.dims)}; only matrices that are held in plain boxes are quantized")
        if odd := sorted({f.dtype for f in held} - set(FROM)):
            raise Unsupported(f"is {', '.join(odd)}; only {' and '.join(FROM)} are quantized")
        g = _geometry(spec.shape, tuple(Box(f.origin, f.extent) for f in held))
        pieces = tuple(_MatrixPart(box, held[i], self._room(box.size), whole) for box, i, whole in g.pieces)
        amax, scales_at = self._measured, self._room(g.bounds.size * ITEMSIZE[SCALES])
        if any(p.whole != p.box for p in pieces):
            self._measured += g.bounds.size
        matrix = _InScratch(rule, pieces, g.bounds, scales_at, amax, g.shared + [[first], [amax]])
        self._matrices.append(matrix)
        values, scales = quantized(spec, rule.value)
        strides = _bytes(g.bounds.extent, SCALES)
        return [
            *(_fragment(values.name, p.box, p.at, row_major(p.box.extent), VALUES) for p in pieces),
            *(
                _fragment(scales.name, b, scales_at + _offset(b.origin, g.bounds.origin, strides), strides, SCALES)
                for b in g.blocks
            ),
        ]

    def _room(self, nbytes: int) -> int:
        at, self._nbytes = self._nbytes, self._nbytes + -(-nbytes // ALIGN) * ALIGN
        return at

    @property
    def nbytes(self) -> int:
        """Bytes of scratch. They are held until `release`."""
        return self._nbytes

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Read weights from these storages from now on. Returns the binding table with scratch in it.

        Raises:
            Unsupported: There is no memory for scratch.
        """
        if not self._matrices:
            return dict(tensors)
        if self._storage is None:
            self._storage = self._allocated()
        if self._amax is None:
            self._amax = torch.empty(self._measured, dtype=torch.float32, device=self._device)
            self._shared_at = torch.from_numpy(self._places).to(self._device)
        scratch, spaces = Space(self._storage), {name: Space(t) for name, t in tensors.items()}
        boxes: dict[ScaleRule, list[WeightBox]] = {}
        for m in self._matrices:
            scales = scratch.view(torch.float32, m.at, m.blocks.extent, _bytes(m.blocks.extent, SCALES))
            amax = self._amax[m.amax : m.amax + m.blocks.size]
            for p, box, measured in [(piece, *some) for piece in m.pieces for some in piece.cut]:
                f, strides = p.source, _bytes(p.box.extent, VALUES)
                at = f.offset + _offset(box.origin, f.origin, f.strides)
                weight = spaces[f.root].view(getattr(torch, f.dtype), at, box.extent, f.strides)
                to = p.at + _offset(box.origin, p.box.origin, strides)
                values = scratch.view(torch.float8_e4m3fn, to, box.extent, strides)
                part = tuple(map(_within, _blocks(box).origin, _blocks(box).extent, m.blocks.origin))
                row0, col0 = (o % BLOCK for o in box.origin)
                own = amax.view(m.blocks.extent)[part] if measured else None
                boxes.setdefault(m.rule, []).append(WeightBox(weight, values, scales[part], own, row0, col0))
        self._quantizers = [quantizer(some, rule) for rule, some in boxes.items()]
        return {**tensors, **{r.name: self._storage for r in self.roots}}

    def _allocated(self) -> torch.Tensor:
        try:
            return torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        except (RuntimeError, MemoryError) as e:
            if not out_of_memory(e):
                raise
            raise Unsupported(
                f"{self._who}: engines ask for weights in FP8, which take {self._nbytes:,} bytes of scratch on this rank",
                [str(e).partition("\n")[0], "leave so much memory free on the trainers' GPUs, or serve in bf16"],
            ) from e

    def measure(self, until: float) -> PartialBlocks | None:
        """Measure the largest values of blocks that `run` needs. Returns the blocks of which this rank has only a part; None if none.

        Args:
            until: Monotonic time by which a GPU must have done it.
        """
        for q in self._quantizers:
            q.measure()
        if not self._numbers or self._amax is None:
            return None
        mine = self._amax.view(torch.int32)[self._shared_at]
        if self._device.type == "cuda":
            wait_for_stream(self._device, until, self._who)
        return PartialBlocks(self._numbers, mine.cpu().numpy().astype("<u4").tobytes())

    def run(self, largest: bytes = b"") -> None:
        """Quantize the weights that were measured. Returns before a GPU has done it.

        Args:
            largest: Bits of the largest value of each block that `measure` returned, over all ranks.
        """
        if largest and self._amax is not None:
            bits = torch.from_numpy(np.frombuffer(largest, "<u4").astype(np.int32))
            self._amax.view(torch.int32)[self._shared_at] = bits.to(self._device)
        for q in self._quantizers:
            q.run()

    def release(self) -> None:
        """Free scratch and drop the storages until `bind`."""
        self._storage, self._quantizers, self._amax, self._shared_at = None, [], None, None

    def explain(self) -> str:
        """Two lines for a person to read; empty if nothing is quantized."""
        if not self._matrices:
            return ""
        return (
            f"{self._who} quantizes {len(self._matrices)} matrices to FP8 before each refit (e4m3, a scale per {BLOCK}x{BLOCK} block, rule "
            f"{' and '.join(self.rules)}), into {self._nbytes:,} bytes of scratch.\nEngines then hold, bit for bit, what they would "
            "load from a checkpoint that this rule wrote from the exported weights in bfloat16."
        )


def with_quantized(held: Inventory, exported: Catalog, catalog: Catalog) -> Inventory:
    """Return a trainer's layout with the scratch in which it quantizes.

    Args:
        held: The layout under the catalog `exported`.
        catalog: `exported`, with what engines need derived.

    Raises:
        Unsupported: As `Quantized`.
    """
    own = list(held.table.fragments(exported, held.roots))
    wanted, apart = {s.of for s in catalog.specs if s.of}, []
    for f in own:
        members = exported.members(f.tensor)
        if members == (f.tensor,):
            apart.append(f)
        elif wanted.intersection(members):
            apart += [
                Fragment(
                    members[f.origin[0] + i],
                    f.origin[1:],
                    f.extent[1:],
                    f.root,
                    f.offset + i * f.strides[0],
                    f.strides[1:],
                    f.dtype,
                )
                for i in range(f.extent[0])
            ]
    q = Quantized(catalog, apart, torch.device("cpu"), held.who)
    roots = tuple(sorted((*held.roots, *q.roots), key=lambda r: r.name))
    table = FragmentTable.build([*own, *catalog.lift(q.fragments)], catalog, roots)
    return replace(held, catalog=catalog.digest(), roots=roots, table=table)


def _bytes(shape: Ints, dtype: str) -> Ints:
    return tuple(s * ITEMSIZE[dtype] for s in row_major(shape))


def _offset(at: Ints, origin: Ints, strides: Ints) -> int:
    return sum((a - o) * s for a, o, s in zip(at, origin, strides))


def _fragment(name: str, box: Box, at: int, strides: Ints, dtype: str) -> Fragment:
    return Fragment(
        name, box.origin, box.extent, ROOT, at, tuple(s if n > 1 else 0 for s, n in zip(strides, box.extent)), dtype
    )


def _disjoint(held: Iterable[tuple[Box, T]]) -> list[tuple[Box, T]]:
    """The boxes, each without the elements of earlier ones: a rank may hold an element twice."""
    out: list[tuple[Box, T]] = []
    for box, f in held:
        left = [box]
        for other, _ in out:
            left = [rest for b in left for rest in b.without(other)]
        out += [(b, f) for b in left]
    return out


def _bounding(boxes: Sequence[Box]) -> Box:
    lo = tuple(map(min, *(b.origin for b in boxes), boxes[0].origin))
    hi = tuple(map(max, *(b.end for b in boxes), boxes[0].end))
    return Box(lo, tuple(h - low for h, low in zip(hi, lo)))


def _whole_blocks(box: Box, shape: Ints) -> Box | None:
    """The part of a box of a matrix that consists of whole blocks; None if there is none."""
    first = [-(-o // BLOCK) * BLOCK for o in box.origin]
    end = [e if e == n else e // BLOCK * BLOCK for e, n in zip(box.end, shape)]
    return Box(tuple(first), tuple(e - o for o, e in zip(first, end))) if all(map(int.__lt__, first, end)) else None


def _held_in_part(boxes: Sequence[Box], bounds: Box, shape: Ints) -> np.ndarray:
    """For each block of `bounds`, a box of the matrix's grid: whether these disjoint boxes have a part of it only. bool."""
    held = np.zeros(bounds.extent, np.int64)
    for b in boxes:
        rows, cols = (_common(o, n, first, count) for o, n, first, count in zip(b.origin, b.extent, *_pair(bounds)))
        held += np.outer(rows, cols)
    size = np.outer(*(_common(0, n, first, count) for n, first, count in zip(shape, *_pair(bounds))))
    return (held > 0) & (held < size)


def _blocks(box: Box) -> Box:
    """The blocks that a box of a matrix touches, as a box of its grid."""
    first = tuple(o // BLOCK for o in box.origin)
    return Box(first, tuple(end - o for end, o in zip(block_grid(box.end), first)))


def _within(start: int, n: int, first: int) -> slice:
    return slice(start - first, start - first + n)


def _pair(box: Box) -> tuple[Ints, Ints]:
    return box.origin, box.extent


def _common(start: int, n: int, first: int, count: int) -> np.ndarray:
    """How many of the indices start..start + n lie in each of the blocks first..first + count."""
    edges = np.arange(first, first + count + 1) * BLOCK
    return np.diff(np.clip(edges, start, start + n))
