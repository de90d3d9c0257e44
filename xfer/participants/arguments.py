"""Arguments of the public calls, checked before a word is sent: what one rank gets wrong is told in its own error, and
never reaches a socket as a message that the other end must take for an attack."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from xfer.errors import HandshakeError, XferError
from xfer.plan.options import MAX_BUCKET
from xfer.rendezvous.channel import check_token, parse_address

LABEL_CHARS = 256
OWN_LABELS = "xfer:"
"""What labels that xfer itself gives to engines begin with."""
LARGEST_NUMBER = 1 << 62
LONGEST_S = 1e8
PAUSE_MODES = ("keep", "wait", "abort")


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels that a session's refits have used up. A call that raised used none: it may be made again under its label.

    last: of the last refit; number: the highest number. Equal on all ranks, which get equal outcomes.
    """

    last: int | str | None = None
    number: int | None = None

    def after(self, label: int | str) -> Labels:
        number = self.number if isinstance(label, str) else max(label, label if self.number is None else self.number)
        return Labels(label, number)

    def wrong(self, label: int | str) -> list[str]:
        """One line when this label is no new one: two sets of weights would have one name."""
        if str(label) == str(self.last):  # as engines compare them, which keep labels as text
            return [f"version={label!r}: the last refit committed {self.last!r}; each version takes a label of its own"]
        if self.number is not None and not isinstance(label, str) and label <= self.number:
            last = "" if self.last == self.number else f", the last label was {self.last!r}"
            return [f"version={label!r}: numbers rise, and a refit has committed {self.number}{last}"]
        return []


@dataclass(frozen=True, slots=True)
class Call:
    """`nccl_xfer_refit`'s arguments. `version`: None where the coordinator is to number it. `want`: replicas that must commit;
    `seconds`: the deadline, from the call on."""

    version: int | str | None
    verify: bool
    wait: str
    want: int
    seconds: float


def checked_call(
    version: object,
    verify: object,
    wait: object,
    min_replicas: object,
    deadline_s: object,
    replicas: int,
    default_s: float,
    used: Labels,
) -> Call:
    """XferError, with all of them, when there are arguments that cannot work. `used`: labels of earlier refits."""
    bad: list[str] = []
    label = _label(version, bad)
    bad += used.wrong(label) if label is not None else []
    try:
        verified = bool(verify)
    except Exception:
        bad.append(f"verify={verify!r}: true or false")
    if wait not in ("commit", "sources"):
        bad.append(f'wait={wait!r}: "commit" or "sources"')
    want = replicas if min_replicas is None else whole(min_replicas)
    if want is None or not 0 <= want <= replicas:
        bad.append(
            f"min_replicas={min_replicas!r}: a whole number from 0 to {replicas}, the replicas that connect() was told"
        )
    if deadline_s is not None:
        bad += wrong_seconds("deadline_s", deadline_s)
    if bad:
        raise XferError("nccl_xfer_refit() was called with arguments that cannot work", bad)
    return Call(label, verified, wait, want, default_s if deadline_s is None else float(deadline_s))


def wrong_seconds(name: str, value: object) -> list[str]:
    """One line when `value` is no deadline."""
    try:
        good = 0 < float(value) <= LONGEST_S and math.isfinite(float(value))
    except (TypeError, ValueError):
        good = False
    return [] if good else [f"{name}={value!r}: seconds, more than 0 and at most {LONGEST_S:.0f}"]


def wrong_globs(name: str, value: Sequence[str]) -> list[str]:
    """One line per pattern that no message could carry."""
    if not _listed(value):
        return [f"{name}={value!r}: a list of patterns"]
    return [f"{name}: {v!r} is not a text of 1 to {LABEL_CHARS} characters" for v in value if not _sendable(v)]


def wrong_whole(name: str, value: object, least: int, most: int = (1 << 31) - 1) -> list[str]:
    """One line when `value` is no whole number from `least` to what a message could carry."""
    number = whole(value)
    if number is not None and least <= number <= most:
        return []
    beyond = number is not None and number > most
    return [f"{name}={value!r}: a whole number, at {f'most {most}' if beyond else f'least {least}'}"]


def wrong_meeting(token: object, *rendezvous: object) -> list[str]:
    """One line for each of these with which nobody could meet. The token is not shown."""
    bad = ["token: none is given, and XFER_TOKEN is not set"] if token is None else []
    checks = [(check_token, token)] if token is not None else []
    for check, value in (*checks, *((parse_address, r) for r in rendezvous)):
        try:
            check(value)
        except HandshakeError as e:
            bad.append(e.message)
    return bad


def wrong_trainer(trainer: object) -> list[str]:
    """One line when `trainer` is no adapter; a model is the usual mistake."""
    if all(hasattr(trainer, name) for name in ("rank", "world", "device", "read")):
        return []
    return [
        f"trainer: {type(trainer).__name__} is no trainer adapter; wrap the model: xfer.TensorTrainer(module), or "
        "xfer.MegatronTrainer(model_chunks, bridge)"
    ]


def wrong_engines(engines: object) -> list[str]:
    """One line when `engines` is one engine, or none at all."""
    return [] if _listed(engines) else [f"engines={engines!r}: a list of engines, also where there is one"]


def wrong_pause_mode(mode: object) -> list[str]:
    return [] if mode in PAUSE_MODES else [f"pause_mode={mode!r}: {', '.join(map(repr, PAUSE_MODES))}"]


def wrong_bucket(value: object) -> list[str]:
    """One line when `value` is no size of a message."""
    return wrong_whole("bucket_bytes", value, 1 << 12, MAX_BUCKET)


def _listed(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _label(version: object, bad: list[str]) -> int | str | None:
    """In the caller's type: whole numbers of any kind as int, text as str."""
    if version is None:
        return None
    label = version if isinstance(version, str) else whole(version)
    good = (
        _sendable(label) and not label.startswith(OWN_LABELS)
        if isinstance(label, str)
        else label is not None and abs(label) <= LARGEST_NUMBER
    )
    if good:
        return label
    shown = repr(version) if len(repr(version)) < 80 else f"{repr(version)[:76]} …"
    bad.append(
        f"version={shown}: a number of at most 62 bits, or a text of 1 to {LABEL_CHARS} characters that does not begin "
        f"with {OWN_LABELS!r}"
    )
    return None


def _sendable(text: object) -> bool:
    if not isinstance(text, str) or not 1 <= len(text) <= LABEL_CHARS:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def whole(value: object) -> int | None:
    """`value` as an int where it is one of any kind, else None."""
    try:
        return int(operator.index(value))
    except TypeError:
        return None
