"""Where the time of a refit goes, if asked for: with XFER_TIMELINE=FOLDER in its environment every process notes moments of each
refit in memory and writes them into a file of its own there, after the engine serves again. `xfer timeline FOLDER` shows them.

Without it a moment costs one call. Clocks are the host's monotonic one, so moments of one host can be compared. Not here:
what is noted (where it happens: coordinator, lane.py, refit.py, worker.py, controller.py), the seconds of every report (report.py).
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
"""After which a worker writes: by then its engine has dropped its caches and serves."""


@dataclass(frozen=True, slots=True, order=True)
class Moment:
    """`at`: seconds, of the host's clock."""

    at: float
    who: str
    what: str
    host: str
    attempt: int
    session: str = ""


def mark(who: str, what: str) -> None:
    kept = _moments
    if kept is not None:
        kept.append((time.monotonic(), who, what))


def write(attempt: int, session: str = "", wait_s: float = 0.0) -> None:
    """What was noted since the last time, as of this attempt. A folder that cannot be written is said once, and no refit's fault.

    session: the coordinator's name for it.
    wait_s: return at once, and write that many seconds later, in a thread that this process does not end before.
    """
    noted, kept = [], _moments
    while kept:
        try:
            noted.append(kept.popleft())
        except IndexError:  # another thread of this process has taken the last
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
                if os.write(to, line) < len(
                    line
                ):  # one call: whoever reads meanwhile, or kills us, seldom meets half a line
                    raise OSError("the last line was written in part only; is the disk full?")
            finally:
                os.close(to)
        except OSError as e:
            _log.warning("xfer: no timeline is kept any more: %s", e)
            _moments = None


def read(folder: Path, note: Callable[[str], None] = _log.warning) -> Iterator[Moment]:
    """All moments in a folder, in no order. XferError naming the file, and the line, that is not one of `write`.

    note: told of a last line that is there in part only: it is being written, or whoever wrote it is gone. It is left out.
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
    """Moments of one session, by default the last that was opened, and the names of all: a job that was started again numbers its
    refits from one again. session: how its name begins; of several such it is the last."""
    found = list(moments)
    names = sorted({x.session for x in found})
    wanted = [n for n in names if n.startswith(session or "")]
    return [x for x in found if wanted and x.session == wanted[-1]], names


@dataclass(frozen=True, slots=True, order=True)
class Typical:
    """One moment over many refits: `at`, `least` and `most` seconds after the first moment of its refit on that host (median and
    extremes), in `count` of them."""

    at: float
    who: str
    what: str
    least: float
    most: float
    count: int


def typical(moments: Iterable[Moment], skip: int = 0) -> dict[str, list[Typical]]:
    """All refits but the first `skip`, by host and in order. A moment that a refit has twice counts as two."""
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
    """Moments of one attempt, by default the last, by host and in order. Hosts' clocks are their own."""
    found = list(moments)
    attempt = max((x.attempt for x in found), default=0) if attempt is None else attempt
    out: dict[str, list[Moment]] = {}
    for x in sorted(found):
        if x.attempt == attempt:
            out.setdefault(x.host, []).append(x)
    return out
