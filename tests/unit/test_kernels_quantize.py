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

from tests.support.block_fp8 import NUMBERS, block_scale, quantized, to_e4m3
from tests.support.examples import EXAMPLES
from tests.support.row_worlds import cut
from tests.unit.test_kernels_triton import DEVICE, GPU, runs
from xfer.kernels import block_fp8
from xfer.kernels.block_fp8 import TorchQuantizer, scales_of
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


@makers
@settings(max_examples=EXAMPLES)
@given(seeds, rules, st.integers(1, 4), st.sampled_from([1, block_fp8.CHUNK]))
def test_any_boxes_get_the_oracles_bits_and_nothing_is_written_beside_them(make, seed, rule, count, chunk):
    """Both dtypes, any strides, beginning anywhere in a block, in one pass and in two, all in one call."""
    some = [random_box(rng) for rng in np.random.default_rng(seed).spawn(count)]
    with patch.object(block_fp8, "CHUNK", chunk):
        q = make([box for _, box in some], rule)
        q.measure()
        q.run()
    for w, box in some:
        for got, want in zip((box.values, box.scales, box.amax), quantized(w, rule, box.row0, box.col0)):
            if got is not None:
                assert same(bits(got), want)
                beside = bits(got._base[:, got.shape[1] :])
                assert (beside == (0x7F if got is box.values else 0x7FC00000)).all()


AMAX = [0.0, 1.0, 0.03125, 0.9, 1.8125, 1.82, 232.0, 448.0, 464.0, 465.0, 3.3e38, 7e-39, np.inf, np.nan]


@makers
@pytest.mark.parametrize("rule", ScaleRule)
@pytest.mark.parametrize("amax", AMAX)
def test_every_number_of_bfloat16_is_rounded_as_the_table_says(make, rule, amax):
    """By the scale of this largest value, which is too small for some."""
    w = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32).reshape(512, 128)
    box = empty(torch.from_numpy(w).to(torch.bfloat16).to(DEVICE), shared=True)
    box.amax.fill_(amax)
    make([box], rule).run()
    scale = block_scale(np.float32(amax), rule)
    with np.errstate(all="ignore"):
        assert same(bits(box.values), to_e4m3(w * (np.float32(1) / scale)))
    assert same(bits(box.scales), np.full((4, 1), scale))


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


def pieces(rng: np.random.Generator, weight: torch.Tensor, whole: WeightBox) -> list[WeightBox]:
    """The weight cut anywhere: each piece writes into its place of `whole`, and the amax of blocks is one array for all."""
    shared = torch.full(whole.grid, torch.nan, device=DEVICE)
    out = []
    for (row, column), (rows, columns), _ in cut(rng, tuple(weight.shape), int(rng.integers(1, 8))):
        at = np.s_[row : row + rows, column : column + columns]
        i, j, row0, col0 = row // 128, column // 128, row % 128, column % 128
        down, across = grid((rows, columns), row0, col0)
        blocks = np.s_[i : i + down, j : j + across]
        out.append(WeightBox(weight[at], whole.values[at], whole.scales[blocks], shared[blocks], row0, col0))
    return out


@makers
@settings(max_examples=EXAMPLES)
@given(seeds, rules, st.booleans())
def test_pieces_that_agree_on_amax_are_quantized_as_the_whole(make, seed, rule, ranks):
    """Pieces of one rank share the array; pieces of several ranks gather the maximum, of which a NaN is the largest."""
    rng = np.random.default_rng(seed)
    rows, columns = (int(n) for n in rng.integers(1, 300, 2))
    w = hard_weight(rng, rows, columns)
    weight = tensor_of(w, torch.float32, rng)
    whole = empty(weight)
    cuts = pieces(rng, weight, whole)
    if ranks:  # each with an array of its own
        shared = cuts[0].amax._base if cuts[0].amax._base is not None else cuts[0].amax
        own = [replace(b, amax=torch.full_like(b.amax, torch.nan)) for b in cuts]
        for b in own:
            make([b], rule).measure()
        shared.zero_()
        for b, o in zip(cuts, own):
            torch.maximum(b.amax, o.amax, out=b.amax)
        for b in cuts:
            make([b], rule).run()
    else:
        one = make(cuts, rule)
        one.measure()
        one.run()
    codes, scales, _ = quantized(w, rule)
    assert same(bits(whole.values), codes) and same(bits(whole.scales), scales)


@pytest.mark.parametrize("rule", ScaleRule)
@pytest.mark.parametrize(
    "amax, ieee, pow2",
    [
        (0.0, np.float32(1e-4) / np.float32(448), 2.0**-22),
        (448.0, 1.0, 1.0),
        (464.0, np.float32(464) / np.float32(448), 1.0),
        (465.0, np.float32(465) / np.float32(448), 2.0),
        (232.0, np.float32(232) / np.float32(448), 0.5),
        (np.inf, np.inf, np.inf),
        (np.nan, np.nan, np.nan),
    ],
)
def test_the_scales_themselves(rule, amax, ieee, pow2):
    want = np.float32(ieee if rule is ScaleRule.IEEE else pow2)
    got, inverse = (x.numpy() for x in scales_of(torch.tensor([amax], dtype=torch.float32), rule))
    assert same(got, np.array([want])) and same(inverse, np.array([np.float32(1) / want]))


def test_a_diverged_trainer_shows():
    """A NaN makes its block NaN; an infinity makes its block NaN when it is multiplied out. Other blocks stay."""
    weight = torch.ones(128, 384, dtype=torch.bfloat16)
    weight[3, 5], weight[3, 133] = torch.nan, -torch.inf
    box = empty(weight.to(DEVICE))
    quantizer([box], ScaleRule.IEEE).run()
    back = box.values.float() * box.scales.repeat_interleave(128, 1)
    assert back[:, :256].isnan().all() and back[:, 256:].eq(1).all()
    assert bits(box.values)[3, 5] == bits(box.values)[3, 133] == 0x7F and bits(box.scales)[0, 0] == 0x7FC00000


def requantized(codes: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What DeepGEMM's requantization to powers of two makes of one block: the smallest one with amax / scale <= 448."""
    numbers = np.append(NUMBERS, np.nan)[codes & 0x7F] * np.where(codes & 0x80, -1, 1)
    x = (numbers * scales).astype(np.float32)
    amax = max(np.abs(x).max(), np.float32(1e-4))
    scale = np.float32(2.0 ** np.ceil(np.log2(np.float64(amax / np.float32(448)))))
    return to_e4m3(x * (np.float32(1) / scale)), np.array([[scale]], np.float32)


@settings(max_examples=EXAMPLES)
@given(seeds, st.floats(1.0, 2.0, exclude_max=True), st.integers(-12, 12))
def test_pow2_survives_requantization(seed, mantissa, exponent):
    """Every byte and every scale, wherever the largest value lies between two powers of two."""
    w = np.random.default_rng(seed).uniform(-1, 1, (128, 128)).astype(np.float32)
    w[0, 0] = 1
    codes, scales, _ = quantized(w * np.float32(mantissa * 2.0**exponent), ScaleRule.POW2)
    again, their = requantized(codes, scales)
    assert same(again, codes) and same(their, scales)


@pytest.mark.engine
@settings(max_examples=EXAMPLES // 4 + 1)
@given(seeds)
def test_ieee_is_what_vllm_computes_and_pow2_what_it_keeps(seed):
    """vLLM's own `per_block_cast_to_fp8`, not compiled, and its `requant_weight_ue8m0_inplace`, which runs after loading."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    rng = np.random.default_rng(seed)
    w = rng.standard_normal(tuple(int(n) for n in rng.integers(1, 300, 2))) * np.exp(rng.uniform(-15, 5))
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
