"""The small world of world.py with a process for every trainer, controller and worker, so that each can be killed or stopped at any point.
Processes are forked from a server that has imported torch once. A worker that dies ends its controller's call at once, as vLLM's executor
does, but those beside it live on, so that what becomes of them can be seen.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from examples.common.ports import free_port
from tests.support.hosts import Host
from tests.support.proc import cause, stopped
from tests.support.world import REFIT, TOKEN, ToyEngine, ToySource, ToyTaker, trainer_session
from xfer.arguments import RefitOptions
from xfer.errors import DeadlineExceeded, EngineLost
from xfer.participants.controller import Controller
from xfer.participants.trainer import TrainerSession
from xfer.participants.worker import WorkerSession
from xfer.routes import worker_side

HOST_PULL = "XFER_TEST_HOST_PULL"
"""In the environment: workers read the trainers' memory themselves, as on GPUs, and routes are opened by exchange."""
RELAY, RDMA = "XFER_TEST_RELAY", "XFER_TEST_RDMA"
"""In the environment: replicas read from one another (`relay=True`)."""

_ctx = mp.get_context("forkserver")
_ctx.set_forkserver_preload(["tests.support.world_processes"])


def _serve(conn: Connection, commands: dict) -> None:
    """Answer one command after another until the pipe closes."""
    faulthandler.enable()  # a crash must not look like a kill
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    commands = {"lives": lambda: True, **commands}
    while True:
        try:
            name, args = conn.recv()
        except (EOFError, OSError):
            return
        began = time.monotonic()
        try:
            answer = {"kind": "done", "value": commands[name](**args)}
        except Exception as e:
            answer = {"kind": "raised", "type": type(e).__name__, "text": str(e)}
        conn.send({**answer, "seconds": time.monotonic() - began})


# ---- in the processes


def _serve_trainer(conn: Connection, made: Callable[..., TrainerSession], **more: Callable) -> None:
    """`made` returns the session of a `connect`; `more`: further commands of the test."""
    session: TrainerSession | None = None

    def connect(**args):
        nonlocal session
        if session is not None:
            session.close()
        session = made(**args)
        try:
            session.open(True)
        except BaseException:
            session.close()
            raise

    def refit(**options):
        r = session.refit(RefitOptions(**REFIT | options))
        return {
            "version": r.version,
            "committed": [o.committed for o in r.outcomes],
            "errors": [f"{type(o.error).__name__}: {o.error}" if o.error else "" for o in r.outcomes],
            "transfer_s": r.transfer_s,
            "routes": [{x.route: x.bytes for x in o.routes} for o in r.outcomes],
        }

    _serve(conn, {"connect": connect, "refit": refit, **more})


def _trainer(conn: Connection, rank: int, world: int, env: dict) -> None:
    os.environ.update(env)
    source, direct = ToySource(rank, world), dict(host_pull=HOST_PULL in os.environ, relay=RELAY in os.environ)

    def made(rendezvous: str, **args):
        return trainer_session(source, rendezvous, TOKEN, **args, **direct)

    _serve_trainer(conn, made, set=source.set, change=source.turn)


def _worker(
    conn: Connection, engine: Connection, rank: int, world: int, env: dict, make=ToyTaker, **more: Callable
) -> None:
    """`conn`: the test's; `engine`: the controller's calls; `more`: further commands of the test."""
    os.environ.update(env)
    taker, session, busy = make(rank, world), None, threading.Lock()

    def init(info: dict):
        nonlocal session
        with busy:
            if session is not None:
                session.close()
            where = info["rendezvous"], info["token"], info["deadline_s"], info["open"]
            session = WorkerSession(taker, worker_side, info["replica"], rank, world, *where)
            session.join()

    def update(info: dict):
        with busy:
            session.receive(info["attempt"], info["deadline_s"])

    def holds(versions: list[int]):
        lane = session._lane_ if session is not None else None
        return {
            "whole": [v for v in versions if not taker.wrong(v)],
            "nan": bool(taker.live["norm"].isnan().all()),
            "idle": not busy.locked(),
            "mapped": lane is not None and getattr(lane.plane, "_routed", None) is not None,
        }

    threading.Thread(target=_serve, args=(engine, {"init": init, "update": update}), daemon=True).start()
    _serve(conn, {"holds": holds, **more})


class ProcessEngine(ToyEngine):
    """Its workers are processes. A call waits for the answers of all; the first worker that is gone ends it."""

    name = "toy engine of processes"

    def __init__(self, workers: list[Connection]):
        super().__init__(0)
        self._workers = workers

    def workers(self, timeout=0.0):
        return len(self._workers)

    def _on_all(self, call: str, info: dict, timeout: float) -> None:
        until = time.monotonic() + timeout
        try:
            for w in self._workers:
                while w.poll():
                    w.recv()  # an answer that came after its call was given up
                w.send((call, {"info": dict(info)}))
            waiting = set(self._workers)
            while waiting:
                ready = wait(list(waiting), max(0.0, until - time.monotonic()))
                if not ready:
                    raise DeadlineExceeded(f"{self.name} did not answer {call}")
                for w in ready:
                    answer = w.recv()
                    assert answer["kind"] == "done", answer  # nothing raises into an engine
                    waiting.discard(w)
        except (EOFError, OSError) as e:
            raise EngineLost(f"{self.name}: a worker died in {call}") from e

    def init(self, info, timeout):
        self._on_all("init", {**info, "open": self.open}, timeout)

    def update(self, info, timeout):
        self._did("update")
        self._on_all("update", info, timeout)


def _controller(conn: Connection, workers: list[Connection], env: dict) -> None:
    os.environ.update(env)
    engine, controller = ProcessEngine(workers), None

    def serve(rendezvous: str, replica: int, deadline_s: float):
        nonlocal controller
        if controller is not None:
            controller.close()
        engine.paused = False
        controller = Controller(engine, rendezvous, TOKEN, replica=replica, deadline_s=deadline_s)

    def state():
        error = controller.error
        return {
            "version": controller.version,
            "serves": error is None and not engine.paused,
            "error": f"{type(error).__name__}: {error}" if error else "",
        }

    _serve(conn, {"serve": serve, "ready": lambda: controller.wait_ready(60.0), "state": state})


# ---- in the test


class Process:
    """A process and the pipe for its commands. host: an emulated host (hosts.py) that it runs on."""

    def __init__(self, target, *args, host: Host | None = None):
        self.conn, there = _ctx.Pipe()
        run = target if host is None else host.run
        self.proc = _ctx.Process(target=run, args=(*([target] if host else []), there, *args), daemon=True)
        self.proc.start()
        there.close()

    def say(self, name: str, **args) -> None:
        self.conn.send((name, args))

    def answer(self, timeout: float = 60.0) -> dict:
        assert self.conn.poll(timeout), f"no answer within {timeout:.0f} s"
        try:
            return self.conn.recv()
        except EOFError:
            self.proc.join(10)
            raise AssertionError(f"the process ended with {self.proc.exitcode}") from None

    def ask(self, name: str, timeout: float = 60.0, **args) -> dict:
        self.say(name, **args)
        return self.answer(timeout)

    def value(self, name: str, **args):
        answer = self.ask(name, **args)
        assert answer["kind"] == "done", answer
        return answer["value"]

    def lives(self) -> bool:
        """Whether it answers. The connections of a killed process break before the process is dead."""
        try:
            return self.value("lives")
        except (OSError, AssertionError):
            return not self.dead()

    def dead(self, timeout: float = 20.0) -> bool:
        self.proc.join(timeout)
        return not self.proc.is_alive()

    def is_stopped(self) -> bool:
        return stopped(self.proc.pid)

    def signal(self, number: int) -> None:
        os.kill(self.proc.pid, number)

    def stop(self) -> None:
        if self.proc.is_alive():
            self.proc.kill()  # a stopped process too
        self.proc.join(10)
        self.conn.close()


@dataclass
class Replica:
    index: int
    controller: Process
    workers: list[Process]

    def stop(self) -> None:
        for p in (self.controller, *self.workers):
            p.stop()


class ProcessWorld:
    """`trainers` processes and `replicas` engines of a controller and `workers` processes each. `hosts`: as which host each replica's
    processes count, in turns."""

    mains = (_trainer, _worker, _controller)
    """Main functions of the processes of each kind."""
    address = "127.0.0.1"
    """Where trainer 0 listens."""

    def __init__(
        self, folder: Path, trainers=2, workers=2, replicas=2, deadline_s=20.0, host_pull=False, relay=False, hosts=(),
        rdma=False,
    ):  # fmt: skip
        self.folder, self.workers, self.deadline_s = Path(folder), workers, deadline_s
        self.host_pull, self.hosts, self.flags = host_pull, hosts, {HOST_PULL: host_pull, RELAY: relay, RDMA: rdma}
        self.trainers = [self._trainer(i, trainers) for i in range(trainers)]
        self.replicas = [self._replica(i) for i in range(replicas)]

    def _env(self, name: str) -> dict:
        env = {"XFER_FAULT_FILE": str(self.folder / f"{name}.fault"), "XFER_FAULT_HANG_S": "4", "OMP_NUM_THREADS": "1"}
        if self.hosts and name.startswith("replica"):
            env["XFER_HOST"] = self.hosts[int(name[7:]) % len(self.hosts)]
        return env | {name: "1" for name, on in self.flags.items() if on}

    def host(self, number: int) -> tuple[Host | None, dict[str, str]]:
        """Where a rank runs (trainers come first, and then the workers of each replica), and its further environment."""
        return None, {}

    def _trainer(self, rank: int, world: int) -> Process:
        host, env = self.host(rank)
        return Process(self.mains[0], rank, world, self._env("trainers") | env, host=host)

    def _replica(self, index: int) -> Replica:
        pipes = [_ctx.Pipe() for _ in range(self.workers)]
        env, first = self._env(f"replica{index}"), len(self.trainers) + index * self.workers
        places = [self.host(first + i) for i in range(self.workers)]
        workers = [
            Process(self.mains[1], there, i, self.workers, env | more, host=host)
            for i, ((_, there), (host, more)) in enumerate(zip(pipes, places))
        ]
        controller = Process(self.mains[2], [here for here, _ in pipes], env, host=places[0][0])
        for pair in pipes:
            for end in pair:
                end.close()
        return Replica(index, controller, workers)

    def fault(self, who: str, text: str) -> None:
        """`who`: "trainers" or "replica0"; `text` as in xfer/faults.py."""
        cause(self.folder / f"{who}.fault", text)

    def meet(self, **more) -> list[dict]:
        """All connect at a new rendezvous; results of the trainers. Those that are dead are started again. more: for
        `trainer_session`."""
        for i, t in enumerate(self.trainers):
            if not t.lives():
                t.stop()
                self.trainers[i] = self._trainer(i, len(self.trainers))
        self.serve_all()
        where = dict(rendezvous=self.rendezvous, replicas=len(self.replicas), deadline_s=self.deadline_s)
        return self.on_all("connect", **where, **more)

    def serve_all(self) -> None:
        """Engines connect to a new rendezvous before any trainer does."""
        self.rendezvous = f"tcp://{self.address}:{free_port()}"
        for r in self.replicas:
            self.serve(r)

    def serve(self, replica: Replica) -> None:
        replica.controller.value("serve", rendezvous=self.rendezvous, replica=replica.index, deadline_s=self.deadline_s)

    def restart(self, index: int) -> None:
        """Start the replica again, at the same rendezvous."""
        self.replicas[index].stop()
        self.fault(f"replica{index}", "")
        self.replicas[index] = self._replica(index)
        self.serve(self.replicas[index])
        self.replicas[index].controller.value("ready")

    def on_all(self, name: str, ranks=None, **args) -> list[dict]:
        self.say(name, ranks, **args)
        return self.answers(ranks)

    def say(self, name: str, ranks=None, **args) -> None:
        for i in range(len(self.trainers)) if ranks is None else ranks:
            self.trainers[i].say(name, **args)

    def answers(self, ranks=None, timeout: float = 60.0) -> list[dict]:
        return [self.trainers[i].answer(timeout) for i in (range(len(self.trainers)) if ranks is None else ranks)]

    def begin(self, weights: int, **options) -> None:
        """A refit of these weights begins; `answers` ends it."""
        for t in self.trainers:
            t.value("set", version=weights)
        self.say("refit", **options)

    def refit(self, weights: int, **options) -> list[dict]:
        self.begin(weights, **options)
        return self.answers()

    def __enter__(self) -> ProcessWorld:
        return self

    def quiet(self) -> None:
        """No faults from here on."""
        for name in ("trainers", *(f"replica{r.index}" for r in self.replicas)):
            self.fault(name, "")

    def stop(self) -> None:
        for x in (*self.trainers, *self.replicas):
            x.stop()

    def __exit__(self, *exc) -> None:
        self.stop()


STOP, CONT, KILL = signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL
