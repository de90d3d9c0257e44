"""Timelines, which show how the time of a refit is spent.

With XFER_TIMELINE=FOLDER in its environment, a process notes moments of each refit in memory. It writes them into a file of its
own in that folder after the engine serves again. `xfer timeline FOLDER` (cli/timelines.py) shows them. Without the variable a
moment costs one call.

Times are of the host's monotonic clock, so only moments of the same host can be compared. Not here: the calls of `mark` (in the
coordinator, lane.py, refit.py, worker.py, controller.py) and the seconds of every report (report.py).
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from xfer.plan.fabric import host_identity

VARIABLE = "XFER_TIMELINE"
_log = logging.getLogger("xfer")
_writing = threading.Lock()
_moments: deque[tuple[float, str, str]] | None = deque() if os.environ.get(VARIABLE) else None


HUB = "coordinator"
ASIDE_S = 0.2
"""Seconds after which a worker writes: by then its engine has dropped its caches and serves."""


def mark(who: str, what: str) -> None:
    """Note a moment, now, if a timeline is wanted."""
    kept = _moments
    if kept is not None:
        kept.append((time.monotonic(), who, what))


def nvtx(name: str) -> AbstractContextManager[None]:
    """Return an NVTX range on this thread for a profiler such as Nsight Systems; nothing where torch has no CUDA."""
    return torch.cuda.nvtx.range(f"xfer: {name}") if torch.version.cuda is not None else nullcontext()


def write(attempt: int, session: str = "", wait_s: float = 0.0) -> None:
    """Write the moments that were noted since the last call.

    If the folder cannot be written, this logs one warning and stops the timeline; the refit does not fail.

    Args:
        attempt: The attempt that the moments belong to.
        session: The coordinator's name of the session.
        wait_s: If not 0, return at once and write that many seconds later, on a thread that the process waits for at its exit.
    """
    noted, kept = [], _moments
    while kept:
        try:
            noted.append(kept.popleft())
        except IndexError:  # another thread of this process has taken the last one
            break
    if noted and wait_s:
        threading.Timer(wait_s, _put, (attempt, session, noted)).start()
    elif noted:
        _put(attempt, session, noted)


def _put(attempt: int, session: str, noted: list[tuple[float, str, str]]) -> None:
    global _moments
    with _writing:
        if _moments is None:
            return
        try:
            folder = Path(os.environ[VARIABLE])
            folder.mkdir(parents=True, exist_ok=True)
            entry = {"attempt": attempt, "session": session, "host": host_identity(), "moments": noted}
            line = json.dumps(entry).encode() + b"\n"
            to = os.open(
                folder / f"{host_identity()}-{os.getpid()}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666
            )
            try:
                # One call, so that a concurrent reader, or a kill, seldom leaves half a line.
                if os.write(to, line) < len(line):
                    raise OSError("the last line was written in part only; is the disk full?")
            finally:
                os.close(to)
        except OSError as e:
            _log.warning("xfer: no timeline is kept any more: %s", e)
            _moments = None
