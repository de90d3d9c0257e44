"""Rows of a program executed by the kernels equal the same rows executed by a plain numpy loop over elements; the Triton kernels' tiles,
sums and aborts. Triton's kernels run in its interpreter on CPUs, compiled on a GPU.

TRITON_INTERPRET=1 python -m pytest tests/unit/test_kernels_rows.py
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from importlib.util import find_spec
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import row_worlds
from tests.support.examples import EXAMPLES
from tests.support.row_worlds import apply_rows, box_bytes, random_rows, row
from tests.unit.test_kernels_checksum import CUTS, checksum_rows, cut_tensor
from xfer.errors import LayoutError
from xfer.kernels import bind, checksum, strided, tiles
from xfer.kernels.strided import moves
from xfer.kernels.tiles import End, Turns, interleaved, plain_tables
from xfer.kernels.torch_impl import TorchRows
from xfer.plan.checksum import added
from xfer.plan.program import ITEMSIZE, Op, wire_dtype

GPU, INTERPRETED = torch.cuda.is_available(), os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if GPU else "cpu"
runs = pytest.mark.skipif(
    find_spec("triton") is None or not (GPU or INTERPRETED), reason="needs triton, and a GPU or TRITON_INTERPRET=1"
)
KINDS = ["torch", pytest.param("triton", marks=runs)]


def bound(rows, roots, side, src_roots=None, **more):
    from xfer.kernels.triton_impl import TritonRows

    return TritonRows(rows, roots, side, src_roots or roots, programs=None if GPU else 2, **more)


def bound_by(kind: str, rows, roots, side, src=None, **triton):
    return bound(rows, roots, side, src, **triton) if kind == "triton" else bind(rows, roots, side, src_roots=src)


def flat(data: np.ndarray, spare: int = 0) -> torch.Tensor:
    """The bytes on the device, beginning `spare` bytes into a storage."""
    return torch.from_numpy(np.concatenate([np.zeros(spare, np.uint8), data])).to(DEVICE)[spare:]


def triton_sums(rows, slot, roots, end, shapes, *tile):
    """The kernel's own sums of rows, by slot: `Sums` leaves what lies on a CPU to torch."""
    from xfer.kernels.checksum_triton import TritonSums

    where = [checksum.placed(r, end, shapes) for r in rows]
    return TritonSums(rows, slot, int(slot.max()) + 1, [r.to(DEVICE) for r in roots], end, where, *tile)


def are_summed(rows, slot, roots, end, shapes, *tile) -> None:
    """The kernel's sums of rows, by slot, equal torch's, also in a second launch."""
    fast, slots = triton_sums(rows, slot, roots, end, shapes, *tile), range(slot.max() + 1)
    want = [checksum_rows(rows[slot == k], roots, end, shapes) for k in slots]
    for _ in range(2):
        fast.launch()
        left = [checksum_rows(rows[(slot == k) & fast.odd], roots, end, shapes) for k in slots]
        assert list(map(added, fast.values().tolist(), left)) == want


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
        out, into = bound_by(kind, rows, s, "src"), bound_by(kind, rows, d, "dst")
        local = bound_by(kind, rows, here, "local", s, turns=turns, abort=abort)
    wire = flat(np.full(max(out.nbytes, into.nbytes) + 5, 0x5A, np.uint8), start)
    for data in (src, row_worlds.fresh_sources(rng, rows, src)):
        for t, r in zip(s, data):
            t.copy_(torch.from_numpy(r))
        out.pack(wire)
        assert np.array_equal(wire.cpu().numpy()[: out.nbytes], row_worlds.unpacked_wire(rows, data, out.nbytes, 0x5A))
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
@pytest.mark.parametrize("src, dst", [*row_worlds.CASTS, ("bfloat16", "float8_e5m2")])
def test_casts_round_as_torch_does(src, dst, kind):
    """At once, and by the two halves of a cast (source, destination)."""
    value = row_worlds.hard_values(src).to(DEVICE)
    want, rows = value.to(getattr(torch, dst)), row((len(value),), src_dtype=src, dst_dtype=dst)
    local, sent = torch.empty_like(want), torch.empty_like(want)
    there = [value.view(torch.uint8)]
    bound_by(kind, rows, [local.view(torch.uint8)], "local", there).copy()
    wire = torch.empty(len(value) * ITEMSIZE[wire_dtype(src, dst)], dtype=torch.uint8, device=DEVICE)
    bound_by(kind, rows, there, "src").pack(wire)
    bound_by(kind, rows, [sent.view(torch.uint8)], "dst").unpack(wire)
    plain = ~want.float().isnan()
    for got in (local, sent):
        assert torch.equal(got.float().isnan(), ~plain)
        assert torch.equal(*(t.view(torch.uint8).view(len(value), -1)[plain] for t in (got, want)))


@runs
def test_an_abort_word_ends_the_copy_early():
    n = 40 * (64 << 10)
    rows = row((n,), src_dtype="uint8")
    source, target = flat(np.random.default_rng(1).integers(1, 255, n, np.uint8)), flat(np.zeros(n, np.uint8))
    abort = torch.ones(1, dtype=torch.int32, device=DEVICE)
    local = bound(rows, [target], "local", src_roots=[source], abort=abort)
    local._launches[0].programs = 2
    local.copy()
    assert int((target != 0).sum()) == 2 * (64 << 10)  # one tile for each program
    abort.zero_()
    local.copy()
    assert torch.equal(target, source)


@runs
@pytest.mark.parametrize("width", [1, 3, 16, 48, 100, 768, 4096, 100_000])
@pytest.mark.parametrize("shift", [0, 1, 2, 8])
def test_rows_of_any_width_and_alignment(width, shift):
    """The unit narrows with the alignment, the bytes stay right: 1-byte dtypes, odd rows, odd offsets."""
    count, pitch = max(2, min(300, 400_000 // width)), width + 32
    r = row((count, width), src_dtype="uint8", src_strides=(pitch, 1), src_offset=shift)
    s = flat(np.random.default_rng(width).integers(0, 256, count * pitch + 64, np.uint8))
    d = flat(np.zeros(count * width + 16, np.uint8))
    bound(r, [d], "local", src_roots=[s]).copy()
    assert torch.equal(d[:-16].view(count, width), s[shift:][: count * pitch].view(count, pitch)[:, :width])
    assert not d[-16:].any()


FAR = 3 << 30
"""Bytes: in no 32 bits with a sign, and twice that in no 32 bits."""


def sparse(nbytes: int) -> torch.Tensor:
    """Zeros, of which only what is touched takes memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, whose name Pythons before 3.13 lack
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)


@runs
@pytest.mark.skipif(GPU or sys.platform != "linux", reason="needs memory that takes none until it is touched")
@pytest.mark.parametrize("src, dst", [("bfloat16", "bfloat16"), ("uint8", "uint8"), ("float32", "bfloat16")])
@pytest.mark.parametrize("far", ["src", "dst"])
def test_offsets_and_strides_beyond_32_bits(src, dst, far):
    """Copies, conversions, constants, messages and sums; rows apart, in a box of three dims and backwards; odd offsets of single bytes."""
    odd = int(src == "uint8")
    for extent, steps, start in (
        ((3, 64), (FAR + odd,), FAR + odd),
        ((2, 2, 24), (FAR, FAR // 2 + odd), 5),
        ((3, 64), (-FAR,), 3 * FAR),
    ):
        start -= start % 4 * (not odd)
        end = {f"{far}_strides": (*steps, ITEMSIZE[src if far == "src" else dst]), f"{far}_offset": start}
        one = row(extent, src_dtype=src, dst_dtype=dst, **end, wire=FAR * 2)
        live = {end: sparse(5 * FAR) for end in ("src", "dst", "wire", "again")}
        at, to = (torch.from_numpy(box_bytes(one[0], end)) for end in ("src", "dst"))
        value = torch.arange(1, len(at) + 1).to(getattr(torch, src))
        live["src"][at] = value.view(torch.uint8).view(at.shape)
        want = value.to(getattr(torch, dst)).view(torch.uint8).view(to.shape)
        bound(one, [live["dst"]], "local", src_roots=[live["src"]]).copy()
        assert torch.equal(live["dst"][to], want)
        bound(one, [live["src"]], "src").pack(live["wire"])
        bound(one, [live["again"]], "dst").unpack(live["wire"])
        assert torch.equal(live["again"][to], want)
        for end in ("src", "dst"):
            shapes = [(1 << 20, *extent[1:])]
            one["origin"][0, -len(extent)] = (1 << 20) - extent[0]
            are_summed(one, np.zeros(1, np.int64), [live[end]], end, shapes)
        fill = one.copy()
        fill["op"], fill["src_dtype"], fill["fill"] = Op.FILL, fill["dst_dtype"], 0x40404040
        bound(fill, [live["again"]], "dst").fill()
        assert (live["again"][to] == 0x40).all()


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([16, 64 << 10]))
def test_tiles_cover_each_byte_once_and_groups_take_turns(seed, size):
    """No group runs ahead of another by more than one tile's share."""
    rng = np.random.default_rng(seed)
    rows, src, dst = random_rows(rng)
    rows = rows[rows["op"] == Op.COPY]
    aligned, count = End([16] * 4), [np.zeros(len(d), int) for d in dst]
    with patch.object(tiles, "SMALL_TILE", size):
        tables = plain_tables(moves(rows, "local"), aligned, aligned, backwards=False)
    for table in tables:
        again = interleaved(table, Turns([1 - k % 2 for k in range(len(src))]))
        assert sorted(map(tuple, again.tiles.tolist())) == sorted(map(tuple, table.tiles.tolist()))
        group = 1 - (again.tiles[:, 0] & 0xFFFFFFFF) % 2
        each = [np.where(group == g, again.nbytes, 0) / again.nbytes[group == g].sum() for g in np.unique(group)]
        assert group[0] == group.min()
        assert np.abs(np.cumsum(each[0]) - np.cumsum(each[-1])).max() <= np.max(each) + 1e-9
        for t, nbytes in zip(table.tiles.tolist(), table.nbytes.tolist()):
            width, deep = t[3] & 0xFFFFFFFF, t[3] >> 32
            for k in range(deep):
                at = t[2] + k * t[5] * table.unit
                count[t[0] >> 32][at : at + width * table.unit] += 1
            assert nbytes == width * deep * table.unit
    want = [np.zeros(len(d), int) for d in dst]
    for r in rows:
        ones, zeros = [np.full(len(s), 1, np.uint8) for s in src], [np.zeros(len(d), np.uint8) for d in dst]
        for w, m in zip(want, apply_rows(np.array([r]), ones, zeros)):
            w += m.astype(int)
    assert all(np.array_equal(a, b) for a, b in zip(count, want))


def test_destinations_that_begin_with_different_sources_never_meet():
    """Four of four equal sources. A source on the destination's own GPU is read evenly all the time."""
    n, count = 60 * (64 << 10), 4
    rows = np.concatenate([row((n,), src_dtype="uint8", src_root=k, dst_root=k) for k in range(count)])
    aligned = End([16] * count)
    (table,) = plain_tables(moves(rows, "local"), aligned, aligned, backwards=False)
    for burst, turns in ((n, 1), (n // 4, 4)):
        orders = np.stack(
            [interleaved(table, Turns(np.roll(range(count), r), burst)).tiles[:, 0] & 0xFFFFFFFF for r in range(4)]
        )
        assert (np.sort(orders, axis=0) == np.arange(count)[:, None]).all()
        assert (np.diff(orders[0]) != 0).sum() == turns * count - 1
    beside = interleaved(table, Turns((3, 0, 1, 2), n, frozenset({1}))).tiles[:, 0] & 0xFFFFFFFF
    assert list(dict.fromkeys(beside[beside != 2].tolist())) == [1, 3, 0]
    assert np.abs(np.cumsum(beside == 2) - np.arange(1, len(beside) + 1) / count).max() < 3


@runs
@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(tile=st.sampled_from([5, 1 << 15]), **CUTS)
def test_checksums_equal_the_twins_number(tile, seed, **how):
    """Rows are in two sets."""
    value, rows, roots = cut_tensor(seed, **how)
    slots = np.random.default_rng(seed).integers(0, 2, len(rows))
    are_summed(rows, slots, roots, "src", [tuple(value.shape)], tile)


def lent(rows, roots, shapes, tile: int | None = None):
    """Sums that may be lent. tile: None for `Sums`' own choice."""
    from xfer.kernels.checksum_triton import LENT_TILE

    return triton_sums(rows, np.zeros(len(rows), np.int64), roots, "dst", shapes, LENT_TILE if tile is None else tile)


@runs
@settings(max_examples=EXAMPLES // 4, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["uint8", "bfloat16", "float32"]), st.sampled_from([1, 5, 256]))
def test_copies_that_sum_leave_the_same_bytes_and_the_same_number(seed, dtype, behind):
    """Sums come right behind what they need or after everything; some need more copies than this kernel waits for."""
    from xfer.kernels import summed_copies as summed

    rng = np.random.default_rng(seed)
    item = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    copies, sums, shapes, src, dst = [], [], [], [], []
    for k in range(int(rng.integers(1, 4))):
        high, wide = int(rng.integers(1, 12)), int(rng.choice([8, 16, 64, 72, 33]))
        pitch, spare = (wide + int(rng.choice([0, 16, 3]))) * item, item * int(rng.choice([0, 16, 1]))
        shapes.append((high, wide))
        src.append(rng.integers(0, 256, high * pitch, dtype=np.uint8))
        dst.append(rng.integers(0, 256, spare + high * wide * item, dtype=np.uint8))
        ends = dict(src_dtype=dtype, dst_strides=(wide * item, item), tensor=k, src_root=k, dst_root=k)
        at = min(wide, int(rng.choice([0, 8, 16, wide // 2])))
        for first, last in ((0, at), (at, wide)):
            if last > first and rng.integers(0, 8):
                at_both = dict(src_offset=first * item, dst_offset=spare + first * item)
                copies.append(row((high, last - first), src_strides=(pitch, item), **at_both, **ends))
        cut = int(rng.integers(0, high))
        for first, last in ((0, cut), (cut, high)):
            if last > first:
                some = row((last - first, wide), dst_offset=spare + first * wide * item, **ends)
                some["origin"][0, -2] = first
                sums.append(some)
    if not copies:
        return
    copies, sums = np.concatenate(copies), np.concatenate(sums)
    sources, live, want = ([flat(x) for x in xs] for xs in (src, dst, dst))
    TorchRows(copies, want, "local", sources).copy()
    number = checksum_rows(sums, [t.cpu() for t in want], "dst", shapes)
    both = lent(sums, live, shapes, tile=4)
    with patch.object(tiles, "SMALL_TILE", 128), patch.multiple(summed, BEHIND=behind, MOST=int(rng.choice([2, 64]))):
        rows = bound(copies, live, "local", src_roots=sources, summed=both)
    for _ in range(2):
        for t, was in zip(live, dst):
            t.copy_(flat(was))
        rows.copy()
        both.launch()
        left = checksum_rows(sums[both.odd], live, "dst", shapes)
        assert all(map(torch.equal, live, want)) and added(int(both.values()[0]), left) == number


@runs
def test_copies_that_sum_can_be_stopped():
    """Sums of what was left out wait for nobody."""
    n = 1 << 26 if GPU else 1 << 18  # more tiles than programs, which take one each before they look at the word
    some = row((n,), src_dtype="bfloat16", dst_dtype="bfloat16")
    source, live = flat(np.full(2 * n, 7, np.uint8)), flat(np.zeros(2 * n, np.uint8))
    sums = lent(some, [live], [(n,)])
    abort = torch.ones(1, dtype=torch.int32, device=DEVICE)
    rows = bound(some, [live], "local", src_roots=[source], summed=sums, abort=abort)
    assert not sums.launch() and sums.values().tolist() == [0]  # all of them were taken over
    rows.copy()
    assert (live.view(-1, 16)[:, 0] == 0).any()
    abort.zero_()
    rows.copy()
    assert torch.equal(live, source)
    assert sums.values().tolist() == [checksum_rows(some, [live], "dst", [(n,)])]
    with pytest.raises(RuntimeError, match="lent to another kernel already"):
        bound(some, [live], "local", src_roots=[source], summed=sums)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU: in the interpreter programs run one after the other")
def test_copies_that_sum_are_stopped_at_any_moment():
    """No program stays, wherever each of them was; the next launch is whole, with its sums."""
    n, stream, rng = 1 << 29, torch.cuda.Stream(), np.random.default_rng(1)
    some = row((n,), src_dtype="bfloat16", dst_dtype="bfloat16")
    source = torch.randint(0, 256, (2 * n,), dtype=torch.uint8, device=DEVICE)
    live = torch.zeros_like(source)
    sums = lent(some, [live], [(n,)])
    abort, one = torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.ones(1, dtype=torch.int32).pin_memory()
    rows = bound(some, [live], "local", src_roots=[source], summed=sums, abort=abort)
    rows.copy()
    torch.cuda.synchronize()
    want, stopped = sums.values().tolist(), 0
    assert want == [checksum_rows(some, [live], "dst", [(n,)])]
    for _ in range(60):
        live.zero_()
        torch.cuda.synchronize()
        ended = torch.cuda.Event()
        rows.copy()
        ended.record()
        until = time.monotonic() + float(rng.uniform(0, 7e-4))
        while time.monotonic() < until:
            pass
        with torch.cuda.stream(stream):
            abort.copy_(one, non_blocking=True)
        until = time.monotonic() + 10
        while not ended.query():
            assert time.monotonic() < until, "a stopped launch goes on"
        torch.cuda.synchronize()
        stopped += not torch.equal(live, source)
        abort.zero_()
        live.zero_()
        rows.copy()
        torch.cuda.synchronize()
        assert torch.equal(live, source) and sums.values().tolist() == want
    assert 10 < stopped, "nearly all had ended before they were stopped"
