"""The rank processes of benchmarks.packed_gpu: trainers that gather whole tensors, engine workers that load them.

Trainers hold dense parameters cut by TP and experts by EP in Megatron's layout; workers hold vLLM's fused storages and copy
their part out of whole tensors. Buckets, packing, shared buffers, arrivals and unpacking are xfer.packed's own; the gathers
and the loaders are in packed_ways.py.
"""

from __future__ import annotations

import os
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from benchmarks.lib.layouts import Model, View, all_ways, engine, trainer
from benchmarks.lib.packed_ways import GatheredStream, OnStream, PartsSource, Rows, Slices, tasks_of, vllm_packed
from xfer.mesh.parallel import EngineParallel
from xfer.packed.broadcast import Arrivals, OneAhead, own_stream
from xfer.packed.buffer import Buffers, Unpacker
from xfer.packed.feed import Pump
from xfer.packed.shared import SharedArrivals, announce, send_offer, wait_done
from xfer.packed.source import PackedSource
from xfer.packed.tensors import TensorStream
from xfer.packed.wire import checked, decode_manifest
from xfer.participants.data_plane import Stop
from xfer.transport.group import Link
from xfer.transport.links import open_group

TRAINERS = WORKERS = 2
SECONDS = 240.0
FLAT, PACKED = "bucketed + flattened", "packed broadcast"
SLICED, BRIDGE = ", a slice and a copy per tensor", ", as Bridge exports"
RAW, LOADS, VLLM = "NCCL broadcast", "loads alone" + SLICED, "vLLM's packed broadcast"
WAYS = {
    "colocated": (FLAT, "one by one", "bucketed gather", FLAT + SLICED, FLAT + BRIDGE),
    "apart": (RAW, PACKED, "one by one", PACKED + SLICED, VLLM, LOADS, PACKED + BRIDGE),
}
"""In the order in which they run, the most telling first."""
ONCE = ("one by one", "bucketed gather")
NOT_COMPARED = (RAW, LOADS)


def soon() -> float:
    return time.monotonic() + SECONDS


# ---- ranks


class Rank:
    """What trainers and workers share: groups, one storage per root, clocks."""

    def __init__(self, index: int, gpus: tuple[int, ...], m: Model, a: Namespace, port: int, pipe):
        self.index, self.m, self.a, self.pipe = index, m, a, pipe
        self.cuda = a.device == "cuda"
        if self.cuda and a.share:
            # NCCL refuses two ranks of one host on one GPU: pretend that each is a host, and use the network between them.
            os.environ.update(NCCL_HOSTID=f"rank{index}", NCCL_MNNVL_ENABLE="0")
            gpus = tuple(g % torch.cuda.device_count() for g in gpus)
        self.device = torch.device("cuda", gpus[index]) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        torch.set_num_threads(1)
        self.store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=SECONDS))
        self.control = open_group(PrefixStore("control", self.store), index, TRAINERS + WORKERS, SECONDS)
        self.trainer = index < TRAINERS
        self.place = index if self.trainer else index - TRAINERS
        self.layout = (
            trainer(m, all_ways(TRAINERS), self.place)
            if self.trainer
            else engine(m, EngineParallel(tp=WORKERS), self.place)
        )
        roots = self.layout.roots()
        self.storages = [torch.empty(r.nbytes, dtype=torch.uint8, device=self.device) for r in roots]
        self.roots = {r.name: t for r, t in zip(roots, self.storages)}
        self.specs = {s.name: s for s in m.specs()}
        self.numbered = {n: (i, s) for i, (n, s) in enumerate(self.specs.items())}
        self.link: Link | None = None
        self.wide: Link | None = None

    def open_links(self, apart: bool) -> None:
        """Open the groups that carry data.

        apart: trainer 0 and all workers, on the devices. Else each trainer with the worker on its GPU, on the host.
        """
        first = self.trainer and self.index == 0
        if apart and (first or not self.trainer):
            self.link = open_group(
                PrefixStore("data", self.store), 0 if first else 1 + self.place, 1 + WORKERS, SECONDS, self.device
            )
        elif not apart:
            self.link = open_group(PrefixStore(f"pair{self.place}", self.store), 0 if self.trainer else 1, 2, SECONDS)
            if first or not self.trainer:  # trainer 0 with all workers
                place = 0 if first else 1 + self.place
                self.wide = open_group(PrefixStore("wide", self.store), place, 1 + WORKERS, SECONDS)

    def gathered(self, value: float) -> list[float]:
        out = []
        for r in range(TRAINERS + WORKERS):
            t = torch.tensor([value], dtype=torch.float64)
            self.control.broadcast(t, r, soon())
            out.append(float(t))
        return out

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def hear(self):
        if not self.pipe.poll(SECONDS):
            raise TimeoutError(f"rank {self.index} heard nothing for {SECONDS:g} s")
        return self.pipe.recv()


class TrainerRank(Rank):
    def prepare(self, apart: bool) -> None:
        View(self.layout, self.storages).write(self.numbered, self.device)
        self.sync()
        backend = "nccl" if self.cuda else "gloo"
        store = PrefixStore("trainers", self.store)
        dist.init_process_group(
            backend, store=store, rank=self.index, world_size=TRAINERS, timeout=timedelta(seconds=SECONDS)
        )
        self.tasks = tasks_of(self.m, [trainer(self.m, all_ways(TRAINERS), r) for r in range(TRAINERS)])
        self.pump: Pump | None = None
        self.used: PackedSource | None = None
        for kind in (GatheredStream, TensorStream):
            source = self.source(kind)
            plan = source.begin()
            source.forget()
            if self.index == 0:
                self.store.set(kind.__name__, plan.manifest)
            if kind is TensorStream:
                self.sizes = [x.nbytes for x in plan.messages]
        self.used = None
        self.open_links(apart)

    def source(self, kind: type, colocated: bool = False, **how) -> PackedSource:
        """kind: GatheredStream gathers as Bridge exports; TensorStream puts boxes together in the buffers."""
        if kind is GatheredStream:
            stream = GatheredStream(self.index, TRAINERS, self.tasks, self.roots, self.device, **how)
        else:
            stream = TensorStream(PartsSource(self.index, TRAINERS, self.m, self.layout, self.roots, self.device))
        self.used = PackedSource(stream, self.a.bucket, colocated)
        if kind is TensorStream and self.a.programs:
            self.used.assembly = replace(self.used.assembly, programs=self.a.programs)
        self.used.read()
        return self.used

    def work(self, way: str, apart: bool) -> Callable[[], None]:
        """One repetition of a way."""
        kind = GatheredStream if way.endswith(BRIDGE) else TensorStream
        if way == "one by one":
            source = self.source(GatheredStream, together=False)
            return (lambda: self.broadcasts(source)) if apart else (lambda: self.handles(source, 1))
        if way == "bucketed gather":
            source = self.source(GatheredStream)
            return lambda: self.handles(source, 0)
        if way == RAW:
            return self.raw
        if way == LOADS:
            return _nobody
        source = self.source(kind, colocated=not apart)
        if way == VLLM:
            return lambda: self.vllm(source)
        return self.feeder(source, self.link, () if apart else (1,))

    def handles(self, source: PackedSource, at_once: int) -> None:
        """Send one CUDA IPC handle of torch per tensor. at_once: tensors per message; 0: a whole bucket."""
        since = 0
        for group in source.begin().groups:
            found = source.tensors(group)
            for some in ([pair] for pair in found) if at_once else [list(found)]:
                self.pipe.send(some)
                self.hear()
                since += 1
                if self.cuda and since % 256 == 0:
                    torch.cuda.ipc_collect()
        self.pipe.send(None)

    def broadcasts(self, source: PackedSource) -> None:
        for group in source.begin().groups:
            for _, tensor in source.tensors(group):
                if self.link is not None:
                    self.link.broadcast(tensor.contiguous(), 0, soon())

    def feeder(self, source: PackedSource, link: Link | None, mapped: tuple[int, ...]) -> Callable[[], None]:
        """Do as xfer.packed.lane does: gather and pack bucket k + 1 while bucket k is sent and loaded.

        mapped: the workers on `link` that map this rank's buffers; if there are none, workers receive.
        """
        turn = 0

        def work() -> None:
            nonlocal turn
            if turn == 0:
                self.pump = Pump(source, f"trainer {self.index}")
                self.pump.exports = link is not None
            turn += 1
            feed, until, stop = self.pump.join(turn, (0,), 0), soon(), Stop()
            with own_stream(self.device, "send"):
                plan = feed.plan(until, stop)
                if mapped and link is not None:
                    send_offer(link, self.pump.offer, mapped, until)
                wire = OneAhead(link, until, lambda sent, _: feed.release(sent, 0))
                for number in range(len(plan.messages) if self.pump.exports else 0):
                    data = feed.take(number, until, stop)
                    if mapped:
                        announce(link, number, mapped, until, self.device)
                        wait_done(link, number, mapped, until)
                        feed.release(number, 0)
                    else:
                        wire.give(number, data)
                wire.close()
            feed.wait_over(until, stop)
            feed.leave(0)

        return work

    def raw(self) -> None:
        """Broadcast messages of the same sizes."""
        if self.link is None:
            return
        data = torch.empty(max(self.sizes), dtype=torch.uint8, device=self.device)
        one_ahead(self.link, (data[:nbytes] for nbytes in self.sizes))

    def vllm(self, source: PackedSource) -> None:
        producer, _ = vllm_packed()
        pairs = (
            (n, t.contiguous() if t is not None else t) for g in source.begin().groups for n, t in source.tensors(g)
        )
        if self.link is None:
            for _ in pairs:
                pass
            return
        producer(pairs, OnStream(self.link), src=0, post_iter_func=lambda pair: pair[1], **vllm_sizes(self.a))

    def free(self) -> None:
        if self.pump is not None:
            self.pump.forget()
            self.pump = None
        if self.used is not None:
            self.used.forget()
            self.used = None

    def said(self) -> str:
        stream = self.used.stream if self.used is not None else None
        return "" if not isinstance(stream, TensorStream) else "pulled" if stream.pulls else "sent in rounds"

    def wrong(self) -> int:
        return 0


class WorkerRank(Rank):
    def prepare(self, apart: bool) -> None:
        self.messages, self.parts = (
            checked(decode_manifest(self.store.get(kind.__name__)), self.specs)
            for kind in (GatheredStream, TensorStream)
        )
        self.order, self.sorted = (
            [p.spec for x in some for p in x.parts if p.start == 0] for some in (self.messages, self.parts)
        )
        self.view, self.buffers = View(self.layout, self.storages), Buffers(2, self.device)
        self.slices = Slices(self.layout, self.roots)
        self.rows: Rows | None = None
        self.open_links(apart)

    def load(self, pairs) -> None:
        self.slices.load(pairs)

    def work(self, way: str, apart: bool) -> Callable[[], None]:
        if way == "one by one":
            return self.broadcasts if apart else self.handles
        if way == "bucketed gather":
            return self.handles
        if way == RAW:
            return self.raw
        if way == LOADS:
            return self.loads
        if way == VLLM:
            return self.vllm
        messages = self.messages if way.endswith(BRIDGE) else self.parts
        if not way.endswith(SLICED):
            self.rows = Rows(self.layout, self.storages, messages, self.a.programs or (64 if apart else None))
        return (lambda: self.received(messages)) if apart else (lambda: self.mapped(self.link, messages))

    def handles(self) -> None:
        while (some := self.hear()) is not None:
            self.load(some)
            self.sync()
            del some
            self.pipe.send(True)

    def broadcasts(self) -> None:
        for spec in self.order:
            data = torch.empty(spec.shape, dtype=torch.bfloat16, device=self.device)
            self.link.broadcast(data, 0, soon())
            self.load([(spec.name, data)])

    def received(self, messages) -> None:
        buffers = self.buffers
        if self.rows is not None:  # load kernels before NCCL's run
            buffers.begin(messages)
            for number, message in enumerate(messages):
                self.rows.bind(number, buffers.take(number, message.nbytes))
        self.packed(Arrivals(self.link, messages, buffers, soon(), self.device, False), messages, buffers.views)

    def loads(self) -> None:
        """Load the bytes of the last refit again, without a wire."""
        unpacker = Unpacker(self.device, self.buffers.views)
        self.buffers.begin(self.parts)
        for number, message in enumerate(self.parts):
            data = self.buffers.take(number, message.nbytes)
            self.load((s.name, t) for s, t in unpacker.take(message, data))

    def mapped(self, link: Link, messages) -> None:
        arrivals = SharedArrivals(link, messages, soon(), self.device, False, exporter=0)
        self.packed(arrivals, messages)

    def packed(self, arrivals: Arrivals | SharedArrivals, messages, views=None) -> None:
        unpacker = Unpacker(self.device, *([views] if views else []))
        for number, message in enumerate(messages):
            data = arrivals.take()
            if self.rows is not None:
                self.rows.load(number, data)
            else:
                self.load((s.name, t) for s, t in unpacker.take(message, data))
            arrivals.free()
        if self.rows is None:
            unpacker.close(self.specs)
        self.sync()
        arrivals.close()

    def raw(self) -> None:
        data = torch.empty(max(x.nbytes for x in self.parts), dtype=torch.uint8, device=self.device)
        one_ahead(self.link, (data[: message.nbytes] for message in self.parts))

    def vllm(self) -> None:
        _, consumer = vllm_packed()
        told = ((s.name, (s.shape, torch.bfloat16)) for s in self.sorted)
        consumer(told, OnStream(self.link), src=0, post_unpack_func=self.load, **vllm_sizes(self.a))

    def wrong(self) -> int:
        return self.view.wrong(self.numbered, self.device)

    def described(self, most: int = 8) -> list[str]:
        """The first wrong tensors: how many elements differ, and the position and value of the first of them."""
        out = []
        for f in self.layout.fragments:
            number, spec = self.numbered[f.tensor]
            if not all(f.extent):
                continue
            want, got = self.view.values(f, spec, number, self.device), self.view.of(f)
            bad = (want != got).nonzero()
            if not len(bad):
                continue
            if len(out) == most:
                return [*out, "and more"]
            at = tuple(bad[0].tolist())
            w, g = int(want[at]) & 0xFFFF, int(got[at]) & 0xFFFF
            both_nan = all(x & 0x7F80 == 0x7F80 and x & 0x7F for x in (w, g))
            kind = "the poison" if g == 0x5A5A else "a different NaN" if both_nan else "a different value"
            all_nan = bool(((want[bad.unbind(1)] & 0x7F80) == 0x7F80).all())
            out.append(
                f"worker {self.place}: {f.tensor} from {f.origin}: {len(bad)} of {want.numel()} wrong, first at {at}: {g:#06x}, "
                f"{kind}, instead of {w:#06x}" + "; all of them should be NaN or infinite" * all_nan
            )
        return out

    def free(self) -> None:
        self.buffers.free()
        self.rows = None

    def said(self) -> str:
        return f"loads bound {self.rows.made} times" if self.rows is not None else ""


def one_ahead(link: Link, messages: Iterable[torch.Tensor]) -> None:
    """Broadcast `messages` from rank 0, one ahead, as the packed route does."""
    wire = OneAhead(link, soon(), lambda number, data: None)
    for number, data in enumerate(messages):
        wire.give(number, data)
    wire.close()


def _nobody() -> None:
    return None


def vllm_sizes(a: Namespace) -> dict[str, int]:
    return dict(buffer_size_bytes=a.bucket, num_buffers=2)


# ---- the loop of all processes


def refused(ways: list[str], a: Namespace) -> dict[str, str]:
    """Why a way cannot run here, by way. Imports what the ways need, which is slow, before any clock runs."""
    if VLLM not in ways:
        return {}
    if a.device != "cuda":
        return {VLLM: "vLLM packs only on CUDA streams"}
    try:
        vllm_packed()
    except Exception as e:
        return {VLLM: f"vLLM cannot be imported: {type(e).__name__}: {e}"[:200]}
    return {}


def measured(rank: Rank, way: str, apart: bool) -> dict:
    """One way's row: milliseconds, wrong elements after the last repetition, and torch's peak bytes beside the weights by rank."""
    rank.sync()
    before = 0
    if rank.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(rank.device)
        before = torch.cuda.memory_allocated(rank.device)
    work = rank.work(way, apart)
    warm, repeats = 1, max(1, rank.a.repeats // 2 if way.endswith(BRIDGE) or way == VLLM else rank.a.repeats)
    if way in ONCE:
        warm, repeats = 0, rank.a.slow_repeats
    spent, first = [], 0.0
    for k in range(warm + repeats):
        if not rank.trainer and k == warm + repeats - 1 and way not in NOT_COMPARED:
            for t in rank.storages:
                t.fill_(0x5A)
        rank.sync()
        rank.gathered(0.0)
        began = time.monotonic()
        work()
        rank.sync()
        ended = time.monotonic()
        seconds = max(rank.gathered(ended)) - max(rank.gathered(began))
        if k >= warm:
            spent.append(seconds * 1e3)
        else:
            first = seconds * 1e3
    peak = torch.cuda.max_memory_allocated(rank.device) - before if rank.cuda else 0
    said = rank.said()
    rank.free()
    wrong = sum(rank.gathered(0 if way in NOT_COMPARED else rank.wrong()))
    return dict(
        way=way, ms=spent, first_ms=first, wrong=None if way in NOT_COMPARED else int(wrong),
        extra_bytes=[int(x) for x in rank.gathered(peak)], said=said,
    )  # fmt: skip


def rank_main(
    index: int, case: str, gpus: tuple[int, ...], m: Model, a: Namespace, ways: list[str], port: int, pipe, answers, go
) -> None:
    """Wait for `go`, run all ways, and put (index, row) for each, then (index, None); on an error (index, its text)."""
    apart = case == "apart"
    try:
        cannot, most = refused(ways, a), max(SECONDS, a.seconds)
        if not go.wait(most):  # earlier cases may take all of the command's time
            raise TimeoutError(f"the ranks of {case} were not told to begin within {most:g} s")
        rank = (TrainerRank if index < TRAINERS else WorkerRank)(index, gpus, m, a, port, pipe)
        rank.prepare(apart)
        for way in ways:
            why = cannot.get(way, "")
            found = dict(way=way, refused=why) if any(rank.gathered(bool(why))) else None
            found = found or measured(rank, way, apart)
            if index == 0 or found.get("said") and index == TRAINERS:
                answers.put((index, found if index == 0 else dict(way=way, details=[f"worker 0: {found['said']}"])))
            if found.get("wrong") and not rank.trainer:
                answers.put((index, dict(way=way, details=rank.described())))
            rank.gathered(0.0)
        answers.put((index, None))
        rank.gathered(0.0)
    except BaseException:
        answers.put((index, traceback.format_exc()))
    time.sleep(0.5)  # the queue writes in a thread of its own
