"""The README's first command with fewer steps: it ends well, and says so, on any machine that runs the tests."""

import contextlib
import io
import os
import signal
import sys
import threading
import time

from examples.demo import run
from tests.support import forge
from tests.support.marks import BOTH
from tests.support.proc import PATIENCE, PYTHON, environment

pytestmark = BOTH


def test_the_demo_ends_with_a_live_engine_that_equals_a_fresh_one(tmp_path, monkeypatch):
    """Without a terminal it also prints each event when it happens. scripts/nightly.sh runs the demo as users do."""
    children, writes = [], []

    class Stamped(io.TextIOBase):
        def write(self, text: str) -> int:
            writes.append((time.monotonic(), text))
            return len(text)

    def start(command, *, env, cwd, stderr, **_):
        children.append(forge.start(command[0], command[1:], env, cwd, None, stderr))
        return children[-1]

    def end() -> None:  # the demo then reports a child that ended
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

    monkeypatch.setattr(run, "Popen", start)
    for name, value in environment().items():  # that of the forges
        monkeypatch.setenv(name, value)
    pythons = [f"--{side}-python={PYTHON[side]}" for side in ("trainer", "engine")]
    monkeypatch.setattr(sys, "argv", ["run", "--steps", "2", "--work", str(tmp_path / "demo"), *pythons])
    late = threading.Timer(420 * PATIENCE, end)
    late.start()
    try:
        with contextlib.redirect_stdout(Stamped()):
            code = run.main()
    finally:
        late.cancel()
    printed = " ".join("".join(text for _, text in writes).split())  # its lines are broken at the terminal's width
    assert code == 0, printed
    assert "2 refits, every one verified: yes" in printed and "tokens and logprobs equal" in printed, printed
    order = ["starting 4 trainer", "connected", "step 1: loss", "step 2: loss", "starting a fresh vLLM", "done"]
    times = [next(when for when, text in writes if words in text) for words in order]
    assert times == sorted(times) and times[-1] - times[-2] > 1.0, "a fresh vLLM takes seconds to start"
