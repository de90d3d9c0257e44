"""Trainers that compute some exported tensors: they fill scratch before "ready", and meet before they compute together."""

import threading
from dataclasses import replace

import pytest
import torch

from tests.support.simulation import simulated
from tests.support.threads import Gather
from tests.support.world import SHAPES, Meets, ToyLayout, ToySource, World, flat, good, until_true
from tests.unit.test_trace_owned import IN, OUT, Merge, computed, full_tensors
from xfer import errors as e
from xfer.coordinator.deadlines import CALL_GRACE_S
from xfer.participants.computing import Meeting as SessionMeeting
from xfer.trace.traced import Traced

MERGE = Merge(2, (0, 0, 0), interleaved=True)

pytestmark = pytest.mark.usefixtures(simulated.__name__)


class Adapted(ToySource):
    """Also has a weight with an adapter, both cut over the ranks and merged on export."""

    def __init__(self, rank: int, world: int, gather: Gather, merge: Merge = MERGE):
        self.merge, self.gather = merge, gather
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
        self.done.run(self.local.__getitem__, lambda group, mine: self.gather(self.rank, mine))


@pytest.fixture
def world():
    w = World(trainers=2, workers=2, shapes={**SHAPES, "x": (OUT, IN)}, deadline_s=20.0)
    gather = Gather(2)
    w.sources = [Adapted(i, 2, gather) for i in range(2)]
    with w:
        yield w


def served(w: World, version: int):
    """A refit, after which everything lies in the engine bit for bit, the merged tensor too. Its report."""
    report = good(w.refit(version))
    full = full_tensors(MERGE, version)
    want = MERGE.outputs(*(full[n] for n in "wab"))["x"]
    for t in w.engines[0].takers:
        columns = slice(t.rank * IN // 2, (t.rank + 1) * IN // 2)
        assert torch.equal(t.live["x"].view(torch.int16), want[:, columns].contiguous().view(torch.int16))
        assert set(t.wrong(version)) == {"x"}, "x is no random toy tensor, and all others are"
    return report


def test_what_the_trainers_compute_together_arrives_bit_for_bit_in_every_refit(world):
    for version in (1, 2, 3):
        report = served(world, version)
        assert report.verified and report.committed == 1
    assert [s.computations for s in world.sources] == [3, 3]
    scratch = world.sources[0].done.nbytes
    assert report.extra_bytes >= scratch >= OUT * IN // 2 * 2
    told = f"computes 1 parts of exported tensors before each refit, into {scratch:,} bytes"
    assert told in world.sessions[0].explain()


def test_a_plan_digest_covers_what_is_computed(world):
    """The same fragments and roots with another factor give another inventory, and so another plan key and digest."""
    session, source, digests = world.sessions[0], world.sources[0], set()
    for merge in (MERGE, replace(MERGE, scale=3.0)):
        source.done = computed(merge, full_tensors(merge, 0), 0)
        session.layout = source.read()
        session.side.read(session._catalog, session.layout)
        digests.add(session.party.shelf._own[session.side.inventory].digest())
    assert len(digests) == 2


def test_a_rank_that_does_not_come_leaves_no_gather_behind(world):
    served(world, 1)
    # The wait for others to gather and the coordinator, which tells more, end at one deadline; this rank hears of either first.
    within = 1.0 + CALL_GRACE_S
    (late,) = world.fails(2, e.DeadlineExceeded, "waiting for trainer 1", within=within, ranks=[0], deadline_s=1.0)
    told = "waiting for trainer 1: it has not called nccl_xfer_refit()" in late.violations
    assert told or late.violations == ("waiting for trainer 1",) and "not all have come" in late.message, late
    assert world.sessions[0].computing is None, "nothing goes on, as of one that stops"
    world.fails(2, e.DeadlineExceeded, ranks=[1])  # the call that it owed is answered as the others' were
    assert [s.computations for s in world.sources] == [1, 1]
    served(world, 3)


def test_a_computation_that_waits_for_a_rank_that_has_stopped_ends_by_the_deadline(world, monkeypatch):
    """All ranks have met, so none is missing at the rendezvous. The next call waits for what still runs; the one after it commits."""
    monkeypatch.setattr("xfer.participants.computing.STOP_GRACE_S", 0.5)
    served(world, 1)
    on, last = threading.Event(), world.sources[1]
    run = last.done.run
    last.done.run = lambda *a: (on.wait(60), run(*a))
    for version, text in ((2, "was not computed in time"), (3, "a computation of an earlier refit has not ended")):
        out = world.fails(version, e.DeadlineExceeded, text, within=1.5 + CALL_GRACE_S, deadline_s=1.5)
    assert all("trainer" in r.where for r in out), out
    assert [s.computations for s in world.sources] == [2, 2]
    on.set()
    last.done.run = run
    served(world, 4)
    assert [s.computations for s in world.sources] == [3, 3]


@pytest.mark.parametrize("agree", [True, False])
def test_a_rank_that_looks_when_its_attempt_is_over_does_as_the_others_did(monkeypatch, agree):
    """Whether all go on to gather. The coordinator had forgotten that, so it waited to the deadline; and a gather would wait for it."""
    appears = SessionMeeting._appears

    def late(meeting, *a):
        found = appears(meeting, *a)
        until_true(meeting._over)
        return found

    with World(trainers=2, sources=[Meets(i, 2) for i in range(2)], deadline_s=15.0) as w:
        w.commits(1)
        for s in w.sources:
            s.digest, s.breaks, s.late_s = "same" if agree else f"of {s.rank}", "after" if s.rank else "", 0.2 * s.rank
        with monkeypatch.context() as patch:
            patch.setattr(SessionMeeting, "_appears", late)
            w.fails(2, e.XferError, "boom" if agree else "would gather different", within=10)
        assert [s.computations for s in w.sources] == [1 + agree] * 2
        for s in w.sources:
            s.digest, s.breaks, s.late_s = "same", "", 0.0
        for version in (3, 4):
            w.commits(version)
        kept = {key.split("/")[0] for key in w.coordinator.store._values if key.startswith("x")}
        assert kept == {"x4"}, "of the last attempt only"


@pytest.mark.parametrize("what", ["drain", "compute"])
def test_a_step_that_goes_on_after_its_call_was_interrupted_is_waited_for(monkeypatch, what):
    """The interrupt comes while the thread of the step starts; see also test_background.py."""
    source, inside, go_on = Meets(0, 1), threading.Event(), threading.Event()
    with World(trainers=1, sources=[source]) as w:
        w.commits(1)
        start, step, background = threading.Thread.start, getattr(source, what), []

        def interrupted(thread) -> None:
            start(thread)
            background.extend([thread] * (thread.name == "xfer-background"))
            if thread in background and len(background) > (what == "compute"):  # a drain comes first
                assert inside.wait(10)
                raise KeyboardInterrupt

        setattr(source, what, lambda *a: (inside.set(), go_on.wait(20), step(*a)))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            w.fails(2, KeyboardInterrupt)
        setattr(source, what, step)
        w.fails(3, e.DeadlineExceeded, deadline_s=0.5)
        w.sessions[0].deadline_s = 0.5
        with pytest.raises(e.DeadlineExceeded, match="uses this rank's parameters"):
            w.sessions[0].release()
        w.sessions[0].deadline_s = w.deadline_s
        go_on.set()
        w.sessions[0].release()
        w.commits(4)
