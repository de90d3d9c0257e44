"""Models of vLLM built on meta tensors beside live ones, and checkpoints read from their headers."""

from __future__ import annotations

import gc
import os

import pytest
import torch

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from safetensors.torch import save_file  # noqa: E402

from examples.common import toy  # noqa: E402
from xfer.engines.hf_spec import checkpoint_specs  # noqa: E402
from xfer.engines.meta_model import fake_rank, make_config, make_meta_model, make_model  # noqa: E402
from xfer.errors import LayoutError  # noqa: E402
from xfer.trace.fragment import TensorSpec  # noqa: E402


def test_building_on_meta_leaves_a_live_model_and_the_process_alone():
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers import rotary_embedding

    vllm_config = make_config(toy.config("qwen3_moe"), tp=2)
    with fake_rank(vllm_config, 0):
        live = make_model(vllm_config, "cpu")
        context = dict(vllm_config.compilation_config.static_forward_context)
        cached = dict(rotary_embedding._ROPE_DICT)
        meta = make_meta_model(vllm_config)
    assert all(p.is_meta for p in meta.parameters())
    assert not any(t.is_meta for _, t in [*live.named_parameters(), *live.named_buffers()])
    assert dict(rotary_embedding._ROPE_DICT) == cached
    assert dict(vllm_config.compilation_config.static_forward_context) == context
    assert parallel_state._TP is None and parallel_state._WORLD is None


def test_a_model_at_the_address_of_a_dead_one_has_all_its_layers(monkeypatch):
    """vLLM keeps by a model's id which layers other stages hold. A loader that finds a dead model's entry leaves layers out."""
    from vllm.model_executor.models import utils

    missing = utils._model_to_pp_missing_layer_names
    stages, whole = make_config(toy.config("qwen3"), pp=2), make_config(toy.config("qwen3"))
    for device in ("cpu", "meta"):
        with fake_rank(stages, 1):
            last = make_model(stages, device)
        assert utils.is_pp_missing_parameter("model.layers.0.mlp.down_proj.weight", last)
        assert utils.is_pp_missing_parameter("layers.0.mlp.down_proj.weight", last.model)
        ids = {id(last), id(last.model)}
        assert missing.keys() >= ids
        del last
        gc.collect()
        assert not missing.keys() & ids  # vLLM's own next model may get one of them

    class Stale(dict):  # a model that vLLM built had whatever id the next one gets
        def __contains__(self, number):
            return number not in removed

        def __getitem__(self, number):
            return ["model.layers.0."]

        def pop(self, number, default):
            removed.append(number)

    removed: list[int] = []
    monkeypatch.setattr(utils, "_model_to_pp_missing_layer_names", Stale())
    with fake_rank(whole, 0):
        model = make_model(whole, "meta")
    assert not utils.is_pp_missing_parameter("model.layers.0.mlp.down_proj.weight", model)


def test_specs_of_a_folder_are_read_from_headers(tmp_path):
    save_file({"b": torch.zeros(2, 3, dtype=torch.bfloat16)}, tmp_path / "1.safetensors")
    save_file({"a": torch.zeros((), dtype=torch.float32)}, tmp_path / "2.safetensors")
    assert checkpoint_specs(tmp_path) == (TensorSpec("a", (), "float32"), TensorSpec("b", (2, 3), "bfloat16"))
    save_file({"a": torch.zeros(3)}, tmp_path / "3.safetensors")
    with pytest.raises(LayoutError) as e:
        checkpoint_specs(tmp_path)
    assert len(e.value.violations) == 1
