"""Rows of a program executed by the kernels equal the same rows executed by a plain numpy loop over elements."""

from __future__ import annotations

import os
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from tests.support.row_worlds import apply_rows, fresh_sources, random_rows, row, unpacked_wire
from xfer.errors import LayoutError
from xfer.kernels import bind, strided
from xfer.plan.program import ITEMSIZE, Op, wire_dtype

EXAMPLES = int(os.environ.get("XFER_EXAMPLES", "200"))


def flat(data: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(data.copy())


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.integers(0, 3))
def test_pack_unpack_equals_the_element_loop(seed, peel, spare):
    """src storage -> wire -> dst storage; negative strides, casts, odd offsets and odd storage starts included."""
    rng = np.random.default_rng(seed)
    rows, src, dst = random_rows(rng)
    want = apply_rows(rows, src, dst)
    # A binding may begin anywhere in its torch storage.
    s = [flat(np.concatenate([np.zeros(spare, np.uint8), r]))[spare:] for r in src]
    d = [flat(np.concatenate([np.zeros(spare, np.uint8), r]))[spare:] for r in dst]
    with patch.object(strided, "PEEL_LIMIT", strided.PEEL_LIMIT if peel else 0):  # both ways to walk backwards
        out, into = bind(rows, s, "src"), bind(rows, d, "dst")
    wire = torch.full((max(out.nbytes, into.nbytes) + 5,), 0x5A, dtype=torch.uint8)
    out.pack(wire)
    assert np.array_equal(wire.numpy()[: out.nbytes], unpacked_wire(rows, src, out.nbytes, 0x5A))
    into.unpack(wire)
    into.fill()
    for got, w in zip(d, want):
        assert np.array_equal(got.numpy(), w)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_local_copy_equals_the_element_loop(seed):
    rows, src, dst = random_rows(np.random.default_rng(seed))
    want = apply_rows(rows, src, dst)
    s, d = [flat(r) for r in src], [flat(r) for r in dst]
    local = bind(rows, d, "local", src_roots=s)
    local.copy()
    local.fill()
    for got, w in zip(d, want):
        assert np.array_equal(got.numpy(), w)


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_warm_call_reads_the_storages_again(seed):
    """The second call with the same buffer carries new bytes: nothing but addresses is kept."""
    rng = np.random.default_rng(seed)
    rows, src, dst = random_rows(rng)
    s, d = [flat(r) for r in src], [flat(r) for r in dst]
    out, into = bind(rows, s, "src"), bind(rows, d, "dst")
    wire = torch.empty(out.nbytes, dtype=torch.uint8)
    out.pack(wire)
    into.unpack(wire)
    again = fresh_sources(rng, rows, src)
    for t, r in zip(s, again):
        t.copy_(torch.from_numpy(r))
    out.pack(wire)
    into.unpack(wire)
    into.fill()
    for got, w in zip(d, apply_rows(rows, again, dst)):
        assert np.array_equal(got.numpy(), w)


def test_heads_and_neighbours_fold_into_one_copy():
    """64 rows of interleaved heads, and 64 rows that follow each other, are one strided copy each."""
    heads = np.concatenate(
        [row((4, 8), src_offset=i * 128, dst_offset=i * 64, wire=i * 64, src_strides=(16, 2)) for i in range(64)]
    )
    follow = np.concatenate([row((4, 8), src_offset=i * 64, dst_offset=i * 64, wire=i * 64) for i in range(64)])
    roots = [torch.zeros(64 * 128, dtype=torch.uint8)]
    assert bind(heads, roots, "src").copies == 1
    assert bind(follow, roots, "src").copies == 1
    reverse = np.concatenate([row((4, 8), src_offset=(63 - i) * 64, dst_offset=i * 64, wire=i * 64) for i in range(64)])
    assert bind(reverse, roots, "src").copies == 64


def test_rows_outside_their_storage_are_refused_all_at_once():
    roots = [torch.zeros(100, dtype=torch.uint8)]
    good = row((5, 10))  # 100 bytes
    late, early, lost = (
        row((5, 10), src_offset=2),
        row((5, 10), src_offset=70, src_strides=(-20, 2)),
        row((5, 10), src_root=3),
    )
    bind(good, roots, "src")
    with pytest.raises(LayoutError) as e:
        bind(np.concatenate([good, late, early, lost]), roots, "src")
    assert len(e.value.violations) == 3


def test_a_short_wire_buffer_and_a_wrong_side_are_refused():
    roots = [torch.zeros(100, dtype=torch.uint8)]
    rows = bind(row((5, 10)), roots, "src")
    with pytest.raises(ValueError, match="99 bytes"):
        rows.pack(torch.empty(99, dtype=torch.uint8))
    with pytest.raises(TypeError):
        rows.unpack(torch.empty(100, dtype=torch.uint8))
    with pytest.raises(TypeError):
        rows.copy()


@pytest.mark.parametrize(
    "src, dst",
    [
        ("float32", "bfloat16"),
        ("float32", "float16"),
        ("bfloat16", "float32"),
        ("bfloat16", "float16"),
        ("float64", "float32"),
        ("float32", "float8_e4m3fn"),
        ("bfloat16", "float8_e5m2"),
    ],
)
def test_casts_round_as_torch_does(src, dst):
    """Ties, subnormals, infinities, NaNs: the two halves of a cast (sender, taker) give what `.to()` gives at once."""
    bits = torch.randint(-(2**31), 2**31 - 1, (4096,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    ties = (torch.arange(2048, dtype=torch.int32) << 20) | 0x8000
    value = torch.cat([bits, ties, torch.tensor([0x7F800000, 0x7FC00001, 1], dtype=torch.int32)]).view(torch.float32)
    value = value.to(getattr(torch, src))
    want = value.to(getattr(torch, dst))
    n = value.numel()
    rows = row(
        (n,), src_dtype=src, dst_dtype=dst, src_strides=(ITEMSIZE[src],), dst_strides=(ITEMSIZE[dst],), op=Op.CAST
    )
    got = torch.empty_like(want)
    wire = torch.empty(n * ITEMSIZE[wire_dtype(src, dst)], dtype=torch.uint8)
    bind(rows, [value.view(torch.uint8)], "src").pack(wire)
    bind(rows, [got.view(torch.uint8)], "dst").unpack(wire)
    same = torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert same or torch.equal(got.float().nan_to_num(7.5), want.float().nan_to_num(7.5))


def test_a_warm_call_allocates_nothing():
    rng = np.random.default_rng(5)
    rows, src, dst = random_rows(rng)
    s, d = [flat(r) for r in src], [flat(r) for r in dst]
    out, into, local = bind(rows, s, "src"), bind(rows, d, "dst"), bind(rows, d, "local", src_roots=s)
    wire = torch.empty(out.nbytes, dtype=torch.uint8)

    def once():
        out.pack(wire)
        into.unpack(wire)
        into.fill()
        local.copy()

    once()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        once()
    assert sum(max(0, e.self_cpu_memory_usage) for e in p.key_averages()) == 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        torch.empty(100)
    assert sum(max(0, e.self_cpu_memory_usage) for e in p.key_averages()) > 0  # the measure itself
