"""Checksums that begin while bytes move: the choice of the first storages, and the same sum."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.row_worlds import row
from tests.support.sums import checksum_rows
from xfer.direct.early import FIRST, EarlySums, first_storages, whole_storages
from xfer.plan.program import Op, row_wire_bytes
from xfer.plan.relay import in_parts

STORAGES = 5


@st.composite
def rows(draw):
    """(rows that are pulled, other rows), of one taker."""
    made = [[], []]
    for k in range(draw(st.integers(1, 12))):
        size, root = draw(st.integers(0, 40)), draw(st.integers(0, STORAGES - 1))
        r = row((size,), src=0, dst=1, tensor=k)
        r["dst_root"], r["dst_offset"] = root, 128 * k
        if draw(st.integers(0, 5)) == 0:
            r["op"] = Op.FILL
        made[draw(st.integers(0, 3)) == 0].append(r)
    empty = row((0,), src=0, dst=1)[:0]
    return tuple(np.concatenate([empty, *some]) for some in made)


@given(rows())
@settings(max_examples=300, deadline=None)
def test_what_comes_first_is_pulled_whole_and_not_too_much(worlds):
    pulled, others = worlds
    pulled = pulled[pulled["op"] != Op.FILL]
    first = first_storages(pulled, others)
    nbytes = row_wire_bytes(pulled)
    assert nbytes[np.isin(pulled["dst_root"], first)].sum() <= FIRST * nbytes.sum()
    assert not np.isin(others["dst_root"][others["op"] != Op.FILL], first).any()


def test_three_of_four_equal_storages_come_first():
    """The others are written by another route, or come in the last part."""
    some = np.concatenate([row((4096,), src=0, dst=1, tensor=k) for k in range(4)])
    some["dst_root"] = range(4)
    assert first_storages(some, some[:0]).tolist() == [0, 1, 2]
    assert first_storages(some, some[1:2]).tolist() == [0, 2, 3]
    for parts, others, want in ((4, some[:0], (2, [0, 1, 2])), (8, some[1:2], (5, [0, 2]))):
        part, first = whole_storages(in_parts(some, parts), others)
        assert (part, first.tolist()) == want
    assert not len(whole_storages(in_parts(some, 1), some[:0])[1])


@given(rows(), st.integers(0, 6))
@settings(max_examples=300, deadline=None)
def test_the_sum_is_that_of_all_rows_whatever_comes_later(worlds, parts):
    """What comes after the first storages are whole writes in none of them. `parts`: of a relay chain; 0 without one."""
    pulled, others = worlds
    pulled = pulled[pulled["op"] != Op.FILL]
    pulled = in_parts(pulled, parts) if parts else pulled
    everything, shapes = np.concatenate([pulled, others]), [(40,)] * 12
    final = [torch.randint(0, 255, (2048,), dtype=torch.uint8) for _ in range(STORAGES)]
    roots = [torch.zeros_like(t) for t in final]
    if parts:
        part, first = whole_storages(pulled, others)
        assert not len(first) or part < pulled["wave"].max()
        gate = EarlySums(everything, roots, shapes, first, part)
    else:
        gate = EarlySums(everything, roots, shapes, first_storages(pulled, others))
        pulled = gate.parts(pulled)
    for wave in sorted(set(pulled["wave"].tolist())):
        for r in pulled[pulled["wave"] == wave]:
            live, want = (t[r["dst_root"]] for t in (roots, final))
            at = slice(r["dst_offset"], r["dst_offset"] + int(row_wire_bytes(r[None])[0]))
            live[at] = want[at]
        gate.after(wave, None)
    for live, t in zip(roots, final):
        live.copy_(t)
    assert gate.value() == checksum_rows(everything, final, "dst", shapes)
