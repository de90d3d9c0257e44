"""Owners: a pure function of names, sizes and costs. The order in which a rank copies parameters out of their memory; what streams do
with it: test_layerwise_watch.py."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import EXAMPLES
from xfer.errors import DeadlineExceeded, LayoutError
from xfer.layerwise import pulls
from xfer.layerwise.ownership import Item, assign, cut, elementwise_cost, newton_schulz_cost
from xfer.layerwise.pulls import Pulls, _Copied, start_in_order, windows

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


# ---- copies out of owners' memory


def queued(rank: int, size: int, shares: list[list[SimpleNamespace]]) -> tuple[list, list[_Copied]]:
    """The copies and events in the order of a rank's stream, and the object of each bucket that is waited for."""
    stream: list = []
    pulls = Pulls(SimpleNamespace(rank=rank, size=size, device="cpu"), None, None, {}, (), SimpleNamespace())
    pulls.copy = stream.append
    record = patch.object(_Copied, "record", lambda work: stream.append(work))
    with patch("torch.cuda.stream", lambda s: nullcontext()), record:
        return stream, start_in_order([(pulls, some) for some in shares])


@given(st.data())
@settings(max_examples=EXAMPLES // 5 + 1, deadline=None)
def test_each_share_of_others_is_copied_once_window_by_window_and_an_event_follows_a_buckets_last_copy(data):
    size, buckets = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 40))
    rank = data.draw(st.integers(0, size - 1))
    owners = [data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4)) for _ in range(buckets)]
    shares = [[SimpleNamespace(owner=r, nbytes=8, bucket=i) for r in some] for i, some in enumerate(owners)]
    stream, works = queued(rank, size, shares)
    copies = [x for x in stream if not isinstance(x, _Copied)]
    assert sorted(map(id, copies)) == sorted(id(s) for some in shares for s in some if s.owner != rank)
    some = list(windows(buckets))
    assert [i for w in some for i in w] == list(range(buckets)) and all(
        len(b) == 2 * len(a) for a, b in zip(some, some[1:-1])
    )
    window = [next(k for k, w in enumerate(some) if s.bucket in w) for s in copies]
    assert window == sorted(window)
    for some, work in zip(shares, works, strict=True):
        mine = [at for at, x in enumerate(stream) if any(x is s for s in some)]
        assert stream[mine[-1] + 1] is work if mine else not any(x is work for x in stream)


@given(st.integers(2, 8), st.integers(1, 4))
@settings(max_examples=EXAMPLES // 5 + 1, deadline=None)
def test_ranks_read_from_different_owners_at_any_time(size, each):
    """Where a window has as much of one owner as of another."""
    shares = [[SimpleNamespace(owner=r, nbytes=8) for r in range(size) for _ in range(each)]]
    order = [[s.owner for s in queued(rank, size, shares)[0][:-1]] for rank in range(size)]
    for at in range((size - 1) * each):
        assert len({owners[at] for owners in order}) == size


def test_without_the_sign_of_all_owners_an_element_of_each_parameter_becomes_nan():
    """With the sign no bit changes, not even that of a negative zero."""
    for came in (True, False):
        dtypes = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float16)
        params = [torch.nn.Parameter(torch.tensor([-0.0, 2.0, 3.0], dtype=d)) for d in dtypes]
        members = [SimpleNamespace(param=p) for p in (*params, torch.nn.Parameter(torch.empty(0)))]
        shares = [
            SimpleNamespace(owner=owner, nbytes=12, home=None, members=some)
            for owner, some in ((1, members[:2]), (2, members[2:]))
        ]
        pulls = Pulls(SimpleNamespace(rank=0, size=3, device="cpu"), None, None, {}, shares, None)
        for dtype, factor in pulls._factor.items():
            factor.copy_(pulls._one[dtype] if came else pulls._nan[dtype])
        before = [p.detach().view(torch.uint8).clone() for p in params]
        pulls.seal(shares)
        for p, was in zip(params, before):
            same = torch.equal(p.detach().view(torch.uint8), was)
            assert same if came else p[0].isnan() and p[1] == 2.0


def test_a_mapping_that_is_opened_after_the_deadline_is_unmapped(monkeypatch):
    """A rank that comes after the deadline lets the background calls of the others go on."""
    come, unmapped = threading.Event(), threading.Event()
    monkeypatch.setattr(pulls, "_open", lambda *_: come.wait(20) and SimpleNamespace(unmap=unmapped.set))
    wire = SimpleNamespace(rank=0, size=2, device=torch.device("cpu"))
    with pytest.raises(DeadlineExceeded, match="did not all say where"):
        pulls.open_pulls(wire, [], 0.1, None)
    come.set()
    assert unmapped.wait(20)
