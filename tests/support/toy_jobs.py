"""Toy jobs of real processes (toy_main.py), started and waited for together: their exit codes and what they said."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from examples.common.ports import free_port
from tests.support.proc import PATIENCE, ROOT, environment


@dataclass(frozen=True)
class Ended:
    """`name`: "trainer 0" or "engine". `code`: its exit code, negative for a signal."""

    name: str
    code: int
    said: str


class ToyJob:
    """`trainers` ranks and one engine of two workers; starts at once. `engine_python`: another Python for the engine.
    `rendezvous`, `token`: default ones of its own."""

    def __init__(
        self, seed: int, trainers: int = 4, engine_python: str = sys.executable, rendezvous: str = "", token: str = ""
    ):
        self.rendezvous = rendezvous or f"tcp://127.0.0.1:{free_port()}"
        env = environment(XFER_TOKEN=token or secrets.token_hex(16))
        common = ["-m", "tests.support.toy_main"]
        self._processes = {}
        for name, command in [
            *(
                (
                    f"trainer {r}",
                    [sys.executable, *common, "trainer", self.rendezvous, f"{seed}", f"{r}", f"{trainers}"],
                )
                for r in range(trainers)
            ),
            ("engine", [engine_python, *common, "engine", self.rendezvous, f"{seed}"]),
        ]:
            self._processes[name] = subprocess.Popen(
                command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )  # fmt: skip

    def ended(self, seconds: float = 200.0) -> list[Ended]:
        """When all have ended; AssertionError, and nobody left running, when they have not by then."""
        until = time.monotonic() + seconds * PATIENCE
        try:
            return [
                Ended(name, p.wait(max(0.1, until - time.monotonic())), p.stdout.read())
                for name, p in self._processes.items()
            ]
        except subprocess.TimeoutExpired as e:
            raise AssertionError(
                f"a process of a toy job still runs after {seconds * PATIENCE:.0f} s: {e.cmd}"
            ) from None
        finally:
            self.kill()

    def kill(self) -> None:
        for p in self._processes.values():
            if p.poll() is None:
                p.kill()
                p.wait(20)


def bad(ended: Sequence[Ended]) -> str:
    """What those said that ended otherwise than with 0."""
    return "\n".join(f"--- {e.name} ended with {e.code}\n{e.said[-1500:]}" for e in ended if e.code != 0)
