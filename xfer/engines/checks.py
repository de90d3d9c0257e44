"""Checks of an engine worker that need no engine framework: which checkpoint tensors it takes, and whether its ranks agree."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch

from xfer.errors import LayoutError, XferError
from xfer.trace.fragment import TensorSpec


def refuse_other_family(
    given: Sequence[TensorSpec], expected: Sequence[TensorSpec], model: str, *, may_lack: bool = False
) -> list[str]:
    """Refuse checkpoint tensors of trainers that are not those of the engine's model.

    Args:
        given: The trainers' checkpoint tensors.
        expected: The checkpoint tensors of the engine's model.
        model: Name of the engine's model, for the error.
        may_lack: Parts of the model may be frozen. A missing tensor is then no error here; `read_layout` refuses bytes that
            nothing writes.

    Returns:
        Names of the tensors that the trainers do not have.

    Raises:
        LayoutError: It lists the names of both sides.
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


def agreed(verdict: bool, about: str, groups: Iterable[torch.distributed.ProcessGroup]) -> bool:
    """Return whether all ranks of these groups pass True. Collective over each group, in this order.

    Args:
        verdict: This rank's answer.
        about: What the answer is about.
        groups: Process groups on the CPU.

    Raises:
        XferError: `about` differs between ranks. All of them raise it.
    """
    number = int.from_bytes(hashlib.blake2b(about.encode(), digest_size=7).digest(), "big")
    least = torch.tensor([int(verdict), number, -number], dtype=torch.int64)
    for group in groups:
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group)
    said, low, minus_high = least.tolist()
    if low != -minus_high:
        raise XferError(
            "the workers of this engine see different models, so they cannot choose a lock together", [f"here: {about}"]
        )
    return bool(said)
