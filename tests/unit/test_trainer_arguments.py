"""Adapters that are made of the wrong things say so in their constructor: what was given, what is expected, what to write."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import xfer
from xfer.errors import Unsupported

NET = torch.nn.Linear(2, 2)
# The trainers' environment lacks mbridge: its classes are recognised by where they come from.
MBRIDGE = type("Qwen3Bridge", (), {"__module__": "mbridge.models.qwen3"})()


class Bridge:
    """What is used of an AutoBridge before a layout is read."""

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


def test_mbridge_is_named_and_what_to_write_instead():
    (line,) = of("bridge", said([NET], MBRIDGE))
    assert "of type mbridge.models.qwen3.Qwen3Bridge" in line and "ISEEKYAN/mbridge" in line
    assert "megatron.bridge.AutoBridge.from_hf_pretrained(" in line and "the model that mbridge built may stay" in line


@pytest.mark.parametrize("bridge, what", [(None, "None"), ("path", "of type str"), (Bridge, "the class ")])
def test_what_is_no_bridge_is_told_what_to_write(bridge, what):
    (line,) = of("bridge", said([NET], bridge))
    assert f"bridge is {what}" in line and "AutoBridge.from_hf_pretrained(" in line and "mbridge" not in line


@pytest.mark.parametrize(
    "chunks, what",
    [
        (None, "model_chunks is None"),
        ("model", "model_chunks is of type str"),
        ({"model": NET}, "model_chunks is of type dict"),
        ([], "model_chunks is empty"),
        ([NET, NET.weight], "model_chunks[1]: is of type torch.nn.parameter.Parameter"),
        (Bridge(), f"model_chunks is of type {__name__}.Bridge"),
    ],
)
def test_what_is_no_model_is_told_with_the_other_mistakes(chunks, what):
    lines = said(chunks, MBRIDGE)
    (line,) = of("model_chunks", lines)
    assert line.startswith(what) and "get_model()" in line and len(of("bridge", lines)) == 1


def test_without_a_process_group_the_calls_that_are_missing_are_named():
    (line,) = of("no process group:", said([NET], Bridge()))
    assert "init_process_group()" in line and "initialize_model_parallel()" in line


def megatrons_own_groups() -> None:
    """In a process of its own: Megatron-Core must not have been imported before the CPU's stand-ins are there."""
    from examples.common import megatron_cpu

    megatron_cpu.install()
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    (line,) = said([NET], Bridge())
    assert line.startswith("no process groups of Megatron:") and "initialize_model_parallel()" in line
    parallel_state.initialize_model_parallel()
    for model in (NET, [NET], torch.nn.ModuleList([NET])):
        assert xfer.MegatronTrainer(model, Bridge()).chunks == [NET]
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.trainer
@pytest.mark.skipif(find_spec("megatron") is None, reason="needs Megatron-Core")
def test_megatrons_own_groups_are_asked_for_and_then_all_is_well():
    code = f"from {__name__} import megatrons_own_groups; megatrons_own_groups()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).parents[2])


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
