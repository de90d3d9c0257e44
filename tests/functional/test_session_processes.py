"""The end of processes: jobs of real processes, forks, and threads inside C++ when a session closes."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from examples.common.ports import free_port
from tests.support.proc import PATIENCE, ROOT, environment
from tests.support.world import TOKEN, ToySource, World
from xfer.errors import HandshakeError
from xfer.participants.lane import Lane
from xfer.plan.inventory import trainer_inventory
from xfer.rendezvous.channel import dial, listen
from xfer.trace.catalog import Catalog
from xfer.transport.group import GlooLink


def toy_job(seed: int, trainers: int, engine_python: str = sys.executable) -> list[tuple[str, subprocess.Popen]]:
    """Processes of a job with a port and a token of its own (tests/support/toy_main.py)."""
    env, at = environment(XFER_TOKEN=secrets.token_hex(16)), f"tcp://127.0.0.1:{free_port()}"
    main = ["-m", "tests.support.toy_main"]
    commands = [
        (f"trainer {r}", [sys.executable, *main, "trainer", at, f"{seed}", f"{r}", f"{trainers}"])
        for r in range(trainers)
    ] + [("engine", [engine_python, *main, "engine", at, f"{seed}"])]
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return [(name, subprocess.Popen(command, cwd=ROOT, env=env, **pipes)) for name, command in commands]


def all_end_well(processes: list[tuple[str, subprocess.Popen]], seconds: float = 200.0) -> None:
    """None ends by a signal or an exception, and the engine holds its own job's bytes."""
    until = time.monotonic() + seconds * PATIENCE
    try:
        codes = [(name, p.wait(max(0.1, until - time.monotonic())), p.stdout.read()[-1500:]) for name, p in processes]
        assert not [c for c in codes if c[1]], "\n".join(f"--- {n} ended with {c}\n{said}" for n, c, said in codes if c)
    finally:
        for _, p in processes:
            p.kill()
            p.wait(20)
            p.stdout.close()


@pytest.mark.parametrize(
    ("seeds", "trainers"),
    [((1,), 2), *(pytest.param(s, 4, marks=pytest.mark.slow) for s in ((1, 2), *zip(range(3, 11))))],
)
def test_processes_of_jobs_end_with_zero(seeds, trainers):
    """Also two jobs of one host at the same time."""
    all_end_well([p for seed in seeds for p in toy_job(seed, trainers)])


@pytest.mark.skipif(
    "XFER_OTHER_PYTHON" not in os.environ, reason="XFER_OTHER_PYTHON names no Python with another torch"
)
def test_two_torches_over_gloo():
    """Trainers with this torch, the engine with another: every byte arrives."""
    all_end_well(toy_job(3, trainers=4, engine_python=os.environ["XFER_OTHER_PYTHON"]))


FORKS = """
import os, sys, time
from tests.support.world import REFIT, World
from xfer.errors import PeerLost
from xfer.arguments import RefitOptions

w = World(trainers=1, workers=1).connect()
w.commits(1)
if not os.fork():
    w.close()  # as leaving a `with` does
    try:
        w.sessions[0].refit(RefitOptions(**REFIT))
    except PeerLost as e:
        sys.exit(0 if "forked" in str(e) else str(e))  # with all that an interpreter does at its end
    sys.exit("a session worked in two processes")
_, ended = os.wait()
assert not ended, ended
w.commits(2)
print(w.rendezvous, flush=True)
sys.stdin.readline()  # somebody connects
if not os.fork():
    print(os.getpid(), flush=True)  # by now it has closed its copies
    time.sleep(60)
    os._exit(0)
w.commits(3)
sys.stdin.read()
"""
"""A data loader does this: its processes are forked from a trainer, end at any time, and may outlive the trainer."""


def test_a_process_that_is_forked_from_one_that_connected_neither_ends_its_session_nor_holds_it():
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    one = subprocess.Popen([sys.executable, "-c", FORKS], env=environment(), cwd=ROOT, **pipes)
    late = threading.Timer(60 * PATIENCE, os.killpg, (one.pid, signal.SIGKILL))
    late.start()
    with one.stdin, one.stdout, contextlib.ExitStack() as end:
        end.callback(lambda: [os.killpg(one.pid, signal.SIGKILL), one.wait(), late.cancel()])
        rendezvous = one.stdout.readline().strip()
        assert rendezvous, "the parent or its first child did not go on as it should"
        ours, gone = dial(rendezvous, TOKEN, 20 * PATIENCE), threading.Event()
        ours.start(lambda message: None, lambda reason: gone.set())
        one.stdin.write("\n")
        one.stdin.flush()
        staying = int(one.stdout.readline())
        with pytest.raises(HandshakeError, match="in use"):
            listen(rendezvous, TOKEN)
        one.kill()
        assert gone.wait(5 * PATIENCE), "the connection lives on in a child of the one that was killed"
        one.wait()
        for sock in listen(rendezvous, TOKEN):
            sock.close()
        os.kill(staying, 0)


def test_no_thread_is_inside_a_link_when_close_has_returned(monkeypatch):
    """A trainer died by std::terminate: a thread was freeing a link, in C++, and returned when the interpreter was gone."""
    inside, abort, stop = [], GlooLink.abort, Lane.stop

    def slow(link, seconds=0.0):
        name = threading.current_thread().name
        inside.append(name)
        time.sleep(0.5 if name.startswith("xfer-read") else 0.0)
        abort(link)
        inside.remove(name)

    monkeypatch.setattr(GlooLink, "abort", slow)
    monkeypatch.setattr(Lane, "stop", lambda lane: (time.sleep(0.2), stop(lane)))  # the coordinator answers before
    w = World().connect()
    w.commits(1)
    for end in (w.sessions[1], w):
        end.close()
        assert inside == []


def test_lanes_that_plan_their_first_replicas_at_once_do_not_crash_the_process():
    """A trainer with two replicas died at random when two threads used msgspec on one class for the first time."""
    layout = ToySource(0, 1).read()
    catalog = Catalog.union([("trainer 0", layout.traced.specs)])
    made = trainer_inventory(catalog, rank=0, host="", roots=layout.roots, fragments=layout.traced.fragments)
    code = """
        import os, sys, threading
        from xfer.plan.inventory import Inventory

        def first_time(data):
            sys.setswitchinterval(1e-6)
            together = threading.Barrier(8)
            threads = [threading.Thread(target=lambda: (together.wait(), Inventory.from_bytes(data))) for _ in range(8)]
            [t.start() for t in threads]
            [t.join() for t in threads]
            os._exit(0)

        children = [os.fork() or first_time(bytes.fromhex(sys.argv[1])) for _ in range(40)]
        sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), made.to_bytes().hex()]
    assert subprocess.run(command, timeout=120).returncode == 0
