"""Rows of a program executed by the kernels equal the same rows executed by a plain numpy loop over elements."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import EXAMPLES
from tests.support.row_worlds import CASTS, apply_rows, fresh_sources, hard_values, random_rows, row, unpacked_wire
from tests.unit.test_kernels_triton import DEVICE, GPU, INTERPRETED, KINDS, flat
from tests.unit.test_kernels_triton import bound as of_triton
from xfer.errors import LayoutError
from xfer.kernels import bind, strided
from xfer.kernels.tiles import Turns
from xfer.plan.program import ITEMSIZE, wire_dtype


def bound(kind: str, rows, roots, side, src=None, **triton):
    return of_triton(rows, roots, side, src, **triton) if kind == "triton" else bind(rows, roots, side, src_roots=src)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=EXAMPLES // (4 if INTERPRETED or GPU else 1), deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.booleans(), st.integers(0, 17), st.integers(0, 3), st.sampled_from([None, (0, 1), (1, 0), (2, 0)]),
    st.sampled_from([0, 100, 1 << 30]),
)  # fmt: skip
def test_both_ways_to_copy_equal_the_element_loop(kind, seed, peel, spare, start, groups, burst):
    """In any order of tiles; storages and wires begin anywhere in theirs. A second call carries new bytes."""
    rng = np.random.default_rng(seed)
    rows, src, dst = random_rows(rng)
    s, d, here = ([flat(r, spare) for r in some] for some in (src, dst, dst))
    abort = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    turns = groups and Turns([groups[k % 2] for k in range(len(s))], burst)
    with patch.object(strided, "PEEL_LIMIT", strided.PEEL_LIMIT if peel else 0):  # both ways to walk backwards
        out, into = bound(kind, rows, s, "src"), bound(kind, rows, d, "dst")
        local = bound(kind, rows, here, "local", s, turns=turns, abort=abort)
    wire = flat(np.full(max(out.nbytes, into.nbytes) + 5, 0x5A, np.uint8), start)
    for data in (src, fresh_sources(rng, rows, src)):
        for t, r in zip(s, data):
            t.copy_(torch.from_numpy(r))
        out.pack(wire)
        assert np.array_equal(wire.cpu().numpy()[: out.nbytes], unpacked_wire(rows, data, out.nbytes, 0x5A))
        into.unpack(wire)
        local.copy()
        into.fill()
        local.fill()
        for got, also, want in zip(d, here, apply_rows(rows, data, dst)):
            assert np.array_equal(got.cpu().numpy(), want) and np.array_equal(also.cpu().numpy(), want)


def test_heads_and_neighbours_fold_into_one_copy():
    """64 rows of interleaved heads, and 64 rows that follow each other, are one strided copy each; in reverse they are 64."""
    roots = [torch.zeros(64 * 128, dtype=torch.uint8)]
    for step, first, copies in ((128, 0, 1), (64, 0, 1), (-64, 63 * 64, 64)):
        some = [
            row((4, 8), src_offset=first + i * step, dst_offset=i * 64, wire=i * 64, src_strides=(16, 2))
            for i in range(64)
        ]
        assert bind(np.concatenate(some), roots, "src").copies == copies


def test_rows_outside_their_storage_a_short_wire_and_a_wrong_side_are_refused():
    roots = [torch.zeros(100, dtype=torch.uint8)]
    good = row((5, 10))  # 100 bytes
    wrong = dict(src_offset=2), dict(src_offset=70, src_strides=(-20, 2)), dict(src_root=3)
    with pytest.raises(LayoutError) as e:
        bind(np.concatenate([good, *(row((5, 10), **columns) for columns in wrong)]), roots, "src")
    assert len(e.value.violations) == 3
    rows = bind(good, roots, "src")
    with pytest.raises(ValueError, match="99 bytes"):
        rows.pack(torch.empty(99, dtype=torch.uint8))
    with pytest.raises(TypeError):
        rows.unpack(torch.empty(100, dtype=torch.uint8))
    with pytest.raises(TypeError):
        rows.copy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("src, dst", [*CASTS, ("bfloat16", "float8_e5m2")])
def test_casts_round_as_torch_does(src, dst, kind):
    """At once, and by the two halves of a cast (source, destination)."""
    value = hard_values(src).to(DEVICE)
    want, rows = value.to(getattr(torch, dst)), row((len(value),), src_dtype=src, dst_dtype=dst)
    local, sent = torch.empty_like(want), torch.empty_like(want)
    there = [value.view(torch.uint8)]
    bound(kind, rows, [local.view(torch.uint8)], "local", there).copy()
    wire = torch.empty(len(value) * ITEMSIZE[wire_dtype(src, dst)], dtype=torch.uint8, device=DEVICE)
    bound(kind, rows, there, "src").pack(wire)
    bound(kind, rows, [sent.view(torch.uint8)], "dst").unpack(wire)
    plain = ~want.float().isnan()
    for got in (local, sent):
        assert torch.equal(got.float().isnan(), ~plain)
        assert torch.equal(*(t.view(torch.uint8).view(len(value), -1)[plain] for t in (got, want)))
