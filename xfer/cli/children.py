"""Processes that answer orders: one line of JSON for each, over standard input and output. All else that they print goes to a log.

A process makes one object of its task, a file, and then calls a method of this object for each order.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread, Timer
from typing import Any, Protocol

import msgspec

from xfer.errors import DeadlineExceeded, XferError, from_wire

ANSWER_S = 1800.0
"""Most seconds for an answer: the largest ranks take minutes to read, and to compare."""


class Process(Protocol):
    """A process that carries out orders, on this host or on another one.

    Attributes:
        name: Name of the process, for errors.
        ready: Done when the process has made its object, with the error if that failed.
    """

    name: str
    ready: Future[Any]

    def order(self, do: str, **how: Any) -> Future[Any]:
        """Call a method of its object, after the orders before. The result is the method's, or raises an XferError."""
        ...

    def stop(self) -> None: ...


class Child:
    """A process that runs `serve`, and the thread that waits for it. It implements `Process`.

    Args:
        command: The command to run; the path of the task is added.
        task: The task, from which the process makes its object.
        env: Environment variables beside those of this process.
    """

    def __init__(self, name: str, command: Sequence[str], task: msgspec.Struct, env: Mapping[str, str]):
        self._folder = tempfile.TemporaryDirectory(prefix="xfer-child-")
        self.name, given, self._log = name, Path(self._folder.name, "task"), Path(self._folder.name, "log")
        given.write_bytes(msgspec.msgpack.encode(task))
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                [*command, str(given)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                errors="replace", env={**os.environ, **env}, start_new_session=True,
            )  # fmt: skip
        self._orders = ThreadPoolExecutor(1)
        self.ready: Future[Any] = self._orders.submit(self._hear)

    def order(self, do: str, **how: Any) -> Future[Any]:
        return self._orders.submit(self._ask, {"do": do, **how})

    def _ask(self, order: dict[str, Any]) -> Any:
        with suppress(OSError):  # a process that is gone reports its end by itself
            print(json.dumps(order), file=self._process.stdin, flush=True)
        return self._hear()

    def _hear(self) -> Any:
        until, late = time.monotonic() + ANSWER_S, Timer(ANSWER_S, self._kill)
        late.start()
        try:
            for line in self._process.stdout or ():
                with suppress(ValueError):  # something that Python printed before `serve`
                    answer = json.loads(line)
                    break
            else:
                with suppress(subprocess.TimeoutExpired):  # it has closed its output, so it is about to end
                    self._process.wait(10)
                tail = [line[:200] for line in self._log.read_text(errors="replace").splitlines()[-12:]]
                if time.monotonic() >= until:
                    raise DeadlineExceeded(f"{self.name} gave no answer within {ANSWER_S:.0f} s", tail)
                raise XferError(f"{self.name} ended with code {self._process.poll()} before it was done", tail)
        finally:
            late.cancel()
        if "error" in answer:
            raise from_wire(*answer["error"])
        return answer["ok"]

    def _kill(self) -> None:
        with suppress(ProcessLookupError):  # with its own children, which may hold its output open
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def stop(self) -> None:
        self._kill()
        self._process.wait()
        self._orders.shutdown(cancel_futures=True)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self._folder.cleanup()


def on_all(children: Sequence[Process], do: str, **how: Any) -> list[Any]:
    """Give all of them the same order at once. Raise the first error after all have answered."""
    orders = [c.order(do, **how) for c in children]
    wait(orders)
    return [o.result() for o in orders]


def serve(name: str, make: Callable[[], Any]) -> None:
    """In a child: make the object and carry out orders. This process ends with its parent.

    Args:
        name: Goes before the text of errors that are not xfer's.
    """
    out, orders, made = os.fdopen(os.dup(1), "w"), SimpleQueue[dict[str, Any]](), None
    os.dup2(2, 1)

    def listen() -> None:
        for line in open(0, closefd=False):
            orders.put(json.loads(line))
        os._exit(3)

    Thread(target=listen, daemon=True).start()
    while True:
        try:
            if made is None:
                made, answer = make(), None
            else:
                order = orders.get()
                answer = getattr(made, order.pop("do"))(**order)
            said: dict[str, Any] = {"ok": answer}
        except Exception as e:
            traceback.print_exc()
            if not isinstance(e, XferError):
                first = str(e).strip().splitlines()[:6] or ["no message"]
                e = XferError(f"{name}: {type(e).__name__}: " + "\n    ".join(first))
            said = {"error": e.to_wire()}
        print(json.dumps(said), file=out, flush=True)
        if made is None:
            os._exit(1)
