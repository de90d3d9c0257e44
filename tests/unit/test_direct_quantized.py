"""A rank's matrices in FP8: whatever boxes ranks hold, each offers what the oracle in numpy makes of the whole matrix."""

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.block_fp8 import quantized as oracle
from tests.support.examples import EXAMPLES
from tests.support.plan_worlds import dense
from tests.support.trace_maps import addresses
from tests.unit.test_kernels_quantize import hard_weight
from xfer.coordinator import messages as m
from xfer.coordinator.blocks import SharedBlocks, largest
from xfer.direct.quantized import ROOT, Quantized
from xfer.errors import ProtocolError, Unsupported
from xfer.kernels.block_fp8 import ScaleRule
from xfer.trace import derived
from xfer.trace.catalog import Catalog
from xfer.trace.derived import BLOCK, block_grid
from xfer.trace.fragment import Fragment, TensorSpec

CPU = torch.device("cpu")
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]


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


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=EXAMPLES // 4, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rule=st.sampled_from(list(ScaleRule)),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    multiple=st.sampled_from([1, 1, 16, BLOCK]),
)
def test_ranks_offer_what_the_whole_matrix_quantizes_to(device, seed, rule, dtype, multiple):
    """Ranks are cut anywhere in rows and columns, some twice (data-parallel). Their pieces begin and end anywhere, overlap, repeat."""
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(1, 3 * BLOCK, 2))
    weight = torch.from_numpy(hard_weight(rng, *shape)).to(dtype)
    codes, scales, _ = oracle(weight.float().numpy(), rule)
    other = TensorSpec("v", (BLOCK, 2 * BLOCK), "bfloat16")  # its blocks are numbered before those of w
    catalog = Catalog((other, TensorSpec("w", shape, "bfloat16"))).deriving([("v", rule.value), ("w", rule.value)])
    seen = {f"w|fp8-{rule.value}": np.zeros(shape, int), f"w|fp8-{rule.value}-scales": np.zeros(scales.shape, int)}
    rows, columns = cuts(rng, shape[0], multiple, 4), cuts(rng, shape[1], multiple, 3)
    ranks, told = [], []
    for a, b in zip(rows, rows[1:]):
        for c, d in zip(columns, columns[1:]):
            inner = [a, *sorted(int(i) for i in rng.integers(a, b, int(rng.integers(0, 3)))), b]
            parts = [(x, y) for x, y in zip(inner, inner[1:]) if y > x]
            parts += [(max(a, x - 3), y) for x, y in parts[:1] if rng.random() < 0.5]
            for _ in range(int(rng.integers(1, 3))):
                fragments, tensors = held(rng, weight, (a, b), (c, d), parts)
                q = Quantized(catalog, fragments, torch.device(device), "trainer 0")
                table = q.bind({n: t.to(device) for n, t in tensors.items()})
                table[ROOT].fill_(0x7F)  # a NaN, wherever nothing is written
                mine = q.measure(0.0)
                ends = zip((b, d), shape)
                assert (mine is None) == (
                    a % BLOCK == c % BLOCK == 0 and all(i % BLOCK == 0 or i == n for i, n in ends)
                )
                told.append(None if mine is None else m.Measured(1, 1, 1, mine.numbers, mine.largest))
                ranks.append((q, table))
    agreed = iter(largest([x for x in told if x is not None]))
    for (q, table), x in zip(ranks, told):
        q.run(next(agreed) if x is not None else b"")
        for f in q.fragments:
            want = codes if f.dtype == "float8_e4m3fn" else scales.view(np.int32)
            assert np.array_equal(offered(table[ROOT], f).cpu().numpy(), want[f.index])
            seen[f.tensor][f.index] += 1
    assert all((count >= 1).all() for count in seen.values())


def test_only_matrices_of_floats_are_quantized():
    specs = (TensorSpec("e", (4, 128, 128), "bfloat16"), TensorSpec("i", (128, 128), "int8"))
    catalog = Catalog(specs).deriving([(s.name, "ieee") for s in specs])
    with pytest.raises(Unsupported) as error:
        Quantized(catalog, [dense(s.name, s.shape, s.dtype) for s in specs], CPU, "trainer 0")
    assert error.value.message == "trainer 0: engines ask for weights in FP8 that this rank cannot quantize"
    assert list(error.value.violations) == [
        "e: has shape [4, 128, 128]; only matrices that are held in plain boxes are quantized",
        "i: is int8; only bfloat16 and float32 are quantized",
    ]


def test_a_rank_without_room_for_scratch_says_how_much_it_takes(monkeypatch):
    catalog = Catalog((TensorSpec("w", (256, 256), "bfloat16"),)).deriving([("w", "ieee")])
    q = Quantized(catalog, [dense("w", (256, 256), "bfloat16")], CPU, "trainer 2")
    weight = torch.zeros(1 << 17, dtype=torch.uint8)
    monkeypatch.setattr(torch, "empty", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")))
    with pytest.raises(Unsupported, match="trainer 2: .* weights in FP8, which take 66,048 bytes of scratch") as error:
        q.bind({"w": weight})
    assert error.value.violations[0] == "CUDA out of memory. Tried"


@pytest.mark.parametrize(
    "blocks, largest", [(b"\4\0\0\0", b"\0" * 4), (b"\3\0\0\0", b"\0" * 8)], ids=["no such block", "two values"]
)
def test_a_rank_that_measures_other_blocks_than_there_are_is_refused(blocks, largest):
    catalog = Catalog((TensorSpec("w", (256, 256), "bfloat16"),)).deriving([("w", "ieee")])
    refit = SimpleNamespace(coordinator=SimpleNamespace(generation=1, catalog=catalog))
    with pytest.raises(ProtocolError, match="trainer 3 measured other blocks than the 4 of the catalog"):
        SharedBlocks(refit).measured(SimpleNamespace(label="trainer 3"), m.Measured(1, 1, 1, blocks, largest))


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


# ---- scales of trainers' own FP8 parameters, with blocks of 4 x 4

SIDE = 4


def parameter_box(rng: np.random.Generator):
    """(a box of a matrix in a parameter, shape of the matrix, rows and columns of the parameter), often aligned."""
    step, turned = rng.choice([1, SIDE], size=(2, 2)).tolist(), rng.random() < 0.3
    shape = tuple(int(rng.integers(1, 5) * SIDE - rng.integers(0, SIDE) * (rng.random() < 0.5)) for _ in range(2))
    origin = tuple(int(rng.integers(0, -(-n // s)) * s) for n, s in zip(shape, step[0]))
    extent = tuple(
        n - o if rng.random() < 0.5 else int(min(n - o, rng.integers(1, 4) * s))
        for n, o, s in zip(shape, origin, step[0])
    )
    place = [int(rng.integers(0, 3) * s) for s in step[1]]
    rows, width = (p + e + int(rng.integers(0, 3)) for p, e in zip(place, extent[::-1] if turned else extent))
    strides = tuple(s if n > 1 else 0 for s, n in zip((1, width) if turned else (width, 1), extent))
    f = Fragment("x", origin, extent, "p", place[0] * width + place[1], strides, derived.VALUES)
    return f, shape, rows, width


def truth(f: Fragment, shape: tuple[int, int], rows: int, width: int) -> dict[tuple[int, int], tuple[int, int]] | None:
    """The parameter's block of each block of the matrix; None if some has several, or only a part of its elements."""
    blocks = np.arange(rows)[:, None] // SIDE * 1000 + np.arange(width) // SIDE
    held = np.full(shape, -1)
    held[f.index] = blocks.reshape(-1)[addresses(f.offset, f.extent, f.strides)].reshape(f.extent)
    found = {}
    for a, b in np.ndindex(*derived.block_grid(shape)):
        there = np.unique(held[a * SIDE : (a + 1) * SIDE, b * SIDE : (b + 1) * SIDE])
        if len(there) > 1:
            return None
        if there[0] >= 0:
            found[a, b] = divmod(int(there[0]), 1000)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_scales_are_those_of_the_parameters_blocks_or_the_box_is_refused(seed, monkeypatch):
    """Against a brute-force map of elements."""
    monkeypatch.setattr(derived, "BLOCK", SIDE)
    rng, given, refused = np.random.default_rng(seed), 0, 0
    for _ in range(250):
        f, shape, rows, width = parameter_box(rng)
        strides = (4 * derived.block_grid((rows, width))[1] + 16, 4)  # rows of scales are padded
        want = truth(f, shape, rows, width)
        try:
            got = derived.scales_of(f, shape, width, "s", 1 << 10, strides)
        except Unsupported as e:
            assert want is None, (f, shape, rows, width, e)
            refused += 1
            continue
        given += 1
        assert want is not None, (f, shape, rows, width)
        assert (got.tensor, got.root, got.dtype) == ("x", "s", derived.SCALES)
        at = addresses(got.offset, got.extent, got.strides).tolist()
        assert dict(zip(np.ndindex(*got.extent), at)) == {
            (a - got.origin[0], b - got.origin[1]): (1 << 10) + row * strides[0] + column * strides[1]
            for (a, b), (row, column) in want.items()
        }
    assert given > 20 and refused > 20, (given, refused)


def test_a_stack_or_interleaved_rows_are_refused():
    stack = Fragment("x", (0, 0, 0), (2, 4, 4), "p", 0, (16, 4, 1), derived.VALUES)
    other = Fragment("x", (0, 0), (4, 4), "p", 0, (4, 1), derived.VALUES, (2, 1))
    for f, shape in ((stack, (2, 4, 4)), (other, (8, 4))):
        with pytest.raises(Unsupported, match="otherwise than in plain boxes of a matrix"):
            derived.scales_of(f, shape, 4, "s", 0, (16, 4))
