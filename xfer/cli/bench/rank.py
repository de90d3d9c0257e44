"""One process of `xfer bench`: a trainer rank or an engine worker with storages of its own.

run.py starts it and gives the orders.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import xfer
from xfer.cli.bench.synthetic import Layout, SyntheticTrainer, SyntheticWorker
from xfer.cli.children import serve
from xfer.participants.worker import WorkerSession
from xfer.plan.inventory import Inventory
from xfer.routes import BUCKET_BYTES, worker_side
from xfer.trace.catalog import Catalog

GROUP_S = 60.0


class Task(msgspec.Struct, forbid_unknown_fields=True):
    """The part of one process in a benchmark.

    Attributes:
        role: "trainer" or "worker".
        joint: Rank among all processes; trainers come first, then the workers of each replica.
        world: Number of processes.
        trainers: Number of trainer ranks.
        devices: torch's names of the devices of all processes.
        hosts: Names of the hosts of all processes.
        pairs: pairs[i][j]: bytes that trainer i sends to process j in a refit.
        meet: Host, by a name or address that all reach, and port at which process groups meet.
        route, drop, narrow, replicas: Arguments of connect.
        catalog, inventory: Their wire forms.
    """

    role: str
    joint: int
    world: int
    trainers: int
    devices: list[str]
    hosts: list[str]
    pairs: list[list[int]]
    meet: tuple[str, int]
    route: str
    drop: list[str]
    narrow: list[str]
    replicas: int
    catalog: bytes
    inventory: bytes


class BenchRank:
    """The common part of both kinds of processes. Each method without an underscore can be ordered (children.py)."""

    session: Any = None

    def __init__(self, task: Task):
        self.task, self.device = task, torch.device(task.devices[task.joint])
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._layout = Layout(Catalog.from_bytes(task.catalog), Inventory.from_bytes(task.inventory), self.device)

    def floor(self, repeats: int) -> list[float]:
        """Seconds of each raw transfer of the refit's bytes, with nothing of xfer: copies out of the trainers' devices where the route
        pulls, else torch's send and receive. By this process's clock, from a barrier to the end of its own part."""
        t = self.task
        self._meet("gloo", t.world)
        try:
            sent = any(n and not self._copied(i, j) for i, row in enumerate(t.pairs) for j, n in enumerate(row))
            group = dist.new_group(backend="nccl") if sent and self.device.type == "cuda" else None
            if group is not None:  # a group's first call needs all its ranks, and some may have nothing to send
                dist.all_reduce(torch.zeros(1, device=self.device), group=group)
            copy, send = self._copies(), self._messages(group)
            out = []
            for _ in range(repeats + 2):
                dist.barrier()
                began = time.perf_counter()
                copy()
                send()
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                out.append(time.perf_counter() - began)
            return out[2:]
        finally:
            dist.destroy_process_group()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # the buffers, on all devices

    def _meet(self, backend: str, world: int) -> None:
        """Make torch's default group of the first `world` processes."""
        t, wait = self.task, timedelta(seconds=GROUP_S)
        store = dist.TCPStore(*t.meet, world, t.joint == 0, timeout=wait)
        dist.init_process_group(backend, store=store, rank=t.joint, world_size=world, timeout=wait)

    def _copied(self, trainer: int, joint: int) -> bool:
        """Whether the floor copies that trainer's bytes for a process, and sends no messages."""
        return self.task.route == "pull" and self.task.hosts[trainer] == self.task.hosts[joint]

    def _copies(self) -> Callable[[], None]:
        """Copy what each trainer has for this worker out of a buffer on that trainer's device, piece by piece."""
        t, piece = self.task, BUCKET_BYTES[self.device.type]
        of = [i for i in range(t.trainers) if t.role == "worker" and self._copied(i, t.joint)]
        wanted = [(t.devices[i], t.pairs[i][t.joint]) for i in of]
        held = [
            (torch.zeros(min(n, piece), dtype=torch.uint8, device=d), torch.zeros(min(n, piece), dtype=torch.uint8, device=self.device), n)
            for d, n in wanted if n
        ]  # fmt: skip

        def move() -> None:
            for source, destination, n in held:
                for at in range(0, n, piece):
                    k = min(piece, n - at)
                    destination[:k].copy_(source[:k], non_blocking=True)

        return move

    def _messages(self, group: Any) -> Callable[[], None]:
        """Send and receive as many bytes between the same pairs, in messages as large as xfer's. Buffers are used again."""
        t, piece = self.task, BUCKET_BYTES[self.device.type]
        sends = t.role == "trainer"
        others = range(t.trainers, t.world) if sends else range(t.trainers)
        pairs = {j: (t.joint, j) if sends else (j, t.joint) for j in others}
        sizes = {j: t.pairs[a][b] for j, (a, b) in pairs.items() if not self._copied(a, b)}
        buffers = {j: torch.zeros(min(n, piece), dtype=torch.uint8, device=self.device) for j, n in sizes.items() if n}
        call = dist.isend if sends else dist.irecv

        def move() -> None:
            for at in range(0, max(sizes.values(), default=0), piece):
                ops = [
                    dist.P2POp(call, b[: min(piece, sizes[j] - at)], j, group)
                    for j, b in buffers.items()
                    if at < sizes[j]
                ]
                for work in dist.batch_isend_irecv(ops) if ops else []:
                    work.wait()

        return move

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


class TrainerRank(BenchRank):
    def __init__(self, task: Task):
        super().__init__(task)
        self._trainer = SyntheticTrainer(self._layout, task.trainers)

    def train(self, seed: int) -> None:
        self._trainer.train(seed)

    def connect(self, rendezvous: str, deadline_s: float) -> None:
        t = self.task
        if t.route == "packed":  # its gathers are the trainers' own
            self._meet("gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl", t.trainers)
        route = (
            xfer.Packed()
            if t.route == "packed"
            else xfer.Direct(narrow=t.narrow, cache_dir=None, host_pull=t.route == "pull" and self.device.type == "cpu")
        )
        self.session = xfer.connect(
            self._trainer, rendezvous, replicas=t.replicas, route=route, drop=t.drop, deadline_s=deadline_s
        )

    def explain(self) -> str:
        return self.session.explain()

    def refit(self, verify: bool) -> dict[str, float]:
        return self.session.refit(verify=verify).flatten("")


class WorkerRank(BenchRank):
    def __init__(self, task: Task):
        super().__init__(task)
        self._worker = SyntheticWorker(self._layout)

    def join(self, info: dict[str, Any]) -> None:
        self.session = WorkerSession(
            self._worker, worker_side, info["replica"], info["index"], info["workers"], info["rendezvous"], info["token"],
            info["deadline_s"],
        )  # fmt: skip
        self.session.join()

    def receive(self, attempt: int, deadline_s: float) -> None:
        self.session.receive(attempt, deadline_s)

    def wrong(self, seed: int) -> dict[str, int]:
        return self._worker.wrong(seed)


def main() -> None:
    task = msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), type=Task)
    serve(f"{task.role} {task.joint}", lambda: (TrainerRank if task.role == "trainer" else WorkerRank)(task))


if __name__ == "__main__":
    main()
