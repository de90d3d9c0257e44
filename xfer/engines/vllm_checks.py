"""What both routes ask of a vLLM worker: which checkpoint tensors it takes, and whether its ranks agree."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch

from xfer.errors import LayoutError, XferError
from xfer.trace.fragment import TensorSpec


def refuse_other_family(
    given: Sequence[TensorSpec], expected: Sequence[TensorSpec], model: str, *, may_lack: bool = False
) -> list[str]:
    """LayoutError with both sides' names when the trainers' checkpoint is not one of the engine's model.

    `may_lack`: parts of the model may be frozen, so a tensor that the trainers lack is no error by itself; whether it is
    needed is told by the bytes that nothing writes. Returns the names of those.
    """
    ours, theirs = {s.name: s.shape for s in expected}, {s.name: s.shape for s in given}
    lines = [
        f"{n}: in the trainers' checkpoint, unknown to the engine's model" for n in sorted(theirs.keys() - ours.keys())
    ]
    absent = sorted(ours.keys() - theirs.keys())
    if not may_lack:
        lines += [f"{n}: needed by the engine's model, not in the trainers' checkpoint" for n in absent]
    lines += [
        f"{n}: {list(theirs[n])} from the trainers, {list(ours[n])} by the engine's config"
        for n in sorted(ours.keys() & theirs.keys())
        if tuple(theirs[n]) != tuple(ours[n])
    ]
    if lines:
        raise LayoutError(f"the trainers' model and the engine's ({model}) are families that do not match", lines)
    return absent


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, p) for p in patterns)


def all_agree(verdict: bool, about: str) -> bool:
    """And over all ranks that take part in this rank's forward: its tensor-parallel and data-parallel groups.

    XferError, on all of them alike, when they are not asking about the same thing.
    """
    from vllm.distributed.parallel_state import get_dp_group, get_tp_group

    number = int.from_bytes(hashlib.blake2b(about.encode(), digest_size=7).digest(), "big")
    least = torch.tensor([int(verdict), number, -number], dtype=torch.int64)
    for group in (get_tp_group(), get_dp_group()):
        if group.world_size > 1:
            torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    said, low, minus_high = least.tolist()
    if low != -minus_high:
        raise XferError(
            "the workers of this engine see different models, so they cannot choose a lock together", [f"here: {about}"]
        )
    return bool(said)
