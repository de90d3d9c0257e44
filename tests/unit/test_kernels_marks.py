"""Marks: exactly the granules that differ, by the torch twin and by the kernels, and copies of nothing else.

TRITON_INTERPRET=1 python -m pytest tests/unit/test_kernels_marks.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import EXAMPLES
from tests.support.row_worlds import change, random_rows
from tests.unit.test_kernels_triton import DEVICE, GPU, KINDS, bound, flat, runs
from xfer.kernels.bits import GRANULE, WORD
from xfer.kernels.marks import ByteRange, ChangeMarks, places, rest_of
from xfer.plan.program import Op, row_wire_bytes
from xfer.plan.relay import handed_on

SIZES = st.lists(
    st.one_of(st.integers(0, 200), st.sampled_from([WORD, WORD + 4, 64 * WORD + 36, 70 * WORD])), min_size=1, max_size=5
)


def granules(now: list[np.ndarray], before: list[np.ndarray]) -> np.ndarray:
    """Marks, with an empty head, of the granules that differ."""
    at = places([len(x) for x in now])
    out = np.zeros(at[-1], np.uint8)
    for i, (a, b) in enumerate(zip(now, before)):
        for g in np.unique(np.flatnonzero(a != b) // GRANULE):
            out[at[i] + g // 8] |= 1 << g % 8
    return out


def with_head(marks: np.ndarray, base: int, sizes: list[int]) -> np.ndarray:
    """Marks with the refit they begin at, and how many bits each storage has."""
    at = places(sizes)
    counts = [np.unpackbits(marks[a:b]).sum() for a, b in zip(at, at[1:])]
    marks[: 8 * (1 + len(sizes))] = np.array([base, *counts], np.int64).view(np.uint8)
    return marks


def some_parts(rng: np.random.Generator, sizes: list[int]) -> tuple[tuple[ByteRange, ...], np.ndarray, np.ndarray]:
    """Parts to compare, without some spans; marks as a writer of those spans may have set them; and which bits of marks belong to parts."""
    spans = [
        ByteRange(i, *sorted(rng.integers(0, n + 1, 2).tolist())) for i, n in enumerate(sizes) if rng.random() < 0.7
    ]
    parts, at = rest_of([s for s in spans if s.start < s.stop], sizes), places(sizes)
    written, ours = np.zeros(at[-1], np.uint8), np.zeros(at[-1], np.uint8)
    for s in spans:
        written[at[s.root] + s.start // 256 : at[s.root] + -(-s.stop // 256)] = rng.integers(0, 256, 1, np.uint8)
    for p in parts:
        ours[at[p.root] + p.start // 256 : at[p.root] + -(-p.stop // 256)] = 255
    return parts, written, ours


@given(st.integers(0, 2**32 - 1), SIZES)
def test_the_rest_of_spans_is_in_words_and_has_every_byte_that_they_lack(seed, sizes):
    rng, taken = np.random.default_rng(seed), [np.zeros(n, bool) for n in sizes]
    spans = []
    for i, n in enumerate(sizes):
        cuts = sorted(set(rng.integers(0, n + 1, 4).tolist()))
        spans += [ByteRange(i, a, b) for a, b in zip(cuts[::2], cuts[1::2])]
    parts = rest_of(spans, sizes)
    assert list(parts) == sorted(parts) and all(p.start % WORD == 0 and p.start < p.stop for p in parts)
    assert all(p.stop % WORD == 0 or p.stop == sizes[p.root] for p in parts)
    for s in (*spans, *parts):
        taken[s.root][s.start : s.stop] = True
    assert all(t.all() for t in taken)
    for p in parts:
        around = [s for s in spans if s.root == p.root and s.start <= p.start and p.stop <= s.stop]
        assert not around, "a part that has nothing new"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(0, 2**32 - 1), SIZES, st.sampled_from([0.0, 0.001, 0.05, 1.0]), st.sampled_from([0, 2, 16]))
def test_granules_that_differ_are_marked_and_copied(kind, seed, sizes, share, spare):
    """A second comparison, after the copies were brought up to date, marks none. Of spans that others mark it takes over the marks."""
    rng = np.random.default_rng(seed)
    before = [rng.integers(0, 256, n, np.uint8) for n in sizes]
    now = [np.where(rng.random(len(b)) < share, b + np.uint8(1), b) for b in before]
    a, none = [flat(x, spare) for x in now], np.zeros(places(sizes)[-1], np.uint8)
    for parts, written, ours in ((None, none, ~none), some_parts(rng, sizes)):
        marks, whole = ChangeMarks(sizes, torch.device(DEVICE), parts), rest_of((), sizes) if parts is None else parts
        marks._by_kernel = kind == "triton"
        b = [flat(before[p.root][p.start : p.stop]) for p in whole]
        for base, was in ((7, before), (8, now)):
            marks.compare(a, b, base, None if parts is None else torch.from_numpy(written).to(DEVICE))
            want = with_head(granules(now, was) & ours | written, base, sizes)
            assert np.array_equal(marks.tensor.cpu().numpy(), want)
            marks.update(a, b)
            assert all(torch.equal(p.of(a), x) for p, x in zip(whole, b))


@runs
@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.02, 0.5]), st.sampled_from([0, 2, 16]), st.booleans())
def test_a_copy_of_what_is_marked_leaves_a_destination_as_a_copy_of_everything(seed, share, spare, every):
    """Conversions among them; also by way of scratch. The kernel tells how much it moved."""
    rng = np.random.default_rng(seed)
    rows, src, dst = random_rows(rng)
    rows = rows[rows["op"] != Op.FILL]
    now = [s.copy() for s in src]
    change(rng, rows, now, share)

    def from_(storages: list[np.ndarray], into: list[torch.Tensor], **more):
        return bound(rows, into, "local", [flat(s, spare) for s in storages], **more)

    roots, wanted = ([flat(d) for d in dst] for _ in range(2))
    from_(src, roots).copy()
    from_(now, wanted).copy()
    marks = granules(now, src)
    if every:
        marks[places([len(s) for s in src])[0] :] = 255
    bits = torch.from_numpy(marks).to(DEVICE)
    addresses = torch.tensor([bits.data_ptr() + int(p) for p in places([len(s) for s in src])[:-1]], device=DEVICE)
    scratch, live = [torch.full_like(r, 77) for r in roots], [flat(r.cpu().numpy(), spare) for r in roots]
    how = dict(abort=torch.zeros(1, dtype=torch.int32, device=DEVICE), bits=addresses)
    staged = from_(now, scratch, live=live, **how)
    staged.move_marked()
    if GPU:
        torch.cuda.synchronize()
    how["abort"].fill_(1)  # a late stop of the pull does not reach what follows
    staged.apply_marked()
    how["abort"].zero_()
    whole = handed_on(rows[rows["src_dtype"] != rows["dst_dtype"]], 0)
    bound(whole, live, "local", scratch).copy()
    some = from_(now, roots, **how)
    some.move_marked()
    assert all(map(torch.equal, roots, wanted)) and all(map(torch.equal, live, wanted))
    if every or not share:
        plain = int(row_wire_bytes(rows[rows["src_dtype"] == rows["dst_dtype"]]).sum())
        assert int(some.marked.moved.sum()) == plain * every
