"""Owners: a pure function of names, sizes and costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xfer.errors import LayoutError
from xfer.layerwise.ownership import Item, assign, cut, elementwise_cost, newton_schulz_cost

items = st.lists(
    st.builds(
        Item,
        name=st.text("abc.0123", min_size=1, max_size=6),
        nbytes=st.integers(0, 10_000),
        cost=st.integers(0, 1_000).map(float),
    ),
    max_size=40,
    unique_by=lambda i: i.name,
)


@given(items, st.integers(1, 9), st.randoms())
def test_every_parameter_has_one_owner_whatever_the_order_and_no_rank_has_much_more_than_others(rows, size, dice):
    a = assign(rows, size)
    dice.shuffle(rows)
    b = assign(rows, size)
    assert a == b and a.digest() == b.digest()
    owner = dict(a.owner)
    assert sorted(owner) == sorted(i.name for i in rows)
    assert sorted(n for r in range(size) for n in a.of(r)) == sorted(owner)
    for r in range(size):
        assert a.nbytes[r] == sum(i.nbytes for i in rows if owner[i.name] == r)
        assert a.cost[r] == pytest.approx(sum(i.cost for i in rows if owner[i.name] == r))
    assert max(a.cost) <= sum(a.cost) / size + max((i.cost for i in rows), default=0.0) + 1e-9


@given(items, st.integers(1, 4), st.integers(0, 60_000))
def test_a_memory_cap_holds_or_every_parameter_without_room_is_named(rows, size, cap):
    try:
        table = assign(rows, size, memory_cap=cap)
    except LayoutError as e:
        assert e.violations and all("memory_cap" in v for v in e.violations)
        assert sum(i.nbytes for i in rows) > cap - max(i.nbytes for i in rows)
    else:
        assert max(table.nbytes) <= cap


def test_names_that_come_twice_and_empty_buckets_are_refused():
    with pytest.raises(LayoutError) as e:
        assign([Item("a", 1, 1.0)] * 2 + [Item("b", 1, 1.0)] * 2, 2)
    assert [v.split(":")[0] for v in e.value.violations] == ["a", "b"]
    with pytest.raises(LayoutError, match="bucket_bytes"):
        cut([1], 0)


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 3000))
def test_buckets_are_consecutive_and_only_the_last_is_small(sizes, limit):
    parts = cut(sizes, limit)
    assert [i for p in parts for i in p] == list(range(len(sizes)))
    for p in parts[:-1]:
        assert sum(sizes[i] for i in p) >= limit
    for p in parts:
        assert sum(sizes[i] for i in list(p)[:-1]) < limit


@given(st.integers(2, 4096), st.integers(2, 4096))
def test_newton_schulz_is_cubic_in_the_short_side_and_knows_no_transposition(a, b):
    assert newton_schulz_cost((a, b)) == newton_schulz_cost((b, a))
    assert newton_schulz_cost((3, a, b)) == pytest.approx(3 * newton_schulz_cost((a, b)))
    work = newton_schulz_cost((a, b)) - elementwise_cost((a, b))
    assert newton_schulz_cost((2 * a, 2 * b)) - elementwise_cost((2 * a, 2 * b)) == pytest.approx(8 * work)
    assert newton_schulz_cost((a,)) == elementwise_cost((a,))
