"""Ranks of a layer-wise job that write parameters, skip modules of one group, step on a sum that was aborted, or close beside one
that failed.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from tests.support import layerwise_model as lm
from tests.support.layerwise_pair import Pair
from tests.support.proc import PATIENCE
from xfer.errors import DeadlineExceeded, Unsupported, XferError
from xfer.layerwise import LayerWiseOptimizer, ParamGroup


def drained_and_changed():
    """All ranks drain and change parameters, one of them late: nobody may copy what another has changed already."""
    seen = []
    for route in ("broadcast", "pull"):
        pair = Pair(route=route)
        pair.steps(2)
        time.sleep(0.3 * (dist.get_rank() == 1))
        pair.owners.drain()
        with torch.no_grad():
            for p in (*pair.net.parameters(), *pair.truth.parameters()):
                p.mul_(0.5)
        dist.barrier()
        pair.same()
        seen.append(len(pair.owners.gather.pulls))
        pair.owners.close()
    return seen


class Experts(torch.nn.Module):
    """Dense layers around experts, which some inputs do not reach."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(0)
        self.dense = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(6))
        torch.manual_seed(seed)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, reached: bool):
        for layer in (*self.dense[:3], *(self.experts if reached else ()), *self.dense[3:]):
            x = x + layer(x)
        return x


def skipped_experts():
    """Two ranks share experts, and in turns one of them skips them; dense layers are everybody's. The bits of gathering at once."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2], [3])]
    digests, stale = [], 0
    for overlap in (True, False):
        net = Experts(seed=7 + (rank > 1) * rank)
        experts = {id(p) for p in net.experts.parameters()}
        o = LayerWiseOptimizer(
            net,
            [ParamGroup(net.parameters(), torch.optim.SGD, {"lr": 0.01})],
            group_of=lambda _, p, experts=experts: groups[max(rank - 1, 0)] if id(p) in experts else None,
            bucket_bytes=1,
            overlap=overlap,
            deadline_s=15.0 * PATIENCE,
        )
        for step in range(6):
            o.zero_grad()
            stale += not o.gather.settled
            net(torch.full((1, 4), rank + 1.0), reached=step < 2 or rank != step % 2).square().mean().backward()
            o.step()
        o.drain()
        digests.append(lm.digest(net))
        o.close()
    return stale, digests


def an_aborted_norm():
    """Over groups of two, so that the wire that norms are summed over has no bucket: what NCCL's watch does to a sum that is late,
    it says so, lets it go, and leaves rubbish."""
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    net = lm.Transformer()
    owners = LayerWiseOptimizer(net, lm.groups(net), group_of=lambda *_: halves[dist.get_rank() // 2], clip_grad=1.0)
    lm.loss_of(net, lm.batch(0, 0)).backward()
    owners.step()
    owners.drain()
    before = [p.detach().clone() for p in net.parameters()]
    wire = owners._peers[0].wire

    def aborted(total: torch.Tensor) -> None:
        wire.lost = DeadlineExceeded("not exchanged in time")
        total.fill_(1e-6)

    wire.all_reduce = aborted
    lm.loss_of(net, lm.batch(1, 0)).backward()
    try:
        owners.step()
    except DeadlineExceeded:
        return all(torch.equal(a, p) for a, p in zip(before, net.parameters()))
    return False


def closed_beside_a_rank_that_failed():
    """One rank cannot go on, all close: typed errors, and everything is let go of."""
    pair = Pair(route="pull", deadline_s=10.0)
    pair.steps(1)
    if dist.get_rank() == 1:
        p = next(p for n, p in pair.owners.named if n in pair.owners.owner and not pair.owners.owns(n))
        p.data = p.data.clone()
    said = "closed"
    try:
        pair.owners.close()
    except XferError as e:
        said = type(e).__name__
    open_ = [w for w in (who.wire for who in pair.owners._peers) if w is not None and not w._closed]
    return [said, len(open_), [len(x._mapping.roots) for x in pair.owners.gather.pulls.values()]]


def closed():
    pair = Pair()
    pair.steps(2)
    pair.owners.close()
    if pair.stale():
        raise AssertionError("closing left old parameters")
    pair.backward()
    try:
        pair.owners.step()
    except Unsupported as e:
        return str(e)
    raise AssertionError("nobody noticed")


def aborted():
    """What every use says once a watch has aborted the wire: here only said to be, for over gloo none is watched."""
    pair = Pair()
    pair.steps(2)
    loss = lm.loss_of(pair.net, lm.batch(7, 0))
    before = lm.digest(pair.net)
    for wire in pair.owners.gather._wires:
        wire.lost = DeadlineExceeded("aborted by the watch", where=f"rank {dist.get_rank()}")
    uses = (lambda: pair.net(lm.batch(8, 0)), loss.backward, pair.owners.step, pair.owners.drain)
    seen = []
    for use in uses:
        try:
            use()
            seen.append("nothing")
        except XferError as e:
            seen.append(str(e))
    return [seen, lm.digest(pair.net) == before]
