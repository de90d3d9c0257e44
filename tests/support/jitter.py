"""A pytest plugin that looks for races: threads stop for a moment at random calls and returns of xfer's and the tests' code.
CONTRIBUTING.md has the command. Threads do not repeat themselves exactly, also with the seed that a run names. Tests that measure
time may fail by it."""

import os
import random
import sys
import threading
import time
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
HERE = tuple(f"{ROOT}/{d}/" for d in ("xfer", "tests"))
OFTEN = float(os.environ.get("XFER_JITTER_OFTEN", "0.004"))
"""Which share of calls and returns stops."""
SECONDS = float(os.environ.get("XFER_JITTER_S", "0.03"))
"""For how long at most."""
SEED = int(os.environ.get("XFER_JITTER_SEED") or random.SystemRandom().randrange(1 << 30))

_chance = random.Random(SEED)
_ours: dict[str, bool] = {}


def stop(frame, event, arg) -> None:
    name = frame.f_code.co_filename
    if (ours := _ours.get(name)) is None:
        ours = _ours[name] = name.startswith(HERE) and name != __file__
    if ours and _chance.random() < OFTEN:
        time.sleep(_chance.random() * SECONDS)


def pytest_runtest_setup(item) -> None:
    threading.setprofile(stop)
    sys.setprofile(stop)


def pytest_runtest_teardown(item) -> None:
    sys.setprofile(None)
    threading.setprofile(None)


def pytest_terminal_summary(terminalreporter) -> None:
    often = f"{OFTEN:.2%} of calls and returns, up to {SECONDS * 1e3:g} ms"
    terminalreporter.write_line(f"jitter: XFER_JITTER_SEED={SEED}, {often}")
