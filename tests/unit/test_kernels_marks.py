"""Marks: exactly the granules that differ, by the torch twin and by the kernels, and copies of nothing else. Writes that mark: exactly the
granules that they change, and every other write is found.

TRITON_INTERPRET=1 python -m pytest tests/unit/test_kernels_marks.py
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from tests.support.examples import EXAMPLES
from tests.support.row_worlds import change, random_rows
from tests.unit.test_kernels_rows import DEVICE, GPU, KINDS, bound, flat, runs
from xfer.kernels import written
from xfer.kernels.bits import GRANULE, WORD
from xfer.kernels.marks import ByteRange, ChangeMarks, places, rest_of
from xfer.kernels.written import Written, spans_of, write
from xfer.plan.program import Op, row_wire_bytes
from xfer.plan.relay import handed_on
from xfer.trainers.marked_writes import mark_writes

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
    for parts, theirs, ours in ((None, none, ~none), some_parts(rng, sizes)):
        marks, whole = ChangeMarks(sizes, torch.device(DEVICE), parts), rest_of((), sizes) if parts is None else parts
        marks._by_kernel = kind == "triton"
        b = [flat(before[p.root][p.start : p.stop]) for p in whole]
        for base, was in ((7, before), (8, now)):
            marks.compare(a, b, base, None if parts is None else torch.from_numpy(theirs).to(DEVICE))
            want = with_head(granules(now, was) & ours | theirs, base, sizes)
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


# ---- writes that mark


class Params:
    """Storages with 16-bit tensors inside, and an optimizer's fp32 masters of these."""

    def __init__(self, seed: int, device: str = "cpu"):
        self.rng = rng = np.random.default_rng(seed)
        dtype = [torch.bfloat16, torch.float16][seed % 2]
        self.roots, self.params = [], []
        for _ in range(rng.integers(1, 3)):
            counts, at, places = rng.choice([1, 7, 8, 40, 513, 1000, 2050], rng.integers(1, 4)), 0, []
            for n in counts.tolist():
                at = -(-at // 16) * 16 + 16 * int(rng.integers(0, 5))
                places.append((at, n))
                at += 2 * n
            values = torch.from_numpy(rng.standard_normal(at // 2 + 8).astype(np.float32)).to(dtype)
            self.roots.append(values.view(torch.uint8).to(device))
            self.params += [self.roots[-1][a : a + 2 * n].view(dtype) for a, n in places]
        self.masters = [p.float() for p in self.params]
        written.announce(self)

    def writes(self):
        return self.params

    def held(self) -> list[np.ndarray]:
        return [r.cpu().numpy().copy() for r in self.roots]

    def step(self, share: float) -> None:
        """Change this share of the masters, and write all of them. Some changes are lost in rounding; some values are special."""
        for m in self.masters:
            some = torch.from_numpy(self.rng.random(len(m)) < share).to(m.device)
            m[some] *= 1 + self.rng.choice([1e-4, 0.5])
            if self.rng.random() < 0.1:
                m[0] = self.rng.choice([0.0, -0.0, np.inf, 1e30, 1e-40])
        write(zip(self.params, self.masters))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0]), min_size=1, max_size=4))
def test_writes_do_what_a_copy_does_and_mark_what_they_change_and_any_other_write_is_found(kind, seed, shares):
    params = Params(seed, DEVICE)
    spans = spans_of(params.roots)
    assert len(spans) == len(params.params) and list(spans) == sorted(spans)
    taken, want = Written(params.roots, spans), 0
    taken._by_kernel = kind == "triton"
    for share in shares:
        before = params.held()
        with patch("xfer.kernels.written_triton.TILE_WORDS", 2) if taken._by_kernel else nullcontext():
            params.step(share)
        assert all(torch.equal(p, m.to(p.dtype)) for p, m in zip(params.params, params.masters))
        want = want | granules(params.held(), before)
        taken.settle()
        assert np.array_equal(taken.bits.cpu().numpy(), want)
    taken.clear()
    k = int(params.rng.integers(len(spans)))
    s, at = spans[k], places([len(r) for r in params.roots])
    if params.rng.random() < 0.5:
        params.step(0.3)  # after another write, and before one
        want = taken.bits.cpu().numpy().copy()
    else:
        want = taken.bits.cpu().numpy() * 0
    one = params.rng.integers(s.start, s.stop)
    params.roots[s.root][one] ^= 1 << params.rng.integers(8)
    if params.rng.random() < 0.5:
        before = params.held()
        params.step(0.1)
        want |= granules(params.held(), before)
    want[at[s.root] + s.start // 256 : at[s.root] + -(-s.stop // 256)] = 255
    for _ in range(2):
        taken.settle()
        assert np.array_equal(taken.bits.cpu().numpy(), want)


def test_of_what_a_writer_names_only_tensors_that_can_be_marked_are_spans():
    params = Params(0)
    root = params.roots[0] = torch.zeros(4096, dtype=torch.uint8)
    half = root.view(torch.bfloat16)
    params.params = [
        half[8:40],
        half[16:24],  # inside the one before
        half[32:36],  # and this one
        half[43:47],  # no multiple of 16 bytes
        half[64:96].view(4, 8).t(),
        half[96:112].view(torch.int16),
        root[256:320].view(torch.float32),
        half[:0],
        torch.zeros(16, dtype=torch.bfloat16),  # elsewhere
        half[512:544],
    ]
    assert spans_of(params.roots[:1]) == (ByteRange(0, 16, 80), ByteRange(0, 1024, 1088))
    assert spans_of([root[2:]]) == (), "a storage that begins at an odd place"
    written.forget(params)
    assert spans_of(params.roots[:1]) == ()


def test_a_write_that_no_kernel_can_do_is_a_plain_copy_and_found_as_any_other_write():
    params = Params(4)
    taken = Written(params.roots, spans_of(params.roots))
    p = max(params.params, key=len)
    for into, value in ((p, p.double() + 1), (p[:4], p[:4].float() + 2), (p, torch.zeros(1))):
        write([(into, value)])
        assert torch.equal(into, value.to(p.dtype).expand(into.shape)) and not taken.bits.any()
        taken.settle()
        assert int((taken.bits == 255).sum()) >= p.nbytes // 256
        taken.clear()


class Interrupt(TorchFunctionMode):
    """KeyboardInterrupt in place of one call of torch, by its number."""

    def __init__(self, at: int):
        super().__init__()
        self.left = at

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == -1:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def test_what_a_write_that_is_interrupted_has_changed_is_marked():
    at, over = 0, False
    while not over:
        params = Params(3)
        taken, before = Written(params.roots, spans_of(params.roots)), params.held()
        for m in params.masters:
            m += 1
        try:
            with Interrupt(at):
                write(zip(params.params, params.masters))
            over = True
        except KeyboardInterrupt:
            at += 1
        taken.settle()
        changed = granules(params.held(), before)
        assert not (changed & ~taken.bits.numpy()).any(), at
    assert at > 20 * len(params.params) and changed.any()


def test_storages_that_move_go_on_and_nobody_who_is_gone_takes_writes():
    params = Params(3)
    taken = Written(params.roots, spans_of(params.roots))
    moved = [r.clone() for r in params.roots]
    at = [(s.root, s.start, s.stop) for s in taken.spans]
    dtype = params.params[0].dtype
    params.roots, params.params = moved, [moved[i][a:b].view(dtype) for i, a, b in at]
    params.masters = [p.float() for p in params.params]
    assert spans_of(moved) == taken.spans
    taken.bind(moved)
    taken.settle()
    assert not taken.bits.any(), "they hold the same"
    params.step(1.0)
    assert taken.bits.any()
    bits, version = taken.bits, params.params[0]._version
    del taken
    gc.collect()
    bits.zero_()
    params.step(1.0)
    assert not bits.any() and params.params[0]._version > version


def test_megatrons_copies_wait_for_no_operator_that_reads_them():
    root = torch.zeros(128, dtype=torch.uint8, device=DEVICE)
    a, b = (root[i : i + 32].view(torch.bfloat16) for i in (0, 64))
    master = torch.arange(16, dtype=torch.float32, device=DEVICE)

    class Optimizer:
        """With the names that Megatron's has."""

        shard_float16_groups, shard_fp32_from_float16_groups = [[a, b]], [[master, master]]

        def _copy_main_params_to_model_params(self) -> None:
            a.view(-1)[:].copy_(master)
            self.read = a + 0
            a.copy_(master + 1)
            b.copy_(a)

    optimizer = Optimizer()
    mark_writes(optimizer)
    taken = Written([root], spans_of([root]))
    assert len(taken.spans) == 2
    optimizer._copy_main_params_to_model_params()
    assert torch.equal(optimizer.read, master.bfloat16())
    assert torch.equal(a, (master + 1).bfloat16()) and torch.equal(b, a)
    marks = taken.bits.clone()
    assert int(marks[int(places([128])[0])]) == 0b101
    taken.settle()
    assert torch.equal(taken.bits, marks), "nothing else has written"
