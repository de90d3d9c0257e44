"""The processes of world_processes.py on the packed route: trainers that gather over gloo, workers that load whole tensors.

Hub, lanes, feeds, links, shared memory and torch's collectives among the trainers are the real ones; so are the deaths.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

from tests.support.packed_world import Knobs, PackedTaker, ToyStream
from tests.support.world import TOKEN, ToySource
from tests.support.world_processes import ProcessWorld, _controller, _serve
from xfer.testing.ports import free_port

LIMIT = 512
"""Bytes of a bucket: some buckets for the small tensors of the world."""
COLLECTIVE_S = 600.0
"""Timeout of the trainers' own process group: so long that nothing here is ended by it."""


class Stream(ToyStream):
    """`stand`: a file; while it is there a gather stands still at its second group. `refuse`: what the next `build` raises."""

    stand, refuse = "", ""

    def build(self):
        from xfer.errors import LayoutError
        from xfer.packed import agree

        def own() -> list[int]:
            if self.refuse:
                text, self.refuse = self.refuse, ""
                raise LayoutError(text)
            return []

        agree.of_all_ranks(own, list[int], self.device)
        return super().build()

    def tensors(self, group):
        while self.stand and group.positions[0] and Path(self.stand).exists():
            time.sleep(0.05)
        yield from super().tensors(group)


def _trainer(conn, rank: int, world: int, env: dict) -> None:
    os.environ.update(env)
    import torch.distributed as dist

    from tests.support.world import trainer_session
    from xfer.packed.source import PackedSource
    from xfer.routes import Packed

    stream, session = Stream(ToySource(rank, world), Knobs()), None

    def connect(rendezvous: str, replicas: int, deadline_s: float, meeting: int, colocated: bool):
        nonlocal session
        if session is not None:
            session.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{meeting}", rank=rank, world_size=world,
            timeout=timedelta(seconds=COLLECTIVE_S),
        )  # fmt: skip
        source = PackedSource(stream, LIMIT, True, colocated)
        session = trainer_session(
            source, rendezvous, TOKEN, replicas=replicas, deadline_s=deadline_s, 
            route=Packed(bucket_bytes=LIMIT, colocated=colocated),
        )  # fmt: skip
        try:
            session.open(True)
        except BaseException:
            session.close()
            raise

    def set_version(version: int):
        stream.version = version

    def arrange(**what):
        for name, value in what.items():
            setattr(stream, name, value)

    def refit(**options):
        r = session.refit(
            **{"version": None, "verify": True, "wait": "commit", "min_replicas": None, "deadline_s": None} | options
        )
        return {"version": r.version, "committed": [o.committed for o in r.outcomes]}

    _serve(conn, {"connect": connect, "set": set_version, "arrange": arrange, "refit": refit})


def _worker(conn, engine, rank: int, world: int, env: dict) -> None:
    os.environ.update(env)
    from xfer.participants.worker import WorkerSession
    from xfer.routes import worker_side

    taker, session = PackedTaker(rank, world, ToySource(0, 1).shapes, Knobs()), None
    busy = threading.Lock()

    def init(info: dict):
        nonlocal session
        if session is not None:
            session.close()
        session = WorkerSession(
            taker,
            worker_side,
            info["replica"],
            rank,
            world,
            info["rendezvous"],
            info["token"],
            info["deadline_s"],
            info["open"],
        )
        session.join()

    def update(info: dict):
        session.receive(info["attempt"], info["deadline_s"])

    def exclusively(call):
        def run(**args):
            with busy:
                call(**args)

        return run

    def holds(versions: list[int]):
        return {
            "whole": [v for v in versions if not taker.wrong(v)],
            "nan": bool(taker.live["norm"].isnan().all()),
            "idle": not busy.locked(),
        }

    calls = {"init": exclusively(init), "update": exclusively(update)}
    threading.Thread(target=_serve, args=(engine, calls), daemon=True).start()
    _serve(conn, {"holds": holds})


class PackedProcessWorld(ProcessWorld):
    """See ProcessWorld. `colocated`: buffers are mapped instead of broadcast."""

    mains = (_trainer, _worker, _controller)

    def __init__(self, folder: Path, *, colocated: bool = False, **how):
        self.colocated = colocated
        super().__init__(folder, **how)

    def on_all(self, name: str, ranks=None, **args) -> list[dict]:
        if name == "connect":
            args |= {"meeting": free_port(), "colocated": self.colocated}
        return super().on_all(name, ranks, **args)
