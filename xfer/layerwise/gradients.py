"""Gradients on their way to the owners: reduced there if nobody has reduced them yet, and their norm.

Knows parameters, owners and groups; steps nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from xfer.layerwise.gather import Bucket, Peers


@dataclass(slots=True, eq=False)
class _Sum:
    """What goes to one owner: this rank's `flat` gradients of `params`, and on the owner room for the others'."""

    peers: Peers
    owner: int
    params: list[torch.nn.Parameter]
    flat: torch.Tensor
    others: dict[int, torch.Tensor]
    works: list[dist.Work]


def reduce_to_owners(buckets: Sequence[Bucket]) -> None:
    """The mean of every gradient over its group, on its owner; other ranks' gradients become None.

    Summed in fp32 for 16-bit gradients. A parameter that had a gradient on some ranks only counts zeros for the others, as in
    DDP; one that had none anywhere has none. Every byte goes to one rank only.
    """
    sums = []
    for peers in {id(b.peers): b.peers for b in buckets}.values():
        sums += _started(peers, [s for b in buckets if b.peers is peers for s in b.shares])
    for s in sums:
        for work in s.works:
            work.wait()
        mine, at = s.owner == s.peers.rank, 0
        if mine and s.others:
            s.flat = sum((s.others.get(r, s.flat) for r in range(1, s.peers.size)), s.others.get(0, s.flat))
        for p in s.params:
            part = s.flat[at : at + p.numel()].view(p.shape)
            at += p.numel()
            p.grad = (part / s.peers.size).to(p.dtype) if mine else None


def _started(peers: Peers, shares: Sequence) -> list[_Sum]:
    params = [(s.owner, m.param) for s in shares for m in s.members]
    has = torch.tensor([p.grad is not None for _, p in params], dtype=torch.int32, device=peers.device)
    peers.wire.all_reduce(has)
    counts = has.tolist()
    peers.wire.check()
    by_owner: dict[tuple[int, torch.dtype], list[torch.nn.Parameter]] = {}
    for (owner, p), n in zip(params, counts):
        if n:
            by_owner.setdefault((owner, _wide(p)), []).append(p)
    out = []
    for (owner, _), those in sorted(by_owner.items(), key=lambda x: (x[0][0], str(x[0][1]))):
        s = _Sum(peers, owner, those, torch.cat([_grad(p).reshape(-1) for p in those]), {}, [])
        out.append(s)
        if s.flat.is_cuda:
            s.works.append(peers.wire.reduce(s.flat, owner))
        elif owner == peers.rank:  # summed here, in the order of ranks: gloo's reduce waits for itself
            s.others = {r: torch.empty_like(s.flat) for r in range(peers.size) if r != owner}
            s.works += [peers.wire.receive(t, r) for r, t in s.others.items()]
        else:
            s.works.append(peers.wire.send(s.flat, owner))
    return out


def _wide(p: torch.nn.Parameter) -> torch.dtype:
    return torch.float32 if p.dtype.itemsize < 4 else p.dtype


def _grad(p: torch.nn.Parameter) -> torch.Tensor:
    return torch.zeros(p.shape, dtype=_wide(p), device=p.device) if p.grad is None else p.grad.detach().to(_wide(p))


def squares(gradients: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of the squares of all elements: fp64 scalar on `device`; not finite if any gradient is not."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for g in gradients:
        wide = torch.promote_types(g.dtype, torch.float32)
        total += torch.linalg.vector_norm(g.detach(), dtype=wide).to(torch.float64) ** 2
    return total
