"""Reads and summarizes the timelines that participants/timeline.py writes, for `xfer timeline`."""

from __future__ import annotations

import json
import logging
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xfer.errors import XferError

_log = logging.getLogger("xfer")


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


def read(folder: Path, note: Callable[[str], None] = _log.warning) -> Iterator[Moment]:
    """Yield all moments in a folder, in no order.

    Args:
        folder: A folder of files that `xfer.participants.timeline.write` made.
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
