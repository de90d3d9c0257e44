"""Jobs of real processes: two on one host, builds of libraries that differ, and how processes end.

    .venvs/trainer/bin/python -m pytest -q tests/functional/test_session_processes.py
    .venvs/trainer/bin/python -m pytest -q -s -m slow tests/functional/test_session_processes.py     # 50 processes end
    XFER_OTHER_PYTHON=PYTHON .venvs/trainer/bin/python -m pytest -q tests/functional/test_session_processes.py -k torches

PYTHON has another torch, numpy and msgspec, and nothing else.
"""

import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.support.proc import PATIENCE, ROOT, environment
from tests.support.toy_jobs import ToyJob, bad
from tests.support.world import TOKEN, ToyEngine, World
from xfer.errors import HandshakeError, XferError
from xfer.participants import trainer, worker
from xfer.participants.controller import Controller
from xfer.rendezvous import client as party
from xfer.rendezvous.channel import dial, listen

RUNS = 10


def test_two_jobs_of_one_host_do_not_meet():
    """Each at the same time with ports and a token of its own: each engine has its own job's bytes."""
    jobs = [ToyJob(seed, trainers=2) for seed in (1, 2)]
    try:
        ended = [e for j in jobs for e in j.ended()]
    finally:
        for j in jobs:
            j.kill()
    assert not bad(ended), bad(ended)


def test_who_comes_to_another_jobs_rendezvous_is_refused_and_disturbs_nobody():
    """An engine and a trainer of another job that took this job's port: each has one error of the token; this job refits on."""
    with World(trainers=2, workers=2) as w:
        for version in (1, 2):
            assert not [r for r in w.refit(version) if isinstance(r, BaseException)]
            stranger = Controller(ToyEngine(2), w.rendezvous, TOKEN + "!", replica=0, deadline_s=20 * PATIENCE)
            with pytest.raises(HandshakeError, match="token"):
                stranger.wait_ready(30 * PATIENCE)
            stranger.close()
        other = World(trainers=1, workers=1)
        with pytest.raises(XferError, match=r"127\.0\.0\.1") as e:
            other.rendezvous, other.sources, other.sessions = w.rendezvous, [w.sources[0]], [None]
            other._connect_one(0)  # its rank 0 would listen where this job's rank 0 does
        assert "in use" in str(e.value)
        assert not [r for r in w.refit(3) if isinstance(r, BaseException)]
        assert [t.wrong(3) for t in w.engines[0].takers] == [[], []]


def plane(nccl: str, torch: str = "2.11"):
    return lambda device: (("data plane", "nccl"), ("NCCL", nccl), ("torch", torch))


class Apart(World):
    """The second trainer comes `late_s` after the first. Controllers hear what became of them before all is closed."""

    late_s = 0.0

    def _connect_one(self, i: int):
        time.sleep(i * self.late_s)
        super()._connect_one(i)

    def close(self) -> None:
        for c in self.controllers:
            with contextlib.suppress(XferError):
                c.wait_ready(10.0)
        super().close()


@pytest.mark.parametrize(
    "theirs, says",
    [
        (plane("2.27.3"), ["NCCL is '2.27.3', trainer 0 has '2.28.9': install one version"]),
        (plane("2.28.9", "2.9"), ["torch is '2.9', trainer 0 has '2.11': install one release"]),
        (plane("2.27.3", "2.9"), ["NCCL is '2.27.3'", "torch is '2.9'"]),
    ],
)
@pytest.mark.parametrize("late_s", [0.0, 2.0])
def test_an_engine_with_another_build_is_told_apart_at_the_door(monkeypatch, theirs, says, late_s):
    """One error that names both builds, on every trainer and on the engine, long before the deadline."""
    monkeypatch.setattr(trainer, "data_plane", plane("2.28.9"))
    monkeypatch.setattr(worker, "data_plane", theirs)
    w = Apart(trainers=2, workers=2, deadline_s=60 * PATIENCE)
    w.late_s = late_s
    began = time.monotonic()
    with pytest.raises(HandshakeError) as e:
        w.connect()
    assert time.monotonic() - began < 30 * PATIENCE
    assert all(s in str(e.value) for s in says) and "replica 0" not in str(e.value.where), str(e.value)
    assert isinstance(w.controllers[0].error, HandshakeError) and says[0] in str(w.controllers[0].error)


def test_a_trainer_rank_with_another_build_stops_all(monkeypatch):
    monkeypatch.setattr(worker, "data_plane", plane("2.28.9"))
    answers = iter([plane("2.28.9"), plane("2.28.8")])
    monkeypatch.setattr(trainer, "data_plane", lambda device: next(answers)(device))
    with pytest.raises(HandshakeError, match="NCCL is '2.28.[89]', trainer 0 has '2.28.[89]'"):
        World(trainers=2, workers=2, deadline_s=60 * PATIENCE).connect()


def test_nothing_of_torch_is_compared_where_bytes_go_by_gloo():
    import torch

    assert party.data_plane(torch.device("cpu")) == (("data plane", "gloo"),)


@pytest.mark.skipif(
    "XFER_OTHER_PYTHON" not in os.environ, reason="XFER_OTHER_PYTHON names no Python with another torch"
)
def test_two_torches_over_gloo():
    """Trainers with this torch, the engine with another: every byte arrives."""
    other = os.environ["XFER_OTHER_PYTHON"]
    ended = ToyJob(3, engine_python=other).ended()
    assert not bad(ended), bad(ended)
    said = subprocess.run(
        [other, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=True
    )
    print(f"the engine's torch is {said.stdout.strip()}")


@pytest.mark.slow
def test_processes_end_with_zero(capsys):
    """Ten jobs of four trainers and an engine connect, refit, close and end: none by a signal or an exception."""
    codes: collections.Counter = collections.Counter()
    for run in range(RUNS):
        ended = ToyJob(run + 1).ended()
        codes.update((e.name.split()[0], e.code) for e in ended)
        with capsys.disabled():
            print(bad(ended), end="", flush=True)
    with capsys.disabled():
        print("\n" + "; ".join(f"{n} {side} processes ended with {code}" for (side, code), n in sorted(codes.items())))
    assert codes == {("trainer", 0): 4 * RUNS, ("engine", 0): RUNS}


FORKS = """
import os, sys, time
from tests.support.world import World
from xfer.errors import PeerLost

def good(results):
    assert not [r for r in results if isinstance(r, BaseException)], results

w = World(trainers=1, workers=1).connect()
good(w.refit(1))
if not os.fork():
    w.close()  # as leaving a `with` does
    try:
        w.sessions[0].refit(version=None, verify=True, wait="commit", min_replicas=None, deadline_s=None)
    except PeerLost as e:
        sys.exit(0 if "forked" in str(e) else str(e))  # with all that an interpreter does at its end
    sys.exit("a session worked in two processes")
_, ended = os.wait()
assert not ended, ended
good(w.refit(2))
assert not w.engines[0].takers[0].wrong(2)
good(w.refit(3))
staying = os.fork()
if not staying:
    time.sleep(60)
    os._exit(0)
print(staying, w.rendezvous, flush=True)
good(w.refit(4))
sys.stdin.read()
"""
"""What a loader of data does: its processes are forked from a trainer, end when they like, and may live on when it is dead."""


def test_a_process_that_is_forked_from_one_that_connected_neither_ends_its_session_nor_holds_it():
    one = subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT,
        start_new_session=True,
    )  # fmt: skip
    late = threading.Timer(60 * PATIENCE, os.killpg, (one.pid, signal.SIGKILL))
    late.start()
    with one.stdin, one.stdout, contextlib.ExitStack() as end:
        end.callback(lambda: [os.killpg(one.pid, signal.SIGKILL), one.wait(), late.cancel()])
        line = one.stdout.readline().split()
        assert line, "the parent or a child of it did not go on as it should"
        staying, rendezvous = int(line[0]), line[1]
        with pytest.raises(HandshakeError, match="in use"):
            listen(rendezvous, TOKEN)
        ours = dial(rendezvous, TOKEN, 20 * PATIENCE)
        gone = threading.Event()
        ours.start(lambda message: None, lambda reason: gone.set())
        one.kill()
        assert gone.wait(5 * PATIENCE), "the connection lives on in a child of the one that was killed"
        one.wait()
        for sock in listen(rendezvous, TOKEN):
            sock.close()
        os.kill(staying, 0)
