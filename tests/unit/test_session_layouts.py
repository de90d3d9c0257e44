"""Layouts between ranks: each class of equal ranks publishes once, ranks fetch only what they need, and they refuse bytes whose digest is
not the announced one. The coordinator's and the clients' halves are the real ones; queues stand in for their connections."""

from __future__ import annotations

import lzma
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.examples import EXAMPLES
from tests.support.plan_worlds import worlds
from tests.support.threads import run_ranks
from tests.unit.test_plan_programs import CATALOG, trainer, worker
from xfer.coordinator import messages as m
from xfer.coordinator.layouts import LayoutExchange, Roll, digest_of, pack, unpack, unpack_one
from xfer.errors import DeadlineExceeded, PeerLost, ProtocolError
from xfer.plan.options import PlanOptions
from xfer.plan.planner import plan_replica
from xfer.rendezvous import layouts
from xfer.rendezvous.client import Questions
from xfer.rendezvous.layouts import KEPT, Shelf
from xfer.trace.catalog import Catalog

quick = settings(max_examples=EXAMPLES // 4 + 1, deadline=None, suppress_health_check=list(HealthCheck))


class Rank:
    """A connection's two ends: `send` is the coordinator's, `shelf` the client's. Everything goes over the wire's coding."""

    def __init__(self, job: Job, label: str, inventory=None):
        self.label, self.job = label, job
        self.questions = Questions(self.say, label)
        self.shelf = Shelf(self.questions)
        self.deaf = False
        self.got: list[m.Message] = []
        self.lies: dict[int, bytes] = {}  # of the coordinator, by the number of its message
        self.digest = b"" if inventory is None else self.shelf.offer(inventory)

    def say(self, msg: m.Message, _: float = 0.0) -> None:
        relay = self.job.relay
        self.job.events.put((relay.fetch if isinstance(msg, m.Fetch) else relay.came, self, m.decode(m.encode(msg))))

    def send(self, msg: m.Message) -> None:
        if (lie := self.lies.get(len(self.got))) is not None:
            msg = m.Reply(msg.call, lie)
        self.got.append(msg)
        msg = m.decode(m.encode(msg))
        if isinstance(msg, m.Reply):
            self.questions.put(msg)
        elif not self.deaf:
            self.shelf.give(msg.inventory)

    def count(self, kind: type) -> int:
        return sum(isinstance(g, kind) for g in self.got)


class Job:
    """Trainers and the workers of one replica around one relay."""

    def __init__(self, catalog: Catalog, sources, takers, options: PlanOptions):
        self.events: queue.Queue = queue.Queue()
        self.failed: list[Exception] = []
        self.waits: list[Callable[[], None]] = []
        self.catalog, self.options = catalog, options
        self.trainers = [Rank(self, f"trainer {i}", s) for i, s in enumerate(sources)]
        self.workers = [Rank(self, f"worker {i}", t) for i, t in enumerate(takers)]
        self.ranks = [*self.trainers, *self.workers]
        self.relay = LayoutExchange(lambda digest: [r for r in self.ranks if r.digest == digest], self.waits.append)
        self.thread = threading.Thread(target=self.brain, daemon=True)

    def brain(self) -> None:
        while (event := self.events.get()) is not None:
            call, *args = event
            try:
                call(*args)
            except ProtocolError as e:
                self.failed.append(e)

    def inputs(self, seconds: float = 20.0) -> m.PlanInputs:
        sides = self.trainers, self.workers
        rolls = [self.relay.roll([r.digest for r in side], ["h"] * len(side), keep=4) for side in sides]
        return m.PlanInputs(0, 1, *rolls, deadline_s=seconds)

    def plan(self, ranks=None, inputs=None, stopped=lambda: False) -> list:
        """Return what `Shelf.plan` returns or raises, on a thread per rank."""
        inputs, ranks = inputs or self.inputs(), ranks or self.ranks

        def one(i: int):
            rank = self.ranks.index(ranks[i])
            return ranks[i].shelf.plan(inputs, rank, self.catalog, self.options, None, stopped)

        return run_ranks(len(ranks), one, 30.0)

    def __enter__(self) -> Job:
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.events.put(None)
        self.thread.join(10)


@pytest.fixture
def job() -> Iterator[Job]:
    """A fixed world of several classes."""
    with Job(CATALOG, [trainer(0), trainer(1), trainer(2, nbytes=512)], [worker(0), worker(1)], PlanOptions()) as job:
        yield job


@given(worlds(), st.integers(1, 3))
@quick
def test_all_ranks_plan_the_same_and_each_class_is_sent_once(world, copies):
    sources, takers = world.sources(), world.destinations()
    sources = [s.at(i * copies + k) for i, s in enumerate(sources) for k in range(copies)]  # data-parallel replicas
    options = replace(world.options, hosts=())
    with Job(world.catalog, sources, takers, options) as job:
        got = job.plan()
        want = plan_replica(world.catalog, sources, takers, replace(options, hosts=("h",) * len(job.ranks)))
        for plan, digests in got:
            assert (plan.key, plan.digest) == (want.key, want.digest)
            assert [d.decode() for d in digests] == [i.digest() for i in (*sources, *takers)]
        assert sum(r.count(m.LayoutAsk) for r in job.ranks) == len({r.digest for r in job.ranks})
        # For each side, a roll and the layouts that it names: equal ranks cost no bytes.
        sizes = [1, 1, *(len({r.digest for r in side}) for side in (job.trainers, job.workers))]
        for r in job.ranks:
            assert [len(unpack(g.value, "x")) for g in r.got if isinstance(g, m.Reply)] == sizes
        before = job.relay.sent, job.relay.received
        assert [p.digest for p, _ in job.plan()] == [want.digest] * len(job.ranks)  # what is known is not asked for
        assert before == (job.relay.sent, job.relay.received) and not job.failed


@pytest.mark.parametrize("silent", [False, True])
def test_when_an_owner_is_gone_or_silent_another_of_its_class_is_asked(job, silent):
    lost = job.trainers[0]  # asked first

    def is_over() -> None:
        if silent:
            job.waits[0]()
        else:
            lost.digest = b""
            job.relay.gone(lost)

    lost.shelf.give = lambda digest: job.events.put((is_over,))
    assert len({p.digest for p, _ in job.plan([r for r in job.ranks if r is not lost])}) == 1
    assert lost.count(m.LayoutAsk) == job.trainers[1].count(m.LayoutAsk) == 1


def test_what_never_comes_ends_at_the_deadline_or_with_the_lane(job):
    job.trainers[2].deaf = True  # the only one of its class
    assert all(isinstance(e, DeadlineExceeded) for e in job.plan(job.trainers[:2], job.inputs(seconds=1.0)))
    assert all(isinstance(e, PeerLost) for e in job.plan(job.trainers[:2], stopped=lambda: True))
    job.trainers[2].deaf = False  # a lane that was cancelled, or gave up, holds up nobody after it
    job.events.put((job.relay.gone, job.trainers[2]))
    assert len({p.digest for p, _ in job.plan(job.trainers[:2])}) == 1


def test_lanes_of_one_process_share_what_comes(job, monkeypatch):
    opened = layouts._opened
    monkeypatch.setattr(layouts, "_opened", lambda *a: (time.sleep(0.3), opened(*a))[1])  # lanes look on meanwhile
    assert len({p.digest for p, _ in job.plan([job.trainers[0]] * 6)}) == 1
    assert job.trainers[0].count(m.Reply) == 4


def test_a_layout_under_a_false_digest_is_refused_by_everyone(job):
    a, b = job.trainers[0], job.trainers[2]
    roll = job.relay.roll([a.digest, b.digest], ["h", "h"], keep=4)
    good = a.shelf._own[a.digest].content()
    for packed in (pack([good]), pack([good, good]), pack([good])[:-1], b"", pack([good]) + b"x"):
        with pytest.raises(ProtocolError):
            job.relay.came(b, m.Layout(b.digest, packed))
    job.relay.came(a, m.Layout(a.digest, pack([good])))

    for at, lie in enumerate(
        ([Roll((b.digest, a.digest), ("h", "h")).content()], [good, good])
    ):  # the roll, the layouts
        told = Rank(job, "told lies")
        told.lies[at] = pack(lie)
        job.ranks.append(told)
        (error,) = job.plan([told], m.PlanInputs(0, 1, roll, roll, deadline_s=10.0))
        assert isinstance(error, ProtocolError) and "another digest" in str(error)


def test_a_rank_answers_for_its_last_inventories_only(job):
    shelf, sent = job.trainers[0].shelf, []
    shelf._questions.send = sent.append
    digests = [shelf.offer(trainer(0, nbytes=1024 + 256 * i)) for i in range(KEPT + 1)]
    for d in digests:
        shelf.give(d)
    assert [s.inventory for s in sent] == digests[1:]


@given(st.lists(st.binary(max_size=40), max_size=5), st.binary(max_size=40), st.data())
@quick
def test_packed_bytes_come_back_or_are_refused(parts, noise, data):
    packed = pack(parts)
    assert unpack(packed, "x") == parts
    if len(parts) == 1:
        assert unpack_one(packed, "x") == parts[0]
    at = data.draw(st.integers(0, len(packed)))
    damaged = packed[:at] + noise + packed[at + len(noise) :]
    try:
        assert damaged == packed or unpack(damaged, "x") == parts
    except ProtocolError:
        pass
    with pytest.raises(ProtocolError):
        unpack(noise, "x")


def test_a_stream_that_grows_without_bound_is_refused(monkeypatch):
    monkeypatch.setattr("xfer.coordinator.layouts.MAX_UNPACKED", 1 << 16)
    assert len(unpack(pack([b"\0" * 60_000]), "x")[0]) == 60_000
    for bomb in (pack([b"\0" * (1 << 24)]), pack([b"\0" * 60_000] * 2)):
        with pytest.raises(ProtocolError, match="more than 65536"):
            unpack(bomb, "x")
    wide = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 28}]
    dictionary = lzma.compress(msgspec.msgpack.encode([b""]), filters=wide)
    with pytest.raises(ProtocolError):
        unpack(dictionary, "x")


def test_a_roll_is_its_inventories_in_order_and_its_hosts():
    x, y = b"0" * 32, b"1" * 32
    rolls = [Roll(*r) for r in (((x, y), ("a", "b")), ((y, x), ("a", "b")), ((x, y), ("ab", "")), ((x,), ("a",)))]
    assert len({digest_of(r.content()) for r in rolls}) == 4
    assert [Roll.from_content(r.content()) for r in rolls] == rolls
    for bad in (b"", Roll((x,), ("a", "b")).content(), Roll((x,), ("a",)).content() + b"x"):
        with pytest.raises(ProtocolError, match="roll: "):
            Roll.from_content(bad)
