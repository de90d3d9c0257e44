"""What ranks hold changes between refits, and within some that fail: whatever commits has the bytes of that moment.

Checksums alone do not see any of it: both ends would sum the same old storages.
"""

import gc
import os
import time
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.world import ToyEngine, ToyLayout, ToySource, ToyTaker, World, good, right
from xfer.errors import DeadlineExceeded, LayoutError, Unsupported
from xfer.participants import faults
from xfer.participants.lane import Lane
from xfer.participants.refit import RefitCall

EXAMPLES = min(100, max(12, int(os.environ.get("XFER_EXAMPLES", "12"))))
EXTRA = {"extra": (4, 4)}


class Computing(ToySource):
    """All ranks meet before they are ready, as where adapters are merged. `breaks`: this one fails there, in the next refit."""

    breaks = False

    def read(self):
        layout = super().read()
        return ToyLayout(replace(layout.traced, gathers=("g",)), layout.roots, layout.tensors)

    def compute(self, meet):
        if self.breaks:
            self.breaks = False
            raise RuntimeError("boom")
        meet((0, 1), "same")


def move(source: ToySource, session) -> None:
    source.params = {n: t.clone() for n, t in source.params.items()}


def turn(source: ToySource, session) -> None:
    """Other strides, another layout."""
    source.params["layers.0.w"] = source.params["layers.0.w"].t().contiguous().t()


def export(source: ToySource, session) -> None:
    """One tensor more, or less: other specs."""
    if "extra" in source.shapes:
        source.shapes = {n: s for n, s in source.shapes.items() if n != "extra"}
        del source.params["extra"]
    else:
        source.shapes = source.shapes | EXTRA
        source.set(0)


def give_up(source: ToySource, session) -> None:
    source.fail = RuntimeError("boom")


def break_down(source: ToySource, session) -> None:
    source.breaks = True


def release(source: ToySource, session) -> None:
    session.release()


steps = st.lists(
    st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from([move, turn, export, give_up, break_down, release])),
        unique_by=lambda e: e[0],
        max_size=2,
    ),
    min_size=2,
    max_size=6,
)


@pytest.mark.parametrize("host_pull", [False, True])
def test_whatever_changed_and_failed_before_a_refit_that_commits_has_the_bytes_of_its_moment(host_pull):
    with World(drop=("extra",), host_pull=host_pull, deadline_s=6.0, sources=[Computing(i, 2) for i in range(2)]) as w:
        version = 0

        @given(steps)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            phases=[Phase.generate],
        )
        def run(rounds):
            nonlocal version
            for events in rounds:
                fails = any(e in (give_up, break_down) for _, e in events)
                for rank, event in events:
                    event(w.sources[rank], w.sessions[rank])
                version += 1
                out = w.refit(version, verify=version % 2 == 0)
                for s in w.sources:
                    s.fail, s.breaks = None, False
                if not fails:
                    good(out)
                    right(w, version)
            version += 1
            good(w.refit(version))
            right(w, version)

        run()


class Keeping(ToyTaker):
    """Has a parameter that no refit writes, as `keep=` names them; what it is to be is read with the layout."""

    breaks = False

    def __init__(self, *a):
        super().__init__(*a)
        self.kept = torch.ones(4)

    def read(self, catalog):
        if self.breaks:
            raise LayoutError("nothing of this engine takes layers.2.w")
        self.was = self.kept.clone()
        return super().read(catalog)

    def check(self):
        if not torch.equal(self.was, self.kept):
            raise Unsupported("kept parameters hold other bytes than when this engine joined")
        return super().check()


def test_what_was_lost_while_a_layout_could_not_be_read_does_not_pass_for_what_is_to_be_kept():
    """An engine sleeps at level 2 after a refit that ended in its reading; the next one that reads has no other to compare with."""
    engine = ToyEngine(2)
    taker = engine.takers[0] = Keeping(0, 2)
    with World(trainers=1, drop=("extra",), engines=[engine]) as w:
        good(w.refit(1))
        taker.breaks = True
        export(w.sources[0], w.sessions[0])
        assert isinstance(w.refit(2)[0], LayoutError)
        taker.breaks = False
        taker.kept.zero_()
        for _ in range(2):
            assert isinstance(w.refit(3)[0], Unsupported)
        taker.kept.fill_(1)  # loaded again
        good(w.refit(4))
        right(w, 4)


def test_storages_that_are_gone_are_kept_alive_by_nobody():
    with World() as w:
        good(w.refit(1))
        old = [weakref.ref(t.untyped_storage()) for t in w.sources[0].params.values()]
        move(w.sources[0], w.sessions[0])
        good(w.refit(2))
        gc.collect()
        assert not any(ref() is not None for ref in old)
        right(w, 2)


def test_an_engine_that_could_not_read_what_trainers_export_reads_what_they_export_next():
    class Refuses(ToyTaker):
        def read(self, catalog):
            if catalog is not None and any(s.name == "extra" for s in catalog.specs):
                raise LayoutError("the loader does not know 'extra'")
            return super().read(catalog)

    engine = ToyEngine(1)
    engine.takers = [Refuses(0, 1)]
    with World(trainers=1, workers=1, engines=[engine]) as w:
        good(w.refit(1))
        export(w.sources[0], None)
        assert isinstance(w.refit(2)[0], LayoutError)
        export(w.sources[0], None)
        w.sources[0].set(3)
        good(w.refit(3))
        right(w, 3)


def unreadable(catalog):
    raise LayoutError("no loader for that")


def moved(taker: ToyTaker) -> None:
    taker.live["embed"] = taker.live["embed"].clone()


def test_an_engine_that_cannot_read_is_named_where_others_do_not_call_at_all():
    with World(trainers=2, workers=1) as w:
        good(w.refit(1))
        taker = w.engines[0].takers[0]
        moved(taker)
        taker.read = unreadable
        (got,) = w.refit(2, ranks=[0], deadline_s=2.0)
        assert isinstance(got, DeadlineExceeded) and "trainer 1: it has not called" in str(got)
        assert "worker 0: it cannot read what trainers exported so far: no loader for that" in str(got)
        w.refit(ranks=[1])
        del taker.read
        good(w.refit(3))
        right(w, 3)


def test_a_layout_that_was_read_and_not_told_is_told_after_one_that_could_not_be_read(monkeypatch):
    point, raised = faults.point, []

    def once(who, index, where):
        if (who, where) == ("worker", "arm") and not raised:
            raised.append(where)
            raise RuntimeError("between the look and the word")
        point(who, index, where)

    with World(trainers=1, workers=1) as w:
        good(w.refit(1))
        taker = w.engines[0].takers[0]
        old = taker.live["layers.0.w"]
        taker.live["layers.0.w"] = torch.empty(old.shape[::-1], dtype=old.dtype).t()
        monkeypatch.setattr(faults, "point", once)
        assert "between the look" in str(w.refit(2)[0])
        moved(taker)
        taker.read = unreadable
        assert "no loader for that" in str(w.refit(2)[0])
        del taker.read
        good(w.refit(3))
        right(w, 3)


@pytest.mark.parametrize("verify", [False, True])
def test_a_refit_that_is_interrupted_commits_nothing_of_what_comes_after(monkeypatch, verify):
    """Whoever catches a KeyboardInterrupt goes on with the weights; the engine must not get what they are by then as that version."""
    with World(trainers=1, workers=1) as w:
        good(w.refit(1))
        outcome, go = RefitCall._outcome, Lane._go

        def late(lane, message):
            if lane._role == "trainer":
                time.sleep(1.0)
            return go(lane, message)

        def interrupted(call):
            lane = next(iter(call.party.lanes.values()))
            while lane.go_attempt < call.number:
                time.sleep(0.01)
            raise KeyboardInterrupt

        monkeypatch.setattr(Lane, "_go", late)
        monkeypatch.setattr(RefitCall, "_outcome", interrupted)
        assert isinstance(w.refit(2, verify=verify)[0], KeyboardInterrupt)
        w.sources[0].set(3)  # the next optimizer step
        monkeypatch.setattr(RefitCall, "_outcome", outcome)
        monkeypatch.setattr(Lane, "_go", go)
        time.sleep(1.5)
        assert w.controllers[0].version != 2 and w.engines[0].label != "2"
        good(w.refit(4, verify=verify))
        right(w, 4)


def test_what_no_replica_committed_is_neither_verified_nor_the_version():
    with World(trainers=1, workers=1, replicas=2) as w:
        good(w.refit(1))
        w.engines[0].fail["start"] = w.engines[1].fail["start"] = RuntimeError("boom")
        report = w.refit(2, min_replicas=0)[0]
        assert report.committed == 0 and not report.verified and w.sessions[0].version == 1
        w.engines[0].fail = {}
        w.engines[1].fail["start"] = RuntimeError("boom")
        assert isinstance(w.refit(3)[0], Exception)  # one of two, and both were wanted
        assert w.sessions[0].version == w.controllers[0].version == 2
