"""Small collectives of the packed route among trainer ranks: a flag, some numbers, or one value per rank.

They use torch.distributed's default group, which holds all trainers; without it there is one rank. They run only where every
rank takes part: after the session's *Go*, or in a loop that is the same on all ranks.
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
    """Return (rank, world size) of this process in the default group, or (0, 1) without one."""
    there = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if there else (0, 1)


def alone() -> bool:
    return ranks()[1] == 1


def carried(device: torch.device) -> torch.device:
    """Return the device of tensors that the group carries: the CPU for gloo, so that nothing waits for a GPU."""
    return torch.device("cpu") if dist.get_backend() == "gloo" else device


def largest(numbers: list[int], device: torch.device) -> list[int]:
    """Return the largest value of all ranks at each position. One all-reduce."""
    told = torch.tensor(numbers, dtype=torch.int64, device=carried(device))
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return told.tolist()


def any_rank(flag: bool, fingerprint: bytes, device: torch.device) -> bool:
    """Return whether `flag` is true on some rank. One all-reduce of 24 bytes.

    Raises:
        PlanMismatch: on all ranks, if their fingerprints differ and no flag is true.
    """
    if alone():
        return flag
    number = int.from_bytes(fingerprint[:7].ljust(7, b"\0"), "big")
    said, high, minus_low = largest([int(flag), number, -number], device)
    if high != -minus_low and not said:  # a rank whose tensors changed sets its flag, and all ranks plan again
        raise PlanMismatch(
            "trainer ranks would send different buckets; nothing was moved",
            [f"here: {fingerprint.hex()}", "install the same packages on all ranks"],
        )
    return bool(said)


def of_all_ranks(make: Callable[[], T], decoder: msgspec.msgpack.Decoder[T], device: torch.device) -> list[T]:
    """Return the result of `make` of every rank, in rank order.

    Values travel as msgpack and are decoded to exactly one type, because torch's own object collectives unpickle bytes from
    sockets. If `make` raises on some rank, it still takes part, and every rank raises the same error, which names the rank.

    Args:
        make: Returns this rank's value.
        decoder: Decodes the value's type. Make it at import: two threads that describe one class at once crash the process.
        device: Device of this rank's tensors.
    """
    if alone():
        return [make()]
    rank, value = dist.get_rank(), msgspec.msgpack.encode(None)
    failure: Exception | None = None
    try:
        value = msgspec.msgpack.encode(make())  # a value that cannot be encoded is a failure, too
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
        msgspec.msgpack.decode(bytes(p[:n].cpu().numpy()), type=tuple[msgspec.Raw, str, str])
        for p, n in zip(padded, sizes, strict=True)
    ]
    for r, (_, name, text) in enumerate(said):
        if name:
            kind_of_error = getattr(errors, name, None)
            if not (isinstance(kind_of_error, type) and issubclass(kind_of_error, XferError)):
                kind_of_error, text = XferError, f"{name}: {text}"
            raised = kind_of_error(f"trainer {r} failed to describe its exports: {text}")
            raise raised from (failure if r == rank else None)
    return [decoder.decode(value) for value, _, _ in said]
