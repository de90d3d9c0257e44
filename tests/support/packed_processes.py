"""The processes of world_processes.py on the packed route: trainers that gather over gloo, workers that load whole tensors."""

from __future__ import annotations

import functools
import os
import time
from datetime import timedelta
from pathlib import Path

import msgspec
import torch.distributed as dist

from examples.common.ports import free_port
from tests.support.packed_world import Knobs, PackedTaker, ToyStream
from tests.support.world import TOKEN, ToySource, trainer_session
from tests.support.world_processes import ProcessWorld, _controller, _serve_trainer, _worker
from xfer.errors import LayoutError
from xfer.packed import agree
from xfer.packed.source import PackedSource
from xfer.routes import Packed

NUMBERS = msgspec.msgpack.Decoder(list[int])
LIMIT = 512
"""Bytes of a bucket: some buckets for the small tensors of the world."""
COLLECTIVE_S = 600.0
"""Timeout of the trainers' own process group: so long that nothing here is ended by it."""


class Stream(ToyStream):
    """`stand`: a file; while it is there a gather stands still at its second group. `refuse`: what the next `build` raises."""

    stand, refuse = "", ""

    def build(self, assembly):
        def own() -> list[int]:
            text, self.refuse = self.refuse, ""
            if text:
                raise LayoutError(text)
            return []

        agree.of_all_ranks(own, NUMBERS, self.device)
        return super().build(assembly)

    def tensors(self, group):
        while self.stand and group.positions[0] and Path(self.stand).exists():
            time.sleep(0.05)
        yield from super().tensors(group)


def _trainer(conn, rank: int, world: int, env: dict) -> None:
    os.environ.update(env)
    stream = Stream(ToySource(rank, world), Knobs())

    def made(rendezvous: str, meeting: int, colocated: bool, **args):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{meeting}", rank=rank, world_size=world,
            timeout=timedelta(seconds=COLLECTIVE_S),
        )  # fmt: skip
        source, route = PackedSource(stream, LIMIT, colocated), Packed(bucket_bytes=LIMIT, colocated=colocated)
        return trainer_session(source, rendezvous, TOKEN, **args, route=route)

    def arrange(**what):
        for name, value in what.items():
            setattr(stream, name, value)

    _serve_trainer(conn, made, set=lambda version: arrange(version=version), arrange=arrange)


def _taker(rank: int, world: int) -> PackedTaker:
    return PackedTaker(rank, world, ToySource(0, 1).shapes, Knobs())


class PackedProcessWorld(ProcessWorld):
    """See ProcessWorld. `colocated`: buffers are mapped instead of broadcast."""

    mains = (_trainer, functools.partial(_worker, make=_taker), _controller)

    def __init__(self, folder: Path, *, colocated: bool = False, **how):
        self.colocated = colocated
        super().__init__(folder, **how)

    def on_all(self, name: str, ranks=None, **args) -> list[dict]:
        if name == "connect":
            args |= {"meeting": free_port(), "colocated": self.colocated}
        return super().on_all(name, ranks, **args)
