"""What a controller may ask of an engine, whatever its handle is. Not here: how any of it is done (handles.py, remote.py)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

ASK_S = 60.0
"""Seconds that an engine has for a question that costs it nothing."""


@runtime_checkable
class EngineHandle(Protocol):
    """The controller's view of an engine. Timeouts in seconds; one that runs out raises DeadlineExceeded.

    EngineLost: the engine's process is gone. XferError: it answered with an error, whose text is in the message.
    """

    name: str

    @property
    def engine(self) -> Any:
        """What the handle was made of."""

    def refuse_own_loop(self, call: str) -> None:
        """Unsupported where the caller's thread runs what the engine's answers need: `call` would wait for itself."""

    def ask_paused(self, timeout: float) -> None:
        """Ask whether somebody else has paused the engine, so that `pause` has to ask nothing."""

    def hand_over_drafter(self, timeout: float) -> bool:
        """Whether the engine has a drafter (speculative decoding), which its workers' transfer engines then know. They see it
        only when a draft update is opened, so this opens and finishes an empty one."""

    def hold(self) -> AbstractContextManager[None]:
        """Inside, the owner may use the engine and no refit begins; needed only where the engine cannot be paused
        itself."""

    def workers(self, timeout: float = ASK_S) -> int:
        """Number of workers that `init` and `update` reach, all data-parallel ranks of the replica together."""

    def ranks_in_step(self, timeout: float = ASK_S) -> bool:
        """Whether it has data-parallel ranks, which may wait for one another in every step: then no worker may be kept in a
        call before all ranks are paused."""

    def init(self, info: Mapping[str, Any], timeout: float) -> None:
        """Hand `info` to every worker's transfer engine, once per connection."""

    def pause(self, timeout: float) -> None:
        """Returns when nothing is being computed; requests that arrive later wait. Idempotent. Notes whether somebody else had
        paused the engine before."""

    def resume(self, timeout: float) -> None:
        """Serve again. Undoes only this handle's own `pause`, not that of somebody else, or of vLLM's sleep, which was there
        before it."""

    def assume_paused(self) -> None:
        """Tell the handle that the pause it finds, or found, is an earlier controller's: `resume` undoes it."""

    def stay_paused(self, timeout: float = ASK_S) -> None:
        """The engine is not to serve any more. Does not resume it, but lets go of its owner's thread if that waits for
        us."""

    def start_update(self, timeout: float, *, then: Mapping[str, Any] | None = None) -> None:
        """Open vLLM's update session. One that a failed refit left open is finished first. then: what `update` will be called
        with next; an engine that takes calls in order gets it before it has answered this one."""

    def update(self, info: Mapping[str, Any], timeout: float) -> None:
        """Blocks, and blocks the engine, until every worker has left its receive call."""

    def finish_ahead(self) -> None:
        """While `update` runs in another thread, and is known to end well: `finish` and `reset_caches` will be called next. An
        engine that takes calls in order gets them now."""

    def finish(self, version: str | None, timeout: float) -> None:
        """Close the session if one is open; then set the version if one is given."""

    def set_version(self, text: str, timeout: float) -> None:
        """The engine's own label of its weights, which it attaches to outputs."""

    def get_version(self, timeout: float) -> str | None:
        """That label as it is now; None where the engine has none."""

    def assume_open_session(self) -> None:
        """Tell the handle of a session that an earlier controller left open; workers say so when they join."""

    def reset_caches(self, timeout: float) -> None:
        """Drop what older weights computed: prefix (frozen requests recompute), connector and encoder caches. XferError when the
        engine says that it did not. It says so for connectors that have a reset; workers refuse others when they join
        (settings.py). vLLM 0.25 does not say it over HTTP: there a connector whose reset failed is not seen."""
