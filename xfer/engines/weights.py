"""The weights of one engine worker: where they lie, which version they hold, and their lock.

An adapter owns one `LiveWeights`. The adapter knows the engine's framework: it reads layouts and runs a dummy forward. The
session and the routes ask the weights for everything else. This module uses plain torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch

from xfer.coordinator.messages import Holds, Label
from xfer.engines.asleep import LeftAlone, refuse_asleep
from xfer.engines.copies import Copies
from xfer.engines.layout import EngineLayout, run_recipes
from xfer.engines.live import LiveSlot, LiveStorages
from xfer.engines.lock import Agree, Forward, candidates, fill_nan, try_locks
from xfer.errors import XferError


class LiveWeights:
    """The live weights of one worker, for all its connections. If one of them leaves the engine torn, only its lock can undo the NaN.

    Implements `Weights` (participants/worker.py) and `BoundWeights` (direct/worker.py). Not thread-safe.

    Args:
        device: The model's device.
        forward: A dummy forward of the model. It tests candidates for the lock.
        agree: See `lock.Agree`.
        holds: The first value of the attribute.

    Attributes:
        holds: "whole": one version, of a checkpoint or a committed refit. "mix": a refit has begun to write and none has committed
            since. "nothing": random weights.
        version: Label of the last refit that was installed.
        paused: Whether a controller was told to pause the engine, and none has said since that it serves.
        tensors: The binding table: root name -> flat uint8 tensor, with the lock's scratch in place of its live storage.
    """

    def __init__(
        self,
        device: torch.device,
        forward: Forward,
        agree: Agree = lambda verdict, about: verdict,
        holds: Holds = "whole",
    ):
        self.device, self.holds = device, holds
        self.version: Label = None
        self.paused = False
        self.tensors: Mapping[str, torch.Tensor] = {}
        self._forward, self._agree = forward, agree
        self._live: LiveStorages | None = None
        self._layout: EngineLayout | None = None
        self._copies: Copies | None = None
        self._left_alone: LeftAlone | None = None
        self._candidates: Sequence[LiveSlot] = ()
        self._lock: LiveSlot | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)  # of the lock: every refit writes it whole

    # ---- where they lie

    def watch(self, live: LiveStorages, may_lock: Sequence[LiveSlot]) -> None:
        """Use these storages from now on. The lock stays, in the state that it has, if it is one of `may_lock`.

        Args:
            live: The storages of the model.
            may_lock: Candidates for the lock, in the order in which to try them.
        """
        self._live, self._candidates = live, may_lock
        if self._lock not in may_lock:
            self._lock = None
        self._engage_if_torn()

    def bind(
        self,
        layout: EngineLayout,
        live: LiveStorages,
        copies: Copies | None = None,
        left_alone: LeftAlone | None = None,
    ) -> EngineLayout:
        """Use these storages, for refits by this layout.

        Args:
            layout: The layout of `live`.
            live: The storages of the model.
            copies: Finds tensors outside of these storages. Its `look` has been called.
            left_alone: Detects that a sleep has changed bytes that refits leave alone. None: the engine never sleeps.

        Returns:
            The layout. Its `tensors` are the binding table.
        """
        self.watch(live, candidates(layout, live))
        self._layout, self._copies, self._left_alone = layout, copies, left_alone
        self.tensors = self._table(layout)
        return replace(layout, tensors=self.tensors)

    @property
    def layout(self) -> EngineLayout:
        if self._layout is None:
            raise _not_read()
        return self._layout

    @property
    def live(self) -> LiveStorages:
        """The storages that were read, at the addresses of the last `rebind`."""
        if self._live is None:
            raise _not_read()
        return self._live

    def check(self, quick: bool = False) -> Literal["same", "moved", "changed"]:
        """Tell whether the bindings still hold. Costs microseconds.

        Args:
            quick: See `Slots.check`.

        Returns:
            "same"; "moved": call `rebind`; "changed": read and plan again.

        Raises:
            Unsupported: The engine sleeps, has slept and lost bytes that refits leave alone, or has made tensors in a forward that
                no refit reaches.
        """
        if self._layout is None:
            return "changed"
        state = self.live.check(quick)
        if self._left_alone is not None:
            refuse_asleep(self.live)
            self._left_alone.check(self.live)
        if self._copies is not None and state != "changed":
            self._copies.check()
        return state

    def rebind(self) -> Mapping[str, torch.Tensor]:
        """Return the binding table at the present addresses.

        Raises:
            RebindError: The layout has changed. It names each difference.
        """
        layout = self.layout
        self._live = self.live.rebound()
        if self._copies is not None:
            self._copies.look()  # it compares with the storages, which are new
        self._engage_if_torn()
        self.tensors = self._table(layout)
        return self.tensors

    def _table(self, layout: EngineLayout) -> dict[str, torch.Tensor]:
        live = self.live.tensors
        table = {r.name: live.get(r.name, layout.tensors[r.name]) for r in layout.roots}
        return table if self._lock is None else {**table, self._lock.root: self._scratch}

    # ---- the lock

    def choose_lock(self) -> str:
        """Find the storage that holds NaN while a refit is open. Collective over the workers of a replica.

        Returns:
            Its name; "" on ranks that need none.

        Raises:
            XferError: No tensor qualifies.
        """
        if self._lock is None:
            with torch.no_grad():  # tensors made in inference_mode could not be written outside it
                found = try_locks(self._candidates, self.live, self._forward, self._agree)
            if found is None:
                return ""
            self._lock, self._scratch = found, self.live.tensors[found.root].clone()
            self._engage_if_torn()
        return self._lock.root

    def engage_lock(self) -> None:
        """Fill the lock with NaN, before the first byte is written: an engine that is resumed now answers NaN.

        The old bytes are not kept: an engine whose refit fails answers NaN until a later one commits.
        """
        self.holds = "mix"
        self._engage_if_torn()

    def release_lock(self) -> None:
        """Copy the new bytes of the lock to its live storage, at the commit, after the last write."""
        if self._lock is not None:
            self.live.tensors[self._lock.root].copy_(self._scratch)
        self.holds = "whole"

    def capture_lock(self) -> None:
        """Save the bytes that a loader wrote to the lock's live storage, for the commit, and fill it with NaN again.

        Raises:
            XferError: The loader did not write the tensor.
        """
        if self._lock is None:
            return
        live = self.live.tensors[self._lock.root]
        if not live.view(self._lock.dtype).isfinite().any():
            raise XferError(f"{self._lock.name} holds no number after loading: the loader did not write it")
        self._scratch.copy_(live)
        self._engage_if_torn()

    def _engage_if_torn(self) -> None:
        if self._lock is not None and self.holds != "whole":
            fill_nan(self._lock, self.live.tensors[self._lock.root])

    # ---- around the wire

    def run_recipes(self) -> None:
        """Do the loader's computations on the checkpoint tensors that arrived in scratch."""
        run_recipes(self.layout, self.tensors)

    def synchronize(self) -> None:
        """Wait until the device has done all queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _not_read() -> XferError:
    return XferError("the engine's layout has not been read yet")
