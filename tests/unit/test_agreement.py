"""Agreement of ranks: either all go on or none does, whatever the order in which ranks come, look, give up, refuse and die. Ranks are
threads that take turns: a schedule decides which rank makes its next call of the store, so there is no clock here."""

import re
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from tests.support.examples import EXAMPLES
from tests.support.threads import run_ranks
from xfer.agreement import Agreement
from xfer.coordinator.messages import StoreCall
from xfer.errors import DeadlineExceeded, PlanMismatch, RebindError, XferError
from xfer.participants.computing import Meeting
from xfer.rendezvous.client import SILENT
from xfer.rendezvous.store import RendezvousStore


class Died(BaseException):
    pass


def looks(store, key: str, until: float, over) -> bool:
    """`until`: how often the rank looks before it gives up."""
    return any(store.check([key]) for _ in range(int(until)))


@dataclass(frozen=True)
class Rank:
    """patience: number of looks before it gives up. digest: compared among ranks. refuses: it fails instead of coming. dies_at: number
    of calls of the store before it dies."""

    patience: int = 5
    digest: str = "a"
    refuses: bool = False
    dies_at: int = 1000


def run(ranks: list[Rank], choose) -> list[object]:
    """Return by rank "on", its error, or None if it died. `choose(alive)` returns the rank whose thread goes on to its next call."""
    shared, ends, steps, over = HashStore(), [None] * len(ranks), [0] * len(ranks), set()
    go, back = [threading.Semaphore(0) for _ in ranks], threading.Semaphore(0)

    class Store:
        """One rank's view of the store; each call takes a turn."""

        def __init__(self, rank: int):
            self._rank = rank

        def __getattr__(self, name: str):
            def call(*arguments):
                back.release()
                go[self._rank].acquire()
                if steps[self._rank] > ranks[self._rank].dies_at:
                    raise Died
                return getattr(shared, name)(*arguments)

            return call

    def come(r: int) -> None:
        go[r].acquire()
        agreement = Agreement(Store(r), "meeting", r, range(len(ranks)), appears=looks)
        try:
            if ranks[r].refuses:
                ends[r] = error = RebindError("moved", [f"rank {r}: moved"])
                agreement.refuse(error)
            else:
                agreement.meet(ranks[r].patience, ranks[r].digest)
                ends[r] = "on"
        except XferError as e:
            ends[r] = e
        except Died:
            ends[r] = None
        over.add(r)
        back.release()

    threads = [threading.Thread(target=come, args=(r,), daemon=True) for r in range(len(ranks))]
    for t in threads:
        t.start()
    while alive := [r for r in range(len(ranks)) if r not in over]:
        r = choose(alive)
        steps[r] += 1
        go[r].release()
        assert back.acquire(timeout=20)
    for t in threads:
        t.join(20)
    return ends


RANKS = st.builds(
    Rank,
    patience=st.integers(0, 8),
    digest=st.sampled_from(["a", "a", "a", "b"]),
    refuses=st.integers(0, 9).map(lambda n: n == 0),
    dies_at=st.one_of(st.just(1000), st.just(1000), st.integers(1, 8)),
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(RANKS, min_size=1, max_size=4), st.data())
def test_either_all_ranks_go_on_or_none_does_and_all_hear_the_same(ranks, data):
    ends = run(ranks, lambda alive: data.draw(st.sampled_from(alive)))
    came = [end for rank, end in zip(ranks, ends, strict=True) if end is not None and not rank.refuses]
    errors = {(type(e), e.message, e.violations) for e in came if e != "on"}
    assert not errors or "on" not in came, ends
    assert len(errors) <= 1, "one reason"
    for kind, message, violations in errors:
        if kind is PlanMismatch:
            (one, other) = map(int, re.fullmatch(r"rank (.): differs from rank (.)", *violations).groups())
            assert ranks[one].digest != ranks[other].digest
        elif kind is DeadlineExceeded:
            (late,) = re.findall("(rank .) has given up waiting", message)
            never = {f"waiting for rank {r}" for r, rank in enumerate(ranks) if rank.dies_at <= 1 and not rank.refuses}
            assert never <= {*violations} and f"waiting for {late}" not in violations
    if any(rank.refuses for rank in ranks) or len({rank.digest for rank in ranks}) > 1:
        assert "on" not in came


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(1, 4), st.data())
def test_all_go_on_where_nobody_gives_up(n, data):
    """Each rank has one turn in each round."""
    turns: list[int] = []

    def choose(alive: list[int]) -> int:
        while not turns or turns[-1] not in alive:
            turns[:] = turns[:-1] or data.draw(st.permutations(range(n)))
        return turns.pop()

    assert run([Rank(patience=20)] * n, choose) == ["on"] * n


def test_a_rank_that_does_not_come_is_named():
    ends = run([Rank(), Rank(dies_at=0), Rank()], min)
    missing = "waiting for rank 1", "waiting for rank 2"
    assert all(isinstance(e, DeadlineExceeded) and e.violations == missing for e in ends[::2])


def test_nothing_is_left_of_the_ranks_that_came():
    shared = HashStore()
    Agreement(shared, "meeting", 0, [0]).meet(0.0, "a")
    assert shared.num_keys() == 3, "the word, the counter and the digest"


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.lists(st.sampled_from(["", "0", "1"]), min_size=1, max_size=4))
def test_every_meeting_of_the_same_ranks_compares_what_they_would_gather(world, differs):
    """Process groups may have the same ranks. `differs`: for each meeting, which rank has another digest."""
    store, ranks = HashStore(), tuple(range(world))

    def come(i: int) -> tuple[int, str]:
        meet, passed = Meeting(lambda **_: store, i, time.monotonic() + 5, lambda: False), 0
        try:
            for number, odd in enumerate(differs):
                meet(ranks, f"{number} of {i}" if odd == str(i) else f"{number}")
                passed += 1
        except XferError as error:
            return passed, type(error).__name__
        return passed, ""

    equal = next((n for n, odd in enumerate(differs) if odd), len(differs))
    assert run_ranks(world, come, 15.0) == [(equal, "PlanMismatch" if equal < len(differs) else "")] * world


def test_a_rendezvous_that_falls_silent_is_named_and_no_peer_is():
    """All ranks have come. The process with the rendezvous hangs before one of them has read so."""

    def ask(what, until, message, *, cancelled, why):
        if message().kind is StoreCall.ADD:
            return [b"1"]
        raise DeadlineExceeded(f"no answer in time: {what}", [why])

    store = RendezvousStore(SimpleNamespace(ask=ask, send=lambda message: None), "epoch/", 1.0)
    with pytest.raises(DeadlineExceeded) as e:
        Agreement(store, "meeting", 1, range(2), appears=lambda *_: True).meet(time.monotonic() + 1.0)
    assert e.value.violations == (SILENT,)
