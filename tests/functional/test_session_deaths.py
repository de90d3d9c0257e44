"""Real processes are killed or stopped in a refit. Those that are left end their calls in time, with an error that names the one that is
gone, or with a commit; an engine that serves holds one whole version; once what died was started again, the next refit is right."""

import random
import time
from math import prod

import pytest

from tests.support.proc import PATIENCE
from tests.support.world import SHAPES, until_true
from tests.support.world_processes import CONT, KILL, ProcessWorld
from xfer.coordinator.deadlines import CALL_GRACE_S

FAR = 20.0
"""Deadline of a refit that must end long before it."""
GRACE_S = CALL_GRACE_S + 5.0 * PATIENCE
"""Time after a deadline in which calls end when a process does not answer, and some seconds of a busy machine."""
SHORT = 1.0 * PATIENCE
"""Deadline of a refit that is to reach it."""
KNOWN = list(range(12))
_whole: dict[bool, ProcessWorld] = {}
"""Worlds that the last cases left whole, by `host_pull`: the next case starts only the processes that died."""


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
        assert r["kind"] == "raised" and r["type"] in kinds and r["seconds"] < within, r
        assert all(t in r["text"] for t in texts), r


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
        until_true(lambda: x.value("holds", versions=[])["idle"], 12)
    except (OSError, AssertionError):
        if not x.dead(10):
            raise
    return x.proc.is_alive()


def no_mix(w):
    """Checks what the engines hold, whatever became of the refit. Returns whether each serves."""
    serving = []
    for r in w.replicas:
        state = r.controller.value("state")
        held = [x.value("holds", versions=KNOWN) for x in r.workers if lives(x)]
        if state["serves"]:
            assert len(held) == w.workers and all(h["whole"] == held[0]["whole"] != [] for h in held), (state, held)
        for h in held:
            assert h["whole"] or h["nan"], f"replica {r.index} holds half of something and no NaN: {held}"
        serving.append(state["serves"])
    return serving


def starts_again(w):
    """New trainers for those that died, a new rendezvous, engines as they are."""
    w.fault("trainers", "")
    good(w.meet())
    good(w.refit(5))
    right(w, 5)


def at(w, role, rank, point, action):
    """Arrange a fault of a trainer or of replica 0 for the next refit."""
    if point in ("plan", "link"):  # plans and links are made in a refit only when a layout changed
        w.trainers[0].value("change")
    w.fault("trainers" if role == "trainer" else "replica0", f"{role}:{rank}:{point}:{action}@1")


@pytest.mark.parametrize(("world", "rank"), [(False, 2), (True, 0)], indirect=["world"])
def test_a_trainer_that_stops_is_named_by_all_others_and_the_job_goes_on(world, rank):
    """Trainer 0 has the rendezvous in its process."""
    w, victim, others = world, world.trainers[rank], [i for i in range(3) if i != rank]
    at(w, "trainer", rank, "moving", "stop")
    w.begin(2, deadline_s=SHORT)
    # A trainer whose memory others read cannot know, without the coordinator, that they have ended.
    kinds = ["DeadlineExceeded", *(["PeerLost"] if w.host_pull else [])]
    until_true(victim.is_stopped)
    silent = [] if rank else ["does not answer"]
    failed(w.answers(others), kinds, f"trainer {rank}", *silent, within=SHORT + GRACE_S)
    assert not any(no_mix(w))
    victim.signal(CONT)
    failed(w.answers([rank]), kinds, within=60)
    w.quiet()
    good(w.refit(3))  # the same job goes on
    right(w, 3)


def test_an_engine_of_which_a_worker_stops_while_it_installs_is_left_out_and_comes_back(world):
    w, worker = world, world.replicas[0].workers[1]
    at(w, "worker", 1, "commit", "stop")
    w.begin(2, deadline_s=SHORT, min_replicas=1)
    until_true(worker.is_stopped)
    report = good(w.answers())
    assert report["committed"] == [False, True] and "replica 0 worker 1" in report["errors"][0], report
    assert report["errors"][0].startswith("DeadlineExceeded") and not w.replicas[0].controller.value("state")["serves"]
    right(w, 2, [1])
    worker.signal(CONT)
    w.quiet()
    assert no_mix(w) == [False, True]
    good(w.refit(4))
    right(w, 4)


@pytest.mark.parametrize("text", ["trainer:0:plan", "worker:1:plan"])
def test_a_process_that_is_killed_while_all_connect(tmp_path, text):
    """No trainer serves half a job: connect() fails on all, and the next one finds both replicas."""
    role, rank, _ = text.split(":")
    with ProcessWorld(tmp_path, trainers=3, deadline_s=8.0 * PATIENCE) as w:
        w.fault("trainers" if role == "trainer" else "replica0", f"{text}:kill@1")
        w.serve_all()
        w.say("connect", rendezvous=w.rendezvous, replicas=2, deadline_s=FAR)
        if role == "trainer":
            others = [i for i in range(3) if i != int(rank)]
            failed(w.answers(others), ["PeerLost"], f"trainer {rank}", within=FAR / 2)
            for r in w.replicas:
                # To an engine that comes when all trainers have failed, a rendezvous that is gone is one that is not there yet.
                kinds = ["PeerLost", "DeadlineExceeded"]
                failed([r.controller.ask("ready")], kinds, "trainer", within=w.deadline_s + GRACE_S)
        else:
            failed(w.answers(), ["PeerLost", "EngineLost"], "replica 0", within=FAR / 2)
            w.replicas[0].stop()
            w.quiet()
            w.replicas[0] = w._replica(0)
        starts_again(w)


def test_each_byte_enters_a_host_once_and_a_host_of_which_a_replica_dies_is_alone_in_it(tmp_path):
    """Replicas 0 and 2 are on one host, 1 and 3 on another one, trainers on a third."""
    model = sum(2 * prod(shape) for shape in SHAPES.values())

    def received(report) -> list[int]:
        """Bytes that entered each host."""
        came = [r.get("gloo", 0) for r in report["routes"]]
        return [came[0] + came[2], came[1] + came[3]]

    with ProcessWorld(tmp_path, trainers=2, workers=1, replicas=4, relay=True, hosts=("b", "c")) as w:
        good(w.meet())
        for version in (1, 2):
            report = good(w.refit(version, verify=True))
            assert [sum(r.values()) for r in report["routes"]] == [model] * 4 and received(report) == [model] * 2
            right(w, version)
        w.fault("replica0", "worker:0:moving:hang@1,worker:0:moving:kill@1")
        report = good(w.refit(3, deadline_s=FAR, min_replicas=1))
        assert report["committed"] == [False, True, False, True], report
        assert "replica 2 takes its weights from replica 0, which failed" in report["errors"][2], report
        assert no_mix(w) == report["committed"]
        report = good(w.refit(4, deadline_s=FAR, min_replicas=3))
        assert received(report) == [model] * 2 and report["routes"][2] == {"gloo": model}
        right(w, 4, [1, 2, 3])
        w.restart(0)
        assert received(good(w.refit(5))) == [model] * 2
        right(w, 5)


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(i, marks=pytest.mark.slow) for i in range(5, 60))])
def test_a_process_that_is_killed_at_any_moment(world, seed):
    w, dice = world, random.Random(seed)
    if dice.random() < 0.5:
        w.trainers[dice.randrange(3)].value("change")
    victim = dice.choice([*w.trainers, *w.replicas[0].workers])
    trains = victim in w.trainers
    name = f"trainer {w.trainers.index(victim)}" if trains else "replica 0"
    w.begin(2, deadline_s=FAR, min_replicas=1)
    time.sleep(dice.random() * 0.1)
    victim.signal(KILL)
    assert victim.dead()  # it may have answered before
    answers = w.answers([i for i, t in enumerate(w.trainers) if t is not victim])
    assert len({a["kind"] for a in answers}) == 1 or victim is w.trainers[0], answers
    for a in answers:
        assert a["seconds"] < FAR / 2, a
        if a["kind"] == "raised":
            assert trains and a["type"] in ("PeerLost", "EngineLost") and name in a["text"], a
        else:
            committed, errors = a["value"]["committed"], a["value"]["errors"]
            assert any(committed) and all(c or name in e for c, e in zip(committed, errors)), a
            assert committed[1] or trains, a  # of a trainer's death each replica hears when it happens
    if trains:
        no_mix(w)
        return starts_again(w)
    until_true(lambda: not w.replicas[0].controller.value("state")["serves"])  # its controller has heard of it
    no_mix(w)
    w.restart(0)
    good(w.refit(4))
    right(w, 4)


@pytest.mark.parametrize("world", [True], indirect=True)
def test_a_trainer_that_is_killed_between_refits_is_mapped_no_longer(world):
    """The trainer that is started next needs the memory, long before the engine joins again."""
    mapped = lambda: [x.value("holds", versions=[])["mapped"] for r in world.replicas for x in r.workers]  # noqa: E731
    assert all(mapped())
    world.trainers[2].signal(KILL)
    until_true(lambda: not any(mapped()), 20)
    assert [r.controller.value("state")["serves"] for r in world.replicas] == [True, True]
    starts_again(world)
