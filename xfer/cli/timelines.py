"""Reads and summarizes the timelines that timeline.py writes, for `xfer timeline`."""

from __future__ import annotations

import logging
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from xfer.coordinator.messages import FIRST_COPIES
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
        folder: A folder of files that `xfer.timeline.write` made.
        note: Called with a message about an incomplete last line, which is left out: its writer is still writing, or has ended.

    Raises:
        XferError: A file, or a line of it, is not from `write`; it names them.
    """
    for file in sorted(folder.glob("*.jsonl")):
        move = f"move it out of {folder}"
        try:
            lines = file.read_bytes().split(b"\n")
        except OSError as e:
            raise XferError(f"{file.name} is no timeline: {e.strerror}; {move}") from None
        for number, line in enumerate(lines, 1):
            if not line and number == len(lines):
                continue
            where = f"{file.name}, line {number},"
            try:
                entry = msgspec.json.decode(line, type=_TimelineLine)
            except (msgspec.MsgspecError, UnicodeError) as e:
                if number < len(lines) or isinstance(e, msgspec.ValidationError):
                    raise XferError(f"{where} is no timeline: {type(e).__name__}: {e}; {move}") from None
                note(f"{where} is there in part only and left out: it is being written, or was never finished")
                continue
            for at, who, what in entry.moments:
                yield Moment(at, who, what, entry.host, entry.attempt, entry.session)


class _TimelineLine(msgspec.Struct):
    """A line of such a file."""

    host: str
    attempt: int
    moments: list[tuple[float, str, str]]
    session: str = ""


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
    after: dict[str, dict[tuple[str, str, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for attempt in sorted({x.attempt for x in found if x.attempt < FIRST_COPIES})[skip:]:
        for host, some in of_attempt(found, attempt).items():
            seen = Counter[tuple[str, str]]()
            for x in some:
                after[host][x.who, x.what, seen[x.who, x.what]].append(x.at - some[0].at)
                seen[x.who, x.what] += 1
    return {
        host: sorted(Typical(statistics.median(s), *key[:2], min(s), max(s), len(s)) for key, s in of.items())
        for host, of in after.items()
    }


def of_attempt(moments: Iterable[Moment], attempt: int | None = None) -> dict[str, list[Moment]]:
    """Return the moments of one attempt, by default the last refit, by host and in order. Each host has its own clock."""
    found = list(moments)
    if attempt is None:
        attempt = max((x.attempt for x in found if x.attempt < FIRST_COPIES), default=0)
    out: dict[str, list[Moment]] = defaultdict(list)
    for x in sorted(found):
        if x.attempt == attempt:
            out[x.host].append(x)
    return out


def chrome_trace(moments: Iterable[Moment]) -> dict[str, Any]:
    """Make a trace in Chrome's Trace Event Format, which Perfetto shows.

    A host is a process of the trace, a participant one of its threads. A slice lasts from one moment of a participant to its next one
    in the same refit, and has the name of the later moment, which ended it. Each host begins at 0, because each has its own clock.

    Args:
        moments: Moments of any refits of one session.
    """
    events: list[dict[str, Any]] = []
    pids: dict[str, int] = {}
    tids: dict[tuple[str, str], int] = {}
    begins: dict[str, float] = {}
    last: dict[tuple[str, str], Moment] = {}

    def name(kind: str, label: str, **where: int) -> None:
        events.append({"ph": "M", "name": f"{kind}_name", **where, "args": {"name": label}})

    for x in sorted(moments):
        key = x.host, x.who
        if x.host not in pids:
            pids[x.host] = len(pids) + 1
            begins[x.host] = x.at
            name("process", x.host, pid=pids[x.host])
        if key not in tids:
            tids[key] = len(tids) + 1
            name("thread", x.who, pid=pids[x.host], tid=tids[key])
        before = last.get(key)
        same = before is not None and before.attempt == x.attempt
        since = before.at if before is not None and same else x.at
        shape = {"ph": "X", "dur": (x.at - since) * 1e6} if same else {"ph": "i", "s": "t"}
        where = {"pid": pids[x.host], "tid": tids[key], "ts": (since - begins[x.host]) * 1e6}
        events.append({**shape, "name": x.what, "cat": "refit", **where, "args": {"attempt": x.attempt}})
        last[key] = x
    return {"traceEvents": events, "displayTimeUnit": "ms"}
