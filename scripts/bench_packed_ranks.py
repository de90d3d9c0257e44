"""The rank processes of bench_packed_gpu.py: trainers that gather as Megatron-Bridge does, takers that load as an engine does.

Weights are Qwen3-MoE's by bench_shapes.py: trainers hold dense parameters cut by TP and experts by EP in Megatron's layout;
takers hold vLLM's fused storages and copy their part out of whole tensors. Buckets, packing, shared buffers, arrivals and
unpacking are xfer.packed's own. Not here: the gathers (bench_packed_stream.py), the session, which cases there are, the table.
"""

from __future__ import annotations

import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from bench_packed_stream import GatheredStream, PartsSource, tasks_of, typed
from bench_shapes import Model, Parallel, View, engine, trainer
from torch.distributed import PrefixStore, TCPStore

from xfer.packed.arrivals import Arrivals, own_stream
from xfer.packed.buffer import Buffers, Unpacker
from xfer.packed.feed import Pump
from xfer.packed.shared import SharedArrivals, announce, wait_done
from xfer.packed.source import PackedSource
from xfer.packed.tensors import TensorStream
from xfer.packed.wire import checked, decode_manifest
from xfer.transport.group import Link, open_group

TRAINERS = TAKERS = 2
SECONDS = 240.0


def soon() -> float:
    return time.monotonic() + SECONDS


# ---- ranks


class Rank:
    """What both sides have: places to meet, one storage per root, clocks."""

    def __init__(self, index: int, gpus: tuple[int, ...], m: Model, a: Namespace, port: int, pipe):
        self.index, self.m, self.a, self.pipe = index, m, a, pipe
        self.cuda = a.device == "cuda"
        self.device = torch.device("cuda", gpus[index]) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        torch.set_num_threads(1)
        self.store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=SECONDS))
        self.control = open_group(PrefixStore("control", self.store), index, TRAINERS + TAKERS, SECONDS)
        self.trainer = index < TRAINERS
        self.place = index if self.trainer else index - TRAINERS
        self.layout = (
            trainer(m, self.place, Parallel.all_ways(TRAINERS)) if self.trainer else engine(m, self.place, TAKERS)
        )
        roots = self.layout.roots()
        self.storages = [torch.empty(r.nbytes, dtype=torch.uint8, device=self.device) for r in roots]
        self.roots = {r.name: t for r, t in zip(roots, self.storages)}
        self.specs = {s.name: s for s in m.specs()}
        self.numbered = {n: (i, s) for i, (n, s) in enumerate(self.specs.items())}
        self.link: Link | None = None
        self.wide: Link | None = None

    def open_links(self, apart: bool) -> None:
        """apart: trainer 0 and all takers, on the devices. Else each trainer with the taker of its place, on the host."""
        first = self.trainer and self.index == 0
        if apart and (first or not self.trainer):
            self.link = open_group(
                PrefixStore("data", self.store), 0 if first else 1 + self.place, 1 + TAKERS, SECONDS, self.device
            )
        elif not apart:
            self.link = open_group(PrefixStore(f"pair{self.place}", self.store), 0 if self.trainer else 1, 2, SECONDS)
            if first or not self.trainer:  # and trainer 0 with all takers
                place = 0 if first else 1 + self.place
                self.wide = open_group(PrefixStore("wide", self.store), place, 1 + TAKERS, SECONDS)

    def gathered(self, value: float) -> list[float]:
        out = []
        for r in range(TRAINERS + TAKERS):
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
        self.tasks = tasks_of(self.m, [trainer(self.m, r, Parallel.all_ways(TRAINERS)) for r in range(TRAINERS)])
        self.pump: Pump | None = None
        for kind in (GatheredStream, TensorStream):
            plan = self.source(kind).begin()
            if self.index == 0:
                self.store.set(kind.__name__, plan.manifest)
            if kind is GatheredStream:
                self.sizes = [x.nbytes for g in plan.groups for x in g.messages]
        self.open_links(apart)

    def source(self, kind: type, colocated: bool = False, **how) -> PackedSource:
        if kind is GatheredStream:
            stream = GatheredStream(self.index, TRAINERS, self.tasks, self.roots, self.device, **how)
        else:
            stream = TensorStream(PartsSource(self.index, TRAINERS, self.m, self.layout, self.roots, self.device))
        source = PackedSource(stream, self.a.bucket, True, colocated)
        source.read()
        return source

    def ways(self, apart: bool) -> dict[str, Callable[[], None]]:
        one, many = self.source(GatheredStream, together=False), self.source(GatheredStream)
        if not apart:
            parts = self.source(TensorStream, colocated=True)
            return {
                "one by one": lambda: self.handles(one, 1),
                "bucketed gather": lambda: self.handles(many, 0),
                "bucketed + flattened": self.feeder(self.source(GatheredStream, colocated=True), self.link, (1,)),
                "flattened, parts to trainer 0": self.feeder(parts, self.wide, tuple(range(1, 1 + TAKERS))),
            }
        parts = self.source(TensorStream)
        return {
            "one by one": lambda: self.broadcasts(one),
            "packed broadcast": self.feeder(many, self.link, ()),
            "packed, parts to trainer 0": self.feeder(parts, self.link, ()),
            "NCCL broadcast": self.raw,
            "vLLM's packed broadcast": lambda: self.vllm(many),
        }

    def handles(self, source: PackedSource, at_once: int) -> None:
        """A handle per tensor, made by torch: `at_once` tensors a message, 0: a bucket."""
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
        """As xfer.packed.lane does it: bucket k + 1 is gathered and packed while bucket k is sent and loaded. `mapped`: the
        takers on `link` that map this rank's buffers; none: they receive."""
        turn = 0

        def work() -> None:
            nonlocal turn
            if turn == 0:
                self.pump = Pump(source, f"trainer {self.index}")
                self.pump.exports = link is not None
            turn += 1
            feed, until = self.pump.join(turn, (0,), 0), soon()
            with own_stream(self.device, "send"):
                plan = feed.plan(until, _nobody)
                for taker in mapped if link is not None else ():
                    offer = torch.frombuffer(bytearray(self.pump.offer), dtype=torch.uint8)
                    link.send(torch.tensor([offer.numel()]), taker, 0, until)
                    link.send(offer, taker, 0, until)
                for number in range(plan.messages if self.pump.exports else 0):
                    data = feed.take(number, until, _nobody)
                    if mapped:
                        announce(link, number, mapped, until, self.device)
                        wait_done(link, number, mapped, until)
                    else:
                        link.broadcast(data, 0, until)
                    feed.release(number, 0)
            feed.wait_over(until, _nobody)
            feed.leave(0)

        return work

    def raw(self) -> None:
        """The same messages, nothing gathered, packed or loaded."""
        if self.link is None:
            return
        data = torch.empty(max(self.sizes), dtype=torch.uint8, device=self.device)
        for nbytes in self.sizes:
            self.link.broadcast(data[:nbytes], 0, soon())

    def vllm(self, source: PackedSource) -> None:
        producer, _ = vllm_packed()
        pairs = ((n, t.contiguous()) for g in source.begin().groups for n, t in source.tensors(g))
        if self.link is None:
            for _ in pairs:
                pass
            return
        producer(pairs, OnStream(self.link), src=0, post_iter_func=lambda pair: pair[1], **vllm_sizes(self.a))

    def free(self) -> None:
        if self.pump is not None:
            self.pump._buffers.free()
            self.pump = None

    def wrong(self) -> int:
        return 0


class TakerRank(Rank):
    def prepare(self, apart: bool) -> None:
        self.messages, self.parts = (
            checked(decode_manifest(self.store.get(kind.__name__)), self.specs)
            for kind in (GatheredStream, TensorStream)
        )
        self.order = [p.spec for x in self.messages for p in x.parts if p.start == 0]
        self.view, self.buffers = View(self.layout, self.storages), Buffers(2, self.device)
        self.into: dict[str, list[tuple[torch.Tensor, tuple[slice, ...]]]] = {}
        for f in self.layout.fragments:
            if all(f.extent):
                self.into.setdefault(f.tensor, []).append((typed(self.roots[f.root], f), f.index))
        self.open_links(apart)

    def load(self, pairs) -> None:
        for name, tensor in pairs:
            for mine, index in self.into[name]:
                mine.copy_(tensor[index])

    def ways(self, apart: bool) -> dict[str, Callable[[], None]]:
        if not apart:
            return {
                "one by one": self.handles,
                "bucketed gather": self.handles,
                "bucketed + flattened": lambda: self.mapped(self.link, self.messages),
                "flattened, parts to trainer 0": lambda: self.mapped(self.wide, self.parts),
            }
        return {
            "one by one": self.broadcasts,
            "packed broadcast": lambda: self.received(self.messages),
            "packed, parts to trainer 0": lambda: self.received(self.parts),
            "NCCL broadcast": self.raw,
            "vLLM's packed broadcast": self.vllm,
        }

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
        self.packed(Arrivals(self.link, messages, buffers, soon(), self.device, False), messages, buffers.views)

    def mapped(self, link: Link, messages) -> None:
        length = torch.zeros(1, dtype=torch.int64)
        link.recv(length, 0, 0, soon())
        offer = torch.zeros(int(length), dtype=torch.uint8)
        link.recv(offer, 0, 0, soon())
        arrivals = SharedArrivals(link, messages, bytes(offer.numpy()), soon(), self.device, False)
        self.packed(arrivals, messages)

    def packed(self, arrivals: Arrivals | SharedArrivals, messages, views=None) -> None:
        unpacker = Unpacker(self.device, *([views] if views else []))
        for message in messages:
            self.load((s.name, t) for s, t in unpacker.take(message, arrivals.take()))
            arrivals.free()
        unpacker.close(self.specs)
        self.sync()
        arrivals.close()

    def raw(self) -> None:
        data = torch.empty(max(x.nbytes for x in self.messages), dtype=torch.uint8, device=self.device)
        for message in self.messages:
            self.link.broadcast(data[: message.nbytes], 0, soon())

    def vllm(self) -> None:
        _, consumer = vllm_packed()
        told = ((s.name, (s.shape, torch.bfloat16)) for s in self.order)
        consumer(told, OnStream(self.link), src=0, post_unpack_func=self.load, **vllm_sizes(self.a))

    def wrong(self) -> int:
        return self.view.wrong(self.numbered, self.device)

    def described(self, most: int = 8) -> list[str]:
        """Of the first tensors that are wrong: how many elements, where the first lies, and what is there instead."""
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
                return [*out, "… and more"]
            at = tuple(bad[0].tolist())
            w, g = int(want[at]) & 0xFFFF, int(got[at]) & 0xFFFF
            both_nan = all(x & 0x7F80 == 0x7F80 and x & 0x7F for x in (w, g))
            kind = "the poison" if g == 0x5A5A else "another NaN" if both_nan else "another value"
            all_nan = bool(((want[bad.unbind(1)] & 0x7F80) == 0x7F80).all())
            out.append(
                f"taker {self.place}: {f.tensor} from {f.origin}: {len(bad)} of {want.numel()} wrong, first at {at}: {g:#06x}, "
                f"{kind}, instead of {w:#06x}" + "; all of them should be NaN or infinite" * all_nan
            )
        return out

    def free(self) -> None:
        self.buffers.free()


def _nobody() -> None:
    return None


# ---- vLLM's own, where it can be imported


class OnStream:
    """What vLLM's packing wants of a communicator: a broadcast that the current stream waits for, and the host does not."""

    def __init__(self, link: Link):
        self._group = link._group()

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._group.broadcast([tensor], options).wait()


def vllm_packed() -> tuple[Callable, Callable]:
    """(producer, consumer); ImportError where there is no vLLM with them."""
    from vllm.distributed.weight_transfer import packed_tensor as it

    for kind in ("packed_nccl_broadcast", "packed_broadcast"):
        if hasattr(it, f"{kind}_producer"):
            return getattr(it, f"{kind}_producer"), getattr(it, f"{kind}_consumer")
    raise ImportError("this vLLM packs under other names")


def vllm_sizes(a: Namespace) -> dict[str, int]:
    return dict(buffer_size_bytes=a.bucket, num_buffers=2)


# ---- the loop of all processes


def refused(way: str, rank: Rank) -> str:
    """Why a way cannot be run here; "" when it can."""
    if way != "vLLM's packed broadcast":
        return ""
    if not rank.cuda:
        return "vLLM packs on CUDA streams only"
    try:
        vllm_packed()
    except Exception as e:
        return f"vLLM cannot be imported: {type(e).__name__}: {e}"[:200]
    return ""


def measured(rank: Rank, way: str, work: Callable[[], None], slow: bool) -> dict:
    """Milliseconds from the last rank's start to the last rank's end, wrong elements after the last repetition, and the
    most bytes that torch had beside the weights, by rank."""
    rank.sync()
    before = 0
    if rank.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(rank.device)
        before = torch.cuda.memory_allocated(rank.device)
    warm, repeats = (0, rank.a.slow_repeats) if slow else (1, rank.a.repeats)
    spent = []
    for k in range(warm + repeats):
        if not rank.trainer and k == warm + repeats - 1 and way != "NCCL broadcast":
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
    peak = torch.cuda.max_memory_allocated(rank.device) - before if rank.cuda else 0
    rank.free()
    wrong = sum(rank.gathered(rank.wrong()))
    return dict(
        way=way, ms=spent, wrong=None if way == "NCCL broadcast" else int(wrong),
        extra_bytes=[int(x) for x in rank.gathered(peak)],
    )  # fmt: skip


def rank_main(index: int, apart: bool, gpus: tuple[int, ...], m: Model, a: Namespace, port: int, pipe, answers) -> None:
    """Puts (index, dict) for each way and (index, None) at the end, or (index, text) of what went wrong."""
    try:
        rank = (TrainerRank if index < TRAINERS else TakerRank)(index, gpus, m, a, port, pipe)
        rank.prepare(apart)
        slow = ("one by one",) if apart else ("one by one", "bucketed gather")
        for way, work in rank.ways(apart).items():
            if a.ways and not any(w in way for w in a.ways):
                continue
            why = refused(way, rank)
            found = dict(way=way, refused=why) if any(rank.gathered(bool(why))) else None
            found = found or measured(rank, way, work, way in slow)
            if index == 0:
                answers.put((index, found))
            if found.get("wrong") and not rank.trainer:
                answers.put((index, dict(way=way, details=rank.described())))
            rank.gathered(0.0)
        answers.put((index, None))
        rank.gathered(0.0)
    except BaseException:
        answers.put((index, traceback.format_exc()))
    time.sleep(0.5)  # so that the queue's thread has written
