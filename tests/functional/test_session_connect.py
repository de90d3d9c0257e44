"""How a job meets at its rendezvous: calls that fail and come again, builds that differ, layouts and caches."""

import threading
import time

import pytest
import torch

import xfer
from examples.common.ports import free_port
from tests.support.connect import flat_connect
from tests.support.simulation import simulated
from tests.support.world import TOKEN, ToyEngine, ToySource, World, raised, right
from xfer import errors as e
from xfer.participants import trainer, worker
from xfer.participants.worker import WorkerSession
from xfer.plan.cache import PlanCache
from xfer.plan.fabric import Fabric, Site
from xfer.rendezvous import client as party

pytestmark = pytest.mark.usefixtures(simulated.__name__)


def on_all(ranks: int, call) -> list:
    return World(trainers=ranks).on_all(call)


def somewhere() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def refuse(text: str = "this model cannot be read"):
    raise e.Unsupported(text)


def test_a_rank_that_has_left_waits_for_the_next_session_until_its_deadline_only():
    at, engine = somewhere(), ToyEngine(1)

    def connect(rank: int, seconds: float = 20.0):
        source = ToySource(rank, 2)
        return flat_connect(trainer=source, rendezvous=at, token=TOKEN, deadline_s=seconds, engines=[engine])

    one, other = on_all(2, connect)
    other.close()
    with pytest.raises(e.DeadlineExceeded, match=r"no new session began at (.|\n)*called xfer.connect\(\) again"):
        connect(1, 0.5)
    one.close()
    for session in reversed(on_all(2, connect)):
        session.close()


def test_an_adapter_is_that_of_one_open_session():
    """Each look at storages is compared with the one before: another session's look would hide what has moved from this one."""
    trainer = ToySource(0, 1)
    for _ in range(2):
        with xfer.connect(trainer, somewhere(), TOKEN, wait=False) as session:
            for _ in range(2):
                with pytest.raises(e.XferError, match=r"an open session .*trainer 0 of 1.*make another ToySource"):
                    xfer.connect(trainer, somewhere(), TOKEN, wait=False)
            xfer.connect(ToySource(0, 1), somewhere(), TOKEN, wait=False).close()
            assert not session.refit(min_replicas=0).committed


# ---- all ranks hear why it fails, whichever rank knows


@pytest.mark.parametrize("late_s", [0.0, 0.5])
@pytest.mark.parametrize("no_engine", [True, False])
def test_an_engine_that_cannot_be_used_is_named_to_ranks_that_do_not_wait_for_it(no_engine, late_s):
    """Rank 0 finds it before it waits for anything, or when it asks the engine."""
    where = dict(rendezvous=somewhere(), token=TOKEN, deadline_s=20.0, wait=False)
    engine, text = (object(), "object.pause_generation") if no_engine else (ToyEngine(1), "no route /pause")
    if not no_engine:
        engine.workers = lambda timeout: refuse(text)

    def run(rank: int):
        time.sleep(late_s * rank)
        with flat_connect(trainer=ToySource(rank, 2), engines=[engine], **where) as session:
            time.sleep(0.5)  # the controller may still be asking its engine
            return xfer.nccl_xfer_refit(session, deadline_s=5.0)

    began = time.monotonic()
    raised(on_all(2, run), e.Unsupported, text)
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("wait", [True, False])
def test_an_engine_without_a_place_for_its_lock_is_refused_when_it_joins(wait):
    """On all sides. The worker that has one does not wait for the other."""
    toy, words = ToyEngine(2), "no small tensor of this model"
    toy.takers[1].choose_lock, w = lambda: refuse(words), World(engines=[toy], wait=wait)
    if wait:
        with pytest.raises(e.XferError, match=words):
            w.connect()
    else:
        with w, pytest.raises(e.XferError, match=words):
            w.controllers[0].wait_ready(5)


# ---- builds of libraries that differ


def test_an_engine_with_another_build_is_told_apart_at_the_door(monkeypatch):
    """One error that names both builds, long before the deadline. Where bytes go by gloo, nothing of torch is compared."""
    assert party.data_plane(torch.device("cpu")) == (("data plane", "gloo"),)
    for side, nccl, version in ((trainer, "2.28.9", "2.11"), (worker, "2.27.3", "2.9")):
        built = ("data plane", "nccl"), ("NCCL", nccl), ("torch", version)
        monkeypatch.setattr(side, "data_plane", lambda device, built=built: built)
    w, began = World(deadline_s=60), time.monotonic()
    with pytest.raises(e.HandshakeError) as caught:
        w.connect()
    assert time.monotonic() - began < 30
    says = "NCCL is '2.27.3', trainer 0 has '2.28.9': install one", "torch is '2.9', trainer 0 has '2.11': install"
    raised([caught.value], e.HandshakeError, *says)
    assert "replica 0" not in str(caught.value.where), str(caught.value)


# ---- layouts, caches and fabrics


def digests(w: World) -> set[str]:
    planes = [lane.plane for s in w.sessions for lane in s.lanes.values()]
    planes += [s._lane_.plane for engine in w.engines for s in engine.sessions]
    return {p.part.digest for p in planes}


def test_a_layout_is_published_once_and_not_at_all_with_a_plan_in_the_cache(tmp_path, monkeypatch):
    puts, put = [], PlanCache.put
    monkeypatch.setattr(PlanCache, "put", lambda cache, part: (puts.append(part.key), put(cache, part)))
    made = dict(trainers=2, workers=2, replicas=2, cache_dir=str(tmp_path))
    with World(**made) as w:
        relay = w.coordinator.planning.layouts
        assert len(relay._known) == 4 + 2 and not relay._wanted, "two of trainers, two of workers, a roll of each side"
        first = relay.received
        for version in (1, 2):
            w.commits(version)
        assert relay.received == first, "a warm refit publishes nothing"
        plans, written = digests(w), len(puts)
    with World(**made) as w:
        # Workers keep no cache of their own and still ask; trainers do not.
        assert all(not s.party.shelf._layouts for s in w.sessions)
        assert all(len(x._party.shelf._layouts) == 4 for engine in w.engines for x in engine.sessions)
        assert digests(w) == plans
        w.commits(1)
    assert written and len(puts) == written, "what came from the cache is not written there again"


G = 10**9


def test_senders_over_a_fabric_refit_bit_for_bit_and_the_digest_knows_the_fabric():
    fabric = Fabric.uniform(3, 4, nvlink=400 * G, nic=50 * G, cross_rail="spine", spine=60 * G)
    with World(replicas=2) as w:
        plain = digests(w)
    with World(replicas=2, fabric=Site(fabric, (0, 1), ((4, 5), (2, 10)))) as w:
        placed = digests(w)
        # One plan per replica, the same on all ranks; without a fabric replicas differ in where they start only.
        assert len(plain) == len(placed) == 2 and not plain & placed
        w.commits(1)
    with pytest.raises(e.LayoutError, match="3 workers of replica 0; there are 2 and 2"):
        World(deadline_s=15.0, fabric=Site(fabric, (0, 1), ((8, 9, 10),))).connect()


# ---- replicas that fail early, and layouts that all trainers read in one collective, as with `probe=`


@pytest.mark.parametrize(("wait", "together"), [(False, False), (False, True), (True, False)])
def test_a_replica_that_fails_before_the_trainers_have_read_is_left_out_like_one_that_fails_later(
    monkeypatch, wait, together
):
    """Unless they wait for all: then they hear the reason. The worker says that it is worker 1 of 1, as with offline data parallelism."""
    failed, read, join = threading.Event(), ToySource.read, WorkerSession._join

    def refused(session):
        session.index = session.replica
        try:
            return join(session)
        finally:
            if session.replica:
                failed.set()

    def late(source):
        assert failed.wait(20)
        time.sleep(0.5 if together else 0.0)  # longer than trainers wait for a connect that cannot succeed
        return read(source)

    monkeypatch.setattr(WorkerSession, "_join", refused)
    monkeypatch.setattr(ToySource, "read", late)
    monkeypatch.setattr(ToySource, "reads_together", together)
    monkeypatch.setattr("xfer.participants.trainer.STOP_GRACE_S", 0.2)
    w = World(trainers=1, workers=1, replicas=2, wait=wait)
    text = "worker 1 of 1: an engine that was started as one rank of several"
    if wait:
        with pytest.raises(e.HandshakeError, match=text):
            w.connect()
        return
    with w:
        w.controllers[0].wait_ready(20)
        with pytest.raises(e.HandshakeError, match=text):
            w.controllers[1].wait_ready(5)
        assert [o.committed for o in w.refit(1, min_replicas=1)[0].outcomes] == [True, False]


class ReadTogether(ToySource):
    """A barrier stands for the collective."""

    reads_together = True
    all_here = threading.Barrier(2)

    def read(self):
        self.all_here.wait(60)
        return super().read()


@pytest.fixture
def together(monkeypatch):
    monkeypatch.setattr(ReadTogether, "all_here", threading.Barrier(2))
    yield [ReadTogether(i, 2) for i in range(2)]
    ReadTogether.all_here.abort()


def test_a_layout_that_is_read_together_is_not_read_again_by_one_rank_alone(together):
    with World(trainers=2, sources=together) as w:
        w.commits(1)
        w.sources[1].turn()
        w.fails(2, e.RebindError, "connect again")
        right(w, 1)


@pytest.mark.parametrize("reason", ["refused", "absent"])
def test_a_layout_that_is_read_together_does_not_hold_a_rank_whose_peer_does_not_come(together, reason):
    where = dict(rendezvous=somewhere(), token=TOKEN, deadline_s=2.0)

    def connect(i):
        return flat_connect(trainer=together[i], replicas=1 + i, **where)

    out = on_all(2 if reason == "refused" else 1, connect)
    kind, text = (e.HandshakeError, "replicas is ") if reason == "refused" else (e.DeadlineExceeded, "trainer 1")
    raised(out, kind, text)
