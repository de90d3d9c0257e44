"""The catalog: grouping is lossless, goes by structure, and is the same on every rank."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import EXAMPLES
from tests.support.trace_maps import element_map
from xfer.errors import LayoutError, ProtocolError
from xfer.mesh.box import row_major
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import Fragment, TensorSpec

quick = settings(max_examples=EXAMPLES, deadline=None, database=None)

words = st.sampled_from(["model", "layers", "experts", "w", "0", "1", "2", "3", "02", "*"])
names = st.lists(words, min_size=1, max_size=5).map(".".join)
specs = st.dictionaries(
    names,
    st.tuples(st.sampled_from([(), (2,), (2, 3)]), st.sampled_from(["float32", "bfloat16"])),
    min_size=1,
    max_size=40,
).map(lambda d: [TensorSpec(n, s, t) for n, (s, t) in d.items()])


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


@quick
@given(specs.filter(lambda s: len(s) > 1), st.integers(0, 1 << 20))
def test_lifting_keeps_every_element(found, seed):
    rng, c = random.Random(seed), catalog(found)
    fragments = []
    for s in found:
        at = rng.choice([0, 64, 256]) + rng.randrange(8) * 24
        fragments.append(
            Fragment(s.name, (0,) * len(s.shape), s.shape, "r", at, tuple(4 * x for x in row_major(s.shape)), s.dtype)
        )
    lifted = c.lift(fragments)
    want = {}
    for (tensor, index, *place), n in element_map(fragments).items():
        group, i = c.grouped(tensor)
        want[(group, index if i is None else (i, *index), *place)] = n
    assert element_map(lifted) == want


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


@quick
@given(st.binary(max_size=60))
def test_bytes_that_are_no_catalog_are_a_protocol_error(data):
    try:
        Catalog.from_bytes(data)
    except ProtocolError:
        pass
    good = catalog([TensorSpec("x", (2,), "float32")]).to_bytes()
    with pytest.raises(ProtocolError):
        Catalog.from_bytes(good[:-1])


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
