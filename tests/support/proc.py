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
from tests.support.hosts import Host

ROOT = forge.ROOT
MARK = "@xfer "
PATIENCE = float(os.environ.get("XFER_TEST_PATIENCE", "1"))
"""Factor of all deadlines of tests for their children, for busy machines."""
PYTHON = {side: str(ROOT / f".venvs/{side}/bin/python") for side in ("trainer", "engine")} | {"here": sys.executable}
"""By side. "here": in the test's own environment, whichever that is."""


_emitted = 0


def emit(kind: str, **fields) -> None:
    """In a child: reports an event to the test."""
    global _emitted
    _emitted += 1
    sys.stdout.write(MARK + json.dumps({"kind": kind, **fields}) + "\n")
    sys.stdout.flush()


def commands():
    """In a child: yields the test's commands until it closes the pipe."""
    settle_at_exit()
    for line in sys.stdin:
        yield json.loads(line)


def obey(*does: Callable[..., dict | None]) -> None:
    """In a child, to its end: for every {"do": name, **rest} from the test, calls the function of that name with the rest.

    What a function that emits nothing returns is told as an event of its name. An exception is told as "raised" and ends nothing.
    """
    words = {f.__name__: f for f in does}
    emit("up")
    for c in commands():
        began, before, word = time.monotonic(), _emitted, c.pop("do")
        try:
            back = words[word](**c)
            if _emitted == before:
                emit(word, **(back or {}))
        except Exception as e:
            traceback.print_exc()
            took, drained = time.monotonic() - began, getattr(e, "drained", True)
            emit("raised", type=type(e).__name__, text=str(e), seconds=took, drained=drained)


def methods(of: object) -> list[Callable[..., None]]:
    """Public methods of a child's object, for `obey`."""
    return [f for n in dir(of) if not n.startswith("_") and callable(f := getattr(of, n))]


def environment(**more: str) -> dict[str, str]:
    path = [str(ROOT / "tests" / "support" / "jittered")] if os.environ.get("XFER_JITTER_CHILDREN") == "1" else []
    path += [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "XFER_CPU_RESIDENT": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": os.pathsep.join(path), **more,
    }  # fmt: skip


def cause(faults: Path, text: str) -> None:
    """From now on these faults happen (xfer/faults.py) in processes whose XFER_FAULT_FILE this is."""
    new = faults.with_suffix(".new")
    new.write_text(text)
    os.replace(new, faults)


def stopped(pid: int) -> bool:
    """By SIGSTOP; every thread of it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except OSError:
        return False


class Child:
    """One process running `tests.support.<module>`, or a module by its full name, in the environment of `side`, on this or an emulated
    host."""

    def __init__(
        self, name: str, side: str, module: str, args: list[str], work: Path, host: Host | None = None, **env: str
    ):
        self.name, self.log_path = name, Path(work) / f"{name}.log"
        self._log = open(self.log_path, "w")
        run = ["-m", module if "." in module else f"tests.support.{module}", *args]
        if host is None:
            self.proc = forge.start(PYTHON[side], run, environment(**env), ROOT, None, self._log)
        else:
            self.proc = subprocess.Popen(
                host.command(PYTHON[side], *run), env=environment(**{**host.env(), **env}), cwd=ROOT, text=True,
                start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            )  # fmt: skip
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
        """Returns the next event of these kinds and skips others. AssertionError with the log if the child raises, ends or is late; a late
        one is aborted, so that the log ends with the stacks of all its threads and processes."""
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

    def ask(self, do: str, *kinds: str, timeout: float = 300.0, **command) -> dict:
        """Send a command and return its answer. kinds: kinds of answer to accept; default: the command's own name."""
        self.say(do=do, **command)
        return self.expect(*kinds or (do,), timeout=timeout)

    def tail(self, lines: int = 60) -> str:
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


class Children(list[Child]):
    """Processes that are asked the same thing, such as the ranks of a job."""

    def ask(self, do: str, *kinds: str, timeout: float = 300.0, **command) -> list[dict]:
        """The answers of all, in their order. See `Child`.

        Raises:
            AssertionError: A child failed or the time is up, with the answers of all. Most others wait for it for ever, so they are soon
                aborted by `Child.expect`, with their stacks.
        """
        kinds = kinds or (do,)
        for c in self:
            c.say(do=do, **command)
        until = time.monotonic() + timeout * PATIENCE
        said: dict[int, dict] = {}
        while len(said) < len(self) and time.monotonic() < until:
            for r, c in enumerate(self):
                if r not in said and not c.events.empty():
                    event = c.events.get()
                    if event["kind"] in (*kinds, "raised", "ended"):
                        said[r] = event
            if any(x["kind"] not in kinds for x in said.values()):
                until = min(until, time.monotonic() + GRACE_S * PATIENCE)
            time.sleep(0.01)
        bad = [f"{self[r].name}: {x}\n{self[r].tail(20)}" for r, x in sorted(said.items()) if x["kind"] not in kinds]
        for r in range(len(self)):
            if r not in said:
                try:
                    self[r].expect(*kinds, timeout=0.1)
                    bad.append(f"{self[r].name}: late")
                except AssertionError as e:
                    bad.append(str(e))
        assert not bad, "\n".join(bad)
        return [said[r] for r in range(len(self))]


GRACE_S = 5.0
"""Seconds that other children have left for their answers once one has failed."""


class Family:
    """Children that end together. `host_of`: the emulated host of each by its name; None: this machine."""

    def __init__(self, work: Path, host_of: Callable[[str], Host | None] = lambda name: None):
        self.work, self.children, self.host_of = Path(work), [], host_of

    def start(self, name: str, side: str, module: str, *args: str, **env: str) -> Child:
        child = Child(name, side, module, list(args), self.work, self.host_of(name), **env)
        self.children.append(child)
        return child

    def ranks(self, module: str, world: int, name: str = "trainer", side: str = "trainer", **env: str) -> Children:
        """Starts a job of torch.distributed as torchrun does. side: key of PYTHON."""
        job = dict(WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), **env)
        numbers = [str(r) for r in range(world)]
        return Children(self.start(name + r, side, module, RANK=r, LOCAL_RANK=r, **job) for r in numbers)

    def __enter__(self) -> Family:
        return self

    def __exit__(self, *exc) -> None:
        stop_all(reversed(self.children))
