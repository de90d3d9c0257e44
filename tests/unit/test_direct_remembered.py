"""What a trainer rank keeps of a refit, under a real layer-wise optimizer that marks its writes: whatever happens to the weights between
refits, those who pull what is marked have the trainer's bytes. Megatron's distributed optimizer: tests/support/megatron_worker.py.

Here is also a stand-in for those who pull. Real ones: tests/functional/test_session_changes.py.
"""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.examples import EXAMPLES
from tests.support.layerwise_half import Half
from tests.support.pulled_marks import Pair, reading
from xfer.kernels.bits import WORD
from xfer.kernels.marks import ByteRange
from xfer.layerwise import LayerWiseOptimizer, ParamGroup
from xfer.trainers.dtensor import TensorTrainer
from xfer.trainers.layerwise import LayerWiseTrainer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Net(nn.Module):
    """Weights in bf16, one in fp32, one that is frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = ((40, 48), (700,), (3, 7), (64, 32), (16,), (90, 20))
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(s).bfloat16()) for s in sizes)
        self.norm = nn.Parameter(torch.randn(300))
        self.frozen = nn.Parameter(torch.randn(80).bfloat16(), requires_grad=False)
        self.register_buffer("bias", torch.randn(60))


class Trainer:
    """Rank 0, alone or of two.

    Args:
        sources: As of LayerWiseTrainer, for rank 0 of two. "": it is alone.
    """

    def __init__(self, sources: str):
        self.net, self.random = Net(), torch.Generator().manual_seed(1)
        self.alone = not sources
        self.optimizer = (LayerWiseOptimizer if self.alone else Half)(self.net, self.groups())
        base = TensorTrainer(self.net, rank=0, world=1 if self.alone else 2)
        self.source = LayerWiseTrainer(base, self.optimizer, sources or "all")
        self.source.drain()
        self.names = [r.name for r in self.source.read().roots]

    def groups(self) -> list[ParamGroup]:
        return [ParamGroup([p for p in self.net.parameters() if p.requires_grad], torch.optim.SGD, {"lr": 1.0})]

    def roots(self) -> list[torch.Tensor]:
        self.source.drain()
        if self.source.check() == "changed":
            self.names = [r.name for r in self.source.read().roots]
        tensors = self.source.rebind()
        return [tensors[n] for n in self.names]

    def rand(self, like: torch.Tensor) -> torch.Tensor:
        return torch.rand(like.shape, generator=self.random)

    # ---- what happens

    def step(self, n: int) -> None:
        """A step that changes few elements, some only in their masters."""
        self.optimizer.drain()
        if not self.alone:
            self.optimizer.wire.value = float(n)
        for p in (p for p in self.net.parameters() if p.requires_grad):
            p.grad = ((self.rand(p) < [0.0, 0.01, 0.2][n % 3]) * self.rand(p)).to(p.dtype)
        self.optimizer.step()

    def chosen(self, n: int) -> torch.Tensor:
        """Any parameter or buffer."""
        some = [*self.net.parameters(), *self.net.buffers()]
        return some[n % len(some)].data

    def data(self, n: int) -> None:
        """Code that no version counter shows."""
        self.optimizer.drain()
        self.chosen(n).view(-1)[n % 3 :: 11] += 0.25

    def raw(self, n: int) -> None:
        self.optimizer.drain()
        t = self.chosen(n)
        t.view(-1).view(torch.uint8).numpy()[n % t.nbytes] ^= 1 << n % 8

    def load(self, n: int) -> None:
        state = {k: v + (self.rand(v) < 0.01) for k, v in self.net.state_dict().items()}
        self.net.load_state_dict(state)

    def average(self, n: int) -> None:
        """Parameters and masters, and nobody is told."""
        self.optimizer.drain()
        for o in self.optimizer.owned:
            o.target.data.mul_(1 + 2.0 ** -(n % 9))
            o.param.data.copy_(o.target)

    def synchronize(self, n: int) -> None:
        self.data(n)
        self.optimizer.synchronize()

    def move(self, n: int) -> None:
        if self.alone:  # ranks of several refuse it
            for p in (*self.net.layers, self.net.norm):
                p.data = p.data.clone()

    def close(self, n: int) -> None:
        """Another optimizer follows."""
        if self.alone:
            self.optimizer.close()
            self.optimizer = self.source.optimizer = LayerWiseOptimizer(self.net, self.groups(), masters=n % 2 == 0)


DOES = st.tuples(
    st.sampled_from("step step step step data raw load average synchronize move close".split()), st.integers(0, 1000)
)
PLAN = st.tuples(st.just("plan"), st.integers(1, 1000))
REFIT = st.tuples(st.just("refit"), st.sampled_from(["", "", "", "one fails", "all fail", "sent, too", "interrupted"]))


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.sampled_from(["", "owners", "all"]), st.lists(st.one_of(DOES, DOES, REFIT, PLAN), max_size=25))
def test_whatever_writes_the_weights_those_who_pull_what_is_marked_have_the_trainers_bytes(sources, events):
    trainer, pair = Trainer(sources), Pair()
    for what, how in [("refit", ""), *events, ("refit", ""), ("step", 1), ("refit", "")]:
        if what == "refit":
            pair.refit(trainer.roots(), how)
        else:
            getattr(pair if what == "plan" else trainer, what)(how)


@pytest.mark.parametrize("sources", ["owners", "all"])
def test_what_an_owner_steps_has_no_copies_and_moves_where_it_changes(sources):
    trainer, pair = Trainer(sources), Pair()
    whole, kept = sum(r.numel() for r in trainer.roots()), lambda: sum(t.numel() for t in pair.last._copies)
    owned = sum(p.nbytes for p in trainer.optimizer.writes())
    assert owned > whole / 3
    for _ in range(2):  # what rank 1 owns changes once
        trainer.step(1)
        moved = pair.refit(trainer.roots(), "")
        words = 2 * WORD * len(list(trainer.optimizer.writes()))
        assert kept() <= whole - owned + words, (whole, owned, kept(), words)
        assert pair.last.nbytes <= kept() + whole / 8, "marks of so little are much"
    assert 0 < moved < whole / 3
    assert pair.refit(trainer.roots(), "") == 0, "marks are of the last refit"
    pair.refit(trainer.roots(), "sent, too")
    assert kept() == whole and pair.last.whole(pair.number, "0"), "messages are compared with copies"
    pair.refit(trainer.roots(), "")
    assert kept() < whole and pair.last.whole(pair.number, "0") is None


def test_there_are_copies_of_what_plans_read_and_marks_for_these_plans_only():
    roots, pair = [torch.zeros(n * WORD, dtype=torch.uint8) for n in (100, 7)], Pair()
    spans = [ByteRange(0, 0, 9 * WORD), ByteRange(0, 9 * WORD, 20 * WORD), ByteRange(0, 70 * WORD + 1, 71 * WORD + 1)]
    keep = partial(pair.last.keep, roots=roots, pulled=True, sends=True)
    assert keep(1, plans={"a": reading(spans), "b": reading(spans[:1])})
    copies, parts = pair.last.whole(1, "a")
    assert parts == (ByteRange(0, 0, 20 * WORD), ByteRange(0, 70 * WORD, 72 * WORD))
    assert [c.numel() for c in copies] == [20 * WORD, 2 * WORD] and pair.last.whole(2, "a") is None
    assert pair.last.marks_for("b") is not None and pair.last.marks_for("c") is None and pair.last.whole(1, "c") is None
    assert not keep(2, plans={"b": reading(spans[:1])}), "a replica that leaves changes nothing"
    assert keep(3, plans={"c": reading([ByteRange(1, 0, 5)])}), "workers map other marks"
    assert pair.last.whole(3, "c")[1] == (ByteRange(1, 0, WORD),) and pair.last.marks_for("a") is None


@pytest.mark.parametrize("call", ["empty_like", "_foreach_copy_"])
def test_what_is_kept_of_a_refit_counts_only_when_all_of_it_is_there(monkeypatch, call):
    """The caller is interrupted, or memory is short, in a refit that nobody commits. A later one brings what has changed since the last."""
    trainer, pair, real = Trainer(""), Pair(), getattr(torch, call)

    def broken(*tensors):
        real(*tensors)
        raise KeyboardInterrupt

    pair.refit(trainer.roots(), "")
    trainer.data(0)
    trainer.step(2)
    if call == "empty_like":
        pair.last.forget()
    pair.last.compare(trainer.roots())
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, call, broken)
        roots = trainer.roots()
        pair.last.keep(2, roots, pair.plans(roots), pulled=True, sends=False)
    for _ in range(2):
        pair.refit(trainer.roots(), "")
