"""Boxes, merging and moving fragments: whatever is done to them, the map from element to byte stays the same."""

from __future__ import annotations

import random
import time
from collections import Counter
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.examples import EXAMPLES
from tests.support.trace_maps import addresses, element_map
from xfer.errors import LayoutError
from xfer.mesh.box import row_major
from xfer.trace import boxes as boxes_module
from xfer.trace.boxes import boxes, merge, refined, relocate, split_of
from xfer.trace.compose import blocks, covers, fold, rewrite, trace_back
from xfer.trace.fragment import Fragment, TensorSpec
from xfer.trace.view import Region, contiguous


@pytest.fixture(autouse=True, scope="module")
def few_is_one():
    """Toys interleave few elements; they are to take the road of many."""
    with mock.patch.object(boxes_module, "FEW", 1):
        yield


quick = settings(max_examples=EXAMPLES, deadline=None, database=None)
sizes = st.integers(1, 5)


@st.composite
def regions(draw, within: int = 120) -> Region:
    """A strided region without repeated addresses, below `within`."""
    shape = tuple(draw(st.lists(sizes, min_size=0, max_size=3)))
    order = draw(st.permutations(range(len(shape))))
    strides, span = [0] * len(shape), 1
    for d in order:
        strides[d] = span * draw(st.integers(1, 2))
        span = strides[d] * shape[d]
    region = Region(0, shape, tuple(strides))
    return region.shifted(draw(st.integers(0, max(0, within - 1 - region.last))))


def spots(r: Region) -> list[int]:
    """The addresses of a region's elements, in row-major order."""
    return addresses(r.offset, r.shape, r.strides).tolist()


@quick
@given(st.lists(st.integers(1, 5), max_size=3), st.data())
def test_boxes_say_where_every_element_lies(shape, data):
    """Any region of a checkpoint tensor, however it cuts across rows, against any storage region of the same shape."""
    spec = TensorSpec("t", tuple(shape), "float32")
    size = int(np.prod(shape))
    c = data.draw(regions(size).filter(lambda r: r.last < size))
    c = c.expanded((*data.draw(st.sampled_from([(), (1,), (3,)])), *c.shape))
    strides = row_major(c.shape) if data.draw(st.booleans()) else tuple(data.draw(st.integers(0, 30)) for _ in c.shape)
    s = Region(data.draw(st.integers(0, 50)), c.shape, strides).scaled(4)
    found = boxes(spec, c, s, "root", "float32")
    pairs = zip(spots(c), spots(s))
    want = Counter(("t", tuple(map(int, np.unravel_index(a, shape))), "root", b, "float32") for a, b in pairs)
    assert element_map(found) == want
    assert all(i.stop <= n for f in found for i, n in zip(f.index, shape))
    plain = boxes(spec, c, s, "root", "float32", plain=True)
    assert element_map(plain) == want and not any(f.steps for f in plain)


def unraveled(fragments: list[Fragment], shape: tuple[int, ...]) -> Counter:
    """`element_map` with linear indices, which a split of the shape does not change."""
    found = element_map(fragments).items()
    return Counter({(t, int(np.ravel_multi_index(i, shape)) if i else 0, *rest): n for (t, i, *rest), n in found})


@quick
@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.data())
def test_a_split_makes_interleaved_parts_boxes_and_moves_nothing(shape, data):
    """Parts of one tensor that take every q-th index of a dim, as gate and up columns do."""
    shape = tuple(shape)
    spec = TensorSpec("t", shape, "float32")
    found, at = [], 0
    for _ in range(data.draw(st.integers(1, 3))):
        steps = tuple(data.draw(st.sampled_from([q for q in range(1, n + 1) if n % q == 0])) for n in shape)
        origin = tuple(data.draw(st.integers(0, q - 1)) for q in steps)
        extent = tuple(n // q for n, q in zip(shape, steps))
        row = row_major(shape)
        c = Region(sum(o * r for o, r in zip(origin, row)), extent, tuple(q * r for q, r in zip(steps, row)))
        found += boxes(spec, c, contiguous(extent).shifted(at).scaled(4), "root", "float32")
        at += c.size
    split = split_of(shape, found)
    lifted = [x for f in found for x in refined(f, shape, split or shape)]
    assert not any(x.steps for x in lifted)
    assert unraveled(lifted, split or shape) == unraveled(found, shape)
    if split and len({f.steps for f in found}) == 1:
        assert len(lifted) == len(found)


@st.composite
def fragment_lists(draw) -> list[Fragment]:
    """Tiles of a few tensors, laid out row-major, reversed along a dim, replicated, or anywhere."""
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    out = []
    for t in range(rng.randint(1, 2)):
        shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(0, 3)))
        strides = [s * 4 * rng.choice([1, 1, -1, 3]) for s in row_major(shape)]
        tile = tuple(rng.randint(1, n) for n in shape)
        for origin in np.ndindex(*(-(-n // k) for n, k in zip(shape, tile))):
            o = tuple(i * k for i, k in zip(origin, tile))
            e = tuple(min(k, n - a) for k, n, a in zip(tile, shape, o))
            at = 400 + sum(a * s for a, s in zip(o, strides)) + (rng.random() < 0.2) * 1000
            own = tuple(s if n > 1 else 0 for s, n in zip(strides, e))
            out.append(Fragment(f"t{t}", o, e, f"r{rng.random() < 0.1}", at, own, "float32"))
    if rng.random() < 0.2:
        out += out[: rng.randint(1, len(out))]
    rng.shuffle(out)
    return out


@quick
@given(fragment_lists(), st.randoms(use_true_random=False))
def test_merging_keeps_the_element_map_and_does_not_depend_on_order(fragments, rng):
    merged = merge(fragments)
    assert element_map(merged) == element_map(fragments)
    assert len(merged) <= len(fragments)
    shuffled = fragments[:]
    rng.shuffle(shuffled)
    assert merge(shuffled) == merged
    assert all(s == 0 for f in merged for s, n in zip(f.strides, f.extent) if n == 1)


def experts(count: int, layers: int) -> list[Fragment]:
    """Gate, up and down of each expert in two storages per layer, as a TP rank of an engine holds them."""
    out = []
    for layer in range(layers):
        for e in range(count):
            for k, name in enumerate(("gate", "up")):
                at = f"{layer}.w13", (2 * e + k) * 384 * 4096, (0, 4096, 2)
                out.append(Fragment(f"{layer}.{name}", (e, 0, 0), (1, 384, 2048), *at, "bfloat16"))
            at = f"{layer}.w2", e * 2048 * 768, (0, 768, 2)
            out.append(Fragment(f"{layer}.down", (e, 0, 0), (1, 2048, 384), *at, "bfloat16"))
    return out


def test_experts_of_one_storage_become_one_box_quickly():
    fragments = experts(128, 48)
    random.Random(3).shuffle(fragments)
    start = time.process_time()
    merged = merge(fragments)
    assert len(fragments) == 18432 and len(merged) == 3 * 48
    assert time.process_time() - start < 1.5  # 0.2 s alone on a desktop core


def test_experts_that_lie_in_reverse_become_one_box_with_a_negative_stride():
    fragments = [Fragment("t", (e, 0), (1, 4), "r", (7 - e) * 16, (0, 4), "float32") for e in range(8)]
    (one,) = merge(fragments)
    assert one.extent == (8, 4) and one.strides == (-16, 4) and one.offset == 7 * 16


def test_relocated_parameters_of_one_buffer_merge():
    fragments = [Fragment("t", (e, 0), (1, 4), f"p{e}", 0, (0, 4), "float32") for e in range(8)]
    (one,) = relocate(fragments, {f"p{e}": ("buffer", 64 + e * 16) for e in range(8)})
    assert (one.root, one.offset, one.extent, one.strides) == ("buffer", 64, (8, 4), (16, 4))
    with pytest.raises(LayoutError) as e:
        relocate(fragments, {"p0": ("buffer", 0)})
    assert len(e.value.violations) == 7


# ---- composing reads of scratch


def painted(pieces: list[tuple[Region, tuple[int, ...] | None]]) -> dict[int, tuple[int, int]]:
    """address -> (piece, address in its source): what later writes leave."""
    out: dict[int, tuple[int, int]] = {}
    for i, (where, strides) in enumerate(pieces):
        of = addresses(0, where.shape, strides if strides is not None else (0,) * len(where.shape)).tolist()
        out.update((a, (i, b)) for a, b in zip(spots(where), of))
    return out


@quick
@given(st.lists(regions(60), min_size=1, max_size=4), regions(60), st.data())
def test_a_read_of_scratch_is_traced_back_element_by_element(written, read, data):
    pieces = []
    for where in written:
        mode = data.draw(st.integers(0, 2))
        strides = tuple(reversed(row_major(tuple(reversed(where.shape)))))
        pieces.append((where, None if mode == 0 else row_major(where.shape) if mode == 1 else strides))
    dst = contiguous(read.shape)
    held = painted(pieces)
    want = {b: held.get(a, (-1, 0)) for b, a in enumerate(spots(read))}
    flat = [set(spots(w)) for w, _ in pieces]
    disjoint = sum(map(len, flat)) == len(set().union(*flat))
    for view in (read, read.expanded((2, *read.shape))):
        assert covers(tuple(written), view) == (-1 not in {i for i, _ in want.values()})
    for parts in (trace_back(read, dst, tuple(pieces), disjoint), blocks(read, dst, pieces)):
        got = {}
        for p in parts:
            assert p.src.shape == p.dst.shape
            of = spots(p.src)
            for b, a in zip(spots(p.dst), of):
                assert b not in got
                got[b] = (p.piece, a if p.piece >= 0 and pieces[p.piece][1] is not None else 0)
        assert got == want


def test_a_shape_that_torch_would_not_broadcast_is_refused():
    assert contiguous((2, 1, 4)).expanded((5, 2, 3, 4)).strides == (0, 4, 0, 1)
    for shape in [(4,), (2, 3, 5), (3, 3, 4)]:
        with pytest.raises(LayoutError, match="broadcast"):
            contiguous((2, 3, 4)).expanded(shape)


@quick
@example(Region(0, (2, 2), (2, 1)), Region(0, (3,), (1,)))  # each dim fits the digit, both together do not
@given(regions(60), regions(60))
def test_rewriting_matches_equal_addresses(inner, outer):
    mate, outer_mate = contiguous(inner.shape), contiguous(outer.shape)
    hit = rewrite(inner, mate, outer, outer_mate)
    inside = dict(zip(spots(outer), range(outer.size)))
    mine = spots(inner)
    if hit is None:
        return
    pairs = dict(zip(*(spots(r) for r in hit)))
    assert pairs == {i: inside[a] for i, a in enumerate(mine)}


@quick
@given(st.lists(st.integers(0, 12), min_size=1, max_size=40), st.integers(1, 3))
def test_folding_keeps_the_sequence(rows, unit):
    d = np.arange(len(rows), dtype=np.int64) * unit
    s = np.array(rows, np.int64) * unit
    got = [x for a, b in fold(d, s, unit) for x in zip(*(spots(r) for r in (a, b)))]
    assert got == [(i * unit + k, r * unit + k) for i, r in enumerate(rows) for k in range(unit)]
