"""One rank of plain torch training under a layer-wise optimizer; does what the test says on standard input (proc.obey). A failed
assertion, such as those of HAZARDS, is told to the test."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support import layerwise_model as lm
from tests.support import tcp_bytes
from tests.support.layerwise_half import layers
from tests.support.proc import PATIENCE, emit, obey
from xfer.errors import DeadlineExceeded, PeerLost, PlanMismatch, StaleWeights, Unsupported, XferError
from xfer.layerwise import LayerWiseOptimizer, ParamGroup, checkpoint
from xfer.trainers.dtensor import TensorTrainer

MODELS = {"plain": lm.Transformer, "mixed": lm.MixedTransformer}


def everybody(mine: object) -> list:
    """This value of all ranks."""
    out: list = [None] * dist.get_world_size()
    dist.all_gather_object(out, mine)
    return out


def sgd(net: nn.Module, lr: float = 0.1, **options) -> LayerWiseOptimizer:
    return LayerWiseOptimizer(net, [ParamGroup(net.parameters(), torch.optim.SGD, {"lr": lr})], **options)


class Pair:
    """Two equal models on the same data under DDP: `net` with owners, and `truth`, which every rank steps. `model`: key of MODELS.
    `options`: of the LayerWiseOptimizer."""

    def __init__(self, model: str = "plain", **options):
        self.net, self.truth = MODELS[model](), MODELS[model]()
        self.modules = [DistributedDataParallel(net) for net in (self.net, self.truth)]
        options = {"bucket_bytes": 20_000, "deadline_s": 60.0, **options}
        self.owners = LayerWiseOptimizer(self.modules[0], lm.groups(self.net), **options)
        self.everywhere = lm.Everywhere(self.truth)
        self.number = 0

    def backward(self) -> list[float]:
        """The losses of both models."""
        self.number += 1
        ends = zip(self.modules, (self.owners, self.everywhere))
        return [lm.backward(module, optimizer, self.number, dist.get_rank()) for module, optimizer in ends]

    def steps(self, n: int) -> None:
        for _ in range(n):
            self.backward()
            self.step()

    def step(self) -> None:
        self.owners.step()
        self.everywhere.step()

    def same(self) -> None:
        self.owners.drain()
        assert not self.stale()

    def stale(self) -> list[str]:
        """Names of parameters that are not those of `truth`."""
        pairs = zip(self.net.named_parameters(), self.truth.parameters())
        return [n for (n, a), b in pairs if not torch.equal(a, b)]


# ---- training


def train(steps: int, **options) -> None:
    """Trains a Pair. Answers both losses of each step, and the parameters that differ in the end."""
    pair = Pair(**options)
    gather, losses, ahead, stale = pair.owners.gather, [], [], 0
    begin = gather.begin
    gather.begin = lambda: (ahead.append(gather._ahead), begin())
    for _ in range(steps):
        losses.append(pair.backward())
        pair.step()
        stale += not gather.settled
    pair.owners.drain()
    stats = gather.stats
    emit(
        "trained", losses=losses, wrong=pair.stale(), stale=stale, ahead=ahead, received=stats.received, lacked=stats.lacked,
        unexpected=stats.unexpected, buckets=len(gather.buckets), pulled=len(gather.pulls),
    )  # fmt: skip
    pair.owners.close()


def program(seed: int) -> None:
    """Calls that users make, in a random order and partly on some ranks only. Answers the states of buckets before each operation."""
    together, alone = random.Random(seed), random.Random(f"{seed} {dist.get_rank()}")
    pair = Pair(
        prefetch_depth=together.randint(1, 3),
        rehome=together.random() < 0.7,
        guard=together.choice(["nan", "first", "always"]),
        route=together.choice(["broadcast", "pull"]),
    )
    pair.steps(2)
    states = set()
    for _ in range(16):
        for operation in (step, together.choice(OPERATIONS)):
            states |= {b.state.value for b in pair.owners.gather.buckets}
            operation(pair, alone)
    pair.same()
    pair.owners.close()
    assert not pair.stale()
    with pytest.raises(Unsupported, match="closed"):
        pair.steps(1)
    emit("ran", states=sorted(states), unexpected=pair.owners.gather.stats.unexpected)


def step(pair: Pair, alone: random.Random) -> None:
    """The order of modules differs between ranks; some ranks are slow."""
    pair.net.swap = pair.truth.swap = alone.random() < 0.3
    time.sleep(0.05 * (alone.random() < 0.2))
    pair.steps(1)


def drain(pair: Pair, alone: random.Random) -> None:
    pair.same()


def drain_before_step(pair: Pair, alone: random.Random) -> None:
    pair.backward()
    before = [p.grad.clone() for p in pair.net.parameters() if p.requires_grad]
    pair.owners.drain()
    assert all(map(torch.equal, before, (p.grad for p in pair.net.parameters() if p.requires_grad)))
    pair.step()


def change_after_drain(pair: Pair, alone: random.Random) -> None:
    """Some ranks are late: none may copy what another has changed already."""
    time.sleep(0.1 * (alone.random() < 0.3))
    pair.owners.drain()
    with torch.no_grad():
        for p in (*pair.net.parameters(), *pair.truth.parameters()):
            p.mul_(0.9)


def buckets_in_any_order(pair: Pair, alone: random.Random) -> None:
    gather = pair.owners.gather
    buckets = alone.sample(gather.buckets, len(gather.buckets))
    for b in (*buckets, *buckets):
        gather.start_param_sync(b)
    for b in reversed(buckets):
        gather.finish_param_sync(b, skip_next_bucket_dispatch=True)
        gather.finish_param_sync(b)
    assert not pair.stale()


@torch.no_grad()
def some_ranks_evaluate(pair: Pair, alone: random.Random) -> None:
    if alone.random() < 0.4:
        a, b = (lm.loss_of(n, lm.batch(99, 0)).item() for n in (pair.net, pair.truth))
        assert a == b, "an evaluation saw old parameters"


@torch.no_grad()
def use_one_module(pair: Pair, alone: random.Random) -> None:
    for n in (pair.net, pair.truth):
        n.embed(torch.zeros(1, 1, dtype=torch.long))


def state_dict(pair: Pair, alone: random.Random) -> None:
    a, b = pair.net.state_dict(), pair.truth.state_dict()
    assert all(torch.equal(a[n], b[n]) for n in b)


OPERATIONS = [
    step, drain, drain_before_step, change_after_drain, buckets_in_any_order, some_ranks_evaluate, use_one_module, state_dict,
]  # fmt: skip


# ---- hazards


def more_ranks_than_parameters_and_a_gradient_that_is_not_finite():
    """Gradients go to owners only, so one rank alone knows: no rank steps, and all make the next step."""
    net = nn.Linear(4, 4, bias=False)
    nn.init.ones_(net.weight)
    o = sgd(net, lr=0.25)
    for number in range(4):
        o.zero_grad()
        net(torch.ones(1, 4)).sum().backward()
        if number == 0 and dist.get_rank() == 2:
            net.weight.grad[0, 0] = float("inf")
        o.step()
        o.drain()
        assert o.skipped is (number == 0) and torch.equal(net.weight, torch.full((4, 4), 1.0 - 0.25 * number))
    assert sorted(everybody(len(o.owned))) == [0, 0, 0, 1]


class Experts(nn.Module):
    """Dense layers around experts, which some inputs do not reach."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        torch.manual_seed(seed)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, reached: bool):
        for layer in (*self.dense[:3], *(self.experts if reached else ()), *self.dense[3:]):
            x = x + layer(x)
        return x


def experts_over_groups():
    """Two ranks share experts, and in turns one of them skips them. Over gloo each once waited for what the other had not started.
    Owners get means over a parameter's group, as DDP would give them, and the norm has each gradient once."""
    rank = dist.get_rank()
    # Ranks within the pair are not those among all ranks.
    groups = [dist.new_group(ranks) for ranks in ([0], [1, 3], [2])]
    mine = min(rank, 4 - rank)
    group_of = lambda name, _: groups[mine] if "experts" in name else None  # noqa: E731
    digests, stale = [], 0
    for overlap in (True, False):
        net, truth = (Experts(seed=7 + mine) for _ in range(2))
        options = dict(group_of=group_of, clip_grad=0.5, bucket_bytes=1, deadline_s=15.0 * PATIENCE)
        o, everywhere = sgd(net, 0.01, overlap=overlap, **options), torch.optim.SGD(truth.parameters(), lr=0.01)
        assert [p.size for p in o._peers] == [4, 2 if rank % 2 else 1]
        for step in range(6):
            stale += not o.gather.settled
            for module, optimizer in ((net, o), (truth, everywhere)):
                optimizer.zero_grad()
                reached = step < 2 or rank != 1 + 2 * (step % 2)
                module(torch.full((1, 4), rank + 1.0), reached).square().mean().backward()
            o.step()
            total = torch.zeros((), dtype=torch.float64)
            for name, p in truth.named_parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                group, copies = group_of(name, p), dist.get_world_size(group_of(name, p))
                dist.all_reduce(p.grad, group=group)
                p.grad /= copies
                total += p.grad.double().norm() ** 2 / copies
            dist.all_reduce(total)
            norm = total.sqrt().item()
            assert norm > 0.5 and abs(norm - o.grad_norm) < 1e-4 * norm
            for p in truth.parameters():
                p.grad *= 0.5 / (norm + 1e-6)
            everywhere.step()
        o.drain()
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(net.parameters(), truth.parameters()))
        digests.append(lm.digest(net))
        o.close()
    assert stale == 5 and digests[0] == digests[1]


def unequal_groups():
    """Ranks are in different numbers of groups, as pipeline stages are. torch's own way to make a group waits for ever then."""
    rank = dist.get_rank()
    _, *halves, _ = (dist.new_group(ranks) for ranks in ([0], [0, 1], [2, 3], [0, 1, 2]))
    for group in (None, halves[rank // 2]):
        net = lm.Transformer()
        o = LayerWiseOptimizer(net, lm.groups(net), process_group=group, bucket_bytes=20_000, deadline_s=20.0)
        for number in range(2):
            lm.step(net, o, number, rank)
        o.close()
    a, b, c, d = everybody(lm.digest(net))
    assert a == b != c == d


def a_rank_that_does_not_build_the_optimizer():
    group = dist.new_group(timeout=timedelta(seconds=60))
    net, began = lm.Transformer(), time.monotonic()
    if dist.get_rank() < 3:
        with pytest.raises((DeadlineExceeded, PeerLost)):
            LayerWiseOptimizer(net, lm.groups(net), process_group=group, deadline_s=2.0)
        assert time.monotonic() - began < 10.0 * PATIENCE


def bytes_over_the_wire():
    """One rank owns nearly everything. The plan, and the kernel's count of what comes over TCP, have what a rank lacks and hardly more."""
    net = nn.Sequential(nn.Linear(512, 700), *(nn.Linear(n, n + 1) for n in range(40, 60)))
    o = sgd(net, overlap=False)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    o.step()
    planned, lacked = o.gather.stats.received, o.gather.stats.lacked
    came = []
    for _ in range(2):
        dist.barrier()
        came.append(tcp_bytes.received())
        dist.barrier()  # no rank begins before all have looked
        o.synchronize()
    o.close()
    assert lacked <= planned <= 1.02 * lacked < 1.02 * sum(p.nbytes for p in net.parameters())
    assert None in came or lacked <= came[1] - came[0] <= 1.02 * lacked, (came, lacked)
    all_lacked = everybody(lacked)
    assert max(all_lacked) > 5 * min(all_lacked)


def different_ranks():
    """Rank 0 differs from the others: refused before anything is sent, because gloo ends a process that is sent too many bytes."""
    first, plain = dist.get_rank() == 0, torch.optim.SGD
    options = {"bucket_bytes": 1, "rehome": False, "reduce": "done", "clip_grad": 1.0}
    for what in ("model", "groups", "kind", "view", "strides", *options):
        odd = what if first else ""
        net = layers(5 if odd == "model" else 4)
        if odd == "view":
            net[1].seen = net[1].weight.detach()
        if odd == "strides":
            net[1].weight.data = net[1].weight.detach().t().contiguous().t()
        params, cut = list(net.parameters()), 3 if odd == "groups" else 2
        kinds = (plain, torch.optim.ASGD if odd == "kind" else plain)
        groups = [ParamGroup(some, kind, {"lr": 0.1}) for some, kind in zip((params[:cut], params[cut:]), kinds)]
        at = [p.data_ptr() for p in params]
        lie = what in ("bucket_bytes", "rehome", "view", "strides")
        about = "which parameters lie together" if lie else "their parameters"
        with pytest.raises(PlanMismatch, match=f"disagree about {about}"):
            LayerWiseOptimizer(net, groups, deadline_s=30.0, **{k: v for k, v in options.items() if k == odd})
        assert [p.data_ptr() for p in params] == at, f"{what}: parameters were moved before"


def buffers_of_their_own():
    """Each rank has running statistics of its own data. A checkpoint has all of rank 0's, since DDP would broadcast these."""
    folder = everybody(tempfile.mkdtemp())[0]
    torch.manual_seed(0)
    net = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(4, 4), nn.BatchNorm1d(4))))
    ddp = DistributedDataParallel(net)
    o = sgd(ddp)
    torch.manual_seed(1 + dist.get_rank())
    ddp(torch.randn(8, 4)).square().sum().backward()
    o.step()
    buffers = lambda: torch.cat([b.flatten().float() for b in net.buffers()]).tolist()  # noqa: E731
    before = everybody(buffers())
    checkpoint.save(o, folder)
    checkpoint.load(o, folder)
    o.close()
    assert len(set(map(str, before))) == 4 and buffers() == before[0]
    assert len(set(everybody(lm.digest(net)))) == 1


def checkpoints_that_one_rank_cannot_save_or_load():
    """All ranks raise its error at once, instead of waiting in a collective; later calls are whole."""
    folder, net, one = everybody(tempfile.mkdtemp())[0], layers(4), dist.get_rank() == 1
    o, adapter = sgd(net), TensorTrainer(net)
    if one:
        adapter.read = Mock(side_effect=RuntimeError("this adapter is broken"))
    for how in (checkpoint.save, checkpoint.load):
        for source, own, said in ((None, StaleWeights, "memory ran out"), (adapter, RuntimeError, "broken")):
            if source is None and one:
                o.gather.broken = StaleWeights("a step broke off", ["memory ran out"])
            began = time.monotonic()
            with pytest.raises(Exception, match="" if one else "rank 1: ") as e:
                how(o, folder, source)
            assert e.type is (own if one or source is None else XferError) and said in str(e.value)
            assert time.monotonic() - began < 20 * PATIENCE
            o.gather.broken = None
        checkpoint.save(o, folder)
    checkpoint.load(o, folder)
    o.close()


def a_close_beside_a_rank_that_failed():
    """Every rank raises a typed error or closes, and keeps no connection and no mapping."""
    pair = Pair(route="pull", deadline_s=2.0 * PATIENCE)
    pair.steps(1)
    if dist.get_rank() == 1:
        p = next(p for n, p in pair.owners.named if n in pair.owners.owner and not pair.owners.owns(n))
        p.data = p.data.clone()
    said = "closed"
    try:
        pair.owners.close()
    except XferError as e:
        said = type(e).__name__
    assert said in (("RebindError",) if dist.get_rank() == 1 else ("PeerLost", "DeadlineExceeded", "closed"))
    assert all(p.wire._closed for p in pair.owners._peers if p.wire is not None)
    assert not any(x._mapping.roots for x in pair.owners.gather.pulls.values())


HAZARDS = [
    more_ranks_than_parameters_and_a_gradient_that_is_not_finite, experts_over_groups, unequal_groups,
    a_rank_that_does_not_build_the_optimizer, bytes_over_the_wire, different_ranks, buffers_of_their_own,
    checkpoints_that_one_rank_cannot_save_or_load, a_close_beside_a_rank_that_failed,
]  # fmt: skip


def dying(victim: int, how: str = "ends", deadline_s: float = 10.0, **options) -> None:
    """`victim` ends, or stops, between its step and its gathers. Answers the errors of later uses on the other ranks."""
    pair = Pair(deadline_s=deadline_s, **options)
    pair.steps(2)
    pair.backward()
    if dist.get_rank() == victim:
        gone = {"ends": lambda: os._exit(7), "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP)}
        pair.owners.gather.begin = gone[how]
    seen, began = [], time.monotonic()
    pair.owners.step()
    forward = lambda: pair.net(lm.batch(5, 0))  # noqa: E731
    for use in (forward, forward, pair.owners.step):
        with torch.no_grad(), pytest.raises(XferError) as e:
            use()
        seen.append([e.type.__name__, str(e.value)])
    emit("survived", seen=seen, seconds=time.monotonic() - began)


# ---- checkpoints


def checkpointed(folder: str, steps: int) -> None:
    """Trains, saves while a gather is on its way, and goes on."""
    pair = Pair()
    pair.steps(steps)
    assert not pair.owners.gather.settled
    checkpoint.save(pair.owners, folder)
    saved = lm.digest(pair.truth)
    pair.steps(1)
    pair.same()
    emit("saved", saved=saved)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    obey(train, program, dying, checkpointed, *HAZARDS)
    os._exit(0)  # gloo's threads would wait for peers that are gone


if __name__ == "__main__":
    main()
