"""The processes of benchmarks.cpu: trainer ranks, the engine, and the calls that vLLM's workers answer beside xfer's own.

    python -m benchmarks.lib.cpu_ranks trainer RANK WORLD PORT '{"layers": 18, ...}'
    python -m benchmarks.lib.cpu_ranks engine '{"layers": 18, ...}'

Each reads orders from standard input and answers in marked JSON lines.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Iterable
from math import prod

import torch
from torch.distributed import FileStore, PrefixStore

MARK = "@bench "
TRAINERS, WORKERS = 4, 2


def emit(**said) -> None:
    sys.stdout.write(MARK + json.dumps(said) + "\n")
    sys.stdout.flush()


def commands() -> Iterable[dict]:
    for line in sys.stdin:
        yield json.loads(line)


# ---- the model


def config(layers: int) -> dict:
    """A Qwen3 config: 100 MB per layer in bf16, and 262 MB of embedding and head."""
    from examples.common import toy

    return toy.config(
        "qwen3", num_hidden_layers=layers, hidden_size=2048, intermediate_size=6144, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=32_000,
    )  # fmt: skip


def cut_dim(layout: str, name: str, shape: tuple[int, ...]) -> int | None:
    """The dim of a checkpoint tensor that the four trainers cut in equal parts; None: each holds the whole tensor.

    "tp4" cuts as Megatron-LM and vLLM do, "fsdp4" as FSDP2 does.
    """
    if len(shape) == 1 and layout == "tp4":
        return None
    return 1 if layout == "tp4" and name.endswith(("o_proj.weight", "down_proj.weight")) else 0


# ---- clocks and groups


class Clock:
    """Wall seconds and processor seconds (all threads of this process) since its creation."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict:
        return dict(seconds=time.perf_counter() - self.wall, cpu=time.process_time() - self.cpu)


def until() -> float:
    return time.monotonic() + 600


def meet(link) -> None:
    """Return on all ranks of the link when the last has come."""
    token = torch.zeros(1)
    for r in range(link.size):
        link.broadcast(token, r, until())


def links(path: str, rank: int):
    """The groups of all six ranks, and of trainer 0 with the workers (None on other ranks).

    They are xfer's own gloo groups, since vLLM's processes are not in the trainers' torch world.
    """
    from xfer.transport.links import open_group

    store = FileStore(path, TRAINERS + WORKERS)
    everyone = open_group(PrefixStore("all", store), rank, TRAINERS + WORKERS, 120.0)
    few = [0, *range(TRAINERS, TRAINERS + WORKERS)]
    return everyone, open_group(PrefixStore("few", store), few.index(rank), len(few), 120.0) if rank in few else None


def first_plan(lane) -> dict:
    """Seconds of the session's first plan: the exchange of layouts, and the planning after it."""
    exchange = lane.plane.exchange_seconds
    return dict(exchange_s=exchange, plan_s=lane._planned_s - exchange)


def plan_again(lane, link) -> dict:
    """Plan again from scratch, on all ranks at once, from layouts that all have, as awex plans."""
    from xfer.plan.planner import Drafts

    plane = lane.plane
    shelf = plane.party.shelf
    shelf._drafts = Drafts()
    meet(link)
    clock = Clock()
    shelf.plan(plane.inputs, plane.joint_rank, plane.side.catalog, plane.options(plane.inputs), None, lambda: None)
    return clock.read()


class Raw:
    """send/recv of the bytes that a refit moves, between the same pairs, one message and one buffer per pair."""

    def __init__(self, link, into: dict[int, int], out: dict[int, int]):
        self.link, self.out = link, out
        self.source = torch.ones(max([*out.values(), 1]), dtype=torch.uint8)
        self.taken = {peer: torch.ones(n, dtype=torch.uint8) for peer, n in into.items()}

    @classmethod
    def of(cls, link, program) -> Raw:
        from xfer.plan.program import row_wire_bytes

        into: dict[int, int] = {}
        out: dict[int, int] = {}
        for m in program.receives():
            into[m.src] = into.get(m.src, 0) + int(row_wire_bytes(m.rows).sum())
        for m in program.sends():
            out[m.dst] = out.get(m.dst, 0) + int(row_wire_bytes(m.rows).sum())
        return cls(link, into, out)

    def run(self) -> dict:
        meet(self.link)
        clock = Clock()
        received, sent = self.link.post(
            [(buffer, peer, 0) for peer, buffer in self.taken.items()],
            [(self.source[:n], peer, 0) for peer, n in self.out.items()],
        )
        for pending in (*received, *sent):
            pending.wait(until())
        meet(self.link)
        return clock.read()


def buckets(specs, nbytes: int) -> list[list[tuple[str, tuple[int, ...], int, int]]]:
    """(name, shape, first byte, last byte + 1) of the tensors that travel in one packed broadcast."""
    out: list[list] = [[]]
    used = 0
    for name, shape, dtype in specs:
        n = prod(shape) * dtype.itemsize
        if out[-1] and used + n > nbytes:
            out.append([])
            used = 0
        out[-1].append((name, shape, used, used + n))
        used += n
    return out


# ---- a trainer rank


class Trainer:
    def __init__(self, rank: int, layers: int, layout: str, bucket: int):
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        from examples.common import toy

        self.rank, self.dist, self.refit = rank, dist, None
        self.specs = toy.specs(config(layers))
        self.buckets = buckets(self.specs, bucket)
        mesh = init_device_mesh("cpu", (TRAINERS,))
        self.parameters: dict[str, DTensor] = {}
        self.whole_on_all: set[str] = set()
        for name, shape, dtype in self.specs:
            dim = cut_dim(layout, name, shape)
            if dim is None:
                self.whole_on_all.add(name)
            local = list(shape)
            if dim is not None:
                assert not shape[dim] % TRAINERS
                local[dim] //= TRAINERS
            self.parameters[name] = DTensor.from_local(
                torch.empty(local, dtype=dtype), mesh, [Replicate() if dim is None else Shard(dim)], run_check=False
            )
        self.buffer = torch.empty(max(b[-1][3] for b in self.buckets) if rank == 0 else 0, dtype=torch.uint8)
        self.fill(0)

    def fill(self, seed: int) -> None:
        """Fill all parameters with values of `seed`. Tensors that every rank holds whole are equal on all."""
        noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(seed)).mul_(0.02).to(torch.bfloat16)
        for name, p in self.parameters.items():
            own = 0 if name in self.whole_on_all else self.rank
            flat, at = p.to_local().view(-1), zlib.crc32(f"{name} {own}".encode()) % len(noise)
            for i in range(0, len(flat), len(noise)):
                part = flat[i : i + len(noise)]
                part.copy_(noise.roll(at)[: len(part)])

    def connect(self, rendezvous: str, token: str, host_pull: bool) -> dict:
        import xfer

        t0 = time.perf_counter()
        route = xfer.Direct(cache_dir=None, host_pull=host_pull)
        source = xfer.TensorTrainer(lambda: self.parameters)
        self.refit = xfer.connect(source, rendezvous, token, route=route, deadline_s=300.0)
        moved = sum(self.lane.plane.part.summary.bytes_in)
        return dict(seconds=time.perf_counter() - t0, bytes=moved, **first_plan(self.lane))

    @property
    def lane(self):
        (lane,) = self.refit._session._party.lanes.values()
        return lane

    def ours(self, verify: bool) -> dict:
        import xfer

        self.dist.barrier()
        clock = Clock()
        report = xfer.nccl_xfer_refit(self.refit, verify=verify)
        return clock.read() | report.flatten("")

    def open(self, path: str) -> None:
        self.link, self.few = links(path, self.rank)
        self.raw = Raw.of(self.link, self.lane.plane.part.program)

    def plan(self) -> dict:
        return plan_again(self.lane, self.link)

    def usual(self) -> dict:
        """Gather on every trainer rank (DTensor.full_tensor, as exports do), pack on the first, broadcast."""
        meet(self.link)
        clock, gather, pack, wire = Clock(), 0.0, 0.0, 0.0
        for bucket in self.buckets:
            t0 = time.perf_counter()
            full = [self.parameters[name].full_tensor() for name, *_ in bucket]
            t1 = time.perf_counter()
            gather += t1 - t0
            if self.few is None:
                continue
            for (_, _, a, b), t in zip(bucket, full):
                self.buffer[a:b].copy_(t.view(-1).view(torch.uint8))
            t2 = time.perf_counter()
            self.few.broadcast(self.buffer[: bucket[-1][3]], 0, until())
            t3 = time.perf_counter()
            pack, wire = pack + t2 - t1, wire + t3 - t2
        meet(self.link)
        return clock.read() | dict(gather=gather, pack=pack, broadcast=wire)

    def raw_broadcast(self) -> dict:
        meet(self.link)
        clock = Clock()
        for bucket in self.buckets if self.few is not None else ():
            self.few.broadcast(self.buffer[: bucket[-1][3]], 0, until())
        said = clock.read()
        meet(self.link)
        return said


def trainer(rank: int, world: int, port: str, options: dict) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    t = Trainer(rank, **options)
    emit(said="up")
    for c in commands():
        do = c.pop("do")
        with torch.no_grad():
            if do == "raw":
                emit(said=do, **t.raw.run())
            elif do == "close":
                t.refit.close()
                emit(said=do)
            else:
                emit(said=do, **(getattr(t, do)(**c) or {}))


# ---- the engine


class Worker:
    """Mixed into vLLM's worker: `self` is the worker. Both workers answer each call at once."""

    def bench_open(self, path: str, layers: int, bucket: int) -> dict:
        from examples.common import toy

        session = self.weight_transfer_engine.session
        lane, rank = session._lane_, TRAINERS + self.weight_transfer_engine.worker_rank()
        self.bench_link, self.bench_few = links(path, rank)
        self.bench_raw_ = Raw.of(self.bench_link, lane.plane.part.program)
        self.bench_buckets = buckets(toy.specs(config(layers)), bucket)
        self.bench_buffer = torch.empty(max(b[-1][3] for b in self.bench_buckets), dtype=torch.uint8)
        return first_plan(lane)

    def bench_plan(self) -> dict:
        return plan_again(self.weight_transfer_engine.session._lane_, self.bench_link)

    def bench_cpu(self) -> dict:
        """Processor seconds of this worker so far, without its main thread, which polls vLLM's queue."""
        main = time.pthread_getcpuclockid(threading.main_thread().ident)
        return dict(cpu=time.process_time() - time.clock_gettime(main))

    def bench_scramble(self) -> None:
        """Fill everything that a refit writes with noise."""
        from tests.support.engine_bytes import scramble

        scramble(self.weight_transfer_engine.session.adapter, 1)

    def bench_raw(self) -> dict:
        return self.bench_raw_.run()

    def bench_usual(self) -> dict:
        """Receive buckets and load views of them with vLLM's own loader."""
        meet(self.bench_link)
        clock, load, model = Clock(), 0.0, self.model_runner.model
        for bucket in self.bench_buckets:
            self.bench_few.broadcast(self.bench_buffer[: bucket[-1][3]], 0, until())
            t0 = time.perf_counter()
            with torch.no_grad():
                model.load_weights(
                    (name, self.bench_buffer[a:b].view(torch.bfloat16).view(shape)) for name, shape, a, b in bucket
                )
            load += time.perf_counter() - t0
        meet(self.bench_link)
        return dict(cpu=clock.read()["cpu"], load=load)

    def bench_raw_broadcast(self) -> dict:
        meet(self.bench_link)
        for bucket in self.bench_buckets:
            self.bench_few.broadcast(self.bench_buffer[: bucket[-1][3]], 0, until())
        meet(self.bench_link)
        return {}


def engine(options: dict) -> None:
    from vllm import LLM

    import xfer

    llm = LLM(
        model=options["model"], load_format="dummy", skip_tokenizer_init=True, tensor_parallel_size=WORKERS,
        enforce_eager=True, dtype="bfloat16", max_model_len=128, max_num_seqs=4, block_size=32, seed=0,
        disable_log_stats=True, num_gpu_blocks_override=64, weight_transfer_config={"backend": "xfer"},
        worker_extension_cls="benchmarks.lib.cpu_ranks.Worker",
    )  # fmt: skip
    controller = None
    emit(said="up")
    for c in commands():
        do = c.pop("do")
        if do == "serve":
            controller = xfer.serve(llm, token=os.environ["XFER_TOKEN"], deadline_s=300.0, **c)
            emit(said=do)
        else:
            with controller.serving(force=True):  # no refit meanwhile
                emit(said=do, answers=llm.collective_rpc(do, kwargs=c))


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    side = p.add_subparsers(dest="what", required=True)
    one = side.add_parser("trainer")
    one.add_argument("rank", type=int)
    one.add_argument("world", type=int)
    one.add_argument("port")
    for parser in (one, side.add_parser("engine")):
        parser.add_argument("options", type=json.loads)
    told = p.parse_args()
    if told.what == "trainer":
        trainer(told.rank, told.world, told.port, told.options)
    else:
        engine(told.options)
