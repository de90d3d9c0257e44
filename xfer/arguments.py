"""Checks of the arguments of the public calls, before anything is sent.

A wrong argument raises an error on its own rank. It never reaches a socket, where the other end would reject it as a malformed
message. The functions `wrong_*` return one line per argument that cannot work, so that one error names all of them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsFloat, SupportsIndex

from xfer.coordinator.messages import Arguments
from xfer.errors import HandshakeError, XferError
from xfer.plan.options import MAX_BUCKET
from xfer.rendezvous.channel import check_token, parse_address

LABEL_CHARS = 256
OWN_LABELS = "xfer:"
"""Prefix of the labels that xfer itself gives to engines."""
LARGEST_NUMBER = 1 << 62
LONGEST_S = 1e8
PAUSE_MODES = ("keep", "keep_cache", "wait", "abort")


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels that a session's refits have used. A call that raised uses no label: it may be made again with the same one.

    Equal on all ranks, since they get equal outcomes.

    Attributes:
        last: Label of the last refit; None before the first.
        number: The highest label that is a number; None if there is none.
    """

    last: int | str | None = None
    number: int | None = None

    def after(self, label: int | str) -> Labels:
        """Return the labels after a refit with this label."""
        number = self.number if isinstance(label, str) else max(label, label if self.number is None else self.number)
        return Labels(label, number)

    def wrong(self, label: int | str) -> list[str]:
        """Return one line if this label is not new: two sets of weights would have the same name."""
        if str(label) == str(self.last):  # as engines compare them, which keep labels as text
            return [f"version={label!r}: the last refit committed {self.last!r}; each version takes a label of its own"]
        if self.number is not None and not isinstance(label, str) and label <= self.number:
            last = "" if self.last == self.number else f", the last label was {self.last!r}"
            return [f"version={label!r}: numbers rise, and a refit has committed {self.number}{last}"]
        return []


@dataclass(frozen=True, slots=True)
class RefitOptions:
    """The arguments of a call, as its caller gave them. `Session.refit` documents them; `publish` has another `wait`."""

    version: object = None
    verify: object = False
    wait: object = "commit"
    min_replicas: object = None
    deadline_s: object = None
    delta: object = None
    at_once: object = None
    stage: object = False
    stage_budget: object = None

    def checked(self, replicas: int, default_s: float, used: Labels, route: str) -> Arguments:
        """Check them.

        Args:
            replicas: Number of replicas of the session.
            default_s: Deadline if none is given.
            used: Labels of earlier refits.
            route: Name of the session's route.

        Returns:
            What all trainers ask the coordinator for.

        Raises:
            XferError: Some arguments cannot work; it names all of them.
        """
        bad: list[str] = []
        label = _label(self.version, bad)
        bad += used.wrong(label) if label is not None else []
        verify = False
        try:
            verify = bool(self.verify)
        except Exception:
            bad.append(f"verify={self.verify!r}: true or false")
        if self.wait not in ("commit", "sources", "ready"):
            bad.append(f'wait={self.wait!r}: "commit" or "sources"; publish() returns earlier ("ready")')
        elif self.wait == "ready" and route != "direct":
            bad.append(
                "publish(): this route gathers over the process groups that the next step uses; call refit(), or use xfer.Direct()"
            )
        bad += self._wrong_delta(route) + self._wrong_stage(route)
        turns = 0 if self.at_once is None else whole(self.at_once)
        if self.at_once is not None:
            bad += wrong_whole("at_once", self.at_once, 1)
        budget = LARGEST_NUMBER if self.stage_budget is None else whole(self.stage_budget)
        want = replicas if self.min_replicas is None else whole(self.min_replicas)
        if want is None or not 0 <= want <= replicas:
            told = f"min_replicas={self.min_replicas!r}"
            bad.append(f"{told}: a whole number from 0 to {replicas}, the replicas that connect() was told")
        limit = default_s if self.deadline_s is None else seconds(self.deadline_s)
        if limit is None:
            bad += wrong_seconds("deadline_s", self.deadline_s)
        if bad or want is None or limit is None or turns is None:
            raise XferError("nccl_xfer_refit() was called with arguments that cannot work", bad)
        scratch = budget if self.stage else None
        return Arguments(label, verify, want, limit, self.delta == "auto", min(turns, replicas), scratch)

    def _wrong_delta(self, route: str) -> list[str]:
        told = f"delta={self.delta!r}"
        if self.delta not in (None, "auto"):
            return [f'{told}: None or "auto"']
        if self.delta is not None and route != "direct":
            return [f"{told}: this route always sends all bytes; leave delta out, or connect(route=xfer.Direct())"]
        return []

    def _wrong_stage(self, route: str) -> list[str]:
        bad, budget = [], LARGEST_NUMBER if self.stage_budget is None else whole(self.stage_budget)
        if self.stage not in (False, True):
            bad.append(f"stage={self.stage!r}: true or false")
        elif self.stage and route != "direct":
            bad.append(
                "stage=True: the packed route loads whole tensors into live weights and stages nothing; use xfer.Direct()"
            )
        elif self.stage_budget is not None and not self.stage:
            bad.append(f"stage_budget={self.stage_budget!r}: it is for stage=True")
        if budget is None or not 0 < budget <= LARGEST_NUMBER:
            bad.append(f"stage_budget={self.stage_budget!r}: bytes that each worker may take, at least 1")
        return bad


def wrong_seconds(name: str, value: object) -> list[str]:
    """Return one line if `value` is no deadline."""
    good = seconds(value) is not None
    return [] if good else [f"{name}={value!r}: seconds, more than 0 and at most {LONGEST_S:.0f}"]


def wrong_globs(name: str, value: Sequence[str]) -> list[str]:
    """Return one line for each pattern that no message can carry."""
    if not _listed(value):
        return [f"{name}={value!r}: a list of patterns"]
    return [f"{name}: {v!r} is not a text of 1 to {LABEL_CHARS} characters" for v in value if not _sendable(v)]


def wrong_whole(name: str, value: object, least: int, most: int = (1 << 31) - 1) -> list[str]:
    """Return one line if `value` is no whole number from `least` to `most`, by default the largest in a message."""
    number = whole(value)
    if number is not None and least <= number <= most:
        return []
    beyond = number is not None and number > most
    return [f"{name}={value!r}: a whole number, at {f'most {most}' if beyond else f'least {least}'}"]


def wrong_meeting(token: str | None, *rendezvous: str) -> list[str]:
    """Return one line for each of these that allows no connection. The token is not shown."""
    bad = ["token: none is given, and XFER_TOKEN is not set"] if token is None else []
    checks = [(check_token, token)] if token is not None else []
    for check, value in (*checks, *((parse_address, r) for r in rendezvous)):
        try:
            check(value)
        except HandshakeError as e:
            bad.append(e.message)
    return bad


def wrong_trainer(trainer: object) -> list[str]:
    """Return one line if `trainer` is no adapter; a model is the usual mistake."""
    if all(hasattr(trainer, name) for name in ("rank", "world", "device", "read")):
        return []
    return [
        f"trainer: {type(trainer).__name__} is no trainer adapter; wrap the model: xfer.TensorTrainer(module), or "
        "xfer.MegatronTrainer(model_chunks, bridge)"
    ]


def wrong_engines(engines: object) -> list[str]:
    """Return one line if `engines` is no list, for example one engine."""
    return [] if _listed(engines) else [f"engines={engines!r}: a list of engines, also where there is one"]


def wrong_pause_mode(mode: object) -> list[str]:
    """Return one line if `mode` is none of vLLM's pause modes."""
    return [] if mode in PAUSE_MODES else [f"pause_mode={mode!r}: {', '.join(map(repr, PAUSE_MODES))}"]


def wrong_bucket(value: object) -> list[str]:
    """Return one line if `value` is no size of a message."""
    return wrong_whole("bucket_bytes", value, 1 << 12, MAX_BUCKET)


def _listed(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _label(version: object, bad: list[str]) -> int | str | None:
    """Return a label as an int (whole numbers of any type) or as a str; None if it cannot work, with a line in `bad`."""
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
    """Return `value` as an int if it is a whole number of any type, else None."""
    if not isinstance(value, SupportsIndex):
        return None
    try:
        return int(operator.index(value))
    except TypeError:
        return None


def seconds(value: object) -> float | None:
    """Return `value` as a float if it is a deadline in seconds, else None."""
    if not isinstance(value, str | SupportsFloat | SupportsIndex):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if 0 < number <= LONGEST_S and math.isfinite(number) else None
