"""The catalog: grouping is lossless, goes by structure, and is the same on every rank. Boxes: whatever is done to them, the map from
element to byte stays the same.
"""

import random
import time
from collections import Counter
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.examples import EXAMPLES
from tests.support.trace_maps import addresses, element_map
from xfer.errors import LayoutError, ProtocolError
from xfer.mesh.box import row_major
from xfer.trace import boxes as boxes_module
from xfer.trace.boxes import boxes, merge, refined, relocate, split_of
from xfer.trace.catalog import Catalog
from xfer.trace.compose import rewrite
from xfer.trace.fragment import Fragment, TensorSpec
from xfer.trace.view import Region, contiguous

quick = settings(max_examples=EXAMPLES, deadline=None, database=None)

words = st.sampled_from(["model", "layers", "experts", "w", "0", "1", "2", "3", "02", "*"])
names = st.lists(words, min_size=1, max_size=5).map(".".join)
sizes = st.tuples(st.sampled_from([(), (2,), (2, 3)]), st.sampled_from(["float32", "bfloat16"]))
specs = st.dictionaries(names, sizes, min_size=1, max_size=40).map(lambda d: [TensorSpec(n, *s) for n, s in d.items()])


def catalog(found: list[TensorSpec]) -> Catalog:
    return Catalog(tuple(sorted(found)))


@quick
@given(specs)
def test_grouping_is_lossless(found):
    c = catalog(found)
    assert [s.name for s in c.tensors] == sorted({s.name for s in c.tensors})
    back = []
    for s in c.tensors:
        names = c.members(s.name)
        for i, name in enumerate(names):
            assert c.grouped(name) == (s.name, i if len(names) > 1 else None)
            back.append(TensorSpec(name, s.shape[1:] if len(names) > 1 else s.shape, s.dtype))
        assert len(names) == 1 or s.shape[0] == len(names)
    assert tuple(sorted(back)) == c.specs
    assert [c.tensors[i].name for i in c.index.values()] == list(c.index)


@quick
@given(specs, st.integers(1, 4), st.randoms(use_true_random=False))
def test_the_union_does_not_depend_on_order_or_on_who_says_what(found, ranks, rng):
    parts = [(f"rank {r}", [s for s in found if rng.random() < 0.7]) for r in range(ranks)] + [("last", found)]
    rng.shuffle(parts)
    whole = Catalog.union(parts)
    assert whole == catalog(found) and whole.digest() == catalog(found).digest()
    assert Catalog.from_bytes(whole.to_bytes()) == whole


def test_what_is_a_group():
    def groups(*names: str, odd: str = "") -> list[str]:
        found = [TensorSpec(n, (3,) if n == odd else (2,), "float32") for n in names]
        c = catalog(found)
        return [s.name for s in c.tensors if len(c.members(s.name)) > 1]

    a = [f"l.7.e.{i}.w" for i in range(12)]
    assert groups(*a) == ["l.7.e.*.w"]
    assert groups(*a, "l.7.e.12.w", odd="l.7.e.12.w") == []  # shapes differ
    assert groups(*a[1:]) == []  # does not begin at 0
    assert groups(a[0]) == []  # a single one
    assert groups("l.0.w", "l.1.w") == []  # layers are no group: nothing above them is numbered
    assert groups(*a, "l.7.e.*.w") == []  # the group's name is taken
    assert groups("l.0.e.0.w", "l.0.e.01.w") == []  # not the way integers are written
    assert groups("h.0.anything.0", "h.0.anything.1") == ["h.0.anything.*"]  # words do not matter


def test_disagreements_and_fragments_that_do_not_fit_are_listed_all_at_once():
    a = [TensorSpec(n, (2,), "float32") for n in "xyz"]
    b = [TensorSpec("x", (3,), "float32"), TensorSpec("y", (2,), "bfloat16"), TensorSpec("z", (2,), "float32")]
    with pytest.raises(LayoutError) as e:
        Catalog.union([("trainer 0", a), ("trainer 1", b)])
    assert len(e.value.violations) == 2
    assert "trainer 0" in e.value.violations[0] and "trainer 1" in e.value.violations[0]
    bad = [Fragment("w", (0,), (1,), "r", 0, (4,), "float32"), Fragment("x", (1,), (2,), "r", 0, (4,), "float32")]
    with pytest.raises(LayoutError) as e:
        catalog(a).lift(bad)
    assert len(e.value.violations) == 2


def test_splits_of_ranks_become_one_that_refines_them_all():
    """If one rank holds every other column of a tensor, all ranks see the columns as two dims, in the whole group."""
    names = [f"layers.0.experts.{e}.w" for e in range(3)]

    def rank(*splits):
        return [TensorSpec(n, (4, 12), "bfloat16", s) for n, s in zip(names, splits)]

    catalog = Catalog.union([("a", rank((4, 6, 2), (), ())), ("b", rank((), (4, 3, 2, 2), ()))])
    assert [t.shape for t in catalog.tensors] == [(3, 4, 3, 2, 2)]
    assert Catalog.from_bytes(catalog.to_bytes()) == catalog
    odd = Catalog.union([("a", rank((4, 6, 2), (), ())), ("b", rank((4, 4, 3), (), ()))])
    assert [t.shape for t in odd.tensors] == [(3, 4, 12)]  # neither refines the other: one box per element it is
    every_other = Fragment(names[1], (0, 1), (4, 6), "r", 0, (12, 2), "bfloat16", (1, 2))
    assert [(f.origin, f.extent, f.strides) for f in catalog.lift([every_other])] == [
        ((1, 0, 0, 0, 1), (1, 4, 3, 2, 1), (0, 12, 4, 2, 0))
    ]
    assert len(odd.lift([every_other])) == 6
    with pytest.raises(ProtocolError, match="split"):
        Catalog.from_bytes(msgspec.msgpack.encode([("w", (4, 12), "bfloat16", (4, 5, 2), "", "")]))


# ---- boxes


@pytest.fixture(autouse=True, scope="module")
def few_is_one():
    """Toys interleave few elements; they are to take the road of many."""
    with mock.patch.object(boxes_module, "FEW", 1):
        yield


@st.composite
def regions(draw, within: int = 120) -> Region:
    """A strided region without repeated addresses, below `within`."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
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


@quick
@given(st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple), st.data())
def test_a_split_makes_interleaved_parts_boxes_and_moves_nothing(shape, data):
    """Parts of one tensor that take every q-th index of a dim, as gate and up columns do."""
    spec, number = TensorSpec("t", shape, "float32"), np.arange(np.prod(shape)).reshape(shape)
    found, at = [], 0
    for _ in range(data.draw(st.integers(1, 3))):
        steps = tuple(data.draw(st.sampled_from([q for q in range(1, n + 1) if n % q == 0])) for n in shape)
        part = number[tuple(slice(data.draw(st.integers(0, q - 1)), None, q) for q in steps)]
        c = Region(int(part.flat[0]), part.shape, tuple(s // 8 for s in part.strides))
        found += boxes(spec, c, contiguous(part.shape).shifted(at).scaled(4), "root", "float32")
        at += part.size
    split = split_of(shape, found)
    lifted = [x for f in found for x in refined(f, shape, split or shape)]
    assert not any(x.steps for x in lifted)

    def by_number(fragments: list[Fragment], shape: tuple[int, ...]) -> Counter:
        """`element_map` with linear indices, which a split of the shape does not change."""
        pairs = element_map(fragments).items()
        return Counter({(t, int(np.ravel_multi_index(i, shape)), *rest): n for (t, i, *rest), n in pairs})

    assert by_number(lifted, split or shape) == by_number(found, shape)
    if split and len({f.steps for f in found}) == 1:
        assert len(lifted) == len(found)


@quick
@given(st.randoms(use_true_random=False))
def test_merging_keeps_the_element_map_and_does_not_depend_on_order(rng):
    """Tiles of a tensor, laid out row-major, reversed along a dim, replicated, or anywhere."""
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 3)))
    strides = [s * 4 * rng.choice([1, 1, -1, 3]) for s in row_major(shape)]
    tile, fragments = tuple(rng.randint(1, 3) for _ in shape), []
    for o in np.ndindex(*(-(-n // k) for n, k in zip(shape, tile))):
        o = tuple(i * k for i, k in zip(o, tile))
        e = tuple(min(k, n - a) for k, n, a in zip(tile, shape, o))
        at = 400 + sum(a * s for a, s in zip(o, strides)) + (rng.random() < 0.2) * 1000
        own = tuple(s * rng.choice([1, 1, 1, 2]) if n > 1 else 0 for s, n in zip(strides, e))
        fragments.append(Fragment("t", o, e, f"r{rng.random() < 0.1}", at, own, "float32"))
    fragments += fragments[: rng.randint(0, 5) // 5]
    merged = merge(fragments)
    assert element_map(merged) == element_map(fragments) and len(merged) <= len(fragments)
    rng.shuffle(fragments)
    assert merge(fragments) == merged and not any(s for f in merged for s, n in zip(f.strides, f.extent) if n == 1)


def test_experts_of_one_storage_become_one_box_quickly():
    """Gate, up and down of each expert in two storages per layer, as a TP rank of an engine holds them."""
    fragments = [
        Fragment(f"{n}.{name}", (e, 0, 0), (1, 384, 2048), f"{n}.{root}", at * 384 * 4096, (0, 4096, 2), "bfloat16")
        for n in range(48)
        for e in range(128)
        for name, root, at in (("gate", "w13", 2 * e), ("up", "w13", 2 * e + 1), ("down", "w2", e))
    ]
    random.Random(3).shuffle(fragments)
    start = time.process_time()
    assert len(merge(fragments)) == 3 * 48
    assert time.process_time() - start < 1.5  # 0.2 s alone on a desktop core


@pytest.mark.parametrize("step", [16, -16])
def test_relocated_parameters_of_one_buffer_become_one_box(step):
    fragments = [Fragment("t", (e, 0), (1, 4), f"p{e}", 0, (0, 4), "float32") for e in range(8)]
    (one,) = relocate(fragments, {f"p{e}": ("buffer", 256 + e * step) for e in range(8)})
    assert (one.root, one.offset, one.extent, one.strides) == ("buffer", 256, (8, 4), (step, 4))
    with pytest.raises(LayoutError) as e:
        relocate(fragments, {"p0": ("buffer", 0)})
    assert len(e.value.violations) == 7


def test_a_shape_that_torch_would_not_broadcast_is_refused():
    assert contiguous((2, 1, 4)).expanded((5, 2, 3, 4)).strides == (0, 4, 0, 1)
    for shape in [(4,), (2, 3, 5), (3, 3, 4)]:
        with pytest.raises(LayoutError, match="broadcast"):
            contiguous((2, 3, 4)).expanded(shape)


@quick
@example(Region(0, (2, 2), (2, 1)), Region(0, (3,), (1,)))  # each dim fits the digit, both together do not
@given(regions(60), regions(60))
def test_rewriting_matches_equal_addresses(inner, outer):
    hit = rewrite(inner, contiguous(inner.shape), outer, contiguous(outer.shape))
    inside = dict(zip(spots(outer), range(outer.size)))
    if hit is not None:
        assert dict(zip(*map(spots, hit))) == {i: inside[a] for i, a in enumerate(spots(inner))}
