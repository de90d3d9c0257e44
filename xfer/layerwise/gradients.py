"""Reduces gradients to the owners of their parameters, and computes their norm. It does not step parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from xfer.layerwise.gather import Bucket, Peers


@dataclass(slots=True, eq=False)
class _Sum:
    """One sum of gradients on one owner.

    flat: this rank's gradients of `params`. others: on the owner, buffers for the gradients of other ranks, by rank.
    """

    peers: Peers
    owner: int
    params: list[torch.nn.Parameter]
    flat: torch.Tensor
    others: dict[int, torch.Tensor]
    works: list[dist.Work]


def reduce_to_owners(buckets: Sequence[Bucket]) -> None:
    """Gives each owner the mean of its parameters' gradients over their group. On other ranks the gradients become None.

    16-bit gradients are summed in fp32. Ranks without a gradient for a parameter count as zeros, as in DDP; if no rank has one, the
    owner has none either. Each rank sends a gradient to its owner only.
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
    wire = peers.connected()
    wire.all_reduce(has)
    counts = has.tolist()
    wire.check()
    by_owner: dict[tuple[int, torch.dtype], list[torch.nn.Parameter]] = {}
    for (owner, p), n in zip(params, counts):
        if n:
            by_owner.setdefault((owner, _wide(p)), []).append(p)
    out = []
    for (owner, _), those in sorted(by_owner.items(), key=lambda x: (x[0][0], str(x[0][1]))):
        s = _Sum(peers, owner, those, torch.cat([_grad(p).reshape(-1) for p in those]), {}, [])
        out.append(s)
        if s.flat.is_cuda:
            s.works.append(wire.reduce(s.flat, owner))
        elif owner == peers.rank:  # summed here, in the order of ranks: reductions of gloo's wait for each other
            s.others = {r: torch.empty_like(s.flat) for r in range(peers.size) if r != owner}
            s.works += [wire.receive(t, r) for r, t in s.others.items()]
        else:
            s.works.append(wire.send(s.flat, owner))
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
