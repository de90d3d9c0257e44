"""The order in which a rank copies parameters out of their owners' memory. What streams do with it: test_layerwise_watch.py."""

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
from xfer.errors import DeadlineExceeded
from xfer.layerwise import pulls
from xfer.layerwise.pulls import Pulls, _Copied, start_in_order, windows


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
    size, buckets = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 20))
    rank = data.draw(st.integers(0, size - 1))
    owners = [data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4)) for _ in range(buckets)]
    shares = [[SimpleNamespace(owner=r, nbytes=8, bucket=i) for r in some] for i, some in enumerate(owners)]
    stream, works = queued(rank, size, shares)
    copies = [x for x in stream if not isinstance(x, _Copied)]
    assert sorted(map(id, copies)) == sorted(id(s) for some in shares for s in some if s.owner != rank)
    window = [next(k for k, w in enumerate(windows(buckets)) if s.bucket in w) for s in copies]
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


def test_windows_have_all_places_in_order_and_grow():
    for n in range(70):
        some = list(windows(n))
        assert [i for w in some for i in w] == list(range(n))
        assert all(len(b) == 2 * len(a) for a, b in zip(some, some[1:-1]))


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
