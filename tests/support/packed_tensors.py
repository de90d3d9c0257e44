"""What the packed route gathers from FSDP2 modules and DTensors over gloo: `packed_tensors.py FOLDER` writes FOLDER/seen.json.

The truth is torch's own `full_tensor()`, parameter by parameter. The assertions are in tests/functional/test_packed_tensors.py.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from examples.common.gloo_end import settle_at_exit
from xfer.packed.buffer import Buffers, Unpacker
from xfer.packed.source import PackedSource
from xfer.packed.tensors import TensorStream
from xfer.trainers.dtensor import TensorTrainer

LIMIT = 1024


def gathered(source: PackedSource) -> tuple[dict[str, torch.Tensor], int]:
    plan, out, most = source.begin(), {}, 0
    for group in plan.groups:
        source.go_on(False)
        for name, tensor in source.tensors(group):
            if tensor is not None:
                out[name] = tensor.clone()
        most = max(most, source.stream.collectives)
    return out, most


def placed(source: PackedSource) -> tuple[dict[str, torch.Tensor], int]:
    """As a feed does it: each message straight into its buffer."""
    plan, out, most, mine = source.begin(), {}, 0, source.assembly.here
    buffers, unpacker = Buffers(2, source.device), Unpacker(source.device)
    buffers.begin(plan.messages)
    source.prepare(buffers if mine else None)
    for number, message in enumerate(plan.messages):
        data = buffers.take(number, message.nbytes).fill_(0xEE) if mine else None
        source.place(message, data)
        out |= {s.name: t.clone() for s, t in unpacker.take(message, data)} if mine else {}
        most = max(most, getattr(source.stream, "parts", source.stream).collectives)
    return out, most


def in_rounds_of(source: PackedSource, nbytes: int) -> None:
    """Assemble the next messages in rounds of this size, from storages that were released and found again."""
    source.assembly = replace(source.assembly, round_bytes=nbytes)
    source.forget()
    source.check()


def whole(named) -> dict[str, torch.Tensor]:
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach() for n, t in named}


def looked(source: PackedSource, named, gather=gathered) -> dict:
    got, most = gather(source)
    want = whole(named())
    bad = sorted(n for n in want if n not in got or not torch.equal(got[n], want[n])) if source.assembly.here else []
    return dict(wrong=bad, tensors=len(got), most=most, groups=len(source.plan.groups), built=source.built)


def fsdp(folder: Path) -> dict:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(13, 17), torch.nn.Linear(17, 5), torch.nn.LayerNorm(5)).to(
        torch.bfloat16
    )
    model[2].float()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    source = PackedSource(TensorStream(TensorTrainer(model)), LIMIT)
    source.drain()
    source.read()
    first = looked(source, model.named_parameters)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model[:2](torch.randn(3, 13, dtype=torch.bfloat16)).float().sum().backward()
    optimizer.step()
    source.drain()
    source.check()
    return dict(first=first, second=looked(source, model.named_parameters))


def tensors(folder: Path) -> dict:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    g = torch.Generator().manual_seed(1)
    held = {
        "rows": distribute_tensor(torch.randn(10, 7, generator=g), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.randn(4, 11, generator=g).to(torch.bfloat16), mesh, [Shard(1)]),
        "copies": distribute_tensor(torch.randn(9, generator=g), mesh, [Replicate()]),
        "odd": distribute_tensor(torch.arange(5, dtype=torch.uint8), mesh, [Shard(0)]),
        "plain": torch.randn(3, 3, generator=g),
        "long": distribute_tensor(torch.randn(301, 7, generator=g), mesh, [Shard(0)]),
    }
    source = PackedSource(TensorStream(TensorTrainer(lambda: held)), LIMIT)
    source.read()
    first = looked(source, held.items)
    source.check()
    if dist.get_rank() == 1:
        held["rows"] = DTensor.from_local(
            held["rows"].to_local().clone() + 1, mesh, [Shard(0)], shape=(10, 7), stride=(7, 1)
        )
    if source.check() == "changed":
        source.read()
    second = looked(source, held.items)
    source.assemble(dist.get_rank() != 1)  # two of three put messages together now, and hear of each other's boxes
    everywhere = looked(source, held.items, placed)
    in_rounds_of(source, 100)  # many rounds to a message
    return dict(first=first, second=second, everywhere=everywhere, rounds=looked(source, held.items, placed))


if __name__ == "__main__":
    settle_at_exit()
    dist.init_process_group("gloo")
    where = Path(sys.argv[1])
    seen = {f.__name__: f(where) for f in (fsdp, tensors)}
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, seen)
    if dist.get_rank() == 0:
        (where / "seen.json").write_text(json.dumps(every))
    dist.barrier()
    dist.destroy_process_group()
