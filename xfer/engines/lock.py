"""The NaN lock: while a refit is open, one small tensor that every token depends on holds NaN in the live model.

The first lock is the pause of the engine, but anyone can resume vLLM. An engine that is resumed by force between the
first byte and the commit then answers NaN instead of plausible nonsense. The tensor is found by test and not by name:
NaN in it must turn the model's own forward into NaN at every token.

The refit writes the tensor's new bytes to scratch, which replaces its storage in the binding table; the commit copies
them to the live storage (weights.py). Checksums read the same table, so they see the new value and never the NaN. This
module uses plain torch and chooses the tensor; vllm_layout.py runs vLLM's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from xfer.engines.layout import EngineLayout
from xfer.engines.live import DRAFT, NONE, LiveSlot, LiveStorages, written
from xfer.errors import XferError
from xfer.plan.intervals import difference, size

MAX_BYTES = 1 << 20
"""Largest lock. It is copied once per commit, while the engine is paused. A vector of the model's width is some KiB."""

Forward = Callable[[], Sequence[torch.Tensor] | None]
"""A dummy forward. Later code adds each returned tensor [tokens, …] to the token's state, or multiplies the state with it. None on
ranks that need no lock: every token passes the lock of a later rank."""
Agree = Callable[[bool, str], bool]
"""`agree(verdict, about)` returns whether all ranks of a forward said True. It raises if `about` differs between ranks, so that they
stop together."""


def candidates(layout: EngineLayout, live: LiveStorages) -> list[LiveSlot]:
    """Return floating-point vectors that fill a storage alone and that every refit writes whole, the last of the tree first.

    The order matters if somebody resumes a torn engine: the later the lock, the fewer kernels run on NaN. Routers and index
    kernels come before the last norm, and their behaviour on NaN is unknown. Vectors of a drafter are left out: its NaN
    does not reach the tokens of the served model.
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


def try_locks(order: Sequence[LiveSlot], live: LiveStorages, forward: Forward, agree: Agree) -> LiveSlot | None:
    """Try these tensors until NaN in one of them makes every token of the forward NaN. Afterwards each has its old bytes.

    Collective over all ranks that share a forward.

    Args:
        order: Candidates, in the order in which to try them.
        live: Their storages.
        forward: The dummy forward.
        agree: See `Agree`.

    Returns:
        The tensor; None on ranks that need no lock.

    Raises:
        XferError: No candidate passes, or the model answers NaN already, so no test can tell.
    """
    outputs = forward()
    if outputs is None:
        return None
    if not agree(not _all_nan(outputs), " ".join(slot.name for slot in order)):
        raise XferError(
            "the engine answers NaN with the weights it has, so no lock can be tested",
            ["start it with a checkpoint or with load_format='dummy', and connect before its weights are disturbed"],
        )

    def turns_all_nan(slot: LiveSlot) -> bool:
        storage = live.tensors[slot.root]
        saved = storage.clone()
        fill_nan(slot, storage)
        try:
            return _all_nan(forward() or ())
        finally:
            storage.copy_(saved)

    found = next((slot for slot in order if agree(turns_all_nan(slot), slot.name)), None)
    forward()  # overwrites NaN that earlier forwards may have left, such as in the KV slot of padded tokens
    if found is None:
        raise XferError(
            "no small tensor of this model turns every output NaN, so a torn engine could not be told from another",
            ["candidates: vectors that fill a storage of their own and that every refit writes"],
        )
    return found


def fill_nan(slot: LiveSlot, storage: torch.Tensor) -> None:
    """Fill a tensor with NaN. `storage`: its storage, flat uint8."""
    storage.view(slot.dtype).fill_(float("nan"))


def _all_nan(outputs: Sequence[torch.Tensor]) -> bool:
    """Whether at least one output is NaN in every element."""
    return any(t.numel() > 0 and bool(t.isnan().all()) for t in outputs)
