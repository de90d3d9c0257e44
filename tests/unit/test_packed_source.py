"""What a trainer of the packed route knows of its tasks: whatever is replaced at whatever moment of a gather, and looked at by
the caller's thread then, is what the next gather sends. Other ranks and threads are made up: they come at set moments."""

from __future__ import annotations

import threading

import pytest
import torch

from xfer.errors import RebindError
from xfer.packed import agree
from xfer.packed.plan import TaskSize
from xfer.packed.source import PackedSource
from xfer.packed.tensors import TensorStream
from xfer.trace.fragment import TensorSpec
from xfer.trace.slots import Slots, walk
from xfer.trainers import dtensor
from xfer.trainers.dtensor import TensorTrainer

SPEC = TensorSpec("w", (4,), "float32")
MOMENTS = [
    "before the check",
    "after the check",
    "before the tasks",
    "after the tasks",
    "before plans agree",
    "after plans agree",
]


class Kept:
    """See source.WeightStream: tasks keep the parameter object of `build`, as a framework's do. `at`: what happens at a moment."""

    rank, world, device = 0, 1, torch.device("cpu")

    def __init__(self):
        self.live = self.seen = torch.zeros(4)
        self.at, self.raises = {}, False

    def drain(self) -> None: ...

    def read(self):
        self.seen = self.live
        return (SPEC,)

    def check(self) -> str:
        return "same" if self.seen is self.live else "changed"

    def build(self):
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
@pytest.mark.parametrize("moment", MOMENTS)
def test_what_is_replaced_at_any_moment_of_a_gather_is_what_the_next_one_sends(monkeypatch, moment, fresh, raises):
    stream = Kept()
    source = PackedSource(stream, 1 << 20)
    calls, real = [], agree.any_rank

    def any_rank(*args):
        place = "the check" if not calls else "plans agree"
        calls.append(place)
        stream.happens(f"before {place}")
        out = real(*args)
        stream.happens(f"after {place}")
        return out

    def replaced() -> None:
        """On the caller's thread: the next refit's look."""
        stream.live = torch.ones(4)
        if source.check() == "changed":
            source.read()
        assert source.check() == "same", "the look itself is done"

    source.read()
    if fresh:
        source.begin()
    monkeypatch.setattr(agree, "any_rank", any_rank)
    stream.at[moment], stream.raises = replaced, raises and not fresh
    try:
        source.begin()
    except RuntimeError:
        pass
    came = not stream.at
    if not came:  # a gather that keeps its tasks has none of the later moments
        assert fresh or raises
        stream.at = {}
        replaced()
    plan = source.begin()
    ((_, sent),) = source.tensors(plan.groups[0])
    assert sent is stream.live, f"replaced {moment}"
    built = source.built
    source.begin()
    assert source.built == built, "and is then kept"


def beside(what) -> threading.Thread:
    """Another thread's, which has come as far as it may."""
    thread = threading.Thread(target=what)
    thread.start()
    thread.join(0.3)
    return thread


@pytest.mark.parametrize("at", ["check", "read"])
def test_what_another_rank_releases_is_let_go_of_before_or_after_a_look_and_not_within(monkeypatch, at):
    """Its lanes let go on their own threads, while this rank's caller may be looking already, in the next refit."""
    held = {n: torch.ones(4) for n in "abc"}
    trainer = TensorTrainer(lambda: dict(held))
    stream = TensorStream(trainer)
    source = PackedSource(stream, 1 << 20)
    source.read()
    assert source.check() == "same"
    waiting, real = [], Slots.check if at == "check" else Slots.bind

    def looks(self):
        if not waiting:
            waiting.append(beside(source.forget))
        return real(self)

    monkeypatch.setattr(Slots, "check" if at == "check" else "bind", looks)
    assert source.check() == "same" if at == "check" else source.read()
    waiting[0].join(20)
    assert not waiting[0].is_alive() and not trainer._given and not stream._roots and stream._let_go and source._stale
    assert source.check() == "moved"
    assert len(list(source.tensors(source.begin().groups[0]))) == 3


def test_gathers_over_all_tensors_are_finished_though_they_are_let_go_of_meanwhile(monkeypatch):
    held, seen = {n: torch.ones(4) for n in "abc"}, []
    trainer = TensorTrainer(lambda: dict(held))

    def drain_over(tensors) -> None:
        for t in tensors:
            trainer.let_go()
            seen.append(t)

    monkeypatch.setattr(dtensor, "drain_over", drain_over)
    trainer.finish_gathers()
    assert all(a is b for a, b in zip(seen, held.values(), strict=True))


@pytest.mark.parametrize("ends", ["raises", "is left", "comes to its end"])
def test_what_a_framework_has_kept_of_a_gather_that_did_not_end_is_in_no_other(monkeypatch, ends):
    """As Bridge stacks experts: one that failed with all of them there left them, and the next gather took them for its own."""
    stream = Kept()
    source = PackedSource(stream, 1 << 20)
    source.read()
    plan = source.begin()

    def tensors(group):
        yield SPEC.name, stream.task
        if ends == "raises":
            raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(stream, "tensors", tensors)
    some = source.tensors(plan.groups[0])
    try:
        for _ in some:
            if ends == "is left":
                some.close()
    except torch.OutOfMemoryError:
        pass
    source.begin()
    assert source.built == (1 if ends == "comes to its end" else 2)


def test_a_look_that_ends_as_megatrons_groups_are_gone_has_not_noted_a_move(monkeypatch):
    """Whoever puts messages together from storages binds to new ones when it is told of a move, which is told once."""
    from xfer.trainers import bridge_stream as megatron

    net, group, there = torch.nn.Linear(2, 2), object(), [True]

    def groups():
        if not there[0]:
            raise RebindError("Megatron's process groups are not there")
        return [group]

    monkeypatch.setattr(megatron, "process_groups", groups)
    stream = object.__new__(megatron.BridgeStream)
    stream._slots, stream._scales, stream._groups = Slots([net], walk([net])), megatron.Scales(), groups()
    stream._slots.bind()
    assert stream.check() == "same"
    net.weight.data, there[0] = net.weight.detach().clone(), False
    with pytest.raises(RebindError):
        stream.check()
    there[0] = True
    assert [stream.check(), stream.check()] == ["moved", "same"]
