"""Checks against vLLM's sleep mode, which releases the memory behind weights and keeps their addresses.

This module uses plain torch and the CUDA driver. layout.py decides which bytes refits keep.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch

from xfer.engines.live import DRAFT, LiveStorages
from xfer.errors import Unsupported
from xfer.plan.inventory import Kept


def refuse_asleep(live: LiveStorages) -> None:
    """Raise Unsupported while weights have no memory. The driver is asked, since vLLM's pool has no stable interface for that."""
    from xfer.kernels.cuda_driver import mapped

    if gone := [name for name, t in live.tensors.items() if t.numel() and not mapped(t.data_ptr())]:
        raise Unsupported(
            f"this engine sleeps: there is no memory behind {len(gone)} of its tensors, first {gone[0]}",
            ['wake its weights before the refit, e.g. llm.wake_up(tags=["weights"]); the KV cache may sleep on'],
        )


class LeftAlone:
    """Sums over the bytes that refits leave alone and vLLM does not restore.

    After sleep(level=2) the content of memory is arbitrary. Refits write most of it and vLLM restores the served model's
    buffers, but nothing restores kept parameters, plain attributes or, before vLLM 0.32, buffers of a drafter. The sums detect
    such a loss; they are no strong checksums. They run on the device, since the engine waits for them in every refit.

    Args:
        live: The storages of the model.
        kept: Bytes that refits leave alone.
        constants: Tensors by name that are neither parameters nor buffers (Copies.constants), all on the device of `live`.
            They are not kept alive. A tensor that torch has written since is no longer checked.
    """

    def __init__(
        self, live: LiveStorages, kept: Iterable[Kept], constants: Mapping[str, torch.Tensor] = MappingProxyType({})
    ):
        parameters = {s.root for s in live.slots.values() if s.is_parameter}
        lost = {root for root in live.by_root if root in parameters or root.startswith(DRAFT)}
        self._spans = [s for s in kept if s.root in lost and s.stop > s.start]
        self._constants = [(name, weakref.ref(t), t._version) for name, t in constants.items()]
        self._were = self._sums(live)

    def _sums(self, live: LiveStorages) -> dict[str, list[int]]:
        """The sums of all spans and constants, by name."""
        parts = [(s.root, _words(live.tensors[s.root], s.start, s.stop)) for s in self._spans]
        for name, ref, written in self._constants:
            if (t := ref()) is not None and t._version == written:
                parts.append((f"{name}: a plain attribute", t.detach().reshape(-1).view(torch.uint8)))
        sums = torch.stack([words.sum(dtype=torch.int64) for _, words in parts]).tolist() if parts else []
        out: dict[str, list[int]] = {}
        for (name, _), n in zip(parts, sums, strict=True):
            out.setdefault(name, []).append(n)
        return out

    def check(self, live: LiveStorages) -> None:
        """Raise Unsupported that names all tensors whose bytes have changed since this object was made."""
        if lost := sorted(name for name, now in self._sums(live).items() if now != self._were[name]):
            raise Unsupported(
                "bytes that no refit writes have changed since this engine joined: did it sleep at level 2?",
                [
                    *lost,
                    'load parameters that keep= names again before the refit, llm.collective_rpc("reload_weights"); sleep at '
                    f"level 1 if plain attributes or buffers of a drafter ({DRAFT}*) are among these: no call of vLLM's brings "
                    "those back; if they were changed on purpose, call xfer.serve() again",
                ],
            )


def _words(storage: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """These bytes as int32 if they are aligned, which the device reads faster, otherwise as uint8."""
    part = storage[start:stop]
    return part if start % 4 or stop % 4 else part.view(torch.int32)
