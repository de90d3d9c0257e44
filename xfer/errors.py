"""All errors that xfer raises on purpose, with one class for each reaction of a caller.

An error carries *all* violations found, not only the first, and where it happened. A model has thousands of tensors, so violations
are printed, and sent to other processes, as one line per kind (`by_kind`). Errors cross control connections: `to_wire` gives
plain strings, `from_wire` finds the class by its name in this module, never by an import path. Programming errors, such as a
wrong type passed to an internal function, are ordinary TypeErrors.

Each class has a stable code, with which the text of its errors ends; docs/troubleshooting.md is indexed by it. Codes are made here
alone: they are not sent, and an error that quotes another one in its message or violations drops that one's code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

FEW = 8
"""Up to this many lines are shown as they are."""
KINDS_SHOWN = 40
EXAMPLES = 3
EXAMPLE_CHARS = 200
"""A line has at least EXAMPLES subjects of its kind, and more while all together have at most EXAMPLE_CHARS characters. Those
that differ in more than numbers come first."""

_CODE = re.compile(r"\s*\(XF\d{3}\)")


class XferError(Exception):
    """Base of all. By itself: impossible arguments, or an error that another rank's own code raised.

    Attributes:
        code: Stable code of the class. It never changes its meaning, and a class that is removed leaves a gap.
        violations: All violations, one line each: the subject (a tensor, a rank), a colon, what was expected and what to do. An
            error that came from another process has one line per kind instead.
        where: The process that raised it, such as "trainer 3" or "engine 0 worker 1"; empty if unknown.
    """

    code: ClassVar[str] = "XF100"

    def __init__(self, message: str, violations: Iterable[str] = (), *, where: str = ""):
        self.message, self.where = _CODE.sub("", message), where
        self.violations = tuple(_CODE.sub("", line) for line in violations)
        super().__init__(self.message)

    def __str__(self) -> str:
        head = f"[{self.where}] {self.message}" if self.where else self.message
        lines = "".join(f"\n  - {line}" for line in by_kind(self.violations))
        return f"{head}{lines}\n({self.code})" if lines else f"{head} ({self.code})"

    def line(self) -> str:
        """Class, message, first violation and code in one line, for logs and reports."""
        more = f" (and {len(self.violations)} more lines)" if len(self.violations) > 1 else ""
        first = f": {self.violations[0]}" if self.violations else ""
        return " ".join(f"{type(self).__name__}: {self.message}{first}{more} ({self.code})".split())

    def to_wire(self) -> tuple[str, str, tuple[str, ...], str]:
        # Of a class of another module this is its base.
        known = next(c for c in type(self).__mro__ if _BY_NAME.get(c.__name__) is c)
        return known.__name__, self.message, tuple(by_kind(self.violations)), self.where


def by_kind(violations: Sequence[str]) -> list[str]:
    """One line per kind of violation: the first of the kind, their number, and a few more of their subjects.

    Violations are of one kind if they are equal after their first ": ". If more than FEW lines are left, those that differ only in
    numbers (shapes, offsets) are of one kind, too. A list of at most FEW lines stays as it is.

    Args:
        violations: As in `XferError.violations`.

    Returns:
        At most KINDS_SHOWN lines, the last of which may count the rest.
    """
    lines = list(dict.fromkeys(violations))
    if len(lines) > FEW:
        lines = _grouped(violations, str)
    if len(lines) > FEW:
        lines = _grouped(violations, lambda said: re.sub(r"\b\d+", "0", said))
    if len(lines) <= KINDS_SHOWN:
        return lines
    shown = lines[: KINDS_SHOWN - 1]
    return [*shown, f"… and {len(lines) - len(shown)} more of other kinds"]


def _grouped(violations: Iterable[str], kind: Callable[[str], str]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for line in dict.fromkeys(violations):
        _, colon, said = line.partition(": ")
        groups.setdefault(kind(said if colon else line), []).append(line)
    return [_one_line(lines) for lines in groups.values()]


def _one_line(lines: Sequence[str]) -> str:
    if len(lines) == 1:
        return lines[0]
    subjects = [line.partition(": ")[0] for line in lines]
    # One tensor of each name, whatever its layer.
    unlike = {re.sub(r"\d+", "", subject): subject for subject in reversed(subjects)}
    others = list(dict.fromkeys([subjects[0], *reversed(unlike.values()), *subjects]))[1:]
    shown: list[str] = []
    chars = len(subjects[0])
    for subject in others:
        chars += len(subject)
        if len(shown) + 1 >= EXAMPLES and chars > EXAMPLE_CHARS:
            break
        shown.append(subject)
    more = ", …" if len(shown) + 1 < len(lines) else ""
    return f"{lines[0]} [{len(lines)} of this kind: also {', '.join(shown)}{more}]"


class LayoutError(XferError):
    """The layout of a model cannot be read, or the two sides describe tensors that do not fit each other."""

    code = "XF201"


class CoverageError(XferError):
    """A destination byte has no writer, two writers or no class; a trained tensor has no destination; or nothing that trains is
    sent."""

    code = "XF202"


class PlanMismatch(XferError):
    """Ranks computed different plans from what should be the same inputs. Nothing was moved."""

    code = "XF203"


class RebindError(XferError):
    """Storage changed in a way that cannot be re-planned at this point."""

    code = "XF204"


class HandshakeError(XferError):
    """A peer could not prove the token, or its hello does not match (wire version, torch, dtype support, sizes)."""

    code = "XF102"


class ProtocolError(XferError):
    """A malformed, oversized or out-of-order control message."""

    code = "XF103"


class PeerLost(XferError):
    """A process of the refit is gone. `drained`: its reads and writes of this process's memory have certainly ended."""

    code = "XF302"

    def __init__(self, message: str, violations: Iterable[str] = (), *, where: str = "", drained: bool = True):
        super().__init__(message, violations, where=where)
        self.drained = drained


class EngineLost(XferError):
    """An engine replica cannot serve any more without being restarted."""

    code = "XF303"


class DeadlineExceeded(XferError):
    """A wait ended at its deadline. The violations say per rank what was waited for."""

    code = "XF301"


class VerificationError(XferError):
    """Checksums of what was sent and of what lies in the engine differ, or trainer ranks hold different bytes of one tensor. The
    version was not committed."""

    code = "XF305"


class RefitFailed(XferError):
    """Fewer replicas committed than asked for, or another rank raised; the violations carry each cause."""

    code = "XF304"


class StaleWeights(XferError):
    """Parameters of the step before were used, or would have been: the new ones are on their owner and not here yet."""

    code = "XF306"


class Unsupported(XferError):
    """A feature, layout or order of calls that xfer does not support."""

    code = "XF101"


def out_of_memory(e: BaseException) -> bool:
    """Whether memory ran out: known by the type of Python's and torch's errors, by words in the host's and the driver's."""
    typed = any(c.__name__ in ("MemoryError", "OutOfMemoryError") for c in type(e).__mro__)
    words = ("out of memory", "can't allocate memory", "cannot allocate memory")
    return typed or isinstance(e, RuntimeError | OSError) and any(w in str(e).lower() for w in words)


_BY_NAME = {c.__name__: c for c in list(globals().values()) if isinstance(c, type) and issubclass(c, XferError)}
NAMES = tuple(_BY_NAME)


def from_wire(kind: str, message: str, violations: Iterable[str], where: str) -> XferError:
    """The error that `to_wire` described; an unknown kind becomes an XferError with the name in its message."""
    cls = _BY_NAME.get(kind)
    return cls(message, violations, where=where) if cls else XferError(f"{kind}: {message}", violations, where=where)
