"""A pytest plugin that looks for races: threads stop for a moment at random calls and returns of xfer's and the tests' code.

    python -m pytest -p tests.support.jitter tests/functional/test_session_*.py --ignore-glob '*_cases.py' --ignore-glob '*_faults.py'

Sleeping, not computing: several such runs at once fit on one core, each with a seed of its own (named at the end of a run;
XFER_JITTER_SEED to set it, though threads do not repeat themselves exactly). Tests that measure time may fail by it, and a
failure may be the test's own race; it has also shown defects of xfer that busy machines had not. Of processes that a test
starts, all threads but the main one are slowed with XFER_JITTER_CHILDREN=1. For developers; CI does not run it.
"""

from __future__ import annotations

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
    terminalreporter.write_line(
        f"jitter: XFER_JITTER_SEED={SEED}, {OFTEN:.2%} of calls and returns, up to {SECONDS * 1e3:g} ms"
    )
