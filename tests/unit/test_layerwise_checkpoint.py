"""Checkpoints by parameter of one process: what is in them, what is refused, and what is left of a save that broke off.

Other layouts and several ranks: tests/functional/test_layerwise_torch.py and test_layerwise_megatron.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from tests.support import layerwise_model as lm
from tests.support.layerwise_half import Half, layers
from tests.support.layerwise_model import step
from xfer.errors import LayoutError, StaleWeights, Unsupported, XferError
from xfer.layerwise import LayerWiseOptimizer, ParamGroup, checkpoint
from xfer.trainers.dtensor import TensorTrainer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def made(net: nn.Module) -> LayerWiseOptimizer:
    return LayerWiseOptimizer(net, lm.groups(net))


@pytest.mark.parametrize("model", [lm.Transformer, lm.MixedTransformer])
def test_a_checkpoint_goes_on_bit_for_bit(model, tmp_path):
    net = model()
    o = made(net)
    for i in range(3):
        step(net, o, i)
    o.param_groups[0]["lr"] = 0.003
    checkpoint.save(o, tmp_path)
    went_on = [step(net, o, i) for i in range(3, 6)]
    other = model(seed=11)
    o2 = made(other)
    step(other, o2, 77)
    checkpoint.load(o2, tmp_path)
    assert [step(other, o2, i) for i in range(3, 6)] == went_on
    assert lm.digest(other) == lm.digest(net)


ADAM, OTHERS = torch.optim.Adam, (torch.optim.NAdam, torch.optim.ASGD)
PLACED = [
    *((ADAM, how) for how in ({}, {"fused": True}, {"capturable": True}, {"fused": True, "amsgrad": True})),
    *((kind, how) for kind in OTHERS for how in ({}, {"capturable": True})),
]


@pytest.mark.parametrize("kind, how", PLACED, ids=[f"{kind.__name__} {how}" for kind, how in PLACED])
def test_numbers_lie_where_torch_would_load_them(kind, how):
    """On a device that is not the CPU (here: one without bytes) a fused or capturable kernel wants `step` there."""
    here = kind([nn.Parameter(torch.ones(3))], **{k: v for k, v in how.items() if k == "amsgrad"})
    here.param_groups[0]["params"][0].grad = torch.ones(3)
    here.step()
    state = here.state[here.param_groups[0]["params"][0]]
    targets = [nn.Parameter(torch.empty(3, device="meta")) for _ in range(2)]
    ours, theirs = (kind([t], **how) for t in targets)
    theirs.load_state_dict({**here.state_dict(), "param_groups": theirs.state_dict()["param_groups"]})
    want, got = theirs.state[targets[1]], checkpoint.placed(ours, targets[0], state)
    numbers = {k for k, v in state.items() if v.dim() == 0}
    assert "step" in numbers and numbers <= got.keys() == state.keys()
    assert {k: (got[k].device, got[k].dtype) for k in numbers} == {k: (want[k].device, want[k].dtype) for k in numbers}
    assert (got["step"].device.type == "meta") == any(how.get(k) for k in ("fused", "capturable"))
    assert all(got[k] is state[k] for k in state.keys() - numbers)


@pytest.mark.parametrize("how", [{"fused": True}, {"amsgrad": True}], ids=str)
def test_a_fused_optimizer_goes_on_bit_for_bit(how, tmp_path):
    nets, seen = [lm.Transformer(layers=1), lm.Transformer(layers=1, seed=11)], []
    for i, net in enumerate(nets):
        trained = [p for p in net.parameters() if p.requires_grad]
        o = LayerWiseOptimizer(net, [ParamGroup(trained, torch.optim.Adam, {"lr": 0.01, **how})])
        step(net, o, 0)
        if i == 0:
            checkpoint.save(o, tmp_path)
        else:
            checkpoint.load(o, tmp_path)
        seen.append([step(net, o, i) for i in range(1, 4)])
    assert seen[0] == seen[1] and lm.digest(nets[0]) == lm.digest(nets[1])


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
    both = [LayerWiseOptimizer(n, [ParamGroup(n.net.parameters(), torch.optim.Adam)]) for n in nets]
    nets[0](torch.randn(8, 4)).sum().backward()
    both[0].step()
    for t in (nets[0].frozen, nets[0].bias, nets[0].scratch):
        t.data.fill_(5.0)
    checkpoint.save(both[0], tmp_path, source(nets[0]))
    checkpoint.load(both[1], tmp_path, source(nets[1]))
    want, got = (n.state_dict() for n in nets)
    assert want.keys() == got.keys() and all(torch.equal(want[k], got[k]) for k in want)
    assert want["net.1.num_batches_tracked"] == 1 and not nets[1].scratch.any()


def test_a_checkpoint_without_an_adapter_is_of_a_model_that_all_ranks_hold(tmp_path):
    """Else ranks would write their own parts under one name, and torch keeps one of them without a word."""
    o = Half(layers())
    for refused, kind in ((checkpoint.save, Unsupported), (checkpoint.load, LayoutError)):
        with pytest.raises(kind) as e:
            refused(o, tmp_path / "apart")
        assert sum("Pass `source`" in v for v in e.value.violations) == 4
    assert not (tmp_path / "apart").exists()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("text", ["[]", "null", '{"format": 0}', "half a fil"])
def test_a_folder_whose_words_are_not_ours_is_a_typed_error(tmp_path, text):
    net = lm.Transformer(layers=1)
    o = made(net)
    step(net, o, 0)
    checkpoint.save(o, tmp_path)
    (tmp_path / "layerwise.json").write_text(text)
    with pytest.raises(LayoutError, match="loaded") as e:
        checkpoint.load(o, tmp_path)
    assert e.value.violations


@pytest.mark.parametrize("part", ["write_data", "finish"])
def test_a_save_that_broke_off_over_another_is_no_checkpoint(tmp_path, monkeypatch, part):
    def killed(*args, **kwargs):
        raise Killed

    net = lm.Transformer(layers=1)
    o = made(net)
    step(net, o, 0)
    checkpoint.save(o, tmp_path)
    with monkeypatch.context() as m:
        m.setattr(dcp.FileSystemWriter, part, killed)
        with pytest.raises(XferError, match="could not be written") as e:
            checkpoint.save(o, tmp_path)
    assert "Killed" in e.value.violations[0]
    before = lm.digest(net)
    with pytest.raises(LayoutError) as e:
        checkpoint.load(o, tmp_path)
    assert "not saved to its end" in e.value.violations[0] and lm.digest(net) == before
    checkpoint.save(o, tmp_path)
    checkpoint.load(o, tmp_path)


def test_folders_that_cannot_be_written_or_read_are_told_to_all_ranks(tmp_path):
    o = made(lm.Transformer(layers=1))
    (tmp_path / "a file").write_text("")
    with pytest.raises(XferError, match="cannot be written"):
        checkpoint.save(o, tmp_path / "a file")
    for folder in (tmp_path / "a file", tmp_path / "nothing"):
        with pytest.raises(LayoutError, match="cannot be loaded"):
            checkpoint.load(o, folder)


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path):
    net = lm.Transformer(layers=1)
    o = made(net)
    step(net, o, 0)
    checkpoint.save(o, tmp_path)
    with pytest.raises(LayoutError) as e:
        checkpoint.load(made(lm.Transformer(layers=2)), tmp_path)
    assert any(v.startswith("blocks.1.up.weight: the checkpoint has no param") for v in e.value.violations)
    with pytest.raises(LayoutError) as e:
        checkpoint.load(made(lm.Transformer(layers=1, width=44)), tmp_path)
    assert any("in the checkpoint" in v for v in e.value.violations)


class Rows(torch.optim.SGD):
    """Keeps one number per row."""

    def step(self):
        for g in self.param_groups:
            for p in g["params"]:
                self.state[p]["rows"] = torch.zeros(p.shape[0])


def test_state_that_is_no_tensor_of_the_parameters_shape_is_refused(tmp_path):
    net = nn.Linear(4, 3, bias=False)
    o = LayerWiseOptimizer(net, [ParamGroup(net.parameters(), Rows, {"lr": 0.1})])
    net(torch.ones(2, 4)).sum().backward()
    o.step()
    with pytest.raises(Unsupported, match="cannot be saved") as e:
        checkpoint.save(o, tmp_path)
    assert "weight: rows is (3,)" in e.value.violations[0]


def tuned(net: nn.Module, lr: float, **more) -> LayerWiseOptimizer:
    options = {"lr": torch.tensor(lr), "foreach": False}
    o = LayerWiseOptimizer(net, [ParamGroup(net.parameters(), torch.optim.Adam, options)])
    o.param_groups[0].update(more)
    return o


def test_hyperparameters_that_are_tensors_go_on_bit_for_bit_in_the_tensors_that_are_there(tmp_path):
    nets, seen = [layers(2), layers(2)], []
    for i, net in enumerate(nets):
        at = torch.tensor(0.5 * i)
        o = tuned(
            net,
            1e-3,
            warm=(at, 3 + i),
            floor=torch.tensor([1.0 + i]),
            scale=np.float32(0.1 + i),
            on=torch.tensor(i == 0),
        )
        (group,), lr = o.param_groups, o.param_groups[0]["lr"]
        net(torch.ones(2, 4)).sum().backward()
        o.step()
        if i == 0:
            lr.fill_(5e-5)  # as a schedule does
            checkpoint.save(o, tmp_path)
        else:
            checkpoint.load(o, tmp_path)
            assert group["lr"] is lr and group["warm"][0] is at, "whoever holds the tensors has what was loaded"
            assert group["lr"] == torch.tensor(5e-5) and group["warm"] == (torch.tensor(0.0), 3)
            assert group["floor"].tolist() == [1.0] and group["scale"] == np.float32(0.1) and bool(group["on"])
        o.zero_grad()
        net(torch.ones(2, 4)).square().sum().backward()
        o.step()
        seen.append(lm.digest(net))
    assert seen[0] == seen[1]


def test_a_number_may_be_loaded_into_a_tensor_and_the_other_way(tmp_path):
    for lr in (torch.tensor(0.25), 0.25):
        o = tuned(layers(1), 1.0)
        o.param_groups[0]["lr"] = lr
        checkpoint.save(o, tmp_path)
        for now in (torch.tensor(1.0), 1.0):
            other = tuned(layers(1), 1.0)
            other.param_groups[0]["lr"] = now
            checkpoint.load(other, tmp_path)
            got = other.param_groups[0]["lr"]
            assert got == 0.25 and type(got) is type(now)


def test_hyperparameters_that_cannot_be_saved_are_said(tmp_path, caplog):
    o = tuned(layers(1), 1.0, rates=torch.ones(3), pair=(torch.ones(2), 1))
    with pytest.raises(Unsupported, match="cannot be saved") as e:
        checkpoint.save(o, tmp_path)
    assert [v.split(" has ")[0] for v in e.value.violations] == ["group 0: rates", "group 0: pair"]
    assert not list(tmp_path.iterdir())
    schedule = lambda step: 1.0  # noqa: E731
    o = tuned(layers(1), 1.0, schedule=schedule)
    checkpoint.save(o, tmp_path)
    assert "schedule is a function, which is not saved" in caplog.text
    checkpoint.load(o, tmp_path)
    assert o.param_groups[0]["schedule"] is schedule


def test_a_scheduler_that_is_made_after_loading_goes_on_from_the_rate_that_training_began_with(tmp_path):
    """It keeps that in the groups, as torch's own state has them. Made anew it would take the present one for it."""
    halving = lambda step: 0.5**step  # noqa: E731
    nets, rates = [lm.Transformer(), lm.Transformer()], []
    o = made(nets[0])
    schedule = torch.optim.lr_scheduler.LambdaLR(o, halving)
    for i in range(2):
        step(nets[0], o, i)
        schedule.step()
    checkpoint.save(o, tmp_path)
    o2 = made(nets[1])
    checkpoint.load(o2, tmp_path)
    for net, opt, s in ((nets[0], o, schedule), (nets[1], o2, torch.optim.lr_scheduler.LambdaLR(o2, halving, 1))):
        step(net, opt, 2)
        s.step()
        rates.append([g["lr"] for g in opt.param_groups])
    assert rates[0] == rates[1] == [0.02 / 8, 0.005 / 8] and lm.digest(nets[0]) == lm.digest(nets[1])


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


class Breaks(torch.optim.SGD):
    def step(self):
        super().step()
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_of_a_step_that_broke_off_nothing_is_saved(tmp_path):
    net = layers()
    o = LayerWiseOptimizer(net, [ParamGroup(net.parameters(), Breaks, {"lr": 0.1})])
    net(torch.ones(2, 4)).sum().backward()
    with pytest.raises(torch.OutOfMemoryError):
        o.step()
    for use in (checkpoint.save, checkpoint.load):
        with pytest.raises(StaleWeights, match="broke off"):
            use(o, tmp_path)
    assert not list(tmp_path.iterdir())
