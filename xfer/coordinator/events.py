"""Events that drive the coordinator, and the effects it asks for. Times are seconds of one monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from xfer.coordinator.messages import Message


@dataclass(frozen=True, slots=True)
class Connected:
    """A connection proved the job's token. `client`: a number that no other connection of this job has."""

    client: int


@dataclass(frozen=True, slots=True)
class Received:
    """A whole, valid message arrived."""

    client: int
    message: Message


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A connection ended, from either side."""

    client: int
    reason: str


@dataclass(frozen=True, slots=True)
class Unproven:
    """A caller could not prove the token and was sent away. `host`: where it called from."""

    host: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing happened but the passing of time: `Coordinator.wake_at` has come."""


@dataclass(frozen=True, slots=True)
class Send:
    client: int
    message: Message


@dataclass(frozen=True, slots=True)
class Close:
    """Close the connection, after what was sent to it."""

    client: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of the timeline (XFER_TIMELINE)."""

    text: str


Event = Union[Connected, Received, Disconnected, Unproven, Tick]  # noqa: UP007 (evaluated at run time on Python 3.10)
Effect = Union[Send, Close, Mark]  # noqa: UP007
