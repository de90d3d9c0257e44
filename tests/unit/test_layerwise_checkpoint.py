"""Checkpoints by parameter: contents, refusals, saves that broke off, and errors of one rank that all ranks raise. Other layouts and
several processes: tests/functional/test_layerwise_torch.py and test_layerwise_megatron.py."""

from __future__ import annotations

import time
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import HashStore
from torch.distributed import checkpoint as dcp
from torch.optim import ASGD, Adam, NAdam

from tests.support import layerwise_model as lm
from tests.support.layerwise_half import Half, layers
from tests.support.layerwise_model import step
from tests.support.threads import run_ranks
from xfer.errors import LayoutError, PeerLost, StaleWeights, Unsupported, XferError
from xfer.layerwise import LayerWiseOptimizer, ParamGroup, checkpoint
from xfer.layerwise.together import Together
from xfer.trainers.dtensor import TensorTrainer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def made(net: nn.Module, **adam) -> LayerWiseOptimizer:
    trained = [p for p in net.parameters() if p.requires_grad]
    return LayerWiseOptimizer(net, [ParamGroup(trained, Adam, {"lr": 0.01, **adam})] if adam else lm.groups(net))


@pytest.fixture
def saved(tmp_path):
    """A small model and its optimizer, saved after a step."""
    net = lm.Transformer(layers=1)
    o = made(net)
    step(net, o, 0)
    checkpoint.save(o, tmp_path)
    return net, o


# ---- what is in them


@pytest.mark.parametrize(
    "model, adam",
    [(lm.Transformer, {}), (lm.MixedTransformer, {}), (lm.Transformer, {"fused": True}), (lm.Transformer, {"amsgrad": True})],
)  # fmt: skip
def test_a_checkpoint_goes_on_bit_for_bit(model, adam, tmp_path):
    net, other = model(), model(seed=11)
    o, o2 = made(net, **adam), made(other, **adam)
    for i in range(3):
        step(net, o, i)
    o.param_groups[0]["lr"] = 0.003
    checkpoint.save(o, tmp_path)
    step(other, o2, 77)
    checkpoint.load(o2, tmp_path)
    assert [step(other, o2, i) for i in range(3, 6)] == [step(net, o, i) for i in range(3, 6)]
    assert lm.digest(other) == lm.digest(net)


PLACED = [(kind, how) for kind in (Adam, NAdam, ASGD) for how in ({}, {"capturable": True})]
PLACED += [(Adam, {"fused": True}), (Adam, {"fused": True, "amsgrad": True})]


@pytest.mark.parametrize("kind, how", PLACED, ids=[f"{kind.__name__} {how}" for kind, how in PLACED])
def test_numbers_lie_where_torch_would_load_them(kind, how):
    """On a device that is not the CPU (here: one without bytes) a fused or capturable kernel wants `step` there."""
    p, *targets = (nn.Parameter(torch.ones(3, device=at)) for at in ("cpu", "meta", "meta"))
    here, ours, theirs = (
        (kind([p], amsgrad="amsgrad" in how) if kind is Adam else kind([p])),
        *(kind([t], **how) for t in targets),
    )
    p.grad = torch.ones(3)
    here.step()
    state = here.state[p]
    theirs.load_state_dict({**here.state_dict(), "param_groups": theirs.state_dict()["param_groups"]})
    want, got = theirs.state[targets[1]], checkpoint.placed(ours, targets[0], state)
    numbers = {k for k, v in state.items() if v.dim() == 0}
    assert "step" in numbers and numbers <= got.keys() == state.keys()
    assert {k: (got[k].device, got[k].dtype) for k in numbers} == {k: (want[k].device, want[k].dtype) for k in numbers}
    assert (got["step"].device.type == "meta") == any(how.get(k) for k in ("fused", "capturable"))
    assert all(got[k] is state[k] for k in state.keys() - numbers)


class Counting(nn.Module):
    """A frozen parameter and buffers beside what is trained: one over a parameter, one that is not persistent."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("bias", torch.zeros(4, dtype=torch.bfloat16))
        self.register_buffer("seen", self.net[0].weight.detach()[:2])
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.net(x) + self.bias


@pytest.mark.parametrize("source", [lambda net: None, TensorTrainer], ids=["own names", "an adapter"])
def test_a_checkpoint_has_all_that_the_modules_state_has(tmp_path, source):
    nets = [Counting(), Counting()]
    for n in nets if source is TensorTrainer else ():
        del n.seen  # it would name these bytes a second time
    both = [LayerWiseOptimizer(n, [ParamGroup(n.net.parameters(), Adam)]) for n in nets]
    nets[0](torch.randn(8, 4)).sum().backward()
    both[0].step()
    for t in (nets[0].frozen, nets[0].bias, nets[0].scratch):
        t.data.fill_(5.0)
    checkpoint.save(both[0], tmp_path, source(nets[0]))
    checkpoint.load(both[1], tmp_path, source(nets[1]))
    want, got = (n.state_dict() for n in nets)
    assert want.keys() == got.keys() and all(torch.equal(want[k], got[k]) for k in want)
    assert want["net.1.num_batches_tracked"] == 1 and not nets[1].scratch.any()


@pytest.mark.parametrize("masters", [False, True])
def test_state_has_the_dtype_of_what_is_stepped_here_and_not_where_it_was_saved(masters, tmp_path):
    nets = [lm.Transformer(dtype=torch.bfloat16), lm.Transformer(dtype=torch.bfloat16, seed=11)]
    a, b = (LayerWiseOptimizer(n, lm.groups(n), masters=m) for n, m in zip(nets, (masters, not masters)))
    step(nets[0], a, 0)
    checkpoint.save(a, tmp_path)
    checkpoint.load(b, tmp_path)
    assert lm.digest(nets[0]) == lm.digest(nets[1])
    states = [(o.target, v) for o in b.owned for v in b.inner[o.group].state[o.target].values() if v.dim()]
    assert {(t.dtype, v.dtype) for t, v in states} == {(torch.bfloat16,) * 2 if masters else (torch.float32,) * 2}
    assert torch.isfinite(torch.tensor([step(nets[1], b, i) for i in range(2)])).all()


# ---- hyperparameters


def tuned(lr, **more) -> LayerWiseOptimizer:
    net = layers(1)
    o = LayerWiseOptimizer(net, [ParamGroup(net.parameters(), Adam, {"lr": torch.tensor(1.0), "foreach": False})])
    o.param_groups[0].update(lr=lr, **more)
    return o


def test_hyperparameters_are_loaded_into_the_tensors_that_are_there(tmp_path, caplog):
    """Captured graphs read learning rates in tensors. What was a number may be a tensor here, and the other way round. A function is not
    saved, and stays."""
    t = torch.tensor
    was = dict(up=0.25, down=t(0.25), warm=(t(0.0), 3), floor=t([1.0]), scale=np.float32(0.1), on=t(True), of=len)
    now = dict(up=t(1.0), down=1.0, warm=(t(0.5), 4), floor=t([2.0]), scale=np.float32(1.1), on=t(False), of=max)
    # A scheduler takes the present rate for the one that training began with, which it keeps here, if that is not there.
    checkpoint.save(tuned(t(5e-5), initial_lr=0.02, **was), tmp_path)
    assert "of is a builtin_function_or_method, which is not saved" in caplog.text
    lr = t(1e-3)
    o = tuned(lr, **now)
    checkpoint.load(o, tmp_path)
    (group,) = o.param_groups
    assert group["lr"] is lr and lr == t(5e-5) and group["initial_lr"] == 0.02
    assert group["up"] is now["up"] and group["up"] == 0.25 == group["down"] and type(group["down"]) is float
    assert group["warm"][0] is now["warm"][0] and group["warm"] == (t(0.0), 3)
    assert group["floor"].tolist() == [1.0] and group["scale"] == np.float32(0.1) and bool(group["on"])
    assert group["of"] is max


def test_hyperparameters_and_state_that_cannot_be_saved_are_named(tmp_path):
    o = tuned(1.0, rates=torch.ones(3), pair=(torch.ones(2), 1))
    o.inner[0].state[o.owned[0].target]["rows"] = torch.zeros(4)  # a number per row, as some optimizers keep
    with pytest.raises(Unsupported, match="cannot be saved") as e:
        checkpoint.save(o, tmp_path)
    assert [v.split(" has ")[0] for v in e.value.violations[1:]] == ["group 0: rates", "group 0: pair"]
    assert "0.weight: rows is (4,)" in e.value.violations[0] and not list(tmp_path.iterdir())


# ---- what is refused


def test_without_an_adapter_all_ranks_must_hold_the_same_parameters(tmp_path):
    """Ranks would write their own parts under one name, and torch keeps one of them without a word."""
    o = Half(layers())
    for refused, kind in ((checkpoint.save, Unsupported), (checkpoint.load, LayoutError)):
        with pytest.raises(kind) as e:
            refused(o, tmp_path / "apart")
        assert sum("Pass `source`" in v for v in e.value.violations) == 4
    assert not (tmp_path / "apart").exists()


REFUSED = [  # the model that loads, the order of its groups, and what the checkpoint's file says
    ({"layers": 2}, 1, None, "blocks.1.up.weight: the checkpoint has no param"),
    ({"width": 44}, 1, None, "in the checkpoint"),
    ({}, -1, None, "embed.weight: in parameter group 0 here, saved in group 1"),
    *(({}, 1, text, "loaded") for text in ("[]", "null", '{"format": 0}', '{"format": 1, "tensors": 5}', "half a fil")),
]


@pytest.mark.parametrize("model, order, text, said", REFUSED)
def test_a_load_that_is_refused_says_why_and_changes_nothing(saved, tmp_path, model, order, text, said):
    """In another order of the same groups Muon would go on with Adam's learning rate and decay, and Adam with Muon's."""
    if text is not None:
        (tmp_path / "layerwise.json").write_text(text)
    net = lm.Transformer(**{"layers": 1, "seed": 11, **model})
    o = LayerWiseOptimizer(net, lm.groups(net)[::order])
    rates, before = [g["lr"] for g in o.param_groups], lm.digest(net)
    with pytest.raises(LayoutError) as e:
        checkpoint.load(o, tmp_path)
    assert any(said in line for line in (e.value.message, *e.value.violations)) and e.value.violations
    names = {n for n, p in net.named_parameters() if p.requires_grad}
    assert order == 1 or {v.split(":")[0] for v in e.value.violations} == names
    assert [g["lr"] for g in o.param_groups] == rates and lm.digest(net) == before


@pytest.mark.parametrize("part", ["write_data", "finish"])
def test_a_save_that_broke_off_over_another_is_no_checkpoint(saved, tmp_path, monkeypatch, part):
    class Killed(BaseException):
        pass

    net, o = saved
    with monkeypatch.context() as m, pytest.raises(XferError, match="could not be written") as e:
        m.setattr(dcp.FileSystemWriter, part, Mock(side_effect=Killed))
        checkpoint.save(o, tmp_path)
    assert "Killed" in e.value.violations[0]
    before = lm.digest(net)
    with pytest.raises(LayoutError) as e:
        checkpoint.load(o, tmp_path)
    assert "not saved to its end" in e.value.violations[0] and lm.digest(net) == before
    checkpoint.save(o, tmp_path)
    checkpoint.load(o, tmp_path)


def test_folders_that_cannot_be_written_or_read_are_typed_errors(tmp_path):
    o = made(lm.Transformer(layers=1))
    (tmp_path / "a file").write_text("")
    with pytest.raises(XferError, match="cannot be written"):
        checkpoint.save(o, tmp_path / "a file")
    for folder in (tmp_path / "a file", tmp_path / "nothing"):
        with pytest.raises(LayoutError, match="cannot be loaded"):
            checkpoint.load(o, folder)


# ---- calls that all ranks make together; ranks are threads here


def on_ranks(store, size: int, call) -> list:
    """The result of `call`, or what it raises, on each rank."""

    def rank(r: int):
        ranks = Together("save", f"rank {r}", 20.0, store, r, size)
        with ranks.telling():
            return call(r, ranks)

    return run_ranks(size, rank)


RAISED = [StaleWeights("broke off", ["b 3", "b 4"]), ValueError("two\nlines"), OSError("\udc80"), KeyboardInterrupt()]


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("error", RAISED, ids=repr)
def test_all_ranks_raise_at_once_what_one_raises_and_their_next_call_is_whole(at, error):
    def call(r: int, ranks: Together, fails: bool = True) -> str:
        for i in range(3):
            if fails and (r, i) == (2, at):
                raise error
            ranks.meet()
        return "done"

    store, began = HashStore(), time.monotonic()
    seen = on_ranks(store, 4, call)
    assert time.monotonic() - began < 10 and seen[2] is error
    kind = type(error) if isinstance(error, XferError) else XferError
    lines = error.violations if kind is StaleWeights else [f"{type(error).__name__}: {error}"]
    why = [f"rank 2: {line}".replace("\n", " ").replace("\udc80", "?").strip() for line in lines]
    for r in (0, 1, 3):
        assert type(seen[r]) is kind and seen[r].where == f"rank {r}", seen[r]
        assert [v.strip() for v in seen[r].violations] == why
    assert on_ranks(store, 4, lambda r, ranks: call(r, ranks, False)) == ["done"] * 4


def test_a_rank_refuses_in_its_own_words_and_the_others_in_those_of_one_of_them():
    def call(r: int, ranks: Together) -> None:
        ranks.refuse([f"parameter {r}"] if r % 2 else [], "cannot be saved", Unsupported)

    seen = on_ranks(HashStore(), 4, call)
    assert all(type(e) is Unsupported for e in seen)
    assert [seen[1].violations, seen[3].violations] == [("parameter 1",), ("parameter 3",)]
    assert {*seen[0].violations, *seen[2].violations} <= {"rank 1: parameter 1", "rank 3: parameter 3"}


def test_a_store_that_is_gone_is_a_typed_error():
    class Gone:
        def __getattr__(self, name: str):
            raise RuntimeError("Connection reset by peer")

    ranks = Together("save", "", 1.0, HashStore(), 0, 2)
    ranks._store = Gone()
    with pytest.raises(PeerLost, match="store in which ranks meet is gone"), ranks.telling():
        ranks.meet()
