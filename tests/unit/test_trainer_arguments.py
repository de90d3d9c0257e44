"""Adapters refuse wrong arguments in their constructor: what was given, what is expected, what to write."""

from __future__ import annotations

import re
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import xfer
from xfer.errors import Unsupported
from xfer.trainers import megatron

NET = torch.nn.Linear(2, 2)
# The trainers' environment lacks mbridge: its classes are recognised by where they come from.
MBRIDGE = type("Qwen3Bridge", (), {"__module__": "mbridge.models.qwen3"})()


class Bridge:
    """The part of an AutoBridge that is used before a layout is read."""

    _model_bridge = property(lambda self: None)
    hf_pretrained = None


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def said(*arguments) -> tuple[str, ...]:
    with pytest.raises(Unsupported, match=re.escape("MegatronTrainer(model_chunks, bridge)")) as e:
        xfer.MegatronTrainer(*arguments)
    return e.value.violations


def of(argument: str, lines) -> list[str]:
    return [line for line in lines if line.startswith(argument)]


MADE = "megatron.bridge.AutoBridge.from_hf_pretrained("


@pytest.mark.parametrize(
    "chunks, bridge, what, texts",
    [
        ([NET], None, None, ["bridge is None", MADE]),
        ([NET], "path", None, ["bridge is of type str", MADE]),
        ([NET], Bridge, None, ["bridge is the class ", MADE]),
        (None, object(), "model_chunks is None",
         ["bridge is of type object", MADE, "or mbridge's bridge"]),
        ("model", "path", "model_chunks is of type str", ["bridge"]),
        ({"model": NET}, "path", "model_chunks is of type dict", ["bridge"]),
        ([], "path", "model_chunks is empty", ["bridge"]),
        ([NET, NET.weight], "path", "model_chunks[1]: is of type torch.nn.parameter.Parameter", ["bridge"]),
        (Bridge(), "path", f"model_chunks is of type {__name__}.Bridge", ["bridge"]),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named_together_with_what_to_write_instead(chunks, bridge, what, texts):
    lines = said(chunks, bridge)
    (line,) = of("bridge", lines)
    assert all(text in line for text in texts), line
    models = of("model_chunks", lines)
    assert len(models) == (what is not None) and all(m.startswith(what) and "get_model()" in m for m in models)


def test_a_bridge_of_mbridge_needs_no_megatron_bridge(monkeypatch):
    monkeypatch.setattr(megatron, "_installed", lambda name: False)
    lines = said([NET], MBRIDGE)
    assert of("bridge", lines) == [] and lines[0].startswith("megatron.core: not installed")


def test_without_a_process_group_the_calls_that_are_missing_are_named():
    (line,) = of("no process group:", said([NET], Bridge()))
    assert "init_process_group()" in line and "initialize_model_parallel()" in line


@pytest.mark.engine
@pytest.mark.skipif(find_spec("megatron") is not None, reason="needs an environment without Megatron-Core")
def test_without_megatron_its_packages_are_named_with_the_other_mistakes(world):
    lines = said(None, None)
    assert len(lines) == 3 and lines[0].startswith("megatron.core and megatron.bridge: not installed")
    assert "xfer.TensorTrainer(module)" in lines[0]


def test_a_list_is_no_model_for_a_tensor_trainer():
    with pytest.raises(Unsupported, match="parameters is a list") as e:
        xfer.TensorTrainer([NET])
    assert "give a module, or a callable" in e.value.violations[0]


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs Megatron-Core")
def test_biases_of_routers_that_would_change_without_the_fence_are_refused():
    """Where nothing is set yet, a training loop sets what updates them later."""
    net, trainer, seen = torch.nn.Linear(2, 2), object.__new__(xfer.MegatronTrainer), []
    trainer.rank, trainer.chunks = 0, [net, net]
    net.config = SimpleNamespace(finalize_model_grads_func=None, moe_router_enable_expert_bias=True)
    with pytest.raises(Unsupported, match="set config.finalize_model_grads_func before"):
        trainer.fence_before(lambda: seen.append("fence"))
    net.config.finalize_model_grads_func = seen.append
    trainer.fence_before(lambda: seen.append("fence"))
    for _ in range(2):
        trainer.finish_gathers()  # as each publish does
        net.config.finalize_model_grads_func("finished")
        assert seen == ["fence", "finished"]
        seen.clear()
        net.config.finalize_model_grads_func = seen.append  # as Megatron-LM's train() does
