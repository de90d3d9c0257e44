"""What a refit's planner is told by the ranks of a layer-wise optimizer, with a gather in flight and after a drain."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from tests.support.layerwise_pair import Pair
from xfer.plan.inventory import engine_inventory, trainer_inventory
from xfer.plan.planner import plan_replica
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import Fragment, Root, Span
from xfer.trainers.dtensor import TensorTrainer
from xfer.trainers.layerwise import LayerWiseTrainer


def refit_sources():
    """Who the planner lets send what, with a gather in flight; and that what they send is what was stepped."""
    pair = Pair(prefetch_depth=1)
    pair.steps(3)
    lacking = pair.stale()
    sides = {}
    for sources in ("owners", "all"):
        source = LayerWiseTrainer(TensorTrainer(pair.net), pair.owners, sources)
        source.drain()
        layout = source.read()
        truth = dict(pair.truth.named_parameters())
        wrong = [
            f.tensor for f in layout.traced.fragments if not torch.equal(_bytes(layout, f), _flat(truth[f.tensor]))
        ]
        sides[sources] = dict(wrong=wrong, senders=_senders(layout), lacking=pair.stale())
    owner = {name: peers.ranks[r] for name, (peers, r) in pair.owners.owner.items()}
    pair.steps(1)
    pair.same()
    return dict(before=lacking, owner=owner, **sides)


def refit_without_the_wrapper():
    """An adapter that was not told of the optimizer finishes its gathers; one for owners leaves them."""
    pair = Pair(prefetch_depth=1)
    seen = {}
    trainers = {
        "owners": lambda net: LayerWiseTrainer(TensorTrainer(net), pair.owners),
        "module": TensorTrainer,
        "tensors": lambda net: TensorTrainer(lambda: {n: p.detach() for n, p in net.named_parameters()}),
        "copies": lambda net: TensorTrainer(lambda: {n: p.detach().double() for n, p in net.named_parameters()}),
        "another model's": lambda net: TensorTrainer(lambda: {"w": torch.zeros(3)}),
    }
    for name, trainer in trainers.items():
        pair.steps(2)
        before = len(pair.stale())
        trainer(pair.net).drain()
        seen[name] = [before, len(pair.stale())]
    pair.same()
    pair.steps(1)
    pair.owners.close()
    pair.net.blocks[0].up.weight.data.add_(1.0)
    TensorTrainer(pair.net).drain()  # of a closed one nobody asks anything
    return seen


def _flat(t: torch.Tensor) -> torch.Tensor:
    return t.detach().contiguous().view(-1).view(torch.uint8)


def _bytes(layout, f) -> torch.Tensor:
    """Of a fragment that lies contiguously, as all do here."""
    n = math.prod(f.extent) * 4
    return layout.tensors[f.root][f.offset : f.offset + n]


def _senders(layout) -> dict[str, list[int]]:
    """By tensor, who sends it in a plan for one engine worker that takes everything."""
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (layout.traced.specs, layout.roots, layout.traced.fragments))
    catalog = Catalog.union([(f"trainer {r}", specs) for r, (specs, _, _) in enumerate(parts)])
    holders = [
        trainer_inventory(catalog, rank=r, host="here", roots=roots, fragments=fragments)
        for r, (_, roots, fragments) in enumerate(parts)
    ]
    specs = parts[0][0]
    size = {s.name: 4 * math.prod(s.shape) for s in specs}
    wanted = [
        Fragment(
            s.name,
            (0,) * len(s.shape),
            s.shape,
            s.name,
            0,
            tuple(4 * x for x in torch.empty(s.shape).stride()),
            s.dtype,
        )
        for s in specs
    ]
    taker = engine_inventory(
        catalog, rank=0, host="there", roots=[Root(n, b) for n, b in size.items()], fragments=wanted,
        footprint=[Span(n, 0, b) for n, b in size.items()],
    )  # fmt: skip
    plan = plan_replica(catalog, holders, [taker])
    out: dict[str, set[int]] = {}
    for rows in plan.rows():
        for row in rows:
            out.setdefault(catalog.tensors[row["tensor"]].name, set()).add(int(row["src"]))
    return {name: sorted(ranks) for name, ranks in out.items()}
