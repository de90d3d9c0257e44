"""Opens a link of the kind that the tensors of its ranks need."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed import Store

from xfer.transport.group import GlooLink, Link
from xfer.transport.nccl import NcclLink


def open_group(
    store: Store,
    rank: int,
    size: int,
    timeout: float,
    device: torch.device | str = "cpu",
    labels: Sequence[str] = (),
    cancelled: Callable[[], bool] = lambda: False,
    *,
    blocking: bool = False,
    max_ctas: int | None = None,
) -> Link:
    """Opens a link among `size` ranks. Collective.

    Args:
        store: Where the ranks meet, with a prefix of this group's own.
        timeout: Seconds within which all ranks must come.
        device: Where the tensors of this rank are: NCCL for CUDA, gloo otherwise.
        labels: Names of the ranks for errors, e.g. "trainer 2" or "engine 0 worker 1".
        cancelled: Asked while waiting.
        blocking, max_ctas: Options of `NcclLink`, ignored on the CPU.

    Raises:
        DeadlineExceeded: Not all ranks came in time. PeerLost: A rank is gone. Aborted: `cancelled()` said so.
    """
    names = tuple(labels) or tuple(f"rank {i}" for i in range(size))
    if not 0 <= rank < size or len(names) != size:
        raise ValueError(f"rank {rank} of {size} with {len(names)} labels")
    device = torch.device(device)
    if device.type == "cuda":
        return NcclLink(store, rank, size, timeout, device, names, cancelled, blocking=blocking, max_ctas=max_ctas)
    return GlooLink(store, rank, size, timeout, names, cancelled)
