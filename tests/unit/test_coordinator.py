"""Parts of the coordinator by themselves. All of it, with real participants: tests/functional/test_session.py."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from xfer.coordinator import messages as m
from xfer.coordinator.commit import TRANSITIONS, Phase
from xfer.coordinator.coordinator import Coordinator
from xfer.coordinator.events import Connected, Received
from xfer.coordinator.refit import Owed
from xfer.coordinator.state import Client, Options, Replica, differences, told

EXAMPLES = int(os.environ.get("XFER_EXAMPLES", "200"))


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
            left |= {
                r.index: {c for c in clients if c.hello.role == "trainer" or c.hello.replica == r.index} for r in some
            }
        elif left:
            c = random.choice(clients)
            mine = [r for r in left if c.hello.role == "trainer" or c.hello.replica == r]
            assert all(owed.owes(c, r) == (c in left[r]) for r in mine)
            said = tuple(random.sample(mine, random.randint(0, len(mine))))
            for r in said:
                left[r].discard(c)
            assert owed.done(c, said) == sorted(r for r, ranks in left.items() if not ranks)
            left = {r: ranks for r, ranks in left.items() if ranks}


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


def test_a_trainer_that_was_refused_for_its_arguments_is_not_waited_for_by_the_closing_rendezvous():
    """It has its error. connect() of trainer 0 once raised five seconds later than that of the others."""
    options = Options(2, 1, 20.0, 4096, settings=(("deadline_s", "20"),))
    co = Coordinator(options, "session", 0.0)
    for i, seconds in enumerate(("20", "19")):
        co.handle(Connected(i), 0.0)
        co.handle(Received(i, m.Hello("trainer", i, 2, 0, "host", 7, settings=(("deadline_s", seconds),))), 0.0)
    assert "deadline_s is '19', trainer 0 has '20'" in str(co.failure) and co.met == {0, 1}


def test_all_arguments_in_which_ranks_differ_are_named():
    here = Options(2, 1, 20.0, 4096)
    here = replace(here, settings=told(here))
    other = Options(2, 2, 19.0, 8192, drop=("vision.*",), narrow=tuple(f"layer.{i}.*" for i in range(99)))
    lines = differences(m.Hello("trainer", 1, 2, 0, "elsewhere", 7, settings=told(other)), here)
    for name in ("replicas", "deadline_s", "bucket_bytes", "drop", "narrow"):
        assert any(line.startswith(f"{name} is ") and "trainer 0 has " in line for line in lines), (name, lines)
    assert all(len(line) < 600 for line in lines)
