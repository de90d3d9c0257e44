"""Processes that are killed or stopped, at every point of a refit: who hears of it, when, and what the engines hold then.

Every trainer, controller and worker is a process of its own, and two replicas take part in every case (what runs in them
is small: tests/support/world_processes.py). The same points with a real vLLM are in test_refit_errors.py.

Three things must hold after every case. Whoever is left has ended its call with an error that names the process that is
gone, or with a commit. An engine that serves holds one whole version on all its workers, the one its label says. And once
what died was started again, the next refit is right everywhere.
"""

import random
import time

import pytest

from examples.common.ports import free_port
from tests.support.proc import PATIENCE
from tests.support.world_processes import CONT, KILL, ProcessWorld, until
from xfer.coordinator.deadlines import CALL_GRACE_S

FAR = 20.0
"""Deadline of a refit that must end long before it."""
GRACE_S = CALL_GRACE_S + 5.0 * PATIENCE
"""What may be added to a deadline when a process does not answer, and some seconds of a busy machine."""
SHORT = 2.0 * PATIENCE
"""Deadline of a refit that is to reach it."""
KNOWN = list(range(12))


_whole: dict[bool, ProcessWorld] = {}
"""Worlds that cases have left whole, by `host_pull`: the next case starts no processes but those that died."""


@pytest.fixture(scope="module", autouse=True)
def stops_worlds():
    yield
    while _whole:
        _whole.popitem()[1].stop()


@pytest.fixture
def world(tmp_path_factory, request):
    """Asked for with True, workers read the trainers' memory themselves, and open their routes by exchange, as on GPUs."""
    pulled = getattr(request, "param", False)
    w = _whole.pop(pulled, None)
    if w is None:
        w = ProcessWorld(tmp_path_factory.mktemp("world"), trainers=3, workers=2, replicas=2, host_pull=pulled)
    try:
        if not hasattr(w, "rendezvous"):
            good(w.meet())
        good(w.refit(1))
        yield w
        w.quiet()
        good(w.refit(0, deadline_s=FAR / 2))
        right(w, 0)
        _whole[pulled] = w
    finally:
        if _whole.get(pulled) is not w:
            w.stop()


def good(results):
    assert all(r["kind"] == "done" for r in results), results
    return results[0]["value"]


def failed(results, kinds, *texts, within):
    for r in results:
        assert r["kind"] == "raised" and r["type"] in kinds, r
        assert r["seconds"] < within, r
        for t in texts:
            assert t in r["text"], r


def right(w, version, replicas=None):
    """All workers hold exactly these weights, and the controllers serve them."""
    for r in w.replicas:
        if replicas is None or r.index in replicas:
            assert r.controller.value("state")["serves"], f"replica {r.index}"
            held = [x.value("holds", versions=KNOWN) for x in r.workers]
            assert [h["whole"] for h in held] == [[version]] * w.workers, f"replica {r.index}: {held}"


def lives(x) -> bool:
    """Whether a worker lives; then it has left its call. One that is being killed has lost its pipe before it is dead."""
    try:
        until(lambda: x.value("holds", versions=[])["idle"], 12, "a worker has left its call")
    except (OSError, AssertionError):
        if not x.dead(10):
            raise
    return x.proc.is_alive()


def no_mix(w):
    """What the engines hold, whatever became of the refit. Returns whether each serves."""
    serving = []
    for r in w.replicas:
        state = r.controller.value("state")
        alive = [x for x in r.workers if lives(x)]
        held = [x.value("holds", versions=KNOWN) for x in alive]
        if state["serves"]:
            assert len(held) == w.workers and all(h["whole"] == held[0]["whole"] != [] for h in held), (state, held)
        for h in held:
            assert h["whole"] or h["nan"], f"replica {r.index} holds half of something and no NaN: {held}"
        serving.append(state["serves"])
    return serving


def at(w, role, rank, point, action):
    """Arrange it for the next refit. Plans and links are made in a refit only when a layout changed."""
    if point in ("plan", "link"):
        w.trainers[0].value("change")
    w.fault("trainers" if role == "trainer" else "replica0", f"{role}:{rank}:{point}:{action}@1")


def starts_again(w):
    """New trainers for those that died, a new rendezvous, engines as they are."""
    w.fault("trainers", "")
    good(w.meet())
    good(w.refit(5))
    right(w, 5)


# ---- killed

TRAINER_POINTS = ["plan", "link", "enter", "moving", "wave", "done"]
WORKER_POINTS = ["plan", "link", "arm", "moving", "wave", "done", "commit"]


def cases(*every, slow):
    """The first in every run, those in `slow` in slow ones."""
    return [*every, *(pytest.param(*c, marks=pytest.mark.slow) for c in slow)]


@pytest.mark.parametrize(
    ("rank", "point"),
    cases(
        *((2, p) for p in TRAINER_POINTS), (0, "link"), (0, "enter"), (0, "moving"),
        slow=[(0, "plan"), (0, "wave"), (0, "done")],
    ),
)  # fmt: skip
def test_a_trainer_that_is_killed_is_named_by_all_others_and_the_job_starts_again(world, rank, point):
    w = world
    at(w, "trainer", rank, point, "kill")
    others = [i for i in range(3) if i != rank]
    for t in w.trainers:
        t.value("set", version=2)
    w.say("refit", deadline_s=FAR)
    failed(w.answers(others), ["PeerLost"], f"trainer {rank}", within=FAR / 2)
    assert w.trainers[rank].dead()
    serving = no_mix(w)
    if rank and point in ("plan", "link", "enter"):
        assert serving == [True, True]  # not a byte had moved: version 1 is served on
    if point in ("moving", "wave", "done"):
        assert not all(serving)  # where bytes moved; the other replica may not have been armed yet
    starts_again(w)


@pytest.mark.parametrize(("rank", "point"), cases((0, "plan"), (2, "link"), slow=[(0, "link"), (2, "plan")]))
def test_a_trainer_that_is_killed_while_all_connect(tmp_path, rank, point):
    with ProcessWorld(tmp_path, trainers=3, deadline_s=8.0 * PATIENCE) as w:
        w.fault("trainers", f"trainer:{rank}:{point}:kill@1")
        w.say("connect", rendezvous=start(w), replicas=2, deadline_s=FAR)
        others = [i for i in range(3) if i != rank]
        failed(w.answers(others), ["PeerLost"], f"trainer {rank}", within=FAR / 2)
        for r in w.replicas:
            # To an engine that comes when all trainers have failed, a rendezvous that is gone is one that is not there yet.
            kinds = ["PeerLost", "DeadlineExceeded"]
            failed([r.controller.ask("ready")], kinds, "trainer", within=w.deadline_s + GRACE_S)
        starts_again(w)


def start(w):
    """The engines at a new rendezvous, before any trainer is there."""
    w.rendezvous = f"tcp://127.0.0.1:{free_port()}"
    for r in w.replicas:
        w.serve(r)
    return w.rendezvous


@pytest.mark.parametrize(
    ("rank", "point"), cases(*((1, p) for p in WORKER_POINTS), slow=[(0, p) for p in WORKER_POINTS])
)
def test_a_worker_that_is_killed_ends_its_replica_only_and_a_new_one_takes_its_place(world, rank, point):
    w = world
    at(w, "worker", rank, point, "kill")
    report = good(w.refit(2, deadline_s=FAR, min_replicas=1))
    assert report["committed"] == [False, True]
    assert report["errors"][0].startswith(("PeerLost", "EngineLost")), report
    assert f"replica 0 worker {rank}" in report["errors"][0], report
    assert w.replicas[0].workers[rank].dead()
    assert no_mix(w) == [False, True]
    right(w, 2, [1])
    failed(w.refit(3, deadline_s=FAR), ["PeerLost"], f"replica 0 worker {rank}", "1 of 2 replicas", within=FAR / 2)
    right(w, 3, [1])
    w.restart(0)
    good(w.refit(4))
    right(w, 4)


@pytest.mark.parametrize(
    ("point", "action"),
    cases(("arm", "kill"), ("moving", "kill"), ("wave", "stop"), slow=[("done", "kill"), ("link", "kill")]),
)
def test_a_worker_of_a_row_takes_along_those_behind_it_if_bytes_moved(tmp_path, point, action):
    """Three replicas that hand on what they read; the one in the middle."""
    with ProcessWorld(tmp_path, trainers=1, workers=2, replicas=3, host_pull=True, relay=True) as w:
        good(w.meet())
        good(w.refit(1))
        if point == "link":
            w.trainers[0].value("change")
        here = f"worker:0:{point}"
        # Not before the others are armed, or the last one goes around it.
        w.fault("replica1", (f"{here}:hang@1," if point == "moving" else "") + f"{here}:{action}@1")
        report = good(w.refit(2, deadline_s=SHORT if action == "stop" else FAR, min_replicas=1))
        first, middle, last = report["committed"]
        assert first and not middle
        if point in ("arm", "link"):
            assert last, report  # it goes around the one that is gone
        elif point in ("moving", "wave"):
            assert not last and "replica 2 takes its weights from replica 1, which failed" in report["errors"][2], (
                report
            )
        if action == "kill":
            assert no_mix(w) == report["committed"]
            failed(w.refit(3, deadline_s=FAR), ["PeerLost"], "replica 1 worker 0", "2 of 3 replicas", within=FAR / 2)
            right(w, 3, [0, 2])
        w.restart(1)
        good(w.refit(4))
        right(w, 4)


@pytest.mark.parametrize("point", cases("plan", slow=[("read",), ("link",)]))
def test_a_worker_that_is_killed_while_all_connect(tmp_path, point):
    """Nobody serves half a job: connect() fails on all trainers, and the next one finds both replicas."""
    with ProcessWorld(tmp_path, trainers=3, deadline_s=8.0 * PATIENCE) as w:
        w.fault("replica0", f"worker:1:{point}:kill@1")
        w.say("connect", rendezvous=start(w), replicas=2, deadline_s=FAR)
        failed(w.answers(), ["PeerLost", "EngineLost"], "replica 0", within=FAR / 2)
        w.replicas[0].stop()
        w.fault("replica0", "")
        w.replicas[0] = w._replica(0)
        starts_again(w)


def test_a_controller_that_is_killed_ends_its_replica_only(world):
    w = world
    w.fault("replica0", "worker:1:moving:hang@1")
    for t in w.trainers:
        t.value("set", version=2)
    w.say("refit", deadline_s=FAR, min_replicas=1)
    time.sleep(1.0)
    w.replicas[0].controller.signal(KILL)
    report = good(w.answers())
    assert report["committed"] == [False, True] and "replica 0 controller" in report["errors"][0]
    right(w, 2, [1])
    w.restart(0)
    good(w.refit(4))
    right(w, 4)


@pytest.mark.parametrize("seed", cases(0, 1, 2, slow=[(s,) for s in range(3, 60)]))
def test_a_process_that_is_killed_at_any_moment(world, seed):
    """Points are where somebody thought of trouble; this is wherever it falls."""
    w, dice = world, random.Random(seed)
    if dice.random() < 0.5:
        w.trainers[dice.randrange(3)].value("change")
    victim = dice.choice([*w.trainers, *w.replicas[0].workers])
    for t in w.trainers:
        t.value("set", version=2)
    w.say("refit", deadline_s=FAR, min_replicas=1)
    time.sleep(dice.random() * 0.1)
    victim.signal(KILL)
    assert victim.dead()  # it may have answered before
    left = [i for i, t in enumerate(w.trainers) if t is not victim]
    answers = w.answers(left)
    assert len({a["kind"] for a in answers}) == 1 or victim is w.trainers[0], answers
    for a in answers:
        assert a["seconds"] < FAR / 2, a
        if a["kind"] == "raised":
            assert a["type"] in ("PeerLost", "EngineLost") and f"trainer {w.trainers.index(victim)}" in a["text"], a
        else:
            committed, errors = a["value"]["committed"], a["value"]["errors"]
            name = f"trainer {w.trainers.index(victim)}" if victim in w.trainers else "replica 0"
            assert any(committed) and all(c or name in e for c, e in zip(committed, errors)), a
            assert committed[1] or victim in w.trainers, a  # of a trainer's death each replica hears when it happens
    if victim in w.replicas[0].workers:
        until(lambda: not w.replicas[0].controller.value("state")["serves"], 10, "its controller has heard of it")
    no_mix(w)
    if victim in w.replicas[0].workers:
        w.restart(0)
        good(w.refit(4))
        right(w, 4)
    else:
        starts_again(w)


@pytest.mark.parametrize("world", [True], indirect=True)
def test_a_trainer_that_is_killed_between_refits_is_mapped_no_longer(world):
    """Its successor needs the memory, long before the engine joins again."""
    mapped = lambda: [x.value("holds", versions=[])["mapped"] for r in world.replicas for x in r.workers]  # noqa: E731
    assert all(mapped())
    world.trainers[2].signal(KILL)
    until(lambda: not any(mapped()), 20, "all workers have unmapped")
    assert [r.controller.value("state")["serves"] for r in world.replicas] == [True, True]
    starts_again(world)


# ---- stopped: it neither answers nor ends


def stopped(process):
    until(lambda: process.state() == "T", 10, "the process is stopped")


@pytest.mark.parametrize(
    ("world", "point"),
    cases(
        (False, "enter"), (False, "moving"), (True, "moving"), slow=[(False, "link"), (False, "done"), (True, "link")]
    ),
    indirect=["world"],
)
def test_trainer_0_with_the_rendezvous_in_it_is_stopped(world, point):
    w = world
    # A trainer whose memory is read by others cannot know, without the coordinator, that they have ended.
    kinds = ["DeadlineExceeded", "PeerLost"] if w.host_pull else ["DeadlineExceeded"]
    at(w, "trainer", 0, point, "stop")
    for t in w.trainers:
        t.value("set", version=2)
    w.say("refit", deadline_s=SHORT)
    stopped(w.trainers[0])
    failed(w.answers([1, 2]), kinds, "trainer 0", "does not answer", within=SHORT + GRACE_S)
    serving = no_mix(w)
    assert point in ("enter", "link") or serving == [False, False]
    w.trainers[0].signal(CONT)
    failed(w.answers([0]), kinds, within=60)
    w.fault("trainers", "")
    good(w.refit(3))  # the same job goes on
    right(w, 3)


@pytest.mark.parametrize("point", cases("moving", slow=[("enter",)]))
def test_a_trainer_that_is_stopped(world, point):
    w = world
    at(w, "trainer", 2, point, "stop")
    for t in w.trainers:
        t.value("set", version=2)
    w.say("refit", deadline_s=SHORT)
    stopped(w.trainers[2])
    failed(w.answers([0, 1]), ["DeadlineExceeded"], "trainer 2", within=SHORT + GRACE_S)
    assert no_mix(w) == [point == "enter"] * 2
    w.trainers[2].signal(CONT)
    failed(w.answers([2]), ["DeadlineExceeded"], "trainer 2", within=60)
    w.fault("trainers", "")
    good(w.refit(3))
    right(w, 3)


@pytest.mark.parametrize("point", cases("arm", "commit", slow=[("link",), ("moving",)]))
def test_a_worker_that_is_stopped_ends_its_replica_only_and_may_come_back(world, point):
    w = world
    at(w, "worker", 1, point, "stop")
    for t in w.trainers:
        t.value("set", version=2)
    w.say("refit", deadline_s=SHORT, min_replicas=1)
    stopped(w.replicas[0].workers[1])
    report = good(w.answers())
    assert report["committed"] == [False, True]
    assert report["errors"][0].startswith(("DeadlineExceeded", "EngineLost")), report
    assert "replica 0 worker 1" in report["errors"][0], report
    assert not w.replicas[0].controller.value("state")["serves"]
    right(w, 2, [1])
    if point == "moving":
        good(w.refit(3, deadline_s=SHORT, min_replicas=1))  # still stopped
        right(w, 3, [1])
    w.replicas[0].workers[1].signal(CONT)
    w.fault("replica0", "")
    serves = no_mix(w)
    assert serves[1] and not (serves[0] and point in ("moving", "commit"))  # before its first write it may serve on
    good(w.refit(4))  # nothing was started again
    right(w, 4)
