"""Storages and exports change between refits: a refit that commits moves the bytes that trainers hold at its call. Checksums alone do not
show a refit of old storages, since both ends sum them. Also trainers that differ, and training whose result no engine receives."""

import gc
import logging
import re
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.simulation import simulated
from tests.support.world import SHAPES, ToyEngine, ToyLayout, ToySource, ToyTaker, World, good, raised, right
from xfer.background import BackgroundCall
from xfer.direct import holders
from xfer.errors import CoverageError, DeadlineExceeded, LayoutError, Unsupported, VerificationError, XferError
from xfer.kernels.written import Written
from xfer.layerwise import LayerWiseOptimizer, ParamGroup
from xfer.participants.lane import Lane
from xfer.participants.refit import RefitCall
from xfer.trace.fragment import TensorSpec
from xfer.trainers.dtensor import TensorTrainer
from xfer.trainers.layerwise import LayerWiseTrainer

pytestmark = pytest.mark.usefixtures(simulated.__name__)
ROOT = Path(__file__).resolve().parents[2]


def unreadable(_):
    raise LayoutError("this engine cannot take it", ["by the test"])


class Widening(ToySource):
    """Exports `embed` as float32 while `wide`: another catalog."""

    wide = False

    def read(self):
        layout = super().read()
        if not self.wide:
            return layout
        specs = tuple(TensorSpec(s.name, s.shape, "float32") if s.name == "embed" else s for s in layout.traced.specs)
        wider = lambda f: replace(f, strides=tuple(2 * s for s in f.strides), dtype="float32")  # noqa: E731
        fragments = tuple(wider(f) if f.tensor == "embed" else f for f in layout.traced.fragments)
        return ToyLayout(replace(layout.traced, specs=specs, fragments=fragments), layout.roots, layout.tensors)


def test_exports_that_change_are_planned_anew_and_refused_every_time_until_they_fit():
    with World(sources=[Widening(i, 2) for i in range(2)]) as w:
        w.commits(1)
        for wide, kind in (((0,), LayoutError), ((0, 1), CoverageError)):  # trainers disagree; engines disagree
            for s in w.sources:
                s.wide = s.rank in wide
                s.params["embed"] = s.params["embed"].float() if s.wide else s.params["embed"].bfloat16()
            for version in (2, 3):
                w.fails(version, kind, "embed")
                right(w, 1)
        for s in w.sources:
            s.wide, s.params["embed"] = False, s.params["embed"].bfloat16()
        w.commits(4)


class Keeping(ToyTaker):
    """Has a parameter that no refit writes, as `keep=` names them. `read` notes its value."""

    def __init__(self, *a):
        super().__init__(*a)
        self.kept = torch.ones(4)

    def read(self, catalog):
        self.was = self.kept.clone()
        return super().read(catalog)

    def check(self, quick=False):
        if not torch.equal(self.was, self.kept):
            raise Unsupported("kept parameters hold other bytes than when this engine joined")
        return super().check(quick)


def test_what_was_lost_while_a_layout_could_not_be_read_does_not_pass_for_what_is_to_be_kept():
    """The engine loses its weights (sleep level 2) after a refit that failed while it read its layout."""
    engine = ToyEngine(2)
    taker = engine.takers[0] = Keeping(0, 2)
    with World(trainers=1, drop=("extra",), engines=[engine]) as w:
        w.commits(1)
        taker.read = unreadable
        w.sources[0].export()
        w.fails(2, LayoutError)
        del taker.read
        taker.kept.zero_()
        for _ in range(2):
            w.fails(3, Unsupported)
        taker.kept.fill_(1)  # loaded again
        w.commits(4)


def test_an_engine_that_cannot_read_is_named_where_others_do_not_call_at_all():
    with World(trainers=2, workers=1) as w:
        w.commits(1)
        taker = w.engines[0].takers[0]
        taker.live["embed"] = taker.live["embed"].clone()
        taker.read = unreadable
        texts = "trainer 1: it has not called", "worker 0: it cannot read what trainers exported so far: this engine"
        w.fails(2, DeadlineExceeded, *texts, ranks=[0], deadline_s=2.0)
        w.refit(ranks=[1])
        del taker.read
        w.commits(3)


def test_torch_swaps_no_parameter_of_a_session_and_what_it_converts_in_place_is_found():
    """As the troubleshooting page says."""
    page, flag = (ROOT / "docs/troubleshooting.md").read_text(), torch.__future__.set_swap_module_params_on_conversion
    (words,) = re.findall(
        rf"^\| torch: `(.+)`, from `model.to\(\)` .+ `torch.__future__.{flag.__name__}\(False\)`", page, re.M
    )
    net = torch.nn.Module()
    net.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
    for name, shape in SHAPES.items():
        owner, _, key = name.rpartition(".")
        net.get_submodule(owner).register_parameter(key, torch.nn.Parameter(ToySource.value(name, shape, 1)))
    with World(trainers=1, sources=[TensorTrainer(net, rank=0, world=1)]) as w:
        good(w.refit())
        try:
            flag(True)
            with pytest.raises(RuntimeError, match=re.escape(words)):
                net.to(torch.float32)
        finally:
            flag(False)
        net.to(torch.float32).to(torch.bfloat16)
        for p in net.parameters():
            p.data.mul_(2)
        good(w.refit())
        norm = w.engines[0].takers[0].live["norm"]
        assert torch.equal(norm, net.get_parameter("norm")), "the engine has what lies there now"


@pytest.mark.parametrize("verify", [False, True])
def test_a_refit_that_is_interrupted_commits_nothing_of_what_comes_after(monkeypatch, verify):
    """A caller that catches KeyboardInterrupt may step; the engine must not get the next weights as the interrupted version."""
    with World(trainers=1, workers=1) as w:
        w.commits(1)
        step, begun = threading.Event(), Lane._go

        def interrupted(call):
            while w.sessions[0].lanes[0].go_attempt < call.number:
                time.sleep(0.01)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Lane, "_go", lambda lane, x: (lane._role == "worker" or step.wait(1.0), begun(lane, x))[1])
            patch.setattr(RefitCall, "_outcome", interrupted)
            w.fails(2, KeyboardInterrupt, verify=verify)
            w.sources[0].set(3)  # the next optimizer step
            step.set()
            time.sleep(0.5)
        assert w.controllers[0].version != 2 and w.engines[0].label != "2"
        w.commits(4, verify=verify)


@pytest.mark.parametrize("delta", [None, "auto"])
def test_a_closed_session_keeps_no_storage(delta):
    """An optimizer with its fence keeps the session: memory that the trainer frees later has to be free."""

    class Memory(np.ndarray):
        """Memory of a storage that can be referred to weakly."""

    net, kept = torch.nn.Module(), []
    net.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
    for name, shape in SHAPES.items():
        values = ToySource.value(name, shape, 1).view(torch.int16).numpy().copy().view(Memory)
        kept.append(weakref.ref(values))
        owner, _, key = name.rpartition(".")
        net.get_submodule(owner).register_buffer(key, torch.from_numpy(values).view(torch.bfloat16))
    del values
    with World(trainers=1, sources=[TensorTrainer(net, rank=0, world=1)]) as w:
        good(w.refit(delta=delta))
        right(w, 1)
    for module in net.modules():
        module._buffers.clear()
    gc.collect()
    assert not any(ref() is not None for ref in kept)


def test_a_publish_whose_fence_is_interrupted_commits_nothing_of_what_comes_after(monkeypatch):
    """It is still getting ready, and may read weights of the next step. The next call waits for it."""
    with World(trainers=1, workers=1) as w:
        w.commits(1)
        step, quantize = threading.Event(), w.sessions[0].side.quantize

        def interrupted(*_):
            raise KeyboardInterrupt

        w.sessions[0].side.quantize = lambda *a: (step.wait(20), quantize(*a))
        assert good(w.refit(2, wait="ready")).pending
        with monkeypatch.context() as patch:
            patch.setattr(BackgroundCall, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                w.sessions[0].fence()
        w.sources[0].set(3)  # the next optimizer step
        (end,) = w.refit(4, deadline_s=0.5)
        assert isinstance(end, DeadlineExceeded) and "an earlier publish() has not ended" in str(end), end
        step.set()
        time.sleep(0.5)
        assert w.controllers[0].version != 2 and w.engines[0].label != "2"
        w.commits(5)


# ---- trainers that hold different bytes of one tensor

WIDE = SHAPES | {"bias": (50_000,)}
ASIDE = 77
"""An element of `bias` that a sample does not look at."""


def test_trainers_that_differ_are_told_before_anything_moves_until_a_first_version_is_committed(monkeypatch):
    """They may differ when they connect, since checkpoints may be loaded later."""
    with World(trainers=3, shapes=WIDE) as w:
        for _ in range(2):
            w.sources[1].params["norm"][3] += 1
            w.sources[1].params["bias"] += 1
            text = "2 tensors, such as bias, norm: one content on trainers 0, 2, another on trainer 1"
            w.fails(None, VerificationError, text, "nothing was moved", verify=False)
            assert not w.engines[0].paused and w.controllers[0].error is None
        w.commits(1, verify=False)
        monkeypatch.setattr(holders, "sample", lambda *_: pytest.fail("sampled again"))
        w.commits(2, verify=False)


def test_what_drop_names_may_differ():
    sources = [ToySource(i, 2, WIDE) for i in range(2)]
    sources[1].params["bias"] += 1
    with World(trainers=2, sources=sources, drop=("bias",)) as w:
        assert good(w.refit()).verified


def test_one_element_that_drifts_is_found_by_verify_only_and_workers_of_one_engine_disagree_until_then():
    """Bits are compared, not numbers."""
    with World(trainers=2, workers=2, shapes=WIDE) as w:
        assert w.commits(1).verified
        w.sources[1].params["bias"] += 1  # as a whole, so that it does not matter who sends which part
        good(w.refit(verify=False))
        one, other = (t.live["bias"] for t in w.engines[0].takers)
        assert not torch.equal(one, other), "the engine's workers took it from different trainers"
        for s in w.sources:
            s.set(1)
            s.params["norm"].view(torch.int16)[0] = 0x7FC1  # one NaN
        w.sources[1].params["bias"][ASIDE] += 1
        w.fails(None, VerificationError, "bias: one content on trainer 0, another on trainer 1", "replica 0")
        assert w.engines[0].paused
        w.sources[1].params["bias"][ASIDE] = w.sources[0].params["bias"][ASIDE]
        assert good(w.refit()).verified
        w.sources[1].params["norm"].view(torch.int16)[0] = 0x7FC2  # another NaN
        w.fails(None, VerificationError, "norm: one content on trainer 0")
        assert w.commits(2).verified


def test_replicas_of_one_layout_cost_one_reading_and_a_refit_that_is_not_verified_none(monkeypatch):
    told, tell = [], holders.SharedSums.told
    monkeypatch.setattr(holders.SharedSums, "told", lambda s, v: told.append(0) or tell(s, v))
    with World(trainers=2, replicas=3) as w:
        for version in (1, 2):
            w.commits(version)
        assert len(told) == 2 * 2, "each trainer once per refit"
        w.commits(3, verify=False)
        assert len(told) == 2 * 2


# ---- training that reaches no engine


class Adapted(ToySource):
    """`trains`: its tensors that require grad. Every rank holds whole adapters, which no engine has."""

    def __init__(self, rank: int, world: int, trains):
        super().__init__(rank, world, SHAPES | {n: (40,) for n in ("lora_A", "lora_B")})
        self.trains = frozenset(trains)

    def read(self):
        layout = super().read()
        return type(layout)(layout.traced, layout.roots, layout.tensors, self.trains)


def adapted(*trains) -> World:
    """`trains`: for each of two trainers."""
    return World(trainers=2, sources=[Adapted(i, 2, t) for i, t in enumerate(trains)], drop=("lora_*",))


def test_nothing_that_trains_is_sent():
    """Trainers cannot connect, and the engine's workers are told the same."""
    w = adapted(*[("lora_A", "lora_B")] * 2)
    with pytest.raises(CoverageError) as caught:
        w.connect()
    text = "2 tensors require grad, such as lora_A, lora_B: drop= names all of them; merge adapters"
    raised([caught.value, *(s.error for s in w.engines[0].sessions)], CoverageError, text)


@pytest.fixture
def steps(caplog):
    """Return a function: training steps of these tensors, a refit after each. It returns the number of warnings after each."""
    caplog.set_level(logging.WARNING, "xfer")

    def run(w: World, names, times: int) -> list[int]:
        out = []
        for _ in range(times):
            for s in w.sources:
                for n in names:
                    s.params[n] += 1
            good(w.refit(verify=False))
            out.append(sum("training goes on" in r.message for r in caplog.records))
        return out

    return run


def test_two_refits_in_a_row_that_send_nothing_new_while_training_goes_on_are_told_once(steps, caplog):
    with adapted(*[("lora_A", "lora_B", "norm")] * 2) as w:
        assert steps(w, ("lora_A", "lora_B"), 1) == [0]
        assert steps(w, (), 3) == [0] * 3, "no step, nothing to say"
        for s in w.sources:  # storages that move do not look like training
            s.params["norm"] = s.params["norm"].clone()
        assert steps(w, ("lora_A",), 4) == [0, 1, 1, 1]
        (text,) = [r.message for r in caplog.records if "training goes on" in r.message]
        assert "lora_A" in text and "norm" not in text


def test_training_that_arrives_is_never_doubted(steps, monkeypatch):
    """It is enough that one rank sends a tensor that changes: on a pipeline stage, perhaps only adapters train."""
    with adapted(("lora_A", "norm"), ("lora_A", "norm")) as w, adapted(("lora_A",), ("norm",)) as stages:
        assert steps(stages, ("lora_A", "norm"), 4) == [0] * 4
        assert steps(w, ("lora_A",), 2) == [0, 0]
        assert steps(w, ("lora_A", "norm"), 1) == [0]
        monkeypatch.setattr("xfer.direct.unsent.Sums", lambda *_: pytest.fail("read again"))
        assert steps(w, ("lora_A",), 3) == [0] * 3, "what is sent has changed once: nobody looks any more"


# ---- optimizers that mark what they write


class Owner:
    """A trainer whose weights a layer-wise optimizer writes. All engines pull them."""

    def __init__(self):
        self.net = torch.nn.ParameterDict({n: torch.nn.Parameter(torch.randn(s).bfloat16()) for n, s in MARKED.items()})
        groups = [ParamGroup(list(self.net.parameters()), torch.optim.SGD, {"lr": 1.0})]
        self.optimizer = LayerWiseOptimizer(self.net, groups)
        self.source = LayerWiseTrainer(TensorTrainer(self.net, rank=0, world=1), self.optimizer)
        self.world = World(trainers=1, sources=[self.source], shapes=MARKED, host_pull=True)

    def step(self) -> None:
        """Changes the first elements of each parameter."""
        for p in self.net.parameters():
            p.grad = torch.zeros_like(p)
            p.grad.view(-1)[:3] = 0.5
        self.optimizer.step()

    def refit(self, **how):
        """A refit by changes that brings every byte. Returns its report."""
        report = good(self.world.refit(**{"delta": "auto", "verify": False, **how}))
        assert self.wrong() == []
        return report

    def wrong(self) -> list[str]:
        """Names of tensors of which a worker has other bytes than the trainer."""
        takers = self.world.engines[0].takers
        parts = {n: p.detach().chunk(len(takers), -1) if p.dim() > 1 else [p.detach()] * 2 for n, p in self.net.items()}
        live = lambda t, n: t.live[n][:36] if n == "embed" else t.live[n]  # noqa: E731
        return [n for n, some in parts.items() if not all(torch.equal(live(t, n), x) for t, x in zip(takers, some))]


MARKED = {"embed": (36, 1024), "w": (128, 512), "norm": (12,)}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_refit_by_marks_of_an_optimizer_brings_every_write_without_copies():
    owner = Owner()
    with owner.world as w:
        whole = owner.refit().outcomes[0].bytes_moved
        for _ in range(3):
            owner.step()
            report = owner.refit()
        assert 0 < report.outcomes[0].bytes_moved < whole / 50
        assert report.extra_bytes < whole / 20, "there are no copies"
        assert owner.refit().outcomes[0].bytes_moved == 0, "and nothing happened"
        w.engines[0].fail["start"] = RuntimeError("a failure before bytes move")
        owner.step()
        w.fails(None, XferError, delta="auto", verify=False)
        owner.step()
        assert owner.refit().outcomes[0].bytes_moved < whole / 50, "of both steps"
        owner.net["embed"].data[7] += 1.0
        assert whole / 3 < owner.refit().outcomes[0].bytes_moved < whole, "of one tensor all granules"
        for p in owner.net.parameters():
            p.data = p.data.clone()  # other storages
        owner.step()
        owner.refit()
        owner.optimizer.close()
        owner.net["embed"].data[9] += 1.0
        owner.refit()
        owner.net["embed"].data[9] += 1.0
        assert owner.refit().outcomes[0].bytes_moved < whole / 50, "compared with copies"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_write_that_marks_would_miss_is_refused_by_verify_and_the_next_refit_sends_everything(monkeypatch):
    owner = Owner()
    with owner.world as w:
        whole = owner.refit().outcomes[0].bytes_moved
        owner.step()
        owner.refit()
        with monkeypatch.context() as patch:
            patch.setattr(Written, "settle", lambda _: None)
            owner.net["embed"].data[7] += 1.0
            w.fails(None, VerificationError, delta="auto", verify=True)
        assert "embed" in owner.wrong() and "w" not in owner.wrong()
        assert owner.refit(verify=True).outcomes[0].bytes_moved == whole
