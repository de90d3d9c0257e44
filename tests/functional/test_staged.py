"""Trainers that compute part of what they export, through the session: scratch before "ready", and ranks that compute
together meet before they gather.

Trainers and engine are the small stand-ins of tests/support/world.py; recipes, scratch, planner, hub and transport are the
real ones, and the gathers really wait for each other. With Megatron-Bridge's LoRA and a real vLLM: test_refit_e2e.py,
with the trainer alone in every layout: test_megatron_lora.py.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from tests.support.world import SHAPES, ToyLayout, ToySource, World, flat, until_true
from tests.unit.test_trace_owned import IN, OUT, Meeting, Merge, computed, full_tensors
from xfer import errors as e
from xfer.coordinator.deadlines import CALL_GRACE_S
from xfer.participants.computing import Meeting as SessionMeeting
from xfer.participants.refit import RefitCall
from xfer.trace.traced import Traced

MERGE = Merge(2, (0, 0, 0), interleaved=True)


class Adapted(ToySource):
    """Beside what every toy trainer holds: a weight with an adapter, all cut over the ranks and merged on export."""

    def __init__(self, rank: int, world: int, meeting: Meeting, merge: Merge = MERGE):
        self.merge, self.meeting = merge, meeting
        self.done = computed(merge, full_tensors(merge, 0), rank)  # what this rank reads from the export, alone
        self.local: dict[str, torch.Tensor] = {}
        self.computations = 0
        self.digest = ""
        super().__init__(rank, world)

    def set(self, version: int) -> None:
        super().set(version)
        for name, full in full_tensors(self.merge, version).items():
            local = self.merge.local(name, full, self.rank)
            self.local.setdefault(name, torch.empty_like(local)).copy_(local)

    def read(self) -> ToyLayout:
        plain, c = super().read(), self.done
        traced = c.traced
        specs = tuple(sorted((*plain.traced.specs, *traced.specs)))
        both = Traced(specs, plain.traced.fragments + c.fragments, recipes=traced.recipes, gathers=traced.gathers)
        return ToyLayout(both, (*plain.roots, c.root), {**plain.tensors, c.root.name: flat(c.storage)})

    def compute(self, meet) -> None:
        for x in self.done.exchanges:
            meet(tuple(range(x.group.size())), self.digest or x.digest())
        self.computations += 1
        self.done.run(self.local.__getitem__, lambda group, mine: self.meeting.gather(self.rank, mine))


@pytest.fixture
def world():
    meeting = Meeting(2)
    w = World(trainers=2, workers=2, shapes={**SHAPES, "x": (OUT, IN)}, deadline_s=20.0)
    w.sources = [Adapted(i, 2, meeting) for i in range(2)]
    with w:
        yield w


def served(w: World, version: int) -> None:
    """Everything lies in the engine bit for bit, the merged tensor too."""
    full = full_tensors(MERGE, version)
    want = MERGE.outputs(*(full[n] for n in "wab"))["x"]
    for t in w.engines[0].takers:
        columns = slice(t.rank * IN // 2, (t.rank + 1) * IN // 2)
        assert torch.equal(t.live["x"].view(torch.int16), want[:, columns].contiguous().view(torch.int16))
        assert set(t.wrong(version)) == {"x"}, "x is no random toy tensor, and all others are"


def ok(results: list):
    for r in results:
        if isinstance(r, BaseException):
            raise r
    return results[0]


def test_what_the_trainers_compute_together_arrives_bit_for_bit_in_every_refit(world):
    for version in (1, 2, 3):
        report = ok(world.refit(version))
        assert report.verified and report.committed == 1
        served(world, version)
    assert [s.computations for s in world.sources] == [3, 3]
    scratch = world.sources[0].done.nbytes
    assert report.extra_bytes >= scratch >= OUT * IN // 2 * 2
    assert (
        f"computes 1 parts of exported tensors before each refit, into {scratch:,} bytes" in world.sessions[0].explain()
    )


def test_a_plan_digest_covers_what_is_computed(world):
    """The same fragments and roots, another factor: another inventory, and so another plan key and digest."""

    def announced(session):
        return session._party.shelf._own[session.side.inventory]

    mine = announced(world.sessions[0])
    assert mine.recipes and mine.recipes != announced(world.sessions[1]).recipes
    other = [computed(m, full_tensors(m, 0), 0) for m in (MERGE, Merge(2, (0, 0, 0), interleaved=True, scale=3.0))]
    assert other[0].fragments == other[1].fragments and other[0].root == other[1].root
    digests = []
    for c in other:
        world.sources[0].done = c
        world.sessions[0].layout = world.sources[0].read()
        (s := world.sessions[0]).side.read(s._catalog, s.layout)
        digests.append(announced(world.sessions[0]).digest())
    assert digests[0] == mine.digest() != digests[1]


def test_a_rank_that_does_not_come_leaves_no_gather_behind(world):
    ok(world.refit(1))
    began = time.monotonic()
    (late,) = world.refit(2, ranks=[0], deadline_s=2.0)
    # Who waits to gather and the coordinator, which tells more, end at one deadline; this rank hears of either first.
    met = late.violations == ("waiting for trainer 1",) and "not all have come" in late.message
    told = "waiting for trainer 1: it has not called nccl_xfer_refit()" in late.violations
    assert isinstance(late, e.DeadlineExceeded) and (met or told), late
    assert world.sessions[0].computing is None, "nothing goes on, as of one that stops"
    assert time.monotonic() - began < 2.0 + CALL_GRACE_S and world.sources[0].computations == 1
    (came,) = world.refit(2, ranks=[1])  # the call that it owed is answered as the others' were
    assert isinstance(came, e.DeadlineExceeded) and world.sources[1].computations == 1
    ok(world.refit(3))
    served(world, 3)


def test_a_rank_that_raises_before_frees_those_that_wait_to_gather(world):
    ok(world.refit(1))
    world.sources[1].fail = e.RebindError("layer 3 was offloaded", where="trainer 1")
    began = time.monotonic()
    results = world.refit(2)
    assert all(isinstance(r, e.RebindError) and "layer 3 was offloaded" in str(r) for r in results), results
    assert time.monotonic() - began < 8
    world.sources[1].fail = None
    ok(world.refit(3))
    served(world, 3)


def test_ranks_that_would_gather_different_things_are_stopped_before_they_do(world):
    ok(world.refit(1))
    world.sources[1].digest = "0" * 32
    results = world.refit(2)
    for r in results:
        assert isinstance(r, e.PlanMismatch) and "would gather different tensors" in str(r), r
    assert [s.computations for s in world.sources] == [1, 1]
    world.sources[1].digest = ""
    ok(world.refit(3))
    served(world, 3)


def test_a_computation_that_raises_is_told_to_all_and_the_next_refit_repairs(world):
    ok(world.refit(1))
    runs = [s.done.run for s in world.sources]
    for s in world.sources:
        s.done.run = broken
    results = world.refit(2)
    assert all(isinstance(r, e.XferError) and "out of memory" in str(r) for r in results), results
    for s, run in zip(world.sources, runs, strict=True):
        s.done.run = run
    ok(world.refit(3))
    served(world, 3)


def test_a_computation_that_waits_for_a_rank_that_has_stopped_ends_by_the_deadline(world):
    """They have met, so nobody is missing at the rendezvous; what goes on is waited for by the next call, and the one after repairs."""
    ok(world.refit(1))
    on, (first, last) = threading.Event(), world.sources
    run = last.done.run
    last.done.run = lambda *a: (on.wait(60), run(*a))
    for version, said in ((2, "was not there in time"), (3, "a computation of an earlier refit has not ended")):
        began = time.monotonic()
        results = world.refit(version, deadline_s=2.5)
        assert time.monotonic() - began < 2.5 + CALL_GRACE_S, results
        assert all(isinstance(r, e.DeadlineExceeded) and said in str(r) for r in results), results
    assert all("trainer" in r.where for r in results), results
    assert [s.computations for s in world.sources] == [2, 2]
    on.set()
    last.done.run = run
    ok(world.refit(4))
    served(world, 4)
    assert [s.computations for s in (first, last)] == [3, 3]


def broken(*_):
    raise RuntimeError("out of memory")


class Meets(ToySource):
    """Computes with all other ranks, which is to say that it meets them. `inside`, `go_on`: once they have met."""

    def __init__(self, rank: int, world: int):
        super().__init__(rank, world)
        self.inside, self.go_on, self.computations = threading.Event(), threading.Event(), 0
        self.go_on.set()

    def read(self) -> ToyLayout:
        layout = super().read()
        return ToyLayout(replace(layout.traced, gathers=("g",)), layout.roots, layout.tensors)

    def compute(self, meet) -> None:
        meet(tuple(range(self.world)), "same")
        self.computations += 1
        self.inside.set()
        self.go_on.wait(60)


@pytest.mark.parametrize("ends", ["an error", "the deadline of one"])
def test_who_hears_from_another_rank_that_it_gave_up_is_told_why_as_that_one_is(monkeypatch, ends):
    """Not that they would gather different tensors: nobody knows that."""
    init, go_on = SessionMeeting.__init__, threading.Event()

    def hears_by_that_only(meeting, store, me: int, until: float, over) -> None:
        init(meeting, store, me, time.monotonic() if ends != "an error" and me == 0 else until, over)
        if me == 1:
            meeting._waiting = meeting._store

    with World(trainers=3, sources=[Meets(i, 3) for i in range(3)]) as w:
        ok(w.refit(1))
        hub, last, drain = w.sessions[0]._server.coordinator, w.sources[2], w.sources[2].drain

        def late() -> None:
            until_true(lambda: any(v == b"2" for k, v in list(hub.store._values.items()) if k.endswith("/n")))
            raise e.RebindError("layer 3 was offloaded", where="trainer 2")

        last.drain = late if ends == "an error" else lambda: go_on.wait(60)
        with monkeypatch.context() as patch:
            patch.setattr(SessionMeeting, "__init__", hears_by_that_only)
            out = w.refit(2)
        kind, said = (e.RebindError, "offloaded") if ends == "an error" else (e.DeadlineExceeded, "not all have come")
        assert all(isinstance(r, kind) and said in r.message and "trainer 2" in str(r) for r in out[:2]), out
        last.drain = drain
        go_on.set()
        ok(w.refit(3))
        assert [s.computations for s in w.sources] == [2, 2, 2] and not any(t.wrong(3) for t in w.engines[0].takers)


def test_what_an_interrupted_call_was_computing_is_waited_for_by_the_next(monkeypatch):
    """It would compute at the same time, into the same scratch, and gather among gathers of the other. Nor are parameters let go of
    that it reads."""
    source, is_over = Meets(0, 1), RefitCall._is_over
    with World(trainers=1, sources=[source]) as w:
        ok(w.refit(1))
        source.inside.clear()
        source.go_on.clear()

        def interrupted(call: RefitCall) -> bool:
            if source.inside.is_set() and threading.current_thread().name != "xfer-background":
                raise KeyboardInterrupt
            return is_over(call)

        with monkeypatch.context() as patch:
            patch.setattr(RefitCall, "_is_over", interrupted)
            assert isinstance(w.refit(2)[0], KeyboardInterrupt)
        (late,) = w.refit(3, deadline_s=1.0)
        assert isinstance(late, e.DeadlineExceeded), late
        assert "a computation of an earlier refit has not ended" in str(late)
        assert source.computations == 2
        w.sessions[0].deadline_s = 0.5
        with pytest.raises(e.DeadlineExceeded, match="uses this rank's parameters"):
            w.sessions[0].release()
        w.sessions[0].deadline_s = w.deadline_s
        source.go_on.set()
        w.sessions[0].release()
        ok(w.refit(4))
        assert (
            w.sessions[0].computing is None
            and source.computations == 3
            and not any(t.wrong(4) for t in w.engines[0].takers)
        )


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("what", ["drain", "compute"])
def test_a_call_that_is_interrupted_as_it_begins_something_leaves_nothing_that_nobody_knows(monkeypatch, what, begins):
    """Starting a thread waits for it, so that it may run by then, or is about to. What does is waited for, what does not never will."""
    source, inside, go_on = Meets(0, 1), threading.Event(), threading.Event()
    with World(trainers=1, sources=[source]) as w:
        ok(w.refit(1))
        start, step, asides = threading.Thread.start, getattr(source, what), []

        def held(*a):
            inside.set()
            go_on.wait(20)
            return step(*a)

        def interrupted(thread) -> None:
            asides.extend([thread] * (thread.name == "xfer-background"))
            if thread not in asides or len(asides) <= (what == "compute"):  # a drain comes first
                return start(thread)
            if begins:
                start(thread)
                assert inside.wait(10)
            raise KeyboardInterrupt

        setattr(source, what, held)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            assert isinstance(w.refit(2)[0], KeyboardInterrupt)
        setattr(source, what, step)
        if begins:
            (late,) = w.refit(3, deadline_s=1.0)
            assert isinstance(late, e.DeadlineExceeded), late
            w.sessions[0].deadline_s = 0.5
            with pytest.raises(e.DeadlineExceeded, match="uses this rank's parameters"):
                w.sessions[0].release()
            w.sessions[0].deadline_s = w.deadline_s
        else:
            before = source.drained, source.computations
            start(asides[-1])  # the system may still get to it
            asides[-1].join(10)
            assert before == (source.drained, source.computations)
        go_on.set()
        w.sessions[0].release()
        ok(w.refit(4))
        assert not any(t.wrong(4) for t in w.engines[0].takers)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.lists(st.sampled_from(["", "0", "1"]), min_size=1, max_size=4))
def test_every_meeting_of_the_same_ranks_compares_what_they_would_gather(world, differs):
    """Process groups may have the same ranks. `differs`: for each meeting, which rank has another digest."""
    store, ends, ranks = HashStore(), [None] * world, tuple(range(world))

    def come(i: int) -> None:
        meet, passed = SessionMeeting(lambda **_: store, i, time.monotonic() + 5, lambda: False), 0
        try:
            for number, odd in enumerate(differs):
                meet(ranks, f"{number} of {i}" if odd == str(i) else f"{number}")
                passed += 1
            ends[i] = passed, ""
        except e.XferError as error:
            ends[i] = passed, type(error).__name__

    threads = [threading.Thread(target=come, args=(i,)) for i in ranks]
    for t in threads:
        t.start()
    for t in threads:
        t.join(15)
    equal = next((n for n, odd in enumerate(differs) if odd), len(differs))
    assert ends == [(equal, "PlanMismatch" if equal < len(differs) else "")] * world
