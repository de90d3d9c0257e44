"""Whole programs of the example as process groups, and what their steps say."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

from examples.grpo.gate import Row
from tests.support.proc import PATIENCE, PYTHON, ROOT, environment


class Group:
    """A process and all that it starts. Its output goes to a log."""

    def __init__(self, name: str, command: list[str], work: Path, **env: str):
        self.log = work / f"{name}.log"
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment(ENGINE_PYTHON=PYTHON["engine"], **env), start_new_session=True,
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def kill(self) -> None:
        """Ends the process and all below it at once: torchrun gives each rank a session of its own."""
        for end, pid in [(os.kill, p) for p in _below(self.process.pid)] + [(os.killpg, self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                end(pid, signal.SIGKILL)
        self.process.wait(20)


def _below(pid: int) -> list[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def until(condition, what: str, *groups: Group, seconds: float = 300, told=lambda: ""):
    """Waits for what the condition returns. `told`: more to say if it does not come."""
    end = time.monotonic() + seconds * PATIENCE
    while not (got := condition()):
        if time.monotonic() > end or any(g.process.poll() is not None for g in groups):
            logs = (g.log.read_text()[-4000:] for g in groups)
            raise AssertionError("\n".join([f"{what}: not within {seconds} s", told(), *logs]))
        time.sleep(0.1)
    return got


def trained(name: str, command: list[str], work: Path, most: float = 1.0001, **env: str) -> tuple[list[Row], str]:
    """The curve and the output of a loop that ended well: the version of each step is its number, and the gate held it
    below `most`."""
    group = Group(name, command, work, **env)
    try:
        code = group.process.wait(900 * PATIENCE)
    finally:
        group.kill()
    said = group.log.read_text()
    assert code == 0, said[-6000:]
    rows = steps_of(work / "curve.jsonl", most)
    assert [r.version for r in rows] == [str(i) for i in range(len(rows))]
    assert len(re.findall(r"^step .* reward .* KL ", said, re.M)) == len(rows)
    return rows, said


def steps_of(curve: Path, most: float = 1.0001) -> list[Row]:
    """The steps that a curve has by now. The gate held in each."""
    lines = curve.read_text().splitlines() if curve.exists() else []
    rows = [Row(**json.loads(line)) for line in lines if line.endswith("}")]
    assert all(1 <= r.error < most and r.kl >= 0 for r in rows), rows
    return rows


def printed(loop: Group) -> list[tuple[int, int]]:
    """(step, replicas away) of each line that a loop has printed, in order."""
    found = re.findall(r"^step +(\d+) .*? ms(?:  (\d) replicas away)?.*\n", loop.log.read_text(), re.M)
    return [(int(step), int(away or 0)) for step, away in found]
