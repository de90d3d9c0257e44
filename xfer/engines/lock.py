"""The NaN lock: while a refit is open, one small tensor that every token depends on holds NaN in the live model.

The first lock is the pause of the engine, but anyone can resume vLLM. An engine that is resumed by force between the
first byte and the commit then answers NaN instead of plausible nonsense. The tensor is found by test and not by name:
NaN in it must turn the model's own forward into NaN at every token.

The refit writes the tensor's new bytes to scratch, which replaces its storage in the binding table; the commit copies
them to the live storage. Checksums read the same table, so they see the new value and never the NaN. This module uses
plain torch; vllm_layout.py runs vLLM's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from xfer.engines.layout import EngineLayout
from xfer.engines.live import DRAFT, NONE, LiveSlot, LiveStorages, written
from xfer.errors import XferError
from xfer.plan.intervals import difference, size

MAX_BYTES = 1 << 20
"""Largest lock. It is copied once per commit, while the engine is paused. A vector of the model's width is some KiB."""

Forward = Callable[[], Sequence[torch.Tensor]]
"""A dummy forward. Later code adds each returned tensor [tokens, …] to the token's state, or multiplies the state with it."""


class Lock:
    """One live storage, and the scratch that refits write in its place.

    Attributes:
        root: Name of the storage.
        slot: The tensor that fills it.
        scratch: Flat uint8. Every refit writes it whole, and the commit copies it to the live storage.
    """

    def __init__(self, slot: LiveSlot, live: torch.Tensor):
        self.root, self.slot = slot.root, slot
        self.scratch = live.clone()
        self._live = live
        self._engaged = False

    def engage(self) -> None:
        """Fill the live tensor with NaN, before the first write. After an aborted refit this changes nothing.

        The old bytes are not kept: an engine whose refit fails answers NaN until a later one commits.
        """
        self._engaged = True
        _fill_nan(self.slot, self._live)

    def release(self) -> None:
        """Copy scratch to the live storage, at the commit, after the last write."""
        self._live.copy_(self.scratch)
        self._engaged = False

    def capture(self) -> None:
        """Save the live bytes that a loader wrote (packed route) in scratch and fill the tensor with NaN again.

        The commit installs them.

        Raises:
            XferError: The loader did not write the tensor.
        """
        if not self._live.view(self.slot.dtype).isfinite().any():
            raise XferError(f"{self.slot.name} holds no number after loading: the loader did not write it")
        self.scratch.copy_(self._live)
        self._engaged = True
        _fill_nan(self.slot, self._live)

    def moved_to(self, live: torch.Tensor) -> None:
        """Use `live`: the same storage at a new address."""
        self._live = live
        if self._engaged:
            _fill_nan(self.slot, live)

    def bound(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the binding table of a refit: `tensors` with scratch in place of the locked storage."""
        return {**tensors, self.root: self.scratch}


def kept(lock: Lock | None, layout: EngineLayout, live: LiveStorages) -> tuple[Lock | None, EngineLayout]:
    """Return the lock, if a layout that was read anew still allows it, in the state that it has, and the layout whose tensors are the
    binding table of a refit."""
    if lock is None or lock.slot not in candidates(layout, live):
        return None, layout
    lock.moved_to(live.tensors[lock.root])
    return lock, replace(layout, tensors=lock.bound(layout.tensors))


def rebound(lock: Lock | None, layout: EngineLayout, live: LiveStorages) -> Mapping[str, torch.Tensor]:
    """Return the binding table of a layout whose storages are now those of `live`."""
    tensors = {r.name: live.tensors.get(r.name, layout.tensors[r.name]) for r in layout.roots}
    if lock is None:
        return tensors
    lock.moved_to(tensors[lock.root])
    return lock.bound(tensors)


def candidates(layout: EngineLayout, live: LiveStorages) -> list[LiveSlot]:
    """Return floating-point vectors that fill a storage alone and that every refit writes whole, the last of the tree first.

    The order matters if somebody resumes a torn engine: the later the lock, the fewer kernels run on NaN. Routers and index
    kernels come before the last norm, and their behaviour on NaN is unknown. Vectors of a drafter are left out: the served
    model would only overrule its NaN.
    """
    done = written(layout.traced.fragments, layout.traced.fills)
    return [s for s in alone(live) if not size(difference(s.bytes(), done.get(s.root, NONE)))]


def alone(live: LiveStorages) -> list[LiveSlot]:
    """Return the candidates for a loader that was not traced and writes every parameter."""
    sizes = {r.name: r.nbytes for r in live.roots}
    out = []
    for slot in live.slots.values():
        if slot.name != slot.root or len(slot.shape) != 1 or not slot.dtype.is_floating_point:
            continue
        if slot.name.startswith(DRAFT):
            continue
        whole = slot.bytes()
        only = all((s.offset, s.shape) == (slot.offset, slot.shape) for s in live.by_root[slot.root])
        if only and size(whole) == sizes[slot.root] <= MAX_BYTES:
            out.append(slot)
    return out[::-1]


def choose(
    layout: EngineLayout, live: LiveStorages, forward: Forward, agree: Callable[[bool, str], bool]
) -> Lock | None:
    """Try the candidates until NaN in one of them makes every token of the forward NaN.

    Collective over all ranks that share a forward.

    Args:
        layout: Layout of the live model.
        live: Its storages.
        forward: The dummy forward.
        agree: `agree(verdict, about)` returns whether all ranks said True. It raises if `about` differs between ranks, so
            that they stop together.

    Returns:
        The lock; None if no candidate passes.

    Raises:
        XferError: The model answers NaN already, so no test can tell.
    """
    return try_locks(candidates(layout, live), live, forward, agree)


def try_locks(
    order: Sequence[LiveSlot], live: LiveStorages, forward: Forward, agree: Callable[[bool, str], bool]
) -> Lock | None:
    """Do the same as `choose` for these slots, in this order."""
    if not agree(not _all_nan(forward()), " ".join(slot.name for slot in order)):
        raise XferError(
            "the engine answers NaN with the weights it has, so no lock can be tested",
            ["start it with a checkpoint or with load_format='dummy', and connect before its weights are disturbed"],
        )
    for slot in order:
        storage = live.tensors[slot.root]
        saved = storage.clone()
        _fill_nan(slot, storage)
        try:
            found = _all_nan(forward())
        finally:
            storage.copy_(saved)
        if agree(found, slot.name):
            return Lock(slot, storage)
    return None


def _fill_nan(slot: LiveSlot, storage: torch.Tensor) -> None:
    storage.view(slot.dtype).fill_(float("nan"))


def _all_nan(outputs: Sequence[torch.Tensor]) -> bool:
    """Whether at least one output is NaN in every element."""
    return any(t.numel() > 0 and bool(t.isnan().all()) for t in outputs)
