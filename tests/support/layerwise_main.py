"""One rank of plain torch training under a layer-wise optimizer; does what the test says on standard input (proc.obey)."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support import layerwise_model as lm
from tests.support import tcp_bytes
from tests.support.layerwise_ends import (
    aborted,
    an_aborted_norm,
    closed,
    closed_beside_a_rank_that_failed,
    drained_and_changed,
    skipped_experts,
)
from tests.support.layerwise_pair import Pair
from tests.support.layerwise_sources import refit_sources, refit_without_the_wrapper
from tests.support.layerwise_unlike import buffers_of_their_own, different_ranks, fails_on_one_rank
from tests.support.proc import emit, obey
from xfer.errors import RebindError, StaleWeights, XferError
from xfer.layerwise import LayerWiseOptimizer, ParamGroup, checkpoint
from xfer.layerwise.gather import State

MODELS = {"plain": lm.Transformer, "mixed": lm.MixedTransformer}


def train(how: str, steps: int, model: str = "plain", ddp: bool = True, **options) -> None:
    """how: "owners" (LayerWiseOptimizer), "everywhere" (every rank steps everything) or "one" (one process, all data)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = MODELS[model]()
    module = DistributedDataParallel(net) if ddp and how != "one" else net
    if how == "owners":
        optimizer = LayerWiseOptimizer(
            module, lm.groups(net), **{"bucket_bytes": 20_000, "deadline_s": 60.0, **options}
        )
        optimizers, ahead, begin = [optimizer], [], optimizer.gather.begin
        optimizer.gather.begin = lambda: (ahead.append(optimizer.gather._ahead), begin())
    else:
        optimizers = [lm.Masters(net)] if model == "mixed" else lm.everywhere(net)
    losses, stale, digests = [], 0, {}
    for step in range(steps):
        if how == "one":
            loss = torch.stack([lm.loss_of(module, lm.batch(step, r)) for r in range(size)]).mean()
        else:
            loss = lm.loss_of(module, lm.batch(step, rank))
        for o in optimizers:
            o.zero_grad()
        loss.backward()
        for o in optimizers:
            o.step()
        if how == "owners":
            stale += not optimizer.gather.settled
        total = loss.detach().double()
        if how != "one":
            dist.all_reduce(total)
            total /= size
        losses.append(total.item())
        if how == "everywhere" and step + 1 in (10, steps):
            digests[str(step + 1)] = lm.digest(net)
    more = dict(digests=digests)
    if how == "owners":
        optimizer.drain()
        s = optimizer.gather.stats
        more |= dict(
            buckets=len(optimizer.gather.buckets),
            pulled=len(optimizer.gather.pulls),
            stale=stale,
            ahead=ahead,
            owned=[len(t.of(rank)) for t in optimizer.ownership.values()],
            received=s.received,
            lacked=s.lacked,
            unexpected=s.unexpected,
            order=[b.index for b in optimizer.gather.order],
        )
        optimizer.close()
    values = torch.cat([p.detach().double().flatten() for p in net.parameters()]) if how in ("one", "owners") else None
    if how == "one":
        train.one = values
    elif values is not None and getattr(train, "one", None) is not None and model == "plain":
        more["distance"] = ((values - train.one).norm() / train.one.norm()).item()
    emit("trained", losses=losses, digest=lm.digest(net), **more)


def hazard(name: str) -> None:
    """Run one of `HAZARDS` on all ranks; answers "fine", with what it returned."""
    emit("fine", what=HAZARDS[name]())


def started_twice_finished_twice():
    pair = Pair()
    pair.steps(2)
    gather = pair.owners.gather
    pair.backward()
    pair.step()
    for b in gather.buckets:
        gather.start_param_sync(b)
        gather.start_param_sync(b)
    for b in reversed(gather.buckets):
        gather.finish_param_sync(b, skip_next_bucket_dispatch=True)
        gather.finish_param_sync(b)
    if pair.stale():
        raise AssertionError(f"not here after finish: {pair.stale()}")
    pair.steps(2)
    pair.same()


def drained_in_flight():
    """The forced sync of Megatron-Core that loses an update."""
    pair = Pair(prefetch_depth=2)
    pair.steps(3)
    states = sorted({b.state.value for b in pair.owners.gather.buckets})
    was = pair.stale()
    pair.same()
    pair.steps(2)
    pair.same()
    return dict(states=states, stale=was)


def drained_between_backward_and_step():
    pair = Pair()
    pair.steps(2)
    pair.backward()
    before = [p.grad.clone() for p in pair.net.parameters() if p.requires_grad]
    pair.owners.drain()
    after = [p.grad for p in pair.net.parameters() if p.requires_grad]
    if not all(map(torch.equal, before, after)):
        raise AssertionError("draining changed gradients")
    pair.step()
    pair.steps(1)
    pair.same()


def another_order():
    pair = Pair()
    pair.steps(2)
    pair.net.swap = pair.truth.swap = True
    pair.steps(3)
    pair.net.swap = pair.truth.swap = dist.get_rank() % 2 == 0  # not even the same on all ranks
    pair.steps(3)
    pair.same()
    return pair.owners.gather.stats.unexpected


def one_rank_evaluates():
    """More forwards on one rank than on others: gathers still match."""
    pair = Pair()
    pair.steps(2)
    if dist.get_rank() == 1:
        with torch.no_grad():
            a, b = (lm.loss_of(n, lm.batch(99, 0)).item() for n in (pair.net, pair.truth))
        if a != b:
            raise AssertionError(f"an evaluation saw old parameters: {a}, not {b}")
    pair.steps(2)
    pair.same()


def skipped_module():
    """A block that is left out in one step is gathered all the same before the next."""
    pair = Pair()
    pair.steps(2)
    with torch.no_grad():
        for n in (pair.net, pair.truth):
            n.embed(torch.zeros(1, 1, dtype=torch.long))
    pair.backward()
    pair.step()
    pair.same()


def state_dict_is_current():
    pair = Pair()
    pair.steps(2)
    a, b = pair.net.state_dict(), pair.truth.state_dict()
    bad = [n for n in b if not torch.equal(a[n], b[n])]
    if bad:
        raise AssertionError(f"state_dict() held old {bad}")


def without_hooks():
    """forward() called past the hooks: an error in the backward, on every rank."""
    pair = Pair()
    pair.steps(2)
    try:
        x = pair.net.blocks[1].forward(torch.ones(2, 3, lm.WIDTH))
        torch.nn.functional.linear(x, pair.net.blocks[0].up.weight).sum().backward()
    except StaleWeights as e:
        pair.owners.drain()
        return str(e)
    raise AssertionError("nobody noticed")


def unannounced_but_watched():
    """guard="always" finishes what any operation reads, hooked or not, also without gradients."""
    pair = Pair(guard="always")
    pair.steps(2)
    for n in (pair.net, pair.truth):
        n.late.forward_pre = n.late.register_forward_pre_hook(
            lambda m, args, n=n: (args[0] + n.blocks[1].down.bias.sum() * 0.1,)
        )
    pair.steps(3)
    pair.same()


def old_values_are_nans():
    """By default a read past all hooks, without a gradient, cannot be mistaken for the last step's; training is as ever."""
    seen = []
    for rehome in (True, False):
        pair = Pair(rehome=rehome)
        pair.steps(2)
        stale = {n for n, p in pair.owners.named if n in pair.owners.owner and not pair.owners.owns(n)}
        held = {
            m.name for b in pair.owners.gather.buckets if b.state is State.STALE for s in b.shares for m in s.members
        }
        values = {n: p.detach() for n, p in pair.owners.named}
        seen.append(len(stale & held))
        wrong = [n for n in stale & held if not values[n].isnan().all()]
        wrong += [n for n in values.keys() - stale if values[n].isnan().any()]
        if wrong:
            raise AssertionError(f"rehome={rehome}: {wrong}")
        pair.steps(3)
        pair.same()
    return seen


def pulled_beside_slow_ranks():
    """Copies out of owners' memory, while some rank is late before its forward, or finishes everything at once."""
    pair = Pair(route="pull", prefetch_depth=1)
    if not pair.owners.gather.pulls:
        return False
    rank, size = dist.get_rank(), dist.get_world_size()
    for i in range(2 * size):
        if i % size == rank:
            time.sleep(0.1)
        elif (i + 1) % size == rank:
            pair.net.state_dict()
        pair.steps(1)
    pair.same()
    pair.owners.close()
    return True


def few_parameters():
    """More ranks than parameters: some own nothing."""
    net = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.ones_(net.weight)
    o = LayerWiseOptimizer(net, [ParamGroup(net.parameters(), torch.optim.SGD, {"lr": 0.25})])
    for _ in range(3):
        net(torch.ones(1, 4)).sum().backward()
        o.step()
        o.zero_grad()
    o.drain()
    if not torch.equal(net.weight, torch.full((4, 4), 0.25)):
        raise AssertionError(str(net.weight))
    return len(o.owned)


def experts_over_halves():
    """Blocks' matrices are replicated over pairs of ranks only; norms are summed over all ranks once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([r for r in range(size) if r % 2 == i]) for i in range(2)]
    net, truth = lm.Transformer(), lm.Transformer()
    for n in (net, truth):
        with torch.no_grad():
            for b in n.blocks:
                b.up.weight.mul_(1 + rank % 2)
    experts = {id(b.up.weight) for b in net.blocks}
    o = LayerWiseOptimizer(
        net,
        lm.groups(net),
        group_of=lambda name, p: pairs[rank % 2] if id(p) in experts else None,
        clip_grad=0.5,
        bucket_bytes=20_000,
    )
    reference = lm.everywhere(truth)
    order = {id(b.up.weight) for b in truth.blocks}
    for i in range(4):
        for n in (net, truth):
            n.zero_grad()
            lm.loss_of(n, lm.batch(i, rank)).backward()
        o.step()
        total = torch.zeros((), dtype=torch.float64)
        for p in truth.parameters():
            if not p.requires_grad:
                continue
            mine = id(p) in order
            dist.all_reduce(p.grad, group=pairs[rank % 2] if mine else None)
            p.grad /= size // 2 if mine else size
            total += p.grad.double().norm() ** 2 / (size // 2 if mine else size)
        dist.all_reduce(total)
        norm = total.sqrt().item()
        if abs(norm - o.grad_norm) > 1e-4 * norm:
            raise AssertionError(f"norm {o.grad_norm}, not {norm}")
        for p in truth.parameters():
            if p.grad is not None:
                p.grad *= min(1.0, 0.5 / (norm + 1e-6))
        for r in reference:
            r.step()
    o.drain()
    bad = [n for (n, a), b in zip(net.named_parameters(), truth.parameters()) if not torch.allclose(a, b, atol=1e-3)]
    if bad:
        raise AssertionError(f"rank {rank}: {bad}")
    return [p.size for p in o._peers]


def unequal_groups():
    """Ranks are in different numbers of groups, as pipeline stages are: those over which owners are still meet."""
    rank = dist.get_rank()
    dist.new_group([0])
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dist.new_group([0, 1, 2])
    for group in (None, halves[rank // 2]):
        net = lm.Transformer()
        o = LayerWiseOptimizer(net, lm.groups(net), process_group=group, bucket_bytes=20_000, deadline_s=20.0)
        for step in range(2):
            o.zero_grad()
            lm.loss_of(net, lm.batch(step, rank)).backward()
            o.step()
        o.close()
    return lm.digest(net)


def not_finite_on_one_rank():
    """Gradients go to owners only, so one rank alone knows: nobody steps all the same, and the next step is one."""
    rank, net = dist.get_rank(), lm.Transformer()
    o = LayerWiseOptimizer(net, lm.groups(net), bucket_bytes=20_000)
    p = next(p for n, p in o.named if n in o.owner)
    before = lm.digest(net)
    for step in range(2):
        o.zero_grad()
        lm.loss_of(net, lm.batch(step, rank)).backward()
        if step == 0 and rank == 2:
            p.grad.view(-1)[0] = float("inf")
        o.step()
        o.drain()
        if o.skipped is not (step == 0) or (lm.digest(net) == before) is not o.skipped:
            raise AssertionError(f"step {step}: skipped is {o.skipped}")


def captured():
    """A CUDA graph over parameters on their way would replay old ones. (Only torch's answer is feigned.)"""
    pair = Pair()
    pair.steps(2)
    was = torch.cuda.is_available, torch.cuda.is_current_stream_capturing
    torch.cuda.is_available = torch.cuda.is_current_stream_capturing = lambda: True
    try:
        pair.net(lm.batch(9, 0))
    except StaleWeights as e:
        seen = str(e)
    else:
        raise AssertionError("nobody noticed")
    finally:
        torch.cuda.is_available, torch.cuda.is_current_stream_capturing = was
    pair.steps(1)
    pair.same()
    return seen


def absent():
    """One rank does not build the optimizer."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    if dist.get_rank() == 3:
        return ["DeadlineExceeded", 0.0]
    net, began = lm.Transformer(), time.monotonic()
    try:
        LayerWiseOptimizer(net, lm.groups(net), process_group=group, deadline_s=2.0)
    except XferError as e:
        return [type(e).__name__, time.monotonic() - began]
    raise AssertionError("nobody noticed")


def changed_memory():
    """A cast after the optimizer was built: refused when the gather would have missed it."""
    pair = Pair()
    pair.steps(2)
    pair.owners.drain()
    pair.net.late.weight.data = pair.net.late.weight.detach().clone()
    try:
        pair.steps(1)
    except RebindError as e:
        return str(e)
    raise AssertionError("nobody noticed")


def wire():
    """When one rank owns nearly everything: bytes lacked, bytes that were to be received by plan, bytes that really came over TCP during
    one gather (None where the kernel does not count them), bytes of the model."""
    net = torch.nn.Sequential(torch.nn.Linear(512, 700), *(torch.nn.Linear(n, n + 1) for n in range(40, 60)))
    o = LayerWiseOptimizer(net, [ParamGroup(net.parameters(), torch.optim.SGD, {"lr": 0.1})], overlap=False)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    o.step()
    s = o.gather.stats
    planned, lacked = s.received, s.lacked
    came = []
    for _ in range(2):
        dist.barrier()
        came.append(tcp_bytes.received())
        dist.barrier()  # nobody begins before all have looked
        o.synchronize()
    travelled = None if None in came else came[1] - came[0]
    o.close()
    return [lacked, planned, travelled, sum(m.nbytes for b in o.gather.buckets for x in b.shares for m in x.members)]


def dying(victim: int, how: str = "ends", deadline_s: float = 10.0, **options) -> None:
    """`victim` ends, or stops, between its step and its gathers; what the others then see, twice."""
    pair = Pair(deadline_s=deadline_s, **options)
    pair.steps(2)
    pair.backward()
    if dist.get_rank() == victim:
        gone = {"ends": lambda: os._exit(7), "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP)}
        pair.owners.gather.begin = gone[how]
    seen, began = [], time.monotonic()
    pair.owners.step()
    for _ in range(2):
        try:
            with torch.no_grad():
                pair.net(lm.batch(5, 0))
        except Exception as e:
            seen.append([type(e).__name__, str(e)])
    try:
        pair.owners.step()
    except Exception as e:
        seen.append([type(e).__name__, str(e)])
    emit("survived", seen=seen, seconds=time.monotonic() - began)


def checkpointed(folder: str, steps: int) -> None:
    """Train, save in the midst of a gather, go on."""
    pair = Pair()
    pair.steps(steps)
    checkpoint.save(pair.owners, folder)
    saved = lm.digest(pair.truth)
    pair.steps(steps)
    pair.same()
    emit("saved", saved=saved, values=torch.cat([p.detach().flatten() for p in pair.net.parameters()]).tolist())


def resumed(folder: str, again: str, steps: int, of: int) -> None:
    """Load what `of` ranks saved, save it again, and go on with all the data that they had."""
    net = lm.Transformer(seed=99)
    o = LayerWiseOptimizer(net, lm.groups(net), bucket_bytes=50_000)
    checkpoint.load(o, folder)
    checkpoint.save(o, again)
    loaded, start = lm.digest(net), torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()
    for step in range(steps, 2 * steps):
        o.zero_grad()
        mine = range(dist.get_rank(), of, dist.get_world_size())
        for r in mine:
            (lm.loss_of(net, lm.batch(step, r)) / len(mine)).backward()
        o.step()
    o.drain()
    emit(
        "resumed",
        loaded=loaded,
        start=start,
        values=torch.cat([p.detach().flatten() for p in net.parameters()]).tolist(),
    )


HAZARDS = {
    f.__name__: f
    for f in (
        started_twice_finished_twice, drained_in_flight, drained_between_backward_and_step, another_order,
        one_rank_evaluates, skipped_module, state_dict_is_current, without_hooks, unannounced_but_watched,
        old_values_are_nans, pulled_beside_slow_ranks, few_parameters, aborted, experts_over_halves, unequal_groups,
        not_finite_on_one_rank, captured, absent, closed, changed_memory, wire, different_ranks, fails_on_one_rank, refit_sources,
        refit_without_the_wrapper, drained_and_changed, an_aborted_norm, closed_beside_a_rank_that_failed,
        skipped_experts, buffers_of_their_own,
    )
}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get("GLOO_SECONDS", "120"))))
    obey(train, hazard, dying, checkpointed, resumed)
    os._exit(0)  # gloo's threads would wait for peers that are gone


if __name__ == "__main__":
    main()
