"""What the packed route gathers from FSDP2 modules and DTensors over gloo is what torch's own `full_tensor()` gives, bit for bit, in
one message per rank and bucket. For test_packed_bridge.py.
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.proc import obey
from xfer.errors import LayoutError
from xfer.packed.buffer import Buffers, Unpacker
from xfer.packed.source import PackedSource
from xfer.packed.tensors import TensorStream
from xfer.trainers.dtensor import TensorTrainer

LIMIT = 1024


def collectives(source: PackedSource) -> int:
    """Of the last message or group."""
    return getattr(source.stream, "parts", source.stream).collectives


def gathered(source: PackedSource) -> tuple[dict[str, torch.Tensor], int]:
    """The tensors of a gather, and the most collectives of a group."""
    plan, out, most = source.begin(), {}, 0
    for group in plan.groups:
        if not source.go_on(False):
            raise RuntimeError("told to stop")
        out |= {name: tensor.detach().clone() for name, tensor in source.tensors(group) if tensor is not None}
        most = max(most, collectives(source))
    return out, most


def placed(source: PackedSource) -> tuple[dict[str, torch.Tensor], int]:
    """Place each message in its buffer, as a feed does. Returns the tensors, and the most collectives of a message."""
    plan, out, most, mine = source.begin(), {}, 0, source.assembly.here
    buffers, unpacker = Buffers(2, source.device), Unpacker(source.device)
    buffers.begin(plan.messages)
    source.prepare(buffers if mine else None)
    for number, message in enumerate(plan.messages):
        data = buffers.take(number, message.nbytes).fill_(0xEE) if mine else None
        source.place(message, data)
        out |= {s.name: t.clone() for s, t in unpacker.take(message, data)} if mine else {}
        most = max(most, collectives(source))
    return out, most


def in_rounds_of(source: PackedSource, nbytes: int) -> None:
    """Assemble the next messages in rounds of this size, from storages that were released and found again."""
    source.assembly = replace(source.assembly, round_bytes=nbytes)
    source.forget()
    source.check()


def compared(source: PackedSource, held, gather=gathered) -> int:
    """Compare what ranks that assemble have gathered. Returns the most messages that arrived for one of ours."""
    got, most = gather(source)
    want = {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach() for n, t in held().items()}
    wanted = want.keys() if source.assembly.here else set()
    assert got.keys() == wanted and all(torch.equal(got[n], want[n]) for n in got), (dist.get_rank(), sorted(got))
    assert len(source.plan.groups) > 1
    return most


def sharded() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(13, 17), torch.nn.Linear(17, 5), torch.nn.LayerNorm(5))
    model.to(torch.bfloat16)[2].float()
    for module in (*model, model):
        fully_shard(module)
    return model


def tensors() -> None:
    mesh, rank, model = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank(), sharded()
    g = torch.Generator().manual_seed(1)
    some = {
        "rows": distribute_tensor(torch.randn(10, 7, generator=g), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.randn(4, 11, generator=g).to(torch.bfloat16), mesh, [Shard(1)]),
        "copies": distribute_tensor(torch.randn(9, generator=g), mesh, [Replicate()]),
        "odd": distribute_tensor(torch.arange(5, dtype=torch.uint8), mesh, [Shard(0)]),
        "plain": torch.randn(3, 3, generator=g),
        "long": distribute_tensor(torch.randn(301, 7, generator=g), mesh, [Shard(0)]),
    }

    def held() -> dict[str, torch.Tensor]:
        return some | dict(model.named_parameters())

    source = PackedSource(TensorStream(TensorTrainer(held)), LIMIT)
    source.drain()
    source.read()
    assert compared(source, held) <= (0 if rank else 2), "one message per rank and bucket"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model[:2](torch.randn(3, 13, dtype=torch.bfloat16)).float().sum().backward()
    optimizer.step()
    source.drain()
    source.check()
    compared(source, held)
    assert source.built == 1, "a step changes values only"
    if rank == 1:
        new = some["rows"].to_local().clone() + 1
        some["rows"] = DTensor.from_local(new, mesh, [Shard(0)], shape=(10, 7), stride=(7, 1))
    if source.check() == "changed":
        source.read()
    compared(source, held)
    assert source.built == 2, "what one rank replaced is read anew on all"
    refused_by_one(source)
    compared(source, held)
    source.assemble(rank != 1)  # two of three put messages together now, and hear of each other's boxes
    one = compared(source, held, placed)
    in_rounds_of(source, 100)
    many = compared(source, held, placed)
    assert source.built == 5 and (rank == 1 or many > 2 >= one > 0), (one, many)


def refused_by_one(source: PackedSource) -> None:
    """What one rank cannot export is said by all, and nobody is left in a collective."""
    told = Mock(side_effect=LayoutError("layers.9.w: has no mapping"))
    with patch.object(source.stream, "_own", told if dist.get_rank() == 1 else source.stream._own):
        source.doubt()
        try:
            source.begin()
        except LayoutError as e:
            assert "trainer 1 failed to describe its exports: layers.9.w: has no mapping" in str(e)
        else:
            raise AssertionError("no error")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    obey(tensors)
