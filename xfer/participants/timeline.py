"""Timelines, which show how the time of a refit is spent.

With XFER_TIMELINE=FOLDER in its environment, a process notes moments of each refit in memory. It writes them into a file of its
own in that folder after the engine serves again. `xfer timeline FOLDER` shows them. Without the variable a moment costs one call.

Times are of the host's monotonic clock, so only moments of the same host can be compared. Not here: the calls of `mark` (in the
coordinator, lane.py, refit.py, worker.py, controller.py) and the seconds of every report (report.py).
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xfer.errors import XferError

VARIABLE = "XFER_TIMELINE"
_log = logging.getLogger("xfer")
_writing = threading.Lock()
_moments: deque[tuple[float, str, str]] | None = deque() if os.environ.get(VARIABLE) else None


HUB = "coordinator"
ASIDE_S = 0.2
"""Seconds after which a worker writes: by then its engine has dropped its caches and serves."""


@dataclass(frozen=True, slots=True, order=True)
class Moment:
    """One moment of a refit.

    Attributes:
        at: Seconds of the host's monotonic clock.
        who: Label of the participant, e.g. "trainer 0".
        what: What happened.
        host: The host's identity.
        attempt: Number of the refit attempt.
        session: The coordinator's name of the session.
    """

    at: float
    who: str
    what: str
    host: str
    attempt: int
    session: str = ""


def mark(who: str, what: str) -> None:
    """Note a moment, now, if a timeline is wanted."""
    kept = _moments
    if kept is not None:
        kept.append((time.monotonic(), who, what))


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
    from xfer.rendezvous.client import host_identity

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


def read(folder: Path, note: Callable[[str], None] = _log.warning) -> Iterator[Moment]:
    """Yield all moments in a folder, in no order.

    Args:
        folder: A folder of files that `write` made.
        note: Called with a message about an incomplete last line, which is left out: its writer is still writing, or has ended.

    Raises:
        XferError: A file, or a line of it, is not from `write`; it names them.
    """
    for file in sorted(folder.glob("*.jsonl")):
        try:
            lines = file.read_bytes().decode().split("\n")
        except (OSError, UnicodeDecodeError) as e:
            why = e.strerror if isinstance(e, OSError) else "it is no text"
            raise XferError(f"{file.name} is no timeline: {why}; move it out of {folder}") from None
        for number, line in enumerate(lines, 1):
            if not line and number == len(lines):
                continue
            try:
                yield from _moments_in(json.loads(line))
            except json.JSONDecodeError as e:
                if number < len(lines):
                    raise _no_timeline(file, number, e) from None
                note(
                    f"{file.name}, line {number}, is there in part only and left out: it is being written, or was never finished"
                )
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as e:
                raise _no_timeline(file, number, e) from None


def _moments_in(entry: Any) -> list[Moment]:
    host, attempt, session = str(entry["host"]), int(entry["attempt"]), str(entry.get("session", ""))
    return [Moment(float(at), str(who), str(what), host, attempt, session) for at, who, what in entry["moments"]]


def _no_timeline(file: Path, line: int, e: Exception) -> XferError:
    return XferError(
        f"{file.name}, line {line}, is no timeline: {type(e).__name__}: {e}; move that file out of {file.parent}"
    )


def of_session(moments: Iterable[Moment], session: str | None = None) -> tuple[list[Moment], list[str]]:
    """Select the moments of one session: a job that was restarted numbers its refits from 1 again.

    Args:
        moments: Moments of any sessions.
        session: Beginning of the session's name; the last of several such sessions counts. Default: the last session.

    Returns:
        The moments of that session, and the names of all sessions.
    """
    found = list(moments)
    names = sorted({x.session for x in found})
    wanted = [n for n in names if n.startswith(session or "")]
    return [x for x in found if wanted and x.session == wanted[-1]], names


@dataclass(frozen=True, slots=True, order=True)
class Typical:
    """One moment over many refits, in seconds after the first moment of its refit on that host.

    Attributes:
        at: The median.
        who: Label of the participant.
        what: What happened.
        least: The minimum.
        most: The maximum.
        count: Number of refits with this moment.
    """

    at: float
    who: str
    what: str
    least: float
    most: float
    count: int


def typical(moments: Iterable[Moment], skip: int = 0) -> dict[str, list[Typical]]:
    """Summarize all refits but the first `skip`, by host and in order. If a refit has a moment twice, these are two moments."""
    found = list(moments)
    wanted = sorted({x.attempt for x in found})[skip:]
    out: dict[str, dict[tuple[str, str, int], list[float]]] = {}
    for attempt in wanted:
        for host, some in of_attempt(found, attempt).items():
            seen: Counter[tuple[str, str]] = Counter()
            for x in some:
                after = out.setdefault(host, {}).setdefault((x.who, x.what, seen[x.who, x.what]), [])
                after.append(x.at - some[0].at)
                seen[x.who, x.what] += 1
    return {
        host: sorted(
            Typical(statistics.median(s), who, what, min(s), max(s), len(s)) for (who, what, _), s in found.items()
        )
        for host, found in out.items()
    }


def of_attempt(moments: Iterable[Moment], attempt: int | None = None) -> dict[str, list[Moment]]:
    """Return the moments of one attempt, by default the last, by host and in order. Each host has its own clock."""
    found = list(moments)
    attempt = max((x.attempt for x in found), default=0) if attempt is None else attempt
    out: dict[str, list[Moment]] = {}
    for x in sorted(found):
        if x.attempt == attempt:
            out.setdefault(x.host, []).append(x)
    return out
