"""Marks: exactly the granules that differ, by the torch twin and by the kernels (in Triton's interpreter on CPUs, compiled on a GPU), and
copies of nothing else.

    TRITON_INTERPRET=1 python -m pytest tests/unit/test_kernels_marks.py
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import EXAMPLES
from tests.support.row_worlds import change, random_rows
from xfer.kernels.bits import GRANULE, WORD
from xfer.kernels.marks import ChangeMarks, places
from xfer.plan.program import Op, row_wire_bytes
from xfer.plan.relay import handed_on

GPU, INTERPRETED = torch.cuda.is_available(), os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if GPU else "cpu"
runs = pytest.mark.skipif(not (GPU or INTERPRETED), reason="needs a GPU or TRITON_INTERPRET=1")


def marks_by_definition(now: list[np.ndarray], before: list[np.ndarray], base: int) -> np.ndarray:
    """The bytes of marks, one granule after the other."""
    at = places([len(x) for x in now])
    out = np.zeros(at[-1], np.uint8)
    head = out[: 8 * (1 + len(now))].view(np.int64)
    head[0] = base
    for i, (a, b) in enumerate(zip(now, before)):
        for g in range(-(-len(a) // GRANULE)):
            if (a[g * GRANULE : (g + 1) * GRANULE] != b[g * GRANULE : (g + 1) * GRANULE]).any():
                out[at[i] + g // 8] |= 1 << g % 8
                head[1 + i] += 1
    return out


def changed(rng: np.random.Generator, sizes: list[int], share: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Storages after and before a step that changes this share of their bytes."""
    before = [rng.integers(0, 256, n, np.uint8) for n in sizes]
    return [np.where(rng.random(len(b)) < share, b + np.uint8(1), b) for b in before], before


def flat(data: np.ndarray, spare: int) -> torch.Tensor:
    """On the device, beginning `spare` bytes into a storage."""
    return torch.from_numpy(np.concatenate([np.zeros(spare, np.uint8), data])).to(DEVICE)[spare:]


SIZES = st.lists(
    st.one_of(st.integers(0, 200), st.sampled_from([WORD, WORD + 4, 64 * WORD + 36, 70 * WORD])), min_size=1, max_size=5
)
WORLDS = given(st.integers(0, 2**32 - 1), SIZES, st.sampled_from([0.0, 0.001, 0.05, 1.0]), st.sampled_from([0, 2, 16]))


@settings(max_examples=EXAMPLES, deadline=None)
@WORLDS
def test_the_twin_marks_the_granules_that_differ(seed, sizes, share, spare):
    """A second comparison, after the copies were brought up to date, marks none."""
    now, before = changed(np.random.default_rng(seed), sizes, share)
    a, b = [flat(x, spare).cpu() for x in now], [flat(x, 0).cpu() for x in before]
    marks = ChangeMarks(sizes, torch.device("cpu"))
    for base, was in ((7, before), (8, now)):
        marks.compare(a, b, base)
        assert np.array_equal(marks.tensor.numpy(), marks_by_definition(now, was, base))
        marks.update(a, b)
        assert all(map(torch.equal, a, b))


@runs
@settings(max_examples=EXAMPLES, deadline=None)
@WORLDS
def test_the_kernels_mark_what_the_twin_marks_and_copy_it(seed, sizes, share, spare):
    module = pytest.importorskip("xfer.kernels.marks_triton", reason="needs triton")
    now, before = changed(np.random.default_rng(seed), sizes, share)
    a, b = [flat(x, spare) for x in now], [flat(x, 0) for x in before]
    at = places(sizes)
    marks = torch.zeros(int(at[-1]), dtype=torch.uint8, device=DEVICE)
    bound = module.MarkKernels(a, b, marks, at)
    bound.compare()
    want = marks_by_definition(now, before, 0)
    counts = want[8 : 8 * (1 + len(now))].view(np.int64)
    for i in bound.rest:
        want[at[i] : at[i + 1]] = counts[i] = 0
    assert np.array_equal(marks.cpu().numpy(), want)
    bound.update()
    for i, (x, y) in enumerate(zip(a, b)):
        assert torch.equal(y.cpu(), torch.from_numpy(before[i])) if i in bound.rest else torch.equal(x, y)


@runs
@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.02, 0.5]), st.sampled_from([0, 2, 16]), st.booleans())
def test_a_copy_of_what_is_marked_leaves_a_destination_as_a_copy_of_everything(seed, share, spare, every):
    """Of random rows, conversions among them; also by way of scratch. The kernel tells how much it moved: nothing if nothing is marked, and
    all bytes of rows that are no conversions if everything is."""
    triton_impl = pytest.importorskip("xfer.kernels.triton_impl", reason="needs triton")
    rng = np.random.default_rng(seed)
    rows, src, dst = random_rows(rng)
    rows = rows[rows["op"] != Op.FILL]
    now = [s.copy() for s in src]
    change(rng, rows, now, share)

    def bound(storages: list[np.ndarray], roots: list[torch.Tensor], **more):
        from_ = [flat(s, spare) for s in storages]
        return triton_impl.TritonRows(rows, roots, "local", from_, programs=None if GPU else 2, **more)

    roots, wanted = ([flat(d, 0) for d in dst] for _ in range(2))
    bound(src, roots).copy()
    bound(now, wanted).copy()
    marks = marks_by_definition(now, src, 1)
    if every:
        marks[places([len(s) for s in src])[0] :] = 255
    bits = torch.from_numpy(marks).to(DEVICE)
    addresses = torch.tensor([bits.data_ptr() + int(p) for p in places([len(s) for s in src])[:-1]], device=DEVICE)
    scratch, live = [torch.full_like(r, 77) for r in roots], [flat(r.cpu().numpy(), spare) for r in roots]
    how = dict(abort=torch.zeros(1, dtype=torch.int32, device=DEVICE), bits=addresses)
    staged = bound(now, scratch, live=live, **how)
    staged.move_marked()
    if GPU:
        torch.cuda.synchronize()
    how["abort"].fill_(1)  # a late stop of the pull does not reach what follows
    staged.apply_marked()
    how["abort"].zero_()
    whole = handed_on(rows[rows["src_dtype"] != rows["dst_dtype"]], 0)
    triton_impl.TritonRows(whole, live, "local", scratch, programs=None if GPU else 2).copy()
    some = bound(now, roots, **how)
    some.move_marked()
    assert all(map(torch.equal, roots, wanted)) and all(map(torch.equal, live, wanted))
    if every or not share:
        plain = int(row_wire_bytes(rows[rows["src_dtype"] == rows["dst_dtype"]]).sum())
        assert int(some.marked.moved.sum()) == plain * every
