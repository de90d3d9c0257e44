"""The small collectives of the packed route among trainer ranks: one flag each, or one list of bytes.

All go over torch.distributed's default group, which is the trainers' world; without it there is one rank. They are called
only where every rank is known to come: after the session's *Go*, or in a loop that all ranks run alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from xfer.errors import PlanMismatch

T = TypeVar("T")


def alone() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


def largest(numbers: list[int], device: torch.device) -> list[int]:
    """Of each position the largest that a rank gives; one all-reduce."""
    told = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return told.tolist()


def any_rank(flag: bool, fingerprint: bytes, device: torch.device) -> bool:
    """Whether `flag` holds on some rank; one all-reduce of 24 bytes. PlanMismatch, on all ranks alike, when their
    fingerprints differ."""
    if alone():
        return flag
    number = int.from_bytes(fingerprint[:7].ljust(7, b"\0"), "big")
    said, high, minus_low = largest([int(flag), number, -number], device)
    if high != -minus_low and not said:  # a rank that has just changed tells that by its flag, and all begin anew
        raise PlanMismatch(
            "trainer ranks would send different buckets; nothing was moved",
            [f"here: {fingerprint.hex()}", "install the same packages on all ranks"],
        )
    return bool(said)


def of_all_ranks(value: T, kind: type[T], device: torch.device) -> list[T]:
    """`value` of every rank, in rank order. By msgpack, decoded to exactly `kind`: torch's own object collectives unpickle
    what comes out of sockets."""
    if alone():
        return [value]
    data = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)
    world = dist.get_world_size()
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(lengths, torch.tensor([data.numel()], dtype=torch.int64, device=device))
    sizes: Sequence[int] = [int(n) for n in lengths]
    mine = torch.zeros(max(sizes), dtype=torch.uint8)
    mine[: data.numel()] = data
    padded = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(padded, mine.to(device))
    return [msgspec.msgpack.decode(bytes(p[:n].cpu().numpy()), type=kind) for p, n in zip(padded, sizes, strict=True)]
