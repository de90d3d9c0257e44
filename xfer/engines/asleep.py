"""What vLLM's sleep mode does to weights: it gives the memory behind them back and keeps their addresses. Plain torch and the
driver; what is kept, and why, is layout.py's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from xfer.engines.live import DRAFT, Storages
from xfer.errors import Unsupported
from xfer.plan.inventory import Kept


def refuse_asleep(live: Storages) -> None:
    """Unsupported while there is no memory behind weights. The driver says so; vLLM's pool has no stable way to tell."""
    from xfer.kernels.cuda_driver import mapped

    if gone := [name for name, t in live.tensors.items() if t.numel() and not mapped(t.data_ptr())]:
        raise Unsupported(
            f"this engine sleeps: there is no memory behind {len(gone)} of its tensors, first {gone[0]}",
            ['wake its weights before the refit, e.g. llm.wake_up(tags=["weights"]); the KV cache may sleep on'],
        )


class KeptParameters:
    """Sums over what refits leave alone and vLLM does not restore. After sleep(level=2) memory holds anything; refits write the rest
    anew and vLLM restores the served model's buffers, but nobody parameters, and nobody what only a drafter has. The sums are
    there to see that, not to tell any two contents apart, and are taken on the device: an engine waits for them in every
    refit."""

    def __init__(self, live: Storages, kept: Iterable[Kept]):
        parameters = {s.root for s in live.slots.values() if s.is_parameter}
        lost = {root for root in live.by_root if root in parameters or root.startswith(DRAFT)}
        self._spans = [s for s in kept if s.root in lost and s.stop > s.start]
        self._were = self._sums(live)

    def _sums(self, live: Storages) -> list[int]:
        sums = [_words(live.tensors[s.root], s.start, s.stop).sum(dtype=torch.int64) for s in self._spans]
        return torch.stack(sums).tolist() if sums else []

    def check(self, live: Storages) -> None:
        """Unsupported, naming all that hold other bytes than when this was made."""
        pairs = zip(self._spans, self._were, self._sums(live), strict=True)
        if lost := sorted({s.root for s, was, now in pairs if was != now}):
            raise Unsupported(
                "what no refit writes holds other bytes than when this engine joined: did it sleep at level 2?",
                [
                    *lost,
                    'load parameters that keep= names again before the refit, llm.collective_rpc("reload_weights"), or sleep at '
                    f"level 1, as an engine must whose drafter has buffers of its own ({DRAFT}*): no call of vLLM's brings those "
                    "back; if they were changed on purpose, call xfer.serve() again",
                ],
            )


def _words(storage: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """As large ones as lie there, which are read faster."""
    part = storage[start:stop]
    return part if start % 4 or stop % 4 else part.view(torch.int32)
