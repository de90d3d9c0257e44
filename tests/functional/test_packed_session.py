"""The packed route's refits over real sockets, links and shared memory: what holds when all goes well, and what each kind of wrong
sender, bucket and loader leads to. Trainers and engines are small stand-ins (tests/support/packed_world.py).
"""

from __future__ import annotations

import errno
import functools
import itertools
import threading
import time
from collections.abc import Callable
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.packed_world import Knobs, PackedWorld
from tests.support.world import good, raised, right, until_true
from xfer import errors as e
from xfer import faults
from xfer.arguments import RefitOptions
from xfer.coordinator import refit
from xfer.packed import feed, plan, trainer, worker
from xfer.packed.lockstep import Lockstep
from xfer.packed.plane import PackedPlane
from xfer.packed.shared import exporters_of, nearest
from xfer.transport import peer_host


@pytest.mark.parametrize("limit", [1024, 256, 1 << 20], ids=["some", "cut", "one"])
@pytest.mark.parametrize("colocated", [False, True], ids=["broadcast", "shared memory"])
def test_refits_in_a_row_each_give_the_new_weights_from_one_gather_for_all_replicas(colocated, limit):
    """In some buckets, in buckets shorter than a tensor, and in one bucket for all. After a release no rank holds buffers or storages, and
    the next refit finds them again: trainers that put messages together map each other's, and all let go before any `release()` returns."""
    with PackedWorld(trainers=3, workers=2, replicas=2, colocated=colocated, limit=limit) as w:
        for v in (1, 2, 3):
            report = good(w.refit(v))
            right(w, v)
            assert report.version == v and report.committed == 2 and report.verified
            assert [c.version for c in w.controllers] == [v, v]
        assert w.engines[0].log == ["pause", "start", "update", "finish", "reset", "resume"] * 3
        how = "in buffers of trainer 0 that 2 workers map" if colocated else "broadcast by trainer 0 to 2 workers"
        assert how in w.sessions[1].explain()
        assert "exported whole by the trainers' framework" in w.sessions[1].explain()
        assert [s.builds for s in w.streams] == [1, 1, 1], "tasks are kept while nothing changes"
        assert {t.given["norm"] for t in w.engines[0].takers} == {torch.float32}
        assert report.outcomes[0].routes[0].route == "packed"
        planned = w.sources[0].plan
        assert (len(planned.messages) == 1) == (limit > 4096) and planned.buffer_bytes <= limit
        assert max(s.party.lanes[0].plane.extra_bytes for s in w.sessions) <= 2 * limit
        collectives = 2 + 3 * (len(planned.groups) + 1) + 2
        assert w.meeting.rounds == collectives, "a collective per refit and one per bucket"
        assert w.sessions[0].side.pump.extra_bytes > 0 and not any(s._stale for s in w.sources)
        w.on_all(lambda i: w.sessions[i].release(), ranks=[1])
        assert all(s._stale for s in w.sources) and not sum(s.side.pump.extra_bytes for s in w.sessions)
        w.on_all(lambda i: w.sessions[i].release(), ranks=[0])
        for v in (4, 5):
            good(w.refit(v))
            right(w, v)


def test_what_only_the_direct_route_can_do_is_refused_all_at_once():
    """Bytes that changed, scratch, and gathers beside the next step, which uses the same process groups."""
    with PackedWorld(trainers=1, workers=1) as w:
        good(w.refit(1))
        for wait, told in (("step", "wait='step'"), ("ready", "publish()")):
            with pytest.raises(e.XferError) as caught:
                w.sessions[0].refit(RefitOptions(delta="auto", stage=True, wait=wait))
            assert [line.split(": ")[0] for line in caught.value.violations] == [told, "delta='auto'", "stage=True"]
            assert all("xfer.Direct()" in line for line in caught.value.violations[wait == "step" :])
        good(w.refit(2))
        right(w, 2)


def test_buffers_are_not_released_before_all_replicas_have_loaded_from_them(monkeypatch):
    """Trainer 1's call has returned, and it releases its weights while a slow replica is about to map trainer 0's buffers."""
    with PackedWorld(trainers=2, workers=1, replicas=2, colocated=True, limit=1 << 20) as w:
        good(w.refit(1))
        opened, forget = peer_host.Mapping.open, w.sessions[0].side.pump.forget
        maps, released = threading.Event(), threading.Event()

        def late(*args):
            if threading.current_thread().name == "xfer-lane-1":
                maps.set()
                released.wait(1.0)  # the other replica's lane of trainer 0 has released, or has to wait for this one
            return opened(*args)

        def call(i: int):
            report = w.sessions[i].refit(RefitOptions(verify=True, wait="sources"))
            if i == 1:
                assert maps.wait(20)
                w.sessions[1].release()
            return report

        monkeypatch.setattr(peer_host.Mapping, "open", late)
        monkeypatch.setattr(w.sessions[0].side.pump, "forget", lambda: (forget(), released.set()))
        for s in w.streams:
            s.version = 2
        second = good(w.on_all(call))
        assert released.is_set() and maps.is_set()
        third = good(w.refit(3))
        assert (third.before or second).committed == 2  # its outcome may have come before trainer 0's call returned
        right(w, 3)


def test_gathers_run_in_one_order_on_all_ranks_in_whatever_order_their_lanes_come(monkeypatch):
    """Collectives of two gathers that cross would be paired with each other. Trainer 1's lane of the first replica comes last."""
    begun: dict[str, list] = {}
    monkeypatch.setattr(refit, "TOGETHER_S", 0.1)
    with PackedWorld(trainers=3, workers=1, replicas=2) as w:
        good(w.refit(1))
        pause, gather = w.engines[1].pause, feed.Feed._gather
        told, reached = threading.Event(), threading.Event()
        first, second = (w.sessions[1].party.lanes[r] for r in (0, 1))
        do_go, other_go = first._go, second._go

        def noted(self):
            begun.setdefault(self._label, []).append(self.replicas)
            gather(self)

        def late(go):
            told.set()
            assert reached.wait(20)
            return do_go(go)

        monkeypatch.setattr(first, "_go", late)
        monkeypatch.setattr(second, "_go", lambda go: (reached.set(), other_go(go))[1])
        monkeypatch.setattr(feed.Feed, "_gather", noted)
        w.engines[1].pause = lambda timeout: (told.wait(20), pause(timeout))
        assert good(w.refit(2)).committed == 2
        assert begun == {f"trainer {i}": [(0,), (1,)] for i in range(3)}
        right(w, 2)


def test_a_gather_that_goes_on_is_named_and_its_tables_stay_until_it_has_ended(monkeypatch):
    """A check of the parameters, which drops a gather's tables, and a release come after its end."""
    monkeypatch.setattr(trainer, "OVER_S", 0.2)
    with PackedWorld(trainers=3) as w:
        good(w.refit(1))
        go_on, beside = threading.Event(), []
        tensors = w.streams[1].tensors
        w.streams[1].tensors = lambda group: (go_on.wait(60), tensors(group))[1]
        for s, session in zip(w.streams, w.sessions, strict=True):

            def looked(look, pump, what):
                beside.extend([] if pump.wait_over(0.0) else [what])
                return look()

            pump = session.side.pump
            s.check = functools.partial(looked, s.check, pump, "check")
            pump.forget = functools.partial(looked, pump.forget, pump, "forget")
        # The first deadline has to be long enough for all ranks to begin that gather, on whatever machine.
        for version, deadline, kind in ((2, 5.0, e.XferError), (3, 1.0, e.DeadlineExceeded)):
            for i, r in enumerate(w.refit(version, deadline_s=deadline)):
                assert isinstance(r, kind), r
                told = [v for v in r.violations if v.endswith(feed.IN_STEP)]
                at = "is in bucket group 0" if i == 1 else "waits for the other trainers"
                assert len(told) == 1 and at in told[0] and r.violations[0] == told[0], r
        for s in w.sessions:
            s.deadline_s = 0.5
        for r in w.on_all(lambda i: w.sessions[i].release()):
            assert isinstance(r, e.DeadlineExceeded) and feed.IN_STEP in str(r), r
        assert not beside
        threading.Timer(0.5, go_on.set).start()
        w.streams[1].state = "moved"
        good(w.refit(4, deadline_s=30.0))
        right(w, 4)
        assert not beside and [s.builds for s in w.streams] == [2, 2, 2]
        w.knobs.exported = short
        assert not any(feed.IN_STEP in str(r) for r in w.refit(5)), "a gather that is over is not named"


# ---- what goes wrong


def short(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    return name, tensor[:-1] if name == "layers.1.w" else tensor


def torn(w: PackedWorld, results, kind: type, *words: str) -> None:
    """All ranks raised this error, the replica answers NaN, and the next refit repairs it."""
    raised(results, kind, *words)
    engine, controller = w.engines[0], w.controllers[0]
    assert engine.takers[0].holds == "mix" and engine.takers[0].live["norm"].isnan().all()
    assert engine.paused and isinstance(controller.error, e.EngineLost)
    for t in engine.takers:
        t.knobs = w.knobs
    good(w.refit(9))
    right(w, 9)
    assert controller.error is None and not engine.paused


def alone(w: PackedWorld, *raised) -> None:
    """As `torn`, and the replica has held up no other one."""
    right(w, 2, [1])
    assert w.controllers[1].version == 2 and not w.engines[1].paused
    torn(w, *raised)


def clean(w: PackedWorld, results, kind: type, *words: str) -> None:
    """All ranks raised this error before a byte of the engine changed: it goes on serving version 1, and the next refit is whole."""
    raised(results, kind, *words)
    right(w, 1)
    assert not w.engines[0].paused and w.controllers[0].version == 1
    good(w.refit(3))
    right(w, 3)


def test_a_rank_that_gave_up_still_takes_part_in_the_gather_and_later_ones_stay_in_step():
    """Its call raised before the coordinator released it. The gather is one for all, and ranks count gathers."""
    with PackedWorld(trainers=2, replicas=2) as w:
        good(w.refit(1))
        begin, lost = w.sources[0].drain, e.PeerLost("gave up")
        w.sources[0].drain = lambda: (time.sleep(0.5), begin())
        gives_up = threading.Timer(0.25, lambda: w.sessions[1]._party.lanes[1].give_up(2, lost))
        gives_up.start()  # after its Ready, before the Go
        began = time.monotonic()
        w.refit(2, deadline_s=15.0)
        assert time.monotonic() - began < 10
        w.sources[0].drain = begin
        assert good(w.refit(3)).committed == 2
        right(w, 3)


def test_buffers_of_an_aborted_link_are_held_until_it_has_left_the_device_and_no_longer(monkeypatch):
    link = Mock(drained=Mock(return_value=False))
    monkeypatch.setattr(worker, "_abandoned", held := [])
    with PackedWorld(2, 1) as w:
        held.append((link, None))
        good(w.refit(1))
        assert len(held) == 1
        link.drained.return_value = True
        good(w.refit(2))
        assert not held


def loader(worker: int, tensor: str, fails: Callable[[], object]):
    """A worker's loader fails at a tensor."""

    def loaded(rank, name, given):
        if name == tensor:
            fails()

    return lambda w, patch: setattr(w.engines[0].takers[worker], "knobs", Knobs(loaded=loaded))


def injected(text: str):
    """The fault happens (xfer/faults.py), in threads of this process."""

    def breaks(w: PackedWorld, patch) -> None:
        faults._passed.clear()
        patch.setenv("XFER_FAULT", text)

    return breaks


def another_export(w: PackedWorld, patch) -> None:
    """Something outside of all parameters has changed, which no check sees: tasks that are made anew are right."""
    w.knobs.exported = lambda n, t: short(n, t) if w.streams[0].builds == 1 else (n, t)


def no_end(w: PackedWorld, patch) -> None:
    patch.setattr(w.engines[0].takers[1], "finish", Mock(side_effect=MemoryError))


def no_room(w: PackedWorld, patch) -> None:
    patch.setattr(w.engines[0].sessions[0]._lane_.plane._buffers, "begin", Mock(side_effect=MemoryError))


def no_tasks(w: PackedWorld, patch) -> None:
    for s in w.streams:
        s.state = "changed"
        patch.setattr(s, "build", Mock(side_effect=e.LayoutError("layers.9.w: has no mapping")))


def a_bucket_less(w: PackedWorld, patch) -> None:
    for s in w.streams:
        s.state = "moved"  # so that a manifest is sent again
    real = plan.BucketPlan.manifest.func
    patch.setattr(plan.BucketPlan, "manifest", property(lambda p: real(plan.BucketPlan(p.groups[:-1], p.limit))))


def another_header(w: PackedWorld, patch) -> None:
    patch.setattr(trainer, "words_of", Mock(side_effect=([n, 2] for n in itertools.count())))


def elsewhere(w: PackedWorld, patch) -> None:
    w.sessions[0].release()
    patch.setattr(peer_host, "_read", Mock(side_effect=ProcessLookupError(errno.ESRCH, "no such process")))


class Placed(PackedWorld):
    """Three trainers on GPUs a, b, a; three workers on b, a, and one where no trainer is. GPUs are made-up UUIDs, and buffers shared
    memory; everything else is what runs on GPUs."""

    PLACES = {"trainer": ("GPU-a", "GPU-b", "GPU-a"), "worker": ("GPU-b", "GPU-a", "GPU-c")}

    def connect(self) -> Placed:
        place = property(lambda plane: self.PLACES[plane.side.role][plane.side.index])
        self._patch = patch.object(PackedPlane, "place", place)
        self._patch.start()
        return super().connect()

    def close(self) -> None:
        super().close()
        self._patch.stop()


WIDE = {"layers.0.w": (24, 12), "layers.1.w": (24, 12), "embed": (36, 9), "norm": (12,)}
placed = functools.partial(Placed, 3, 3, colocated=True, shapes=WIDE)
two, one, small = (functools.partial(PackedWorld, 2, **how) for how in (dict(replicas=2), {}, dict(workers=1)))
shared = functools.partial(small, colocated=True)
TAKES = "ran out of memory while it took in bucket 1"
UNKNOWN = "the engine's loader refused one of 2 tensors: KeyError: 'embed'"
BROKEN = {
    "a name": (
        two, loader(1, "embed", Mock(side_effect=KeyError("embed"))), alone, e.LayoutError, "replica 0 worker 1", UNKNOWN,
        "embed: bfloat16[36, 8]",
    ),
    "memory": (two, loader(0, "layers.1.w", Mock(side_effect=torch.OutOfMemoryError("1 GiB"))), alone, e.RefitFailed, TAKES),
    "memory of the host": (two, loader(0, "layers.1.w", lambda: torch.empty(1 << 60)), alone, e.RefitFailed, TAKES),
    "memory at the end": (two, no_end, alone, e.RefitFailed, "ran out of memory while it finished what it had loaded"),
    "memory for buckets": (small, no_room, clean, e.RefitFailed, "ran out of memory while it made room for buckets"),
    "tasks": (small, no_tasks, clean, e.LayoutError, "layers.9.w: has no mapping"),
    "a bucket": (small, a_bucket_less, clean, e.ProtocolError, "is in no bucket"),
    "a header": (small, another_header, clean, e.ProtocolError, "has not announced here"),
    "a worker that is not colocated": (shared, elsewhere, clean, e.Unsupported, "is not colocated"),
    "an export": (one, another_export, torn, e.PlanMismatch, "layers.1.w"),
    "a sender": (one, injected("trainer:0:wave:raise@2"), torn, e.XferError, "injected fault"),
    "an exporter": (placed, injected("trainer:1:wave:raise@2"), torn, e.XferError, "injected fault"),
    "bytes sent": (one, injected("trainer:0:checksum:raise"), torn, e.VerificationError, "was not committed"),
    "bytes of an exporter": (
        placed, injected("trainer:1:checksum:raise"), torn, e.VerificationError, "worker 0: trainers sent checksum",
    ),
    "bytes held": (one, injected("worker:1:checksum:raise"), torn, e.VerificationError, "was not committed"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_what_goes_wrong_is_never_committed(what, monkeypatch):
    """And leaves the engine as it was if no byte had changed."""
    made, breaks, after, kind, *words = BROKEN[what]
    with made() as w:
        good(w.refit(1))
        with monkeypatch.context() as patch:
            breaks(w, patch)
            results = w.refit(2)
        after(w, results, kind, *words)


# ---- colocated buffers are keyed by their place: a worker maps those of the trainer on its own GPU


places = st.lists(st.sampled_from(["GPU-a", "GPU-b", "GPU-c", "GPU-d"]), min_size=1, max_size=9)


@given(places, st.sampled_from(["GPU-a", "GPU-b", "GPU-z"]))
def test_each_gpu_has_one_exporter_and_a_worker_maps_that_of_its_gpu_else_trainer_0s(trainers, mine):
    found = exporters_of(trainers)
    there = [trainers[r] for r in found]
    assert found[0] == 0 and found == sorted(found) and sorted(there) == sorted(set(trainers))
    assert all(trainers.index(trainers[r]) == r for r in found), "the first trainer of each place"
    exporter = nearest(mine, there)
    assert there[exporter] == mine if mine in there else exporter == 0


def test_every_worker_gets_its_bytes_from_the_exporter_of_its_gpu():
    with placed() as w:
        for v in (1, 2):
            good(w.refit(v))
            right(w, v)
        assert [s.side.pump.exports for s in w.sessions] == [True, True, False]
        assert w.sessions[2].party.lanes[0].plane.extra_bytes == 0, "a rank that exports nothing has no buffers"
        # Trainer 1 has other weights now, as it never would, to show which exporter each worker loads from.
        for rank, version in enumerate((3, 8, 3)):
            w.streams[rank].version = version
        good(w.refit(None))
        assert [t.wrong(v) for t, v in zip(w.engines[0].takers, (8, 3, 3), strict=True)] == [[], [], []]


def test_a_call_that_comes_to_no_collective_is_given_up_and_the_others_end():
    ended, release = [], threading.Event()

    def meets():
        try:
            torch.distributed.broadcast(torch.zeros(1), 0)
        except e.PeerLost as error:
            ended.append(error)
            raise

    with pytest.raises(e.DeadlineExceeded, match="neither ended nor came to a collective"):
        Lockstep(torch.device("cpu"), seconds=1.0).run([meets, lambda: release.wait(60), meets])
    release.set()
    until_true(lambda: ended)
    assert len(ended) == 1, "the one that waited at its collective has left; the third had not begun"
