"""The second lock: while a refit is open, one small tensor that every token passes through holds NaN in the live model.

Pausing the engine is the first lock, and vLLM lets anyone undo it. An engine that is resumed by force between the first
byte and the commit then answers NaN and not plausible nonsense. The tensor is found by trying, not by name: NaN in it
must turn the model's own forward into NaN at every token.

The refit writes the tensor's new bytes to scratch, which stands in for its storage in the binding table; the commit
copies them over. Checksums read the same table, so they see the new value and never the NaN. Plain torch; how to run a
forward of vLLM is vllm_layout.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from xfer.engines.layout import EngineLayout
from xfer.engines.live import DRAFT, NONE, LiveSlot, LiveStorages, written
from xfer.errors import XferError
from xfer.plan.intervals import difference, size

MAX_BYTES = 1 << 20
"""A lock is copied once per commit, inside the outage; a vector of the model's width is some KiB."""

Forward = Callable[[], Sequence[torch.Tensor]]
"""A dummy forward: tensors of [tokens, …], every one of which later code adds to or multiplies with the token's
state."""


class Lock:
    """Live bytes of one storage, and the scratch that refits write instead.

    `scratch` holds the storage's true bytes while engaged, and equal ones otherwise.
    """

    def __init__(self, slot: LiveSlot, live: torch.Tensor):
        self.root, self.slot = slot.root, slot
        self.scratch = live.clone()
        self._live = live
        self._engaged = False

    @property
    def engaged(self) -> bool:
        return self._engaged

    def engage(self) -> None:
        """Before the first write. Again after an abort it changes nothing: the live bytes are NaN already."""
        if not self._engaged:
            self.scratch.copy_(self._live)
            self._engaged = True
        _fill_nan(self.slot, self._live)

    def release(self) -> None:
        """At the commit, after the last write: install what scratch holds."""
        self._live.copy_(self.scratch)
        self._engaged = False

    def capture(self) -> None:
        """After a loader has written the live bytes themselves (packed route): they are the true ones, to be installed by
        the commit, and NaN until then. XferError when the loader left the tensor as it was."""
        if not self._live.view(self.slot.dtype).isfinite().any():
            raise XferError(f"{self.slot.name} holds no number after loading: the loader did not write it")
        self.scratch.copy_(self._live)
        self._engaged = True
        _fill_nan(self.slot, self._live)

    def moved_to(self, live: torch.Tensor) -> None:
        """The storage has another address now."""
        self._live = live
        if self._engaged:
            _fill_nan(self.slot, live)

    def bound(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The binding table of a refit: `tensors` with scratch for the locked storage."""
        return {**tensors, self.root: self.scratch}


def candidates(layout: EngineLayout, live: LiveStorages) -> list[LiveSlot]:
    """Floating-point vectors that alone fill a storage and that every refit writes whole, the last of the tree first;
    none of a drafter's, whose NaN would only make it be overruled.

    The later in the model, the less is computed on NaN when somebody does resume a torn engine: routers and index
    kernels come before the last norm, and what they do with NaN is not for us to find out on a live GPU.
    """
    done = written(layout.traced.fragments, layout.traced.fills)
    return [s for s in alone(live) if not size(difference(s.bytes(), done.get(s.root, NONE)))]


def alone(live: LiveStorages) -> list[LiveSlot]:
    """The candidates of a loader that is not known but writes every parameter."""
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
    """Try the candidates until NaN in one makes every token of the forward NaN. None: no candidate does.

    Collective: every rank that takes part in one another's forward calls this. `agree(verdict, about)` returns whether
    all of them said True, and raises where they speak of different things, so that they stop together. XferError when
    the model answers NaN before anything was tried, as then no test can tell.
    """
    return try_locks(candidates(layout, live), live, forward, agree)


def try_locks(
    order: Sequence[LiveSlot], live: LiveStorages, forward: Forward, agree: Callable[[bool, str], bool]
) -> Lock | None:
    """`choose` among these slots, in this order."""
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
    """Every token carries NaN throughout, in at least one of the outputs."""
    return any(t.numel() > 0 and bool(t.isnan().all()) for t in outputs)
