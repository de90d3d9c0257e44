"""One fault at every point of a refit. A scenario is run once without a fault, and then again for each turn and each fault that may happen
in it, and for each point (xfer/faults.py) and each action there. CI takes a part of them, evenly spread; XFER_EXAMPLES takes more, and
XFER_SEED takes others."""

import os
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sized
from enum import Enum
from typing import NamedTuple

import pytest

from tests.support.examples import EXAMPLES
from tests.support.simulated_job import SOON_S, Job
from tests.support.simulation import Server, Simulation
from xfer.coordinator import deadlines
from xfer.coordinator import messages as m
from xfer.errors import PeerLost, XferError
from xfer.kernels.block_fp8 import ScaleRule

SEED = int(os.environ.get("XFER_SEED", "0"))
DEADLINE_S = 20.0
TIMES = max(3, EXAMPLES // 3)
"""Of faults in each scenario."""


class Scenario(NamedTuple):
    """`how` the job is made, what happens in it, by a function that returns at once, and what before the next refit."""

    how: dict[str, object]
    begin: Callable[[Job], object]
    after: Callable[[Job], object] = lambda job: None


def calls(*, then: Callable[[Job], object] = lambda job: None, **how) -> Callable[[Job], None]:
    """All trainers call, after something else has happened."""

    def begin(job: Job) -> None:
        then(job)
        for i in range(job.trainers):
            job.call(i, **{"min_replicas": 1, "deadline_s": DEADLINE_S} | how)

    return begin


def joins(job: Job) -> None:
    job.leaves(0)
    job.sim.quiet()
    job.again(0)
    job.sim.until(lambda: job.coordinator.replicas[0].phase.before_ready)


def release(job: Job) -> None:
    for i in job.free():
        job.release(i)
    job.sim.quiet()


SCENARIOS = {
    "at once": Scenario({}, calls()),
    "two workers pull": Scenario(dict(pulled=True, workers=2, in_step=True), calls(then=release)),
    "staged deltas": Scenario(dict(stage=True, delta="auto"), calls()),
    "staged, pulled": Scenario(dict(stage=True, pulled=True, computes=True), calls()),
    "published": Scenario(dict(pulled=True), calls(wait="ready", then=lambda job: setattr(job, "trains_s", 0.5))),
    "sources are free": Scenario(dict(delta="auto"), calls(wait="sources")),
    "a relay chain": Scenario(dict(replicas=3, relay=True, pulled=True), calls()),
    "a relay ring": Scenario(dict(replicas=3, relay=True), calls()),
    "in turns": Scenario(dict(replicas=3, at_once=1), calls()),
    "a first copy": Scenario(dict(pulled=True), joins),
    "a replica joins a refit": Scenario(dict(holds=True), calls(then=joins)),
    "prepared": Scenario(dict(computes=True), calls(then=lambda job: (job.sessions[1].prepare(), job.sim.quiet()))),
    "a layout changes": Scenario(dict(pulled=True), calls(then=lambda job: job.sources[1].turn()), lambda job: job.sources[1].turn()),
    "exports change": Scenario(
        dict(computes=True), calls(then=lambda job: [s.export() for s in job.sources]), lambda job: (job.again(1), job.sim.quiet())),
    "FP8": Scenario(dict(forms=(ScaleRule.IEEE,)), calls(then=lambda job: job.sources[0].export())),
}  # fmt: skip

# ---- faults


def rests(job: Job, who: str) -> None:
    """A second, shorter than anything that the coordinator waits for."""
    job.stop(who)
    threading.Timer(1.0, job.sim.stopped.discard, [who]).start()


def changes(job: Job, who: str) -> None:
    """Storages of whatever is in this process: of a trainer only while it is not in a call."""
    kind, number, *_ = who.split()
    if kind == "replica":
        for t in job.engines[int(number)].takers:
            t.changes = "moves" if job.relay else "turns"  # of one layout, engines read from each other
    elif int(number) in job.free():
        job.sources[int(number)].move()


FAULTS: list[tuple[str, Callable[[Job, str], object], str]] = [
    ("dies", Job.die, "tTwcW"),
    ("hangs", Job.stop, "tTwc"),
    ("rests", rests, "tTwc"),
    ("is cut off", Job.breaks, "wc"),
    ("says it again", Job.says_again, "wc"),
    ("has other storages", changes, "tw"),
    ("is served anew", lambda job, who: job.again(0), "c"),
]
"""What happens, how, and to whom: the last trainer (t), trainer 0 (T), a worker and the controller of replica 0 (w, c), a worker of the
last replica (W)."""
TOGETHER = (m.Go, m.Done, m.Drained)
"""Messages that speak of several replicas, or of one: how many they are depends on what comes first."""
HARMLESS, HANGS = ("rests", "says it again", "has other storages", "wait"), ("hangs", "stop")


class Fault(NamedTuple):
    """What happens to a process: in a turn, counted from the scenario's begin, or where it passes a point."""

    what: str
    who: str
    turn: int = 0
    point: str = ""


def faults_of(job: Job, turns: int) -> list[Fault]:
    """A part of all faults, evenly spread."""
    first, *_, last = job.engines
    who = dict(T="trainer 0", t=f"trainer {job.trainers - 1}", w=first.worker(0), c=job.controlled[0], W=last.worker(0))
    at_points = [
        Fault(action, w, point=p)
        for w, p in job.passed
        if w in who.values()
        for action in ("raise", "kill", "stop", "wait")
    ]
    at_turns = [[Fault(what, who[v], turn) for turn in range(turns)] for what, _, some in FAULTS for v in some]
    some = []
    for n, every in enumerate((at_points, *at_turns)):
        most = TIMES // 3 if n == 0 else max(1, TIMES * 2 // 3 // len(at_turns))
        step = max(1, len(every) // most)
        some += every[zlib.crc32(f"{SEED} {n} {turns}".encode()) % step :: step]
    return some


# ---- runs


def over(job: Job) -> bool:
    gone = job.sim.dead | job.sim.stopped
    co = job.coordinator
    idle = "trainer 0" in gone or not (co.refit or co.copies or any(r.phase.before_ready for r in co.replicas.values()))
    return idle and all(f"trainer {i}" in gone for i in job.running)


def as_new(job: Job) -> object:
    """What a refit costs in which nothing happens: messages by kind, bytes, links."""
    said: Counter = Counter()
    send = Server._send
    job.sim.patch(Server, "_send", lambda server, x: (said.update({type(x.message): len(x.clients)}), send(server, x)))
    before, opened, waits = [len(c.said) for c in job.sim.channels], job.epochs(), len(job.coordinator.timers._heap)
    assert all(job.undisturbed(True))
    assert job.relay or job.epochs() == opened, "a warm refit opens nothing"
    assert len(job.coordinator.timers._heap) <= waits + job.replicas, (
        "a refit leaves one deadline for each engine, which has to come back"
    )
    job.sim.patch(Server, "_send", send)
    for c, n in zip(job.sim.channels, before):
        said.update(map(type, c.said[n:]))
    for some in TOGETHER:
        said[some] = min(said[some], 1)
    moved = [
        o.bytes_moved for o in job.ends[0, job.last].outcomes if not job.delta
    ]  # how much changes, the version tells
    return said, moved, dict(left(job.coordinator, "", set()))


def left(x: object, name: str, seen: set[int]) -> Iterator[tuple[str, object]]:
    """Flags of the coordinator and its parts, and how much each remembers."""
    seen.add(id(x))
    for key, value in (x if isinstance(x, dict) else getattr(x, "__dict__", {})).items():
        at = f"{name}.{key}"
        if isinstance(value, (bool, Enum, Sized)) and not isinstance(value, (str, bytes)) and key not in GROWS:
            yield at, len(value) if isinstance(value, Sized) else value
        if isinstance(value, dict) and key == "replicas" or type(value).__module__ in PARTS and id(value) not in seen:
            yield from left(value, at, seen)


GROWS = (
    "clients",
    "_by_number",
    "_refused",
    "finished",
    "tried",
    "gave_to",
    "derives",
    "_values",
    "_known",
    "_rolls",
    "_packed",
)
"""What is remembered of the past on purpose."""
PARTS = [f"xfer.coordinator.{name}" for name in ("state", "planning", "refits", "layouts", "blocks", "status")]


def judge(job: Job, fault: Fault, began: float) -> None:
    """What the ranks heard that lived, how soon, in which words, and what it cost. A replica that joins has the job's deadline, and
    each call has its own, which `Job.call` holds."""
    hangs, mine = fault.what in HANGS, fault.who.startswith("replica")
    took, name = job.sim.now - began, " ".join(fault.who.split()[:2])
    longest = SOON_S if fault.what.startswith("is ") else 3.6
    longest = 3 * DEADLINE_S + deadlines.CALL_GRACE_S + 0.02 if hangs else longest
    assert took <= longest, f"it took {took} s"
    ends = [job.ends[i, job.calls[i]] for i in range(job.trainers) if (i, job.calls[i]) in job.ends]
    for end in ends if job.calls[0] > 2 else ():
        if not isinstance(end, XferError):
            if end.pending:
                continue
            failed = [o for o in end.outcomes if o.error is not None]
            late = job.stage and fault.what == "has other storages"  # what was staged for them cannot be used
            assert not failed or fault.what not in HARMLESS or late and "RebindError" in repr(end), end
            assert job.relay or not mine or [o.replica for o in failed] in ([], [int(fault.who.split()[1])]), end
            assert all(name in str(o.error) for o in failed) or fault.what in ("raise", "is served anew"), end
            assert fault.what != "raise" or any(fault.point in str(o.error) for o in failed) or mine, end
            assert end.committed + len(failed) == len(end.outcomes), end
            reached = [o for o in failed if (o.replica, "pause") in job.told]
            early = job.stage and fault.point in ("plan", "link", "moving", "done")
            assert not (reached and early), "staged bytes reach no engine"
        else:
            assert fault.what not in HARMLESS, end
            drained = getattr(end, "drained", True)
            assert not mine or job.relay or not drained and (hangs or fault.what.startswith("is ")), end
            assert fault.what != "raise" or mine or f"injected fault at {fault.point}" in str(end), end
            heard = name in str(end) or fault.who == "trainer 0" and "rendezvous" in str(end)
            assert fault.what == "raise" or heard, end
            assert fault.what not in ("dies", "kill") or isinstance(end, PeerLost), end
            assert not hangs or fault.who != "trainer 0" or "does not answer" in str(end), end


def fails_to_resume(job: Job, replica: int, fault: Fault) -> bool:
    """Whether a call raises by which its engine comes back after the decision. What older weights have computed may still be in it."""
    mine = fault.who == job.controlled[replica]
    return mine and fault.what == "raise" and fault.point in ("finish", "reset", "resume")


def run(scenario: Scenario, fault: Fault | None = None) -> tuple[list[Fault], tuple]:
    """The faults to try in a scenario, and what a refit costs afterwards."""
    with Simulation(SEED) as sim:
        job = Job(sim, **dict(trainers=2, replicas=2, workers=1) | scenario.how)
        assert all(job.commits())
        job.commits(verify=False)
        job.passed.clear()
        job.told.clear()
        if fault is not None and fault.point:
            job.faults[fault.who, fault.point] = fault.what
        began, first = sim.now, sim.turns
        scenario.begin(job)
        if fault is not None and not fault.point:
            sim.first = lambda: sim.turns >= first + fault.turn
            sim.block(sim.first, sim.now + SOON_S)
            sim.first, began = None, sim.now
            next(act for what, act, _ in FAULTS if what == fault.what)(job, fault.who)
        sim.block(lambda: over(job), sim.now + 100.0)
        faults = faults_of(job, sim.turns - first)
        sim.quiet()
        if fault is not None:
            judge(job, fault, began)
        else:
            assert all({t.held(job.last) for t in e.takers} == {job.last} and not e.paused for e in job.engines)
            in_turn = [(e.replica, what) for e in job.engines for what in ("pause", "resume")]
            assert job.at_once is None or job.told == in_turn, "replicas take turns by number"
        if fault is None or not fault.who.startswith("trainer"):
            assert max(job.published.values(), default=0.0) <= 0.1, "a publish waits for nobody"
        sim.stopped.clear()
        job.untroubled()
        sim.block(lambda: not job.alive(), sim.now + 200.0)
        assert not job.alive(), job.alive()
        sim.wait(deadlines.SETTLE_GRACE_S)
        job.agree()
        heard = fault is None or fault.what not in HANGS and fault.who != "trainer 0"
        for e in job.engines if heard else ():
            if not job.out(e.replica):
                waits = any(t.locked for t in e.takers) or fault is not None and fails_to_resume(job, e.replica, fault)
                assert e.paused == waits, (
                    "torn engines, and those that could not be resumed, wait for a refit; all others serve"
                )
        if any(w.startswith("trainer") for w in sim.dead):
            job.restart()
        scenario.after(job)
        job.mend()
        assert all(job.undisturbed(False))
        new = as_new(job)
        if not sim.dead:
            job.close()
            sim.wait(20.0)
            assert not [t.name for t in sim.threads if t.name.startswith("xfer-")], "threads of closed sessions"
    return faults, new


@pytest.mark.parametrize("name", SCENARIOS)
def test_one_fault_at_any_point_costs_no_more_than_it_must_and_leaves_nothing(name):
    scenario = SCENARIOS[name]
    faults, new = run(scenario)
    for fault in faults:
        try:
            assert run(scenario, fault)[1] == new, "a refit costs other messages afterwards"
        except BaseException as e:
            raise AssertionError(f"{name}: {fault}") from e


def test_a_worker_that_hangs_before_it_sends_its_layout_fails_no_replica_with_an_equal_one():
    """The coordinator asks one of several equal ranks for their layout."""
    run(SCENARIOS["FP8"], Fault("stop", "replica 0 worker 0 of life 1", point="plan"))
