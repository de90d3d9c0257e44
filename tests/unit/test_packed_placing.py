"""Messages assembled from boxes that several ranks hold: every byte comes to its place, pulled or sent in rounds, through tables
that xfer's kernels run. With TRITON_INTERPRET=1 through Triton's, in its interpreter.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from contextlib import nullcontext
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import EXAMPLES
from tests.support.row_worlds import Heap, cut
from tests.support.trace_maps import addresses
from xfer.errors import Unsupported
from xfer.packed import agree, places, tensors
from xfer.packed.buffer import Buffers
from xfer.packed.plan import ALIGN, TaskSize
from xfer.packed.source import Assembly, PackedSource, packed_source
from xfer.packed.tensors import TensorStream, _Rank
from xfer.plan.program import ITEMSIZE
from xfer.trace.fragment import Fragment, TensorSpec
from xfer.trace.traced import Traced, TrainerLayout
from xfer.trainers import traced_stream
from xfer.trainers.dtensor import TensorTrainer

CPU = torch.device("cpu")
RANKS = 3
TRITON = os.environ.get("TRITON_INTERPRET") == "1"
few = settings(deadline=None, max_examples=EXAMPLES // (10 if TRITON else 2) + 1)


class Held:
    """Tensors of random bytes, cut into boxes along random dims; each box on one or several ranks, in storages of their own
    with random strides (gaps, other orders of dims, backwards). Some in bfloat16 are held in float32."""

    def __init__(self, draw):
        rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
        self.truth: dict[str, np.ndarray] = {}
        self.specs: list[TensorSpec] = []
        self.boxes: dict[str, list[places.HeldBox]] = {}
        self.storages: dict[tuple[int, str], np.ndarray] = {}
        heaps, found, stored = [Heap(rng, 3) for _ in range(RANKS)], [], {}
        for i in range(draw(st.integers(1, 4))):
            shape = tuple(draw(st.lists(st.integers(0 if i else 1, 7), max_size=4)))
            spec = TensorSpec(f"t{i}", shape, draw(st.sampled_from(["bfloat16", "float32", "uint8", "float64"])))
            dtype, value = spec.dtype, rng.integers(0, 256, (*shape, ITEMSIZE[spec.dtype]), dtype=np.uint8)
            self.specs.append(spec)
            self.truth[spec.name] = stored[spec.name] = value
            if dtype == "bfloat16" and rng.random() < 0.6:
                dtype, wide = "float32", torch.from_numpy(rng.standard_normal((*shape, 1)).astype(np.float32))
                stored[spec.name], self.truth[spec.name] = (
                    t.flatten().view(torch.uint8).numpy().reshape(*shape, t.element_size())
                    for t in (wide, wide.bfloat16())
                )
            self.boxes[spec.name] = []
            for box in cut(rng, shape, draw(st.integers(0, 5)), interleaved=0.3):
                known = {}
                for r in rng.permutation(RANKS)[: rng.integers(1, RANKS + 1)].tolist():
                    root, offset, strides = heaps[r].place("src", box[1], ITEMSIZE[dtype], True).values()
                    known[r] = Fragment(spec.name, *box[:2], f"r{r}.{root}", offset, strides, dtype, box[2])
                    found.append((r, known[r]))
                self.boxes[spec.name].append(places.HeldBox(box, known))
        for r, heap in enumerate(heaps):
            self.storages |= {(r, f"r{r}.{k}"): data for k, data in enumerate(heap.storages(16))}
        for r, f in found:
            at = addresses(f.offset, f.extent, f.strides)[:, None] + np.arange(ITEMSIZE[f.dtype])
            box = tuple(slice(o, o + n * q, q) for o, n, q in zip(f.origin, f.extent, f.steps))
            self.storages[r, f.root][at] = stored[f.tensor][box].reshape(at.shape)


held = st.composite(Held)


def expected(message, h: Held) -> torch.Tensor:
    out = np.full(message.nbytes, 0x77, np.uint8)
    for p in message.parts:
        out[p.offset : p.offset + p.size] = h.truth[p.spec.name].reshape(-1)[p.start : p.start + p.size]
    return torch.from_numpy(out)


def source_of(h: Held, rank: int) -> SimpleNamespace:
    """The trainer of one rank of `Held`."""
    mine = tuple(f for some in h.boxes.values() for x in some for r, f in x.by.items() if r == rank)
    tensors = {n: torch.from_numpy(x) for (r, n), x in h.storages.items() if r == rank}
    layout = TrainerLayout(Traced(tuple(h.specs), mine), (), tensors)
    return SimpleNamespace(
        rank=rank, world=RANKS, device=CPU, read=lambda: layout, check=lambda: "same", rebind=lambda: tensors
    )


class Wire:
    """In place of `_posted`: what ranks send to each other, in order. `rank`: whose turn it is."""

    def __init__(self):
        self.rank, self.going = 0, defaultdict(deque)

    def posted(self, data, peers, sends: bool) -> list:
        if sends:
            for t, peer in zip(data, peers, strict=True):
                self.going[self.rank, peer].append(t.clone())
            return []
        queues = [self.going[peer, self.rank] for peer in peers]
        return [SimpleNamespace(wait=lambda: [t.copy_(q.popleft()) for t, q in zip(data, queues, strict=True)])]


ranks = st.integers(0, RANKS - 1)


@pytest.mark.parametrize("pulls", [False, True])
@few
@given(held(), st.integers(ALIGN, 2048), st.integers(16, 200), ranks, ranks, st.booleans())
def test_every_byte_comes_to_its_place_pulled_or_sent_in_rounds(pulls, h, limit, most, one, let_go, checks):
    """Two ranks pull by mappings, which are made up: they give the tensors themselves. Or one gets what the others send."""
    streams, wire = [TensorStream(source_of(h, r)) for r in range(RANKS)], Wire()
    for s in streams:
        s.read()

    def told(make, decoder, device):
        return [decoder.decode(msgspec.msgpack.encode(s._own())) for s in streams]

    def mapped(s, said):
        return {r: {i: o._roots[n] for i, n in enumerate(said[r].roots)} for r, o in enumerate(streams) if o is not s}

    def assembled(source: PackedSource, plan) -> None:
        wire.rank, buffers = source.rank, Buffers(2, CPU)
        buffers.begin(plan.messages)
        source.prepare(buffers if source.assembly.here else None)
        for k, message in enumerate(plan.messages):
            data = buffers.take(k, message.nbytes).fill_(0x77) if source.assembly.here else None
            source.place(message, data)
            assert data is None or torch.equal(data, expected(message, h)), source.rank

    with pytest.MonkeyPatch.context() as m:
        m.setattr(agree, "of_all_ranks", told)
        m.setattr(agree, "any_rank", lambda flag, *_: flag)
        m.setattr(TensorStream, "_offer", lambda self, roots: b"offer" * pulls)
        m.setattr(TensorStream, "_mapped", mapped)
        m.setattr(tensors, "_posted", wire.posted)
        if TRITON:
            m.setattr(tensors, "on_gpu", lambda device: True)
        sources = [PackedSource(s, limit) for s in streams]
        for s in sources:
            s.assembly = s.stream.assembly = Assembly(s.rank != one if pulls else s.rank == one, most)
        plans = [s.begin() for s in sources]
        assert len({p.fingerprint for p in plans}) == 1 and all(s.pulls == pulls for s in streams)
        assert all(("by copies out of" if pulls else "in rounds") in s.way for s in sources)
        assert plans[0].buffer_bytes <= max(ALIGN, limit - limit // 8)
        for step in range(2):
            for source, plan in sorted(zip(sources, plans, strict=True), key=lambda x: x[0].assembly.here):
                assembled(source, plan)
            assert not any(wire.going.values())
            if step == 0:  # a framework frees storages that were mapped, and brings them back: all ranks begin anew
                sources[let_go].forget()
                # With `checks` this rank checks after the release, else it had checked before another rank released.
                assert not checks or sources[let_go].check() == "moved"
                assert sources[let_go]._stale
                for s in sources:  # as the ranks' all-reduce tells them
                    s._stale = True
                plans = [s.begin() for s in sources]


@pytest.mark.parametrize(
    "device, backend, refused", [("cuda", "gloo", True), ("cuda", "nccl", False), ("cpu", "gloo", False)]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_rounds_that_the_trainers_group_cannot_carry_are_refused_on_all_ranks(
    monkeypatch, device, backend, refused, rank
):
    monkeypatch.setattr("xfer.packed.tensors.dist.get_backend", lambda: backend)
    monkeypatch.setattr(agree, "any_rank", lambda flag, *_: flag)
    stream = TensorStream(SimpleNamespace(rank=rank, world=2, device=torch.device(device)))
    stream.assembly = Assembly(rank == 0, 1 << 20)
    said = [_Rank((), (), (), r == 0, b"" if r else b"offer") for r in range(2)]
    part = Fragment("t", (0,), (4,), "w", 0, (1,), "uint8")
    stream._targets = (0,)
    for holders in ((0, 1), (1,)):  # first every rank that assembles holds all of it: nothing has to be sent
        stream._held = {"t": [places.HeldBox(((0,), (4,), (1,)), dict.fromkeys(holders, part))]}
        with pytest.raises(Unsupported) if refused and holders == (1,) else nullcontext() as e:
            stream._bind(said)
        assert not stream.pulls
    if refused:
        assert "cannot send from GPUs" in str(e.value) and e.value.violations[0].startswith("trainer 1: its allocator")


class Export:
    """One rank's Megatron: Bridge's export, and parameters whose storages may move."""

    def __init__(self):
        self.value, self.spec = 0, TensorSpec("t", (4,), "uint8")
        self.move()

    def move(self) -> None:
        self.state, self.value = "moved", self.value + 1
        self.tensors = {"r": torch.full((4,), self.value, dtype=torch.uint8)}

    def layout(self) -> TrainerLayout:
        part = Fragment("t", (0,), (4,), "r", 0, (1,), "uint8")
        return TrainerLayout(Traced((self.spec,), (part,)), (), self.tensors)

    def check(self) -> str:
        state, self.state = self.state, "same"
        return state

    def read(self):
        return (self.spec,)

    def bind(self):
        return self

    def build(self, assembly):
        return (TaskSize(0, (self.spec,)),)


def test_where_another_rank_needs_its_export_nothing_is_made_anew_until_something_moves(monkeypatch):
    """This rank could assemble messages from storages; whether all can is agreed whenever tasks are made."""
    others_cannot = [True]
    monkeypatch.setattr(traced_stream, "agree", SimpleNamespace(any_rank=lambda flag, *_: flag or others_cannot[0]))
    stream = traced_stream.TracedStream(SimpleNamespace(rank=0, world=1, device=CPU))
    rank = stream.export = stream._source._slots = Export()
    stream._source.read = rank.layout
    source = PackedSource(stream, 1 << 20)
    source.read()
    for moves, built in ((True, 1), (False, 1), (False, 1), (True, 2), (False, 2)):
        if moves:
            rank.move()
        assert source.check() == ("moved" if moves else "same")
        source.begin()
        assert source.built == built and not source.writes
    others_cannot[0] = False
    rank.move()
    source.check()
    (message,) = source.begin().messages
    source.place(message, data := torch.zeros(4, dtype=torch.uint8))
    assert data.tolist() == [rank.value] * 4 and source.writes, "from where its storages are now"
    assert source.check() == "same" and source.built == 3


def test_a_hole_is_seen_also_where_other_boxes_overlap():
    for second, whole in (((2, 2), True), ((1, 3), True), ((1, 2), False), ((0, 2), False)):
        rows = [(0, 2), second]
        assert places.held_wholly((4, 2), [((o, 0), (n, 2), (1, 1)) for o, n in rows]) is whole
    assert places.held_wholly((), [((), (), ())]) and not places.held_wholly((), [])


@pytest.mark.parametrize("mine", [(0, 2), (1, 2), (0, 1)])
def test_trainers_that_are_not_torchs_default_group_are_refused(monkeypatch, mine):
    """A session may number its trainers otherwise; this route's collectives do not."""
    for there in ((0, 1), (0, 2), (1, 2), (2, 4)):
        monkeypatch.setattr(agree, "ranks", lambda there=there: there)
        trainer = TensorTrainer(lambda: {"a": torch.zeros(2)}, rank=mine[0], world=mine[1])
        with nullcontext() if mine == there else pytest.raises(Unsupported, match="default group"):
            assert packed_source(trainer, 1 << 20).world == mine[1]


def test_tensors_of_too_many_dims_are_refused_by_name():
    f = Fragment("deep", (0,) * 7, (1,) * 7, "r", 0, (0,) * 7, "uint8")
    with pytest.raises(Unsupported, match="dims") as e:
        places.table([places.Copy(0, f, 0, (0,) * 7, "uint8")])
    assert e.value.violations == ("deep",)
