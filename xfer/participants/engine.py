"""The interface between a controller and an engine. Not here: implementations (engines/handles.py, engines/remote.py)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

ASK_S = 60.0
"""Seconds in which an engine must answer a question that costs it no work."""


@runtime_checkable
class EngineHandle(Protocol):
    """An engine, as its controller calls it. Timeouts are in seconds.

    Attributes:
        name: The engine's name in errors and logs.
        keeps_caches: Whether running requests keep their keys and values over a refit, at the owner's wish.

    Raises:
        DeadlineExceeded: The timeout of a call ran out.
        EngineLost: The engine's process is gone.
        XferError: The engine answered with an error, whose text is in the message.
    """

    name: str
    keeps_caches: bool

    @property
    def engine(self) -> Any:
        """The object that the handle was made of."""

    def refuse_own_loop(self, call: str) -> None:
        """Raise Unsupported if the engine needs the caller's thread for its answers: `call` would wait for itself."""

    def ask_paused(self, timeout: float) -> None:
        """Ask whether another party has paused the engine, so that `pause` need not ask."""

    def hand_over_drafter(self, timeout: float) -> bool:
        """Make the drafter (speculative decoding) known to the workers' transfer engines, and return whether there is one.

        The workers see the drafter only when a draft update is opened, so this opens and finishes an empty one.
        """

    def hold(self) -> AbstractContextManager[None]:
        """Return a context in which the owner may use the engine and no refit begins. Needed only for an engine without a
        pause of its own."""

    def workers(self, timeout: float = ASK_S) -> int:
        """Return the number of workers that `init` and `update` reach, over all data-parallel ranks of the replica."""

    def ranks_in_step(self, timeout: float = ASK_S) -> bool:
        """Return whether the engine has data-parallel ranks that may wait for each other in every step. No call may then
        keep a worker before all ranks are paused."""

    def init(self, info: Mapping[str, Any], timeout: float) -> None:
        """Hand `info` to every worker's transfer engine, once per connection."""

    def pause(self, timeout: float) -> None:
        """Pause the engine and return when it computes nothing; requests that arrive later wait. Idempotent. Notes whether
        another party had paused the engine before."""

    def resume(self, timeout: float) -> None:
        """Serve again. Undoes only this handle's own `pause`: an earlier pause by another party or by vLLM's sleep stays."""

    def assume_paused(self) -> None:
        """Treat the pause that the handle finds, or found, as an earlier controller's: `resume` undoes it."""

    def stay_paused(self, timeout: float = ASK_S) -> None:
        """Keep the engine from serving. Does not resume it, but frees the owner's thread if that waits for xfer."""

    def start_update(self, timeout: float, *, then: Mapping[str, Any] | None = None) -> None:
        """Open vLLM's update session. Finishes first a session that a failed refit left open.

        Args:
            timeout: Seconds.
            then: The argument of the `update` call that follows. An engine that takes calls in order gets that call before
                it has answered this one.
        """

    def update(self, info: Mapping[str, Any], timeout: float) -> None:
        """Block, and block the engine, until every worker has left its receive call."""

    def finish_ahead(self, reset: bool) -> None:
        """Send the `finish` that follows, and with `reset` the `reset_caches`, if the engine takes calls in order. Called while
        `update` runs in another thread and is known to succeed."""

    def finish(self, version: str | None, timeout: float) -> None:
        """Close the update session if one is open; then set the version if one is given."""

    def set_version(self, text: str, timeout: float) -> None:
        """Set the engine's own label of its weights, which it attaches to outputs."""

    def get_version(self, timeout: float) -> str | None:
        """Return the label of `set_version`; None if the engine has none."""

    def assume_open_session(self) -> None:
        """Treat an update session as open, which an earlier controller began. Workers report it when they join."""

    def reset_caches(self, timeout: float) -> None:
        """Drop the results of older weights: prefix (frozen requests recompute), connector and encoder caches.

        Raises:
            XferError: The engine reports a failed reset. It reports that for connectors that have a reset; workers refuse
                others when they join (settings.py). vLLM 0.25 does not report it over HTTP: a failed reset of a connector
                is not seen there.
        """
