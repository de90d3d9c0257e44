"""A rank's matrices in FP8: whatever boxes it holds, it offers what the oracle in numpy makes of the whole matrix, or refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.block_fp8 import quantized as oracle
from xfer.direct.quantized import ROOT, Quantized
from xfer.errors import Unsupported
from xfer.kernels.block_fp8 import ScaleRule
from xfer.mesh.box import row_major
from xfer.plan.program import ITEMSIZE
from xfer.trace.catalog import Catalog
from xfer.trace.derived import BLOCK, block_grid
from xfer.trace.fragment import Fragment, TensorSpec

CPU = torch.device("cpu")


def cuts(rng: np.random.Generator, n: int, multiple: int, most: int) -> list[int]:
    """0, some multiples in between, n."""
    inner = np.arange(multiple, n, multiple)
    some = rng.choice(inner, min(len(inner), int(rng.integers(0, most))), replace=False) if len(inner) else []
    return [0, *sorted(int(i) for i in some), n]


def held(rng: np.random.Generator, weight: torch.Tensor, rows, columns, parts: list[tuple]) -> tuple[list, dict]:
    """The box `rows` x `columns` of a weight in storages of a rank, in parts (row slices), some in column-major order."""
    fragments, tensors = [], {}
    for number, (a, b) in enumerate(parts):
        piece = weight[a:b, columns[0] : columns[1]]
        stored = piece.t().contiguous().t() if rng.random() < 0.3 else piece.contiguous()
        name, item = f"p{number}", stored.itemsize
        flat = torch.empty(stored.numel() * item + 16, dtype=torch.uint8)
        flat[16:].view(stored.dtype).as_strided(stored.shape, stored.stride()).copy_(stored)
        strides = tuple(s * item if n > 1 else 0 for s, n in zip(stored.stride(), stored.shape))
        dtype = str(stored.dtype).removeprefix("torch.")
        fragments.append(Fragment("w", (a, columns[0]), tuple(stored.shape), name, 16, strides, dtype))
        tensors[name] = flat
    return fragments, tensors


def offered(scratch: torch.Tensor, f: Fragment) -> torch.Tensor:
    dtype = torch.uint8 if f.dtype == "float8_e4m3fn" else torch.int32
    strides = tuple(s // dtype.itemsize for s in f.strides)
    return scratch.view(dtype).as_strided(f.extent, strides, f.offset // dtype.itemsize)


@pytest.mark.parametrize("rule", ScaleRule)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ranks_offer_what_the_whole_matrix_quantizes_to(rule, dtype):
    """Ranks are cut at multiples of a block; a rank's own pieces may begin and end anywhere, overlap, and repeat."""
    rng = np.random.default_rng(5)
    for _ in range(12):
        shape = tuple(int(n) for n in rng.integers(1, 4 * BLOCK, 2))
        weight = (torch.randn(shape) * 10.0 ** torch.randint(-6, 3, shape)).to(dtype)
        codes, scales, _ = oracle(weight.float().numpy(), rule)
        catalog = Catalog((TensorSpec("w", shape, "bfloat16"),)).deriving([("w", rule.value)])
        seen = {f"w|fp8-{rule.value}": np.zeros(shape, int), f"w|fp8-{rule.value}-scales": np.zeros(scales.shape, int)}
        rows, columns = cuts(rng, shape[0], BLOCK, 3), cuts(rng, shape[1], BLOCK, 3)
        for a, b in zip(rows, rows[1:]):
            for c, d in zip(columns, columns[1:]):
                inner = [a, *sorted(int(i) for i in rng.integers(a, b, int(rng.integers(0, 3)))), b]
                parts = [(x, y) for x, y in zip(inner, inner[1:]) if y > x]
                parts += [(max(a, x - 3), y) for x, y in parts[:1] if rng.random() < 0.5]
                fragments, tensors = held(rng, weight, (a, b), (c, d), parts)
                q = Quantized(catalog, fragments, CPU, "trainer 0")
                table = q.bind(tensors)
                table[ROOT].fill_(0x7F)  # a NaN, wherever nothing is written
                q.run()
                for f in q.fragments:
                    want = codes if f.dtype == "float8_e4m3fn" else scales.view(np.int32)
                    assert np.array_equal(offered(table[ROOT], f).numpy(), want[f.index])
                    seen[f.tensor][f.index] += 1
        assert all((count == 1).all() for count in seen.values())


def test_a_rank_with_a_part_of_a_block_says_which_and_names_every_tensor():
    specs = [TensorSpec(n, (512, 512), "bfloat16") for n in ("a", "b", "c")] + [TensorSpec("v", (512,), "bfloat16")]
    catalog = Catalog(tuple(specs)).deriving([("a", "ieee"), ("b", "ieee"), ("c", "ieee")])
    boxes = {"a": ((0, 0), (192, 512)), "b": ((128, 64), (128, 448)), "c": ((128, 0), (384, 512)), "v": ((0,), (512,))}
    fragments = [Fragment(n, o, e, n, 0, tuple(2 * s for s in row_major(e)), "bfloat16") for n, (o, e) in boxes.items()]
    with pytest.raises(Unsupported) as error:
        Quantized(catalog, fragments, CPU, "trainer 3")
    assert "trainer 3" in error.value.message
    assert [v.split(":")[0] for v in error.value.violations] == ["a", "b"]
    assert "0:192 x 0:512 of [512, 512], and so only a part of 4 blocks" in error.value.violations[0]
    assert "128:256 x 64:512 of [512, 512], and so only a part of 1 blocks" in error.value.violations[1]


def test_only_matrices_of_floats_are_quantized():
    specs = (TensorSpec("e", (4, 128, 128), "bfloat16"), TensorSpec("i", (128, 128), "int8"))
    catalog = Catalog(specs).deriving([(s.name, "ieee") for s in specs])
    fragments = [
        Fragment(s.name, (0,) * len(s.shape), s.shape, s.name, 0, tuple(ITEMSIZE[s.dtype] * n for n in row_major(s.shape)), s.dtype)
        for s in specs
    ]  # fmt: skip
    with pytest.raises(Unsupported) as error:
        Quantized(catalog, fragments, CPU, "trainer 0")
    assert [v.split(":")[0] for v in error.value.violations] == ["e", "i"]


def test_a_catalog_derives_whole_groups_and_survives_the_wire():
    """One expert stands for all, so that they stay one tensor with an expert dim."""
    names = [f"layers.0.experts.{i}.up" for i in range(3)]
    base = Catalog(tuple(TensorSpec(n, (256, 130), "bfloat16") for n in names))
    catalog = base.deriving([(names[1], "pow2"), ("absent", "ieee")])
    assert [(t.name, t.shape, t.dtype) for t in catalog.tensors] == [
        ("layers.0.experts.*.up", (3, 256, 130), "bfloat16"),
        ("layers.0.experts.*.up|fp8-pow2", (3, 256, 130), "float8_e4m3fn"),
        ("layers.0.experts.*.up|fp8-pow2-scales", (3, *block_grid((256, 130))), "float32"),
    ]
    assert catalog.exported == base.specs and catalog.deriving([(names[0], "pow2")]) == catalog
    assert Catalog.from_bytes(catalog.to_bytes()) == catalog and catalog.digest() != base.digest()
