"""The small collectives of the packed route among trainer ranks: one flag each, or one list of bytes.

All go over torch.distributed's default group, which is the trainers' world; without it there is one rank. They are called
only where every rank is known to come: after the session's *Go*, or in a loop that all ranks run alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from xfer import errors
from xfer.errors import PlanMismatch, XferError

T = TypeVar("T")


def ranks() -> tuple[int, int]:
    """(rank, world) of this process in that group."""
    there = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if there else (0, 1)


def alone() -> bool:
    return ranks()[1] == 1


def carried(device: torch.device) -> torch.device:
    """Where that group's tensors lie: gloo carries the host's, and nothing of a GPU's has to be waited for there."""
    return torch.device("cpu") if dist.get_backend() == "gloo" else device


def largest(numbers: list[int], device: torch.device) -> list[int]:
    """Of each position the largest that a rank gives; one all-reduce."""
    told = torch.tensor(numbers, dtype=torch.int64, device=carried(device))
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


def of_all_ranks(make: Callable[[], T], kind: type[T], device: torch.device) -> list[T]:
    """What `make` gives on every rank, in rank order. By msgpack, decoded to exactly `kind`: torch's own object collectives
    unpickle what comes out of sockets.

    When `make` raises on some rank, every rank raises that: the same kind and words, with the rank's name. So a rank whose
    own code fails leaves nobody alone in this collective.
    """
    if alone():
        return [make()]
    rank, failure, value = dist.get_rank(), None, msgspec.msgpack.encode(None)
    try:
        value = msgspec.msgpack.encode(make())  # what cannot be told is a failure, too
    except Exception as e:
        failure = e
    what = "" if failure is None else str(failure)[:4000].encode(errors="replace").decode()
    data = msgspec.msgpack.encode((msgspec.Raw(value), type(failure).__name__ if failure is not None else "", what))
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    world, device = dist.get_world_size(), carried(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(lengths, torch.tensor([mine.numel()], dtype=torch.int64, device=device))
    sizes: Sequence[int] = [int(n) for n in lengths]
    filled = torch.zeros(max(sizes), dtype=torch.uint8)
    filled[: mine.numel()] = mine
    padded = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(padded, filled.to(device))
    said = [
        msgspec.msgpack.decode(bytes(p[:n].cpu().numpy()), type=tuple[kind | None, str, str])
        for p, n in zip(padded, sizes, strict=True)
    ]
    for r, (_, name, text) in enumerate(said):
        if name:
            known = getattr(errors, name, None)
            own = isinstance(known, type) and issubclass(known, XferError)
            raised = (known if own else XferError)(
                f"trainer {r} could not tell what it exports: {text if own else f'{name}: {text}'}"
            )
            raise raised from (failure if r == rank else None)
    return [value for value, _, _ in said]
