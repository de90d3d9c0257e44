"""The coordinator by itself: hellos that it refuses, its table of phases, and how it counts the ranks that are done."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import EXAMPLES
from xfer.coordinator import messages as m
from xfer.coordinator.commit import TRANSITIONS, Phase
from xfer.coordinator.coordinator import Coordinator
from xfer.coordinator.events import Connected, Received, Send, Tick
from xfer.coordinator.first_copy import FirstCopy
from xfer.coordinator.layouts import pack_specs
from xfer.coordinator.refit import Owed
from xfer.coordinator.state import Client, KeyValues, Options, Replica, differences, told
from xfer.errors import LayoutError, Unsupported
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import TensorSpec


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.randoms(use_true_random=True))
def test_a_replica_is_done_when_its_last_rank_is(trainers, sizes, random):
    """Against one set per replica; replicas begin in any batches, ranks end in any order and may repeat themselves."""
    waiting = [Replica(r, size) for r, size in enumerate(sizes)]
    clients = [Client(0, [], m.Hello("trainer", i, trainers, 0, "", 0)) for i in range(trainers)]
    clients += [Client(0, [], m.Hello("worker", i, n, r, "", 0)) for r, n in enumerate(sizes) for i in range(n)]
    owed, left = Owed(trainers, len(sizes)), dict[int, set[Client]]()
    while waiting or left:
        if waiting and random.random() < 0.3:
            some = [waiting.pop() for _ in range(random.randint(1, len(waiting)))]
            owed.begin(some)
            of = lambda r, c: c.hello.role == "trainer" or c.hello.replica == r.index  # noqa: E731
            left |= {r.index: {c for c in clients if of(r, c)} for r in some}
        elif left:
            c = random.choice(clients)
            mine = [r for r in left if c.hello.role == "trainer" or c.hello.replica == r]
            assert all(owed.owes(c, r) == (c in left[r]) for r in mine)
            said = tuple(random.sample(mine, random.randint(0, len(mine))))
            for r in said:
                left[r].discard(c)
            assert owed.done(c, said) == sorted(r for r, ranks in left.items() if not ranks)
            left = {r: ranks for r, ranks in left.items() if ranks}


def test_only_the_ranks_of_a_first_copy_are_heard_about_it():
    """Trainers and workers of other replicas have the same numbers as those of its donor and its joiner."""
    co = Coordinator(Options(1, 3, 20.0, 4096), "session", 0.0)
    for r in co.replicas.values():
        r.size, r.workers = 1, {0: Client(0, [], m.Hello("worker", 0, 1, r.index, "", 0))}
    joiner, donor, third = (r.workers[0] for r in co.replicas.values())
    copy = FirstCopy(co, co.replicas[0], co.replicas[1])
    copy.owed.begin([copy.joiner])
    for stranger in (third, Client(0, [], m.Hello("trainer", 0, 1, 0, "", 0))):
        copy.handle(stranger, m.Done(copy.number, (0,)))
        assert copy.owed.owes(donor, 0) and copy.owed.owes(joiner, 0)
    copy.handle(donor, m.Done(copy.number, (0,)))
    assert not copy.owed.owes(donor, 0) and copy.owed.owes(joiner, 0)


def test_every_phase_ends_and_no_decision_is_taken_back():
    """The table that the docs print: from every phase OVER can be reached, and nothing leads back behind the decision."""
    after = {a: {b for x, b, _ in TRANSITIONS if x is a} for a in Phase}
    for phase in Phase:
        seen, todo = set(), [phase]
        while todo:
            now = todo.pop()
            seen.add(now)
            todo += after[now] - seen
        assert Phase.OVER in seen
        if phase in (Phase.COMMITTING, Phase.SETTLING, Phase.OVER):
            assert not seen & {Phase.ARMING, Phase.MOVING, Phase.ABORTING}


def test_the_design_prints_the_table():
    text = (Path(__file__).parents[2] / "docs" / "design.md").read_text()
    assert "".join(f"| {a.value} | {b.value} | {when} |\n" for a, b, when in TRANSITIONS) in text


def test_a_call_that_waits_for_a_key_is_forgotten_with_the_epoch_of_the_key():
    """Links that failed once left such calls behind for as long as the session lasted."""
    store, outbox = KeyValues(), list[object]()
    client = Client(1, outbox, m.Hello("worker", 0, 1, 0, "host", 7))
    asked = m.StoreAsk(m.StoreCall.GET, ("r0/1/offer",), b"", 5)
    for over in (lambda: store.forget("r0/"), lambda: store.drop(client)):
        store.handle(client, asked, [0])
        over()
        store.handle(client, m.StoreAsk(m.StoreCall.SET, asked.keys, b"late"), [0])
        assert not outbox
        store.forget("r0/")


# ---- admission


HELLOS = [("trainer", 0, 2), ("trainer", 1, 2), ("controller", 0, 2), ("worker", 0, 2), ("worker", 1, 2)]


class Admission:
    """A coordinator to which some of these processes have said hello, and both trainers what they export. Their clients are 1, 2, ..."""

    controller, worker = 3, 4

    def __init__(self, hellos: int = 4) -> None:
        self.coordinator, self.clients = Coordinator(Options(2, 1, 20.0, 4096), "session", 0.0), 0
        catalog = Catalog.union([("trainer", [TensorSpec("t", (4,), "bfloat16")])])
        for hello in HELLOS[:hellos]:
            client, _ = self.hello(*hello)
            if hello[0] == "trainer":
                self.say(client, m.Specs(pack_specs(catalog.to_bytes(), [])))

    def say(self, client: int, message: m.Message) -> str:
        """What the client is told in answer."""
        effects = self.coordinator.handle(Received(client, message), 0.0)
        heard = [x.message for x in effects if isinstance(x, Send) and client in x.clients]
        return "\n".join(str(x.error.error()) for x in heard if isinstance(x, m.Refused | m.Failed))

    def hello(self, role: str, index: int, size: int, replica: int = 0) -> tuple[int, str]:
        self.clients += 1
        self.coordinator.handle(Connected(self.clients), 0.0)
        return self.clients, self.say(self.clients, m.Hello(role, index, size, replica, "elsewhere", 7))


@pytest.mark.parametrize(
    ("hello", "answer"),
    [
        (("trainer", 1, 3), "it says there are 3 trainer ranks, trainer 0 says 2"),
        (("trainer", 5, 2), "trainer rank 5 of 2"),
        (("trainer", 1, 2), "trainer 1 is connected already"),
        (("controller", 0, 0), "its engine says that it has no workers"),
        (("controller", 0, 1), "replica 0 has a controller already"),
        (("controller", 0, 1, 1), "replica 1: trainers expect replicas 0..0"),
        (("worker", 1, 1), "worker 1 of 1: an engine that was started as one rank of several"),
    ],
)
def test_hellos_that_cannot_be_right_are_refused_with_the_reason(hello, answer):
    assert answer in Admission().hello(*hello)[1]


@pytest.mark.parametrize("scope", ["replica", "job"])
def test_a_late_worker_whose_controller_was_told_and_left_is_told_why_too(scope):
    """It was once told that it came before its controller."""
    admission, why = Admission(), m.WireError.of(LayoutError("it cannot read its layout"), "the test")
    failed = m.Failed(why, 0, 0) if scope == "replica" else m.Failed(why)
    admission.say(admission.worker if scope == "replica" else 1, failed)
    admission.say(admission.controller, m.Leave())
    assert "it cannot read its layout" in admission.hello("worker", 1, 2)[1]


def test_workers_of_a_replicas_former_life_do_not_speak_for_its_present_one():
    """Their controller is gone while they read their layouts, and their reports arrive when others have their numbers."""
    admission = Admission()
    co, old = admission.coordinator, admission.worker
    admission.say(admission.controller, m.Leave())
    admission.hello("controller", 0, 2)
    admission.hello("worker", 0, 2)
    for late in (m.InventoryMsg(b"i" * 32, co.generation), m.Failed(m.WireError.of(Unsupported("no"), "w"), 0, 0)):
        admission.say(old, late)
    assert not co.replicas[0].inventories and co.replicas[0].error is None


def test_a_trainer_that_was_refused_for_its_arguments_is_not_waited_for_by_the_closing_rendezvous():
    """It has its error. connect() of trainer 0 once raised five seconds later than that of the others."""
    options = Options(2, 1, 20.0, 4096, settings=(("deadline_s", "20"),))
    co = Coordinator(options, "session", 0.0)
    for i, seconds in enumerate(("20", "19")):
        co.handle(Connected(i), 0.0)
        co.handle(Received(i, m.Hello("trainer", i, 2, 0, "host", 7, settings=(("deadline_s", seconds),))), 0.0)
    assert "deadline_s is '19', trainer 0 has '20'" in str(co.failure) and co.met == {0, 1}


STAGES = {
    3: ("0 of 1 replicas are ready", "replica 0 workers 0 to 1: not connected; is its engine still starting?"),
    5: ("replica 0 workers 0 to 1: reading the layout",),
    7: ("replica 0 is planning and waits for trainers 0 to 1 and replica 0 workers 0 to 1",),
    8: ("replica 0 is linking and waits for trainers 0 to 1 and replica 0 worker 1; can they reach each other?",),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_connect_that_ends_at_its_deadline_says_for_whom_it_waited(stage):
    """An engine whose link did not open was once said not to have joined."""
    admission = Admission(stage)
    co, ranks = admission.coordinator, (1, 2, 4, 5)
    for i in ranks if stage > 5 else ():
        admission.say(i, m.InventoryMsg(b"i" * 32, co.generation))
    if stage > 7:
        for i in ranks:
            admission.say(i, m.Planned(0, co.replicas[0].epoch, "digest"))
        admission.say(4, m.LinkOpen(0, co.replicas[0].epoch))
    co.handle(Tick(), 19.9)
    assert co.failure is None
    co.handle(Tick(), 20.1)
    assert all(text in str(co.failure) for text in STAGES[stage]), str(co.failure)


def test_a_connect_that_waits_for_no_replica_does_not_end_for_one():
    admission = Admission()
    admission.coordinator.opening = False
    admission.coordinator.handle(Tick(), 20.1)
    assert admission.coordinator.failure is None


def test_all_arguments_in_which_ranks_differ_are_named():
    here = Options(2, 1, 20.0, 4096)
    here = replace(here, settings=told(here))
    other = Options(2, 2, 19.0, 8192, drop=("vision.*",), narrow=tuple(f"layer.{i}.*" for i in range(99)))
    hello = m.Hello("trainer", 1, 2, 0, "elsewhere", 7, settings=told(other))
    lines = differences(hello, here)
    for name in ("replicas", "deadline_s", "bucket_bytes", "drop", "narrow"):
        assert any(line.startswith(f"{name} is ") and "trainer 0 has " in line for line in lines), (name, lines)
    assert all(len(line) < 600 for line in lines)
