"""Child processes of functional tests: marked JSON lines out, JSON lines in, logs kept, always ended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from examples.common.gloo_end import settle_at_exit
from examples.common.ports import free_port
from tests.support import forge

ROOT = forge.ROOT
MARK = "@xfer "
PATIENCE = float(os.environ.get("XFER_TEST_PATIENCE", "1"))
"""Factor of all deadlines of tests for their children, for busy machines."""
PYTHON = {side: str(ROOT / f".venvs/{side}/bin/python") for side in ("trainer", "engine")}


def emit(kind: str, **fields) -> None:
    """In a child: reports an event to the test."""
    sys.stdout.write(MARK + json.dumps({"kind": kind, **fields}) + "\n")
    sys.stdout.flush()


def commands():
    """In a child: yields the test's commands until it closes the pipe."""
    settle_at_exit()
    for line in sys.stdin:
        yield json.loads(line)


def obey(*does: Callable[..., None]) -> None:
    """In a child, to its end: for every {"do": name, **rest} from the test, calls the function of that name with the rest.
    An exception is told to the test as "raised" and ends nothing."""
    words = {f.__name__: f for f in does}
    emit("up")
    for c in commands():
        began = time.monotonic()
        try:
            words[c.pop("do")](**c)
        except Exception as e:
            traceback.print_exc()
            took, drained = time.monotonic() - began, getattr(e, "drained", True)
            emit("raised", type=type(e).__name__, text=str(e), seconds=took, drained=drained)


def methods(of: object) -> list[Callable[..., None]]:
    """Public methods of a child's object, for `obey`."""
    return [f for n in dir(of) if not n.startswith("_") and callable(f := getattr(of, n))]


def environment(**more: str) -> dict[str, str]:
    path = [str(ROOT / "tests" / "support" / "jittered")] if os.environ.get("XFER_JITTER_CHILDREN") == "1" else []
    return {
        **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "XFER_CPU_RESIDENT": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": os.pathsep.join([*path, str(ROOT)]), **more,
    }  # fmt: skip


class Child:
    """One process running `tests.support.<module>` in the environment of `side`."""

    def __init__(self, name: str, side: str, module: str, args: list[str], work: Path, **env: str):
        self.name, self.log_path = name, Path(work) / f"{name}.log"
        self._log = open(self.log_path, "w")
        run = ["-m", f"tests.support.{module}", *args]
        self.proc = forge.start(PYTHON[side], run, environment(**env), ROOT, None, self._log)
        self.events: queue.Queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.proc.stdout:
            if line.startswith(MARK):
                self.events.put(json.loads(line[len(MARK) :]))
            else:
                self._log.write(line)
                self._log.flush()
        self.events.put({"kind": "ended", "code": self.proc.wait()})

    def say(self, **command) -> None:
        self.proc.stdin.write(json.dumps(command) + "\n")
        self.proc.stdin.flush()

    def expect(self, *kinds: str, timeout: float = 300.0) -> dict:
        """Returns the next event of these kinds and skips others.

        Raises:
            AssertionError: with the log, if the child raises, ends or is late. A late child is aborted, so that the log ends
                with the stacks of all its threads and processes.
        """
        timeout *= PATIENCE
        until = time.monotonic() + timeout
        while True:
            try:
                event = self.events.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                os.killpg(self.proc.pid, signal.SIGABRT)
                self.proc.wait(10)
                raise AssertionError(f"{self.name}: none of {kinds} within {timeout:.0f} s\n{self.tail(200)}") from None
            if event["kind"] in kinds:
                return event
            if event["kind"] in ("ended", "raised"):
                raise AssertionError(f"{self.name}: {event} while waiting for {kinds}\n{self.tail()}")

    def tail(self, lines: int = 60) -> str:
        self._log.flush()
        return "\n".join(x[:300] for x in self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        self.proc.kill()

    def stop(self) -> None:
        """Ends the process and all that it started."""
        stop_all([self])


def stop_all(children: Iterable[Child]) -> None:
    """Ends these processes at the same time, and all that they started."""
    children = list(children)
    for c in children:
        with contextlib.suppress(OSError):  # it has just ended
            c.proc.stdin.close()
    until = time.monotonic() + 5
    for c in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            c.proc.wait(max(0.0, until - time.monotonic()))
    for c in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(c.proc.pid, signal.SIGKILL)
    for c in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            c.proc.wait(10)
        c._log.close()


class Family:
    """Children that end together."""

    def __init__(self, work: Path):
        self.work, self.children = Path(work), []

    def start(self, name: str, side: str, module: str, *args: str, **env: str) -> Child:
        child = Child(name, side, module, list(args), self.work, **env)
        self.children.append(child)
        return child

    def ranks(self, module: str, world: int, name: str = "trainer", **env: str) -> list[Child]:
        """Starts a job of torch.distributed as torchrun does."""
        job = dict(WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        return [self.start(f"{name}{r}", "trainer", module, RANK=str(r), **job, **env) for r in range(world)]

    def __enter__(self) -> Family:
        return self

    def __exit__(self, *exc) -> None:
        stop_all(reversed(self.children))
