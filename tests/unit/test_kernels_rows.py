"""Rows of a program executed by the kernels equal the same rows executed by a plain numpy loop over elements."""

from __future__ import annotations

import os
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.row_worlds import CASTS, apply_rows, fresh_sources, hard_values, random_rows, row, unpacked_wire
from xfer.errors import LayoutError
from xfer.kernels import bind, strided
from xfer.plan.program import ITEMSIZE, wire_dtype

EXAMPLES = int(os.environ.get("XFER_EXAMPLES", "200"))


def flat(data: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(data.copy())


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.integers(0, 3))
def test_both_ways_to_copy_equal_the_element_loop(seed, peel, spare):
    """Over a wire or locally; negative strides, casts, odd offsets and odd storage starts. A second call carries new bytes."""
    rng = np.random.default_rng(seed)
    rows, src, dst = random_rows(rng)
    # A binding may begin anywhere in its torch storage.
    s, d, here = (
        [flat(np.concatenate([np.zeros(spare, np.uint8), r]))[spare:] for r in some] for some in (src, dst, dst)
    )
    with patch.object(strided, "PEEL_LIMIT", strided.PEEL_LIMIT if peel else 0):  # both ways to walk backwards
        out, into, local = bind(rows, s, "src"), bind(rows, d, "dst"), bind(rows, here, "local", src_roots=s)
    wire = torch.full((max(out.nbytes, into.nbytes) + 5,), 0x5A, dtype=torch.uint8)
    for data in (src, fresh_sources(rng, rows, src)):
        for t, r in zip(s, data):
            t.copy_(torch.from_numpy(r))
        out.pack(wire)
        assert np.array_equal(wire.numpy()[: out.nbytes], unpacked_wire(rows, data, out.nbytes, 0x5A))
        into.unpack(wire)
        local.copy()
        into.fill()
        local.fill()
        for got, also, want in zip(d, here, apply_rows(rows, data, dst)):
            assert np.array_equal(got.numpy(), want) and np.array_equal(also.numpy(), want)


def test_heads_and_neighbours_fold_into_one_copy():
    """64 rows of interleaved heads, and 64 rows that follow each other, are one strided copy each; in reverse they are 64."""
    roots = [torch.zeros(64 * 128, dtype=torch.uint8)]
    for step, first, copies in ((128, 0, 1), (64, 0, 1), (-64, 63 * 64, 64)):
        some = [
            row((4, 8), src_offset=first + i * step, dst_offset=i * 64, wire=i * 64, src_strides=(16, 2))
            for i in range(64)
        ]
        assert bind(np.concatenate(some), roots, "src").copies == copies


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


@pytest.mark.parametrize("src, dst", [*CASTS, ("bfloat16", "float8_e5m2")])
def test_casts_round_as_torch_does(src, dst):
    """The two halves of a cast (source, destination) give what `.to()` gives at once."""
    value = hard_values(src)
    want = value.to(getattr(torch, dst))
    got, rows = torch.empty_like(want), row((len(value),), src_dtype=src, dst_dtype=dst)
    wire = torch.empty(len(value) * ITEMSIZE[wire_dtype(src, dst)], dtype=torch.uint8)
    bind(rows, [value.view(torch.uint8)], "src").pack(wire)
    bind(rows, [got.view(torch.uint8)], "dst").unpack(wire)
    same = torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert same or torch.equal(got.float().nan_to_num(7.5), want.float().nan_to_num(7.5))
