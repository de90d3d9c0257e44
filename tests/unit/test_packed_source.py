"""What a trainer rank of the packed route knows of its export: what is replaced at any moment of a gather is what the next gather
sends, and a rank that fails says so where the others wait for it. Other ranks and threads come at set moments.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from functools import partial
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import msgspec
import pytest
import torch
import torch.distributed as dist

from xfer.errors import LayoutError, PlanMismatch, RebindError, Unsupported, XferError
from xfer.packed import agree
from xfer.packed.plan import TaskSize
from xfer.packed.source import PackedSource
from xfer.packed.tensors import TensorStream, _posted
from xfer.trace.fragment import TensorSpec
from xfer.trace.slots import Slots, walk
from xfer.trainers import bridge_stream, dtensor
from xfer.trainers.dtensor import TensorTrainer
from xfer.trainers.weight_source import weight_source

CPU = torch.device("cpu")
NUMBERS = msgspec.msgpack.Decoder(list[int])
SPEC = TensorSpec("w", (4,), "float32")
MOMENTS = ["the check", "the tasks", "plans agree"]


class Kept:
    """A source.WeightStream whose tasks keep the parameter object of `build`, as a framework's do. `at`: what happens at a moment."""

    rank, world, device = 0, 1, CPU

    def __init__(self):
        self.live = self.seen = torch.zeros(4)
        self.at, self.raises = {}, False

    def drain(self) -> None: ...

    def read(self):
        self.seen = self.live
        return (SPEC,)

    def check(self) -> str:
        return "same" if self.seen is self.live else "changed"

    def build(self, assembly):
        self.happens("before the tasks")
        self.task = self.live
        self.happens("after the tasks")
        if self.raises:
            self.raises = False
            raise RuntimeError("a collective ended")
        return (TaskSize(0, (SPEC,)),)

    def tensors(self, group):
        yield SPEC.name, self.task

    def happens(self, moment: str) -> None:
        if (what := self.at.pop(moment, None)) is not None:
            what()


@pytest.mark.parametrize("raises", [False, True], ids=["", "raises"])
@pytest.mark.parametrize("fresh", [False, True], ids=["tasks are made", "tasks are kept"])
@pytest.mark.parametrize("moment", [f"{when} {what}" for what in MOMENTS for when in ("before", "after")])
def test_what_is_replaced_at_any_moment_of_a_gather_is_what_the_next_one_sends(monkeypatch, moment, fresh, raises):
    stream = Kept()
    source = PackedSource(stream, 1 << 20)
    places, real = iter(["the check", *["plans agree"] * 9]), agree.any_rank

    def any_rank(*args):
        place = next(places)
        stream.happens(f"before {place}")
        out = real(*args)
        stream.happens(f"after {place}")
        return out

    def replaced() -> None:
        """The check of the next refit, on the caller's thread."""
        stream.live = torch.ones(4)
        if source.check() == "changed":
            source.read()
        assert source.check() == "same"

    source.read()
    if fresh:
        source.begin()
    monkeypatch.setattr(agree, "any_rank", any_rank)
    stream.at[moment], stream.raises = replaced, raises and not fresh
    with pytest.raises(RuntimeError) if stream.raises else contextlib.nullcontext():
        source.begin()
    if stream.at:  # a gather that keeps its tasks has none of the later moments
        assert fresh or raises
        stream.at = {}
        replaced()
    ((_, sent),) = source.tensors(source.begin().groups[0])
    assert sent is stream.live, f"replaced {moment}"
    built = source.built
    source.begin()
    assert source.built == built, "the tasks are kept after that"


@pytest.mark.parametrize("at", ["check", "read"])
def test_what_another_rank_releases_is_dropped_before_or_after_a_check_and_not_within(monkeypatch, at):
    """Its lanes drop storages on their own threads, while this rank's caller may be checking already, in the next refit."""
    held = {n: torch.ones(4) for n in "abc"}
    trainer = TensorTrainer(lambda: dict(held))
    stream = TensorStream(trainer)
    source = PackedSource(stream, 1 << 20)
    source.read()
    assert source.check() == "same"
    method = "check" if at == "check" else "bind"
    waiting, real = [], getattr(Slots, method)

    def looks(self):
        if not waiting:
            waiting.append(threading.Thread(target=source.forget))
            waiting[0].start()
            waiting[0].join(0.3)
        return real(self)

    monkeypatch.setattr(Slots, method, looks)
    assert source.check() == "same" if at == "check" else source.read()
    waiting[0].join(20)
    assert not waiting[0].is_alive() and not trainer._given and not stream._roots and stream._let_go and source._stale
    assert source.check() == "moved"
    assert len(list(source.tensors(source.begin().groups[0]))) == 3


def test_gathers_over_all_tensors_are_finished_though_they_are_let_go_of_meanwhile(monkeypatch):
    held, seen = {n: torch.ones(4) for n in "abc"}, []
    trainer = TensorTrainer(lambda: dict(held))
    monkeypatch.setattr(dtensor, "drain_over", lambda ts: seen.extend(t for t in ts if trainer.let_go() is None))
    trainer.finish_gathers()
    assert all(a is b for a, b in zip(seen, held.values(), strict=True))


@pytest.mark.parametrize("ends", ["raises", "is left", "comes to its end"])
def test_after_a_gather_that_did_not_end_tasks_are_made_anew(monkeypatch, ends):
    """Bridge keeps experts until it has all to stack them: what a failed gather left would be in the next one."""
    stream = Kept()
    source = PackedSource(stream, 1 << 20)
    source.read()

    def tensors(group):
        yield SPEC.name, stream.task
        if ends == "raises":
            raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(stream, "tensors", tensors)
    some = source.tensors(source.begin().groups[0])
    next(some)
    if ends == "is left":
        some.close()
    with contextlib.suppress(torch.OutOfMemoryError):
        assert not list(some)
    source.begin()
    assert source.built == (1 if ends == "comes to its end" else 2)


def bridge(**attributes) -> bridge_stream.BridgeStream:
    stream = bridge_stream.BridgeStream(SimpleNamespace(rank=0, world=1, device=CPU, chunks=[]))
    vars(stream).update(attributes)
    return stream


def test_a_check_that_ends_as_megatrons_groups_are_gone_has_not_noted_a_move(monkeypatch):
    """A stream that reads storages binds to new ones when it is told of a move, which is told once."""
    net, groups = torch.nn.Linear(2, 2), Mock(return_value=[object()])
    monkeypatch.setattr(bridge_stream, "process_groups", groups)
    stream = bridge(_slots=Slots([net], walk([net])), _groups=groups())
    stream._slots.bind()
    assert stream.check() == "same"
    net.weight.data = net.weight.detach().clone()
    groups.side_effect = RebindError("Megatron's process groups are not there")
    with pytest.raises(RebindError):
        stream.check()
    groups.side_effect = None
    assert [stream.check(), stream.check()] == ["moved", "same"]


@pytest.mark.parametrize("padded", [True, False])
def test_bridge_may_give_more_rows_than_planned_of_tensors_that_megatron_pads_only(padded):
    stream, tensor = bridge(_tasks=[None], _model_bridge=SimpleNamespace()), torch.arange(12.0).view(6, 2)
    stream.build = lambda assembly: stream._merged([[(0, [("a", [4, 2], "float32", padded)], None)]])
    stream._exported = lambda tasks: iter([("a", tensor)])
    (group,) = PackedSource(stream, 1 << 20).begin().groups
    ((_, got),) = stream.tensors(group)
    assert torch.equal(got, tensor[:4] if padded else tensor), "the packer refuses a tensor of another size"


# ---- collectives over a real group of one rank over gloo; tests/support/packed_tensors.py has several ranks


@pytest.fixture
def group(monkeypatch):
    monkeypatch.setattr(agree, "alone", lambda: False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.distributed_c10d._world.pg_coalesce_state.clear()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "make, kind, says",
    [
        (Mock(side_effect=LayoutError("layers.9.w: has no mapping")), LayoutError, "layers.9.w: has no mapping"),
        (Mock(side_effect=LayoutError("file \udc80")), LayoutError, "file ?"),
        (lambda: 1 / 0, XferError, "ZeroDivisionError: division by zero"),
        (lambda: [torch.Size([2]), object()], XferError, "TypeError: Encoding objects of type object"),
        (lambda: ["\ud800"], XferError, "UnicodeEncodeError"),
    ],
    ids=["refuses", "refuses in no text", "raises", "cannot be encoded", "is no text"],
)
def test_a_rank_that_fails_says_so_where_the_others_wait_for_it(monkeypatch, group, make, kind, says):
    gather = Mock(side_effect=dist.all_gather)
    monkeypatch.setattr(dist, "all_gather", gather)
    with pytest.raises(kind, match="trainer 0 failed to describe its exports") as e:
        agree.of_all_ranks(make, NUMBERS, CPU)
    assert says in str(e.value) and gather.call_count == 2


def test_over_gloo_ranks_agree_in_memory_of_the_host(group):
    """Wherever their weights are. There is no GPU here, so a tensor on one could not be made."""
    cuda = torch.device("cuda")
    assert agree.largest([3, 1], cuda) == [3, 1]
    assert agree.of_all_ranks(lambda: [1, 2], NUMBERS, cuda) == [[1, 2]]


def test_ranks_whose_plans_differ_all_refuse_unless_they_plan_anew(monkeypatch, group):
    monkeypatch.setattr(agree, "largest", lambda numbers, device: [numbers[0], numbers[1] + 1, numbers[2]])
    assert agree.any_rank(True, b"1234567", CPU)
    with pytest.raises(PlanMismatch, match="different buckets"):
        agree.any_rank(False, b"1234567", CPU)


@pytest.mark.parametrize("base", [False, True], ids=["no vLLM", "vLLM 0.25"])
def test_a_vllm_without_weight_sources_is_refused_by_its_version(monkeypatch, base):
    name = "vllm.distributed.weight_transfer.base"
    for n in range(4):
        part = name.rsplit(".", n)[0]
        monkeypatch.setitem(sys.modules, part, ModuleType(part) if base else None)
    with pytest.raises(Unsupported, match="vLLM 0.26 or later"):
        weight_source(TensorTrainer(torch.nn.Linear(2, 2)))


def reduces() -> None:
    """A training step's collective: torch runs it, and does not add it to a batch."""
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert type(work) is not dist.distributed_c10d._IllegalWork
    work.wait()


@pytest.mark.parametrize("fails", [0, 1, 2])
@pytest.mark.parametrize("verb", ["send", "recv"])
def test_a_round_leaves_collectives_of_its_group_alone_whatever_a_post_raises(monkeypatch, group, verb, fails):
    """The backend that posts in batches, as NCCL's does, is made up. `fails`: at this post; 0: at none."""
    backend, posted, parts = Mock(supports_coalescing=True), [], torch.arange(8, dtype=torch.uint8).split(4)
    begun, ended = backend._start_coalescing, backend._end_coalescing

    def post(verb: str, tensors, peer: int, tag: int) -> None:
        assert begun.called and not ended.called, (
            "messages of a round are begun together, or each would wait for its own peer"
        )
        reduces()
        posted.append((verb, tensors[0].tolist(), peer))
        if len(posted) == fails:
            raise RuntimeError("NCCL error: remote process exited")

    backend.send, backend.recv = (partial(post, v) for v in ("send", "recv"))
    with monkeypatch.context() as patch:
        patch.setattr(dist.ProcessGroup, "_get_backend", lambda self, device: backend)
        with pytest.raises(RuntimeError, match="remote process exited") if fails else contextlib.nullcontext():
            assert _posted(parts, [0, 2], verb == "send") == [ended.return_value]
    wanted = [(verb, part.tolist(), peer) for part, peer in zip(parts, (0, 2))]
    assert posted == wanted[: fails or None] and begun.call_count == ended.call_count == 1
    reduces()
