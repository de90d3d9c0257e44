"""A toy engine of world.py that serves some matrices in block FP8: e4m3 values, and a float32 scale per block of 128 x 128."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import numpy as np
import torch

from tests.support.block_fp8 import NATIVE, te_quantized
from tests.support.block_fp8 import quantized as oracle
from tests.support.world import ToyEngine, ToySource, ToyTaker, flat, specs_of
from xfer.engines.layout import EngineLayout
from xfer.kernels.block_fp8 import ScaleRule
from xfer.trace.derived import BLOCK, block_grid, quantized
from xfer.trace.fragment import Fragment, Root, Span
from xfer.trace.traced import Traced

SHAPES = {"layers.0.w": (256, 512), "layers.1.w": (256, 300), "embed": (36, 8), "norm": (12,)}
MATRICES = ("layers.0.w", "layers.1.w")
"""Those in FP8. The second one's last blocks are cut off, and only one worker has it."""


@cache
def truth(
    name: str, shape: tuple[int, ...], version: int, rule: ScaleRule = ScaleRule.IEEE, native: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a whole matrix, by the oracles in numpy. `native`: in block_fp8.NATIVE, as such a trainer has them."""
    weight = ToySource.value(name, shape, version).float().numpy()
    codes, scales = te_quantized(weight, NATIVE[native]) if native else oracle(weight, rule)[:2]
    return torch.from_numpy(codes), torch.from_numpy(np.ascontiguousarray(scales))


class Fp8Taker(ToyTaker):
    """Worker `rank` of two: columns of the first matrix and of what stays in bf16, and on rank 0 all of the second matrix. `native`: by
    matrix, which of block_fp8.NATIVE its trainers are."""

    rule = ScaleRule.IEEE
    all_shapes, matrices = SHAPES, MATRICES
    native: Mapping[str, str] = MappingProxyType({})

    def __init__(self, rank: int, world: int):
        first, *more = self.matrices
        super().__init__(rank, world, {n: s for n, s in self.all_shapes.items() if n not in self.matrices})
        rows, columns = self.all_shapes[first][0], self.all_shapes[first][1] // world
        self.boxes = {first: ((0, rank * columns), (rows, columns))}
        if rank == 0:
            self.boxes |= {name: ((0, 0), self.all_shapes[name]) for name in more}
        for name, (_, extent) in self.boxes.items():
            self.live[name] = torch.full(extent, 0x7F, dtype=torch.uint8)
            self.live[f"{name}_scale_inv"] = torch.full(block_grid(extent), torch.nan)

    def read(self, catalog) -> EngineLayout:
        plain = super().read(catalog)
        specs, fragments, sizes = [*specs_of(self.all_shapes)], [*plain.traced.fragments], []
        bases = {s.name: s for s in specs}
        for name, (origin, _) in self.boxes.items():
            for spec, key in zip(quantized(bases[name], self.rule.value), (name, f"{name}_scale_inv")):
                t = self.live[key]
                first = origin if key == name else tuple(o // BLOCK for o in origin)
                strides = tuple(0 if n == 1 else s * t.itemsize for n, s in zip(t.shape, t.stride()))
                fragments.append(Fragment(spec.name, first, tuple(t.shape), key, 0, strides, spec.dtype))
                specs.append(spec)
                sizes.append((key, t.untyped_storage().nbytes()))
        return EngineLayout(
            roots=(*plain.roots, *(Root(n, size) for n, size in sizes)),
            tensors={**plain.tensors, **{n: flat(self.live[n]) for n, _ in sizes}},
            traced=Traced(
                tuple(sorted(specs)), tuple(fragments), plain.traced.fills, reads=(*plain.traced.reads, *self.boxes)
            ),
            footprint=(*plain.footprint, *(Span(n, 0, size) for n, size in sizes)),
            kept=(),
            staged=(),
        )

    def wrong(self, version: int) -> list[str]:
        bad = super().wrong(version)
        for name, (origin, extent) in self.boxes.items():
            codes, scales = truth(name, self.all_shapes[name], version, self.rule, self.native.get(name, ""))
            here = tuple(slice(o, o + n) for o, n in zip(origin, extent))
            blocks = tuple(slice(s.start // BLOCK, -(-s.stop // BLOCK)) for s in here)
            scale = self.live[f"{name}_scale_inv"]
            if not torch.equal(self.live[name], codes[here]):
                bad.append(name)
            if not torch.equal(scale.view(torch.int32), scales[blocks].contiguous().view(torch.int32)):
                bad.append(f"{name}_scale_inv")
        return bad


def fp8_engine(rule: ScaleRule = ScaleRule.IEEE) -> ToyEngine:
    """Two workers."""
    engine = ToyEngine(2, SHAPES)
    engine.takers = [Fp8Taker(i, 2) for i in range(2)]
    for taker in engine.takers:
        taker.rule = rule
    return engine
