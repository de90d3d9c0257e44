"""Whole-tensor syncs on one host, in the steps in which the field went: one by one, gathered in buckets, gathered in buckets
and flattened; then the packed broadcast beside the raw rate of the same link.

    python scripts/bench_packed.py --shapes toy                      # CPU, gloo, 2 trainers + 2 receivers, seconds
    python scripts/bench_packed.py --shapes 30b --device cuda        # 4 GPUs, NCCL: Qwen3-30B-A3B's tensors, ranks 0-1 and 2-3

Trainers hold rows of every tensor (tensor parallel); receivers take whole tensors and copy their half of the rows out, as a
loader would. Receivers compare every byte after the last repetition of each way. Nothing here is a session: what pausing,
checking and committing cost is told by reports of real refits.

    one by one          all-gather per tensor, broadcast per tensor, load per tensor
    bucketed gather     one exchange per bucket, broadcast per tensor
    packed              one exchange per bucket, one broadcast per bucket, loaded while the next is on its way
    raw broadcast       the same bytes in messages of the same size, nothing gathered or loaded
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_shapes import MODELS, Model

from xfer.mesh.mesh_info import MeshInfo
from xfer.mesh.placement import Shard
from xfer.packed.buffer import Buffers, Packer, Unpacker
from xfer.packed.plan import BucketPlan
from xfer.packed.source import PackedSource
from xfer.packed.tensors import TensorStream
from xfer.packed.wire import checked, decode_manifest
from xfer.testing.ports import free_port
from xfer.trace.fragment import TensorSpec
from xfer.trainers.dtensor import Declared, TensorTrainer
from xfer.transport.group import Link, open_group

SHAPES = {**MODELS, "toy": Model("toy MoE", 4, 256, 4, 2, 128, vocab=2048, experts=16)}
SECONDS = 600.0
WAYS = ("one by one", "bucketed gather", "packed", "raw broadcast")


def value(spec: TensorSpec, device) -> torch.Tensor:
    """Any rank can make any tensor, and no two are alike."""
    n = 1
    for d in spec.shape:
        n *= d
    seed = sum(map(ord, spec.name)) % 9973
    return (
        ((torch.arange(n, device=device, dtype=torch.int64) * 31 + seed) % 8191 - 4096)
        .to(torch.bfloat16)
        .view(spec.shape)
    )


class TrainerRank:
    def __init__(self, rank: int, trainers: int, specs: list[TensorSpec], limit: int, device, link: Link | None):
        self.rank, self.trainers, self.device, self.link, self.specs = rank, trainers, device, link, specs
        mesh = MeshInfo(("tp",), list(range(trainers)))
        self.mine = {s.name: value(s, device)[self.rows(s)].clone() for s in specs}
        declared = {s.name: Declared(s.shape, mesh, [Shard(0)]) for s in specs}
        trainer = TensorTrainer(lambda: self.mine, declared=declared, rank=rank, world=trainers)
        self.source = PackedSource(TensorStream(trainer), limit)
        self.source.read()
        self.plan = self.source.begin()
        self.buffers = Buffers(2, device)

    def rows(self, s: TensorSpec) -> slice:
        step = -(-s.shape[0] // self.trainers)
        return slice(min(self.rank * step, s.shape[0]), min((self.rank + 1) * step, s.shape[0]))

    def send(self, data: torch.Tensor) -> None:
        if self.link is not None:
            self.link.broadcast(data, 0, time.monotonic() + SECONDS)

    def one_by_one(self) -> None:
        for s in self.specs:
            mine, step = self.mine[s.name], -(-s.shape[0] // self.trainers)
            padded = torch.zeros((step, *s.shape[1:]), dtype=mine.dtype, device=self.device)
            padded[: mine.shape[0]] = mine
            slots = [torch.empty_like(padded) for _ in range(self.trainers)]
            dist.all_gather(slots, padded)
            self.send(torch.cat(slots)[: s.shape[0]].contiguous().view(-1).view(torch.uint8))

    def bucketed_gather(self) -> None:
        for group in self.source.begin().groups:
            self.source.go_on(False)
            for _, tensor in self.source.tensors(group):
                if tensor is not None:
                    self.send(tensor.contiguous().view(-1).view(torch.uint8))

    def packed(self) -> None:
        """As feed.py and lane.py do it: bucket k + 1 is gathered while bucket k is sent."""
        ready: queue.Queue = queue.Queue()
        free = threading.Semaphore(2)
        sender = threading.Thread(target=self._sender, args=(ready, free), daemon=True)
        sender.start()
        number = 0

        def buffer(message):
            free.acquire()
            return self.buffers.take(number, message.nbytes, self.plan.buffer_bytes)

        def filled(message, data):
            nonlocal number
            number += 1
            self.settle()
            ready.put(data)

        for group in self.source.begin().groups:
            self.source.go_on(False)
            packer = Packer(group, buffer, filled) if self.link is not None else None
            for name, tensor in self.source.tensors(group):
                if packer is not None:
                    packer.put(name, tensor)
        ready.put(None)
        sender.join()

    def _sender(self, ready: queue.Queue, free: threading.Semaphore) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        while (data := ready.get()) is not None:
            self.send(data)
            free.release()

    def raw_broadcast(self) -> None:
        for group in self.plan.groups:
            for message in group.messages:
                self.send(self.buffers.take(0, message.nbytes, self.plan.buffer_bytes))

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


class Receiver:
    """`half`: which rows it keeps."""

    def __init__(self, half: int, specs: list[TensorSpec], manifest: bytes, order: list[str], device, link: Link):
        self.half, self.device, self.link = half, device, link
        self.specs = {s.name: s for s in specs}
        self.order, self.messages = order, checked(decode_manifest(manifest), self.specs)
        self.live = {
            s.name: torch.zeros((self.keeps(s.shape[0]), *s.shape[1:]), dtype=torch.bfloat16, device=device)
            for s in specs
        }
        self.buffers = Buffers(2, device)

    def keeps(self, rows: int) -> int:
        return rows // 2 if self.half == 0 else rows - rows // 2

    def load(self, name: str, tensor: torch.Tensor) -> None:
        at = 0 if self.half == 0 else tensor.shape[0] // 2
        self.live[name].copy_(tensor[at : at + self.live[name].shape[0]])

    def recv(self, nbytes: int, number: int) -> torch.Tensor:
        data = self.buffers.take(number, nbytes, max(m.nbytes for m in self.messages))
        self.link.broadcast(data, 0, time.monotonic() + SECONDS)
        return data

    def tensors(self, order: list[str]) -> None:
        for i, name in enumerate(order):
            s = self.specs[name]
            n = 2 * torch.Size(s.shape).numel()
            self.load(name, self.recv(n, i).view(torch.bfloat16).view(s.shape))

    def packed(self) -> None:
        here: queue.Queue = queue.Queue()
        free = threading.Semaphore(2)

        def receive() -> None:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            for i, message in enumerate(self.messages):
                free.acquire()
                here.put(self.recv(message.nbytes, i))

        thread = threading.Thread(target=receive, daemon=True)
        thread.start()
        unpacker = Unpacker(self.device)
        for message in self.messages:
            for spec, tensor in unpacker.take(message, here.get()):
                self.load(spec.name, tensor)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            free.release()
        unpacker.close(self.specs)
        thread.join()

    def raw_broadcast(self) -> None:
        for i, message in enumerate(self.messages):
            self.recv(message.nbytes, i)

    def wrong(self) -> list[str]:
        bad = []
        for name, s in self.specs.items():
            at = 0 if self.half == 0 else s.shape[0] // 2
            if not torch.equal(self.live[name], value(s, self.device)[at : at + self.live[name].shape[0]]):
                bad.append(name)
            self.live[name].zero_()
        return bad


def ways(rank: TrainerRank | Receiver, specs: list[TensorSpec]) -> Iterator[tuple[str, Callable[[], None]]]:
    if isinstance(rank, TrainerRank):
        calls = (rank.one_by_one, rank.bucketed_gather, rank.packed, rank.raw_broadcast)
    else:
        plain = [s.name for s in specs]
        calls = (lambda: rank.tensors(plain), lambda: rank.tensors(rank.order), rank.packed, rank.raw_broadcast)
    return zip(WAYS, calls, strict=True)


def process(index: int, a: argparse.Namespace, ports: tuple[int, int], out) -> None:
    torch.set_num_threads(1)
    device = torch.device(a.device, index) if a.device == "cuda" else torch.device("cpu")
    if a.device == "cuda":
        torch.cuda.set_device(device)
    specs = list(SHAPES[a.shapes].specs())
    store = dist.TCPStore("127.0.0.1", ports[1], is_master=index == 0, timeout=timedelta(seconds=SECONDS))
    sends, takes = index == 0, index >= a.trainers
    if not takes:
        os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]))
        dist.init_process_group("nccl" if a.device == "cuda" else "gloo", rank=index, world_size=a.trainers)
    link = None
    if sends or takes:
        place = 0 if sends else 1 + index - a.trainers
        link = open_group(dist.PrefixStore("link", store), place, 1 + a.receivers, SECONDS, device)
    if takes:
        store.wait(["manifest", "order"])
        order = json.loads(store.get("order"))
        rank = Receiver((index - a.trainers) % 2, specs, store.get("manifest"), order, device, link)
    else:
        rank = TrainerRank(index, a.trainers, specs, a.bucket, device, link)
        plan: BucketPlan = rank.plan
        if sends:
            store.set("manifest", plan.manifest)
            store.set("order", json.dumps([t.name for g in plan.groups for t in g.tensors]))
    seconds: dict[str, list[float]] = {}
    peak: dict[str, int] = {}
    total = a.trainers + a.receivers
    for name, call in ways(rank, specs):
        if a.device == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        for i in range(a.repeat + 1):
            key = f"{name}/{i}"
            store.add(key, 1)
            while store.add(key, 0) < total:
                time.sleep(0.0005)
            began = time.perf_counter()
            call()
            if a.device == "cuda":
                torch.cuda.synchronize(device)
            if i:
                seconds.setdefault(name, []).append(time.perf_counter() - began)
        if a.device == "cuda":
            peak[name] = torch.cuda.max_memory_allocated(device) - before
        wrong = rank.wrong() if takes and name != "raw broadcast" else []
        if wrong:
            raise RuntimeError(f"{name}: receiver {index - a.trainers} holds other values in {wrong[:5]}")
    out.put((index, seconds, peak, rank.buffers.nbytes))
    store.add("end", 1)
    while store.add("end", 0) < total:
        time.sleep(0.01)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shapes", choices=sorted(SHAPES), default="toy")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--trainers", type=int, default=2)
    p.add_argument("--receivers", type=int, default=2)
    p.add_argument("--bucket", type=int, default=0, help="bytes; default 1 GiB, 1 MiB for toy shapes")
    p.add_argument("--repeat", type=int, default=5)
    a = p.parse_args()
    a.bucket = a.bucket or (1 << 20 if a.shapes == "toy" else 1 << 30)
    specs = list(SHAPES[a.shapes].specs())
    nbytes = sum(2 * torch.Size(s.shape).numel() for s in specs)
    ctx = mp.get_context("spawn")
    out = ctx.Queue()
    ports = free_port(), free_port()
    children = [ctx.Process(target=process, args=(i, a, ports, out)) for i in range(a.trainers + a.receivers)]
    for c in children:
        c.start()
    found = []
    while len(found) < len(children):
        try:
            found.append(out.get(timeout=1.0))
        except queue.Empty:
            if any(c.exitcode not in (None, 0) for c in children):
                for c in children:
                    c.kill()
                raise SystemExit("a rank failed; its traceback is above") from None
    for c in children:
        c.join()
    print(f"{SHAPES[a.shapes].name}: {len(specs)} tensors, {nbytes / 1e9:.3f} GB, buckets of {a.bucket:,} bytes, {a.trainers} trainers, "
          f"{a.receivers} receivers, {a.device}, torch {torch.__version__}; slowest rank, median of {a.repeat}")  # fmt: skip
    medians = {}
    for way in WAYS:
        runs = [max(seconds[way][i] for _, seconds, _, _ in found) for i in range(a.repeat)]
        medians[way] = statistics.median(runs)
        extra = max((peak.get(way, 0) for _, _, peak, _ in found), default=0)
        more = f"  peak extra {extra / 1e9:6.3f} GB" if extra else ""
        print(f"  {way:16} {medians[way] * 1e3:10.1f} ms  {nbytes / medians[way] / 1e9:7.2f} GB/s{more}")
    print(f"  one by one / packed {medians['one by one'] / medians['packed']:.1f}; "
          f"raw broadcast / packed {medians['raw broadcast'] / medians['packed']:.2f}; "
          f"buffers {max(b for *_, b in found):,} bytes a rank")  # fmt: skip


if __name__ == "__main__":
    main()
