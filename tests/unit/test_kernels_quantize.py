"""Block FP8: the torch twin, the kernel and vLLM's own functions give the bits of the numpy oracle (tests/support/block_fp8.py).

TRITON_INTERPRET=1 python -m pytest tests/unit/test_kernels_quantize.py    # else the kernel needs a GPU, or is skipped
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.block_fp8 import NUMBERS, quantized, to_e4m3
from tests.support.examples import EXAMPLES
from tests.support.row_worlds import cut
from tests.unit.test_kernels_rows import DEVICE, GPU, runs
from xfer.kernels import block_fp8
from xfer.kernels.block_fp8 import TorchQuantizer
from xfer.kernels.quantize import ScaleRule, WeightBox, grid, quantizer

rules, seeds = st.sampled_from(list(ScaleRule)), st.integers(0, 2**32 - 1)


def triton_quantizer(boxes, rule, hardware):
    from xfer.kernels.quantize_triton import TritonQuantizer

    return TritonQuantizer(boxes, rule, hardware)


makers = pytest.mark.parametrize(
    "make",
    [
        pytest.param(TorchQuantizer, id="torch"),
        pytest.param(partial(triton_quantizer, hardware=False), id="kernel, by integers", marks=runs),
        pytest.param(
            partial(triton_quantizer, hardware=True), id="kernel, by the GPU's conversion",
            marks=pytest.mark.skipif(not GPU, reason="needs a GPU"),
        ),
    ],
)  # fmt: skip


def hard_weight(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """float32: all magnitudes, zeros of both signs, subnormals, ties, and in some weights NaN and infinities."""
    w = rng.standard_normal((rows, columns)).astype(np.float32)
    kind = rng.integers(6)
    with np.errstate(over="ignore", under="ignore"):
        if kind == 0:
            w *= np.exp(rng.uniform(-30, 60, (rows, 1))).astype(np.float32)
        elif kind == 1:  # halves between two numbers of e4m3, by a scale of 1
            w = rng.choice(np.concatenate([NUMBERS, (NUMBERS[1:] + NUMBERS[:-1]) / 2]), w.shape).astype(np.float32)
            w *= rng.choice(np.float32([-1, 1]), w.shape)
        elif kind == 2:  # bits of any kind
            w = rng.integers(0, 2**32, w.shape, dtype=np.uint32).view(np.float32).copy()
            w[~np.isfinite(w)] = 0
        elif kind == 3:
            w *= np.float32(rng.choice([1e-40, 1e-6, 0, 3e38]))
    some = rng.integers(0, w.size, 4)
    special = [0.0, -0.0, 1e-42, -1e-42, 448, 232, 464, 1e-4, 3.4e38]
    if kind == 4:
        special += [np.nan, -np.nan, np.inf, -np.inf]
    w.reshape(-1)[some] = rng.choice(np.float32(special), 4)
    return w


def tensor_of(w: np.ndarray, dtype: torch.dtype, rng: np.random.Generator) -> torch.Tensor:
    """The weight on the device, as columns of a wider storage, or transposed, or dense and a parameter."""
    rows, columns = w.shape
    t = torch.from_numpy(w).to(dtype)
    as_integers = t.view({2: torch.int16, 4: torch.int32}[t.element_size()])
    as_integers[t.isnan()] |= int(rng.integers(1 << 7))  # NaN is NaN, whatever else its bits say
    if (kind := rng.integers(4)) == 0:
        return t.t().contiguous().to(DEVICE).t()
    spare = int(rng.choice([0, 16, 3])) if kind == 1 else 0
    wide = torch.zeros(rows, columns + 2 * spare, dtype=dtype, device=DEVICE)
    wide[:, spare : spare + columns] = t.to(DEVICE)
    return wide[:, spare : spare + columns].requires_grad_(bool(kind == 2))


def empty(weight: torch.Tensor, row0: int = 0, col0: int = 0, *, spare: int = 0, shared: bool = False) -> WeightBox:
    """A box whose values and scales are poison, in wider storages."""
    rows, columns = weight.shape
    down, across = grid(weight.shape, row0, col0)
    values = torch.full((rows, columns + spare), 0x7F, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    scales = torch.full((down, across + spare), torch.nan, device=DEVICE)
    amax = torch.full((down, across + 2 * spare), torch.nan, device=DEVICE)[:, :across] if shared else None
    return WeightBox(weight, values[:, :columns], scales[:, :across], amax, row0, col0)


def bits(t: torch.Tensor | None) -> np.ndarray:
    assert t is not None
    return t.cpu().contiguous().view({1: torch.uint8, 4: torch.int32}[t.element_size()]).numpy()


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))


def random_box(rng: np.random.Generator, most: int = 300) -> tuple[np.ndarray, WeightBox]:
    """Float32 numbers, and a box that holds them (rounded, if in bfloat16)."""
    rows, columns = (int(rng.choice([1, n, 128, 16 * (n // 16 + 1)])) for n in rng.integers(1, most, 2))
    row0, col0 = (int(rng.choice([0, 0, 16, n])) for n in rng.integers(0, 128, 2))
    w = hard_weight(rng, rows, columns)
    dtype = (torch.bfloat16, torch.float32)[rng.integers(2)]
    spare, shared = int(rng.choice([0, 0, 16, 5])), bool(rng.integers(2))
    return w, empty(tensor_of(w, dtype, rng), row0, col0, spare=spare, shared=shared)


def pieces(rng: np.random.Generator, whole: WeightBox) -> list[WeightBox]:
    """The box cut anywhere: each piece writes into its place of all three arrays."""
    out = []
    for (row, column), (rows, columns), _ in cut(rng, tuple(whole.weight.shape), int(rng.integers(0, 8))):
        at = np.s_[row : row + rows, column : column + columns]
        (i, row0), (j, col0) = divmod(whole.row0 + row, 128), divmod(whole.col0 + column, 128)
        down, across = grid((rows, columns), row0, col0)
        blocks = np.s_[i : i + down, j : j + across]
        out.append(WeightBox(whole.weight[at], whole.values[at], whole.scales[blocks], whole.amax[blocks], row0, col0))
    return out


@makers
@settings(max_examples=EXAMPLES)
@given(seeds, rules, st.integers(1, 4), st.sampled_from([1, block_fp8.CHUNK]), st.booleans())
def test_any_boxes_get_the_oracles_bits_and_nothing_is_written_beside_them(make, seed, rule, count, chunk, ranks):
    """Both dtypes, any strides, beginning anywhere in a block, whole or cut anywhere, in one pass and in two, all in one call.
    Pieces of one rank share `amax`; pieces of several ranks gather the maximum, of which a NaN is the largest."""
    rngs = np.random.default_rng(seed).spawn(count)
    some = [random_box(rng) for rng in rngs]
    alone = [box for _, box in some if box.amax is None]
    cuts = [piece for rng, (_, box) in zip(rngs, some) if box.amax is not None for piece in pieces(rng, box)]
    with patch.object(block_fp8, "CHUNK", chunk):
        q = make([*alone, *cuts], rule)
        q.measure()
        if ranks:  # each with an array of its own
            own = [replace(b, amax=torch.full_like(b.amax, torch.nan)) for b in cuts]
            for b, o in zip(cuts, own):
                make([o], rule).measure()
                b.amax.zero_()
            for b, o in zip(cuts, own):
                torch.maximum(b.amax, o.amax, out=b.amax)
        q.run()
    for w, box in some:
        for got, want in zip((box.values, box.scales, box.amax), quantized(w, rule, box.row0, box.col0)):
            if got is not None:
                assert same(bits(got), want)
                beside = bits(got._base[:, got.shape[1] :])
                assert (beside == (0x7F if got is box.values else 0x7FC00000)).all()


POWERS = {
    0.0: -22, 7e-39: -22, 0.03125: -13, 0.9: -9, 1.0: -8, 1.8125: -8, 1.82: -7, 232.0: -1, 448.0: 0, 464.0: 0, 465.0: 1, 3.3e38: 120,
}  # fmt: skip
"""Largest value of a block -> exponent of its scale, where scales are powers of two."""


@makers
@pytest.mark.parametrize("rule", ScaleRule)
@pytest.mark.parametrize("amax", [*POWERS, np.inf, np.nan])
def test_every_number_of_bfloat16_is_rounded_as_the_table_says(make, rule, amax):
    """By the scale of this largest value, which is too small for some. If it is not finite, all of the block comes out as NaN."""
    w = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32).reshape(512, 128)
    box = empty(torch.from_numpy(w).to(torch.bfloat16).to(DEVICE), shared=True)
    box.amax.fill_(amax)
    make([box], rule).run()
    ieee, pow2 = np.float32(max(amax, 1e-4)) / np.float32(448), np.float32(2.0 ** POWERS.get(amax, amax))
    scale = ieee if rule is ScaleRule.IEEE else pow2
    with np.errstate(all="ignore"):
        assert same(bits(box.values), to_e4m3(w * (np.float32(1) / scale)))
    assert same(bits(box.scales), np.full((4, 1), scale))
    assert np.isfinite(amax) or (box.values.float() * float(scale)).isnan().all()


@runs
def test_only_what_is_aligned_is_read_and_written_sixteen_at_once():
    """The interpreter does not see a wrong promise of alignment, so here each condition is broken alone."""
    from xfer.kernels.quantize_triton import _unit

    wide = torch.zeros(64, 96, dtype=torch.bfloat16, device=DEVICE)
    good = empty(wide[:, 16:64], 0, 32, spare=16)
    whole = good, replace(good, row0=5), empty(torch.zeros(1, 32, device=DEVICE))
    assert [_unit(b) for b in whole] == [16] * 3
    broken = {
        "width": empty(wide[:, 16:56]),
        "column of the block": replace(good, col0=8),
        "column of the weight": replace(good, weight=wide[:, 8:56]),
        "stride of the weight": replace(good, weight=torch.zeros(64, 88, dtype=torch.bfloat16)[:, :48]),
        "column of the values": replace(good, values=empty(wide).values[:, 8:56]),
        "stride of the values": empty(wide[:, 16:64], spare=8),
        "transposed": empty(torch.zeros(48, 64, dtype=torch.bfloat16).t()),
    }
    assert {name: _unit(b) for name, b in broken.items()} == dict.fromkeys(broken, 1)


@pytest.mark.engine
@settings(max_examples=EXAMPLES)
@given(seeds, st.floats(1.0, 2.0, exclude_max=True), st.integers(-22, 12))
def test_ieee_is_what_vllm_computes_and_pow2_what_it_keeps(seed, mantissa, exponent):
    """vLLM's own `per_block_cast_to_fp8`, not compiled, and its `requant_weight_ue8m0_inplace`, which runs after loading; wherever the
    largest value lies between two powers of two."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    rng = np.random.default_rng(seed)
    w = rng.standard_normal(tuple(int(n) for n in rng.integers(1, 300, 2)))
    w *= mantissa * 2.0**exponent / np.abs(w).max()
    weight = torch.from_numpy(w).to(torch.bfloat16)
    box = empty(weight.to(DEVICE))
    quantizer([box], ScaleRule.IEEE).run()
    with torch.compiler.set_stance("force_eager"):
        values, scales = per_block_cast_to_fp8(weight)
        assert same(bits(box.values), bits(values)) and same(bits(box.scales), bits(scales))
        quantizer([box], ScaleRule.POW2).run()
        values, scales = box.values.cpu().clone(), box.scales.cpu().clone()
        requant_weight_ue8m0_inplace(values, scales)
    assert same(bits(box.values), bits(values)) and same(bits(box.scales), bits(scales))


def test_what_does_not_fit_is_refused_all_at_once():
    weight = torch.zeros(130, 16, device=DEVICE)
    good = empty(weight)
    wrong = [
        good,
        replace(good, weight=weight.half()),
        replace(good, values=torch.empty(16, 130, dtype=torch.float8_e4m3fn, device=DEVICE).t(), scales=weight[:1, :1]),
        replace(good, scales=None),
        replace(good, row0=128),
        replace(good, amax=torch.zeros(1, 1, device=DEVICE)),
    ]
    with pytest.raises(ValueError) as e:
        quantizer(wrong, ScaleRule.IEEE)
    assert re.findall(r"- box (\d)", str(e.value)) == list("122345")
    assert "box 5: amax is torch.float32 (1, 1), not torch.float32 (2, 1)" in str(e.value)


def test_empty_boxes_and_no_boxes_are_nothing_to_do():
    box = empty(torch.zeros(0, 16, device=DEVICE))
    for some in ([], [box]):
        q = quantizer(some, ScaleRule.POW2)
        q.measure()
        q.run()
    assert box.scales.shape == (0, 1)
