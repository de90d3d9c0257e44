"""vLLM's own loaders, traced on meta for every rank of a layout, against vLLM's own loaders on real tensors, byte
by byte.

Both models begin with the same random bytes, so a byte that only one of them writes shows. One process plays every
rank.
"""

from __future__ import annotations

import os
from dataclasses import replace
from math import prod

import pytest
import torch

from tests.support.replay import load, storage_bytes
from xfer.trace.catalog import Catalog
from xfer.trace.loader import named_storages, trace_loader
from xfer.trace.traced import Traced
from xfer.trace.watch import Watch

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

BASE = dict(
    vocab_size=250, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    intermediate_size=192, max_position_embeddings=512, rms_norm_eps=1e-6, torch_dtype="bfloat16", hidden_act="silu",
    tie_word_embeddings=False, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True,
)  # fmt: skip
QWEN3_MOE = dict(BASE, model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], num_experts=8,
                 decoder_sparse_step=1, mlp_only_layers=[])  # fmt: skip
DEEPSEEK_V3 = dict(
    BASE, model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], num_key_value_heads=4, n_routed_experts=8,
    n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1, kv_lora_rank=32, q_lora_rank=48,
    qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32, num_nextn_predict_layers=0, routed_scaling_factor=2.5,
    scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1,
)  # fmt: skip
FAMILIES = {"qwen3_moe": QWEN3_MOE, "deepseek_v3": DEEPSEEK_V3}
LAYOUTS = {"tp2": dict(tp=2), "tp2 ep": dict(tp=2, ep=True), "tp4": dict(tp=4)}


def randomized(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Float storages get the same random bytes in every model of one shape; integer buffers (expert maps) are left
    alone.
    """
    g = torch.Generator().manual_seed(7)
    roots = {name: t.data for name, t in sorted(named_storages(model).values()) if t.is_floating_point()}
    for t in roots.values():
        flat = storage_bytes(t)
        flat.copy_(torch.randint(0, 60, flat.shape, dtype=torch.uint8, generator=g))  # small bytes: never a NaN
    return roots


def checkpoint(specs) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(11)
    return {s.name: torch.randn(s.shape, generator=g).to(getattr(torch, s.dtype)) for s in specs}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    from xfer.engines.hf_spec import canonical_specs

    config = FAMILIES[request.param]
    return config, canonical_specs(config)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_replays_as_vllm_loads(family, layout):
    from xfer.engines.meta_model import fake_rank, make_config, make_meta_model, make_model

    config, specs = family
    vllm_config = make_config(config, **LAYOUTS[layout])
    tensors, catalog, unread = checkpoint(specs), Catalog(specs), []
    for rank in range(LAYOUTS[layout]["tp"]):
        with fake_rank(vllm_config, rank), torch.no_grad():
            built = Watch()
            traced = trace_loader(make_meta_model(vllm_config, built), specs, built=built)
            loaded, replayed = make_model(vllm_config, "cpu"), make_model(vllm_config, "cpu")
            want, got = randomized(loaded), randomized(replayed)
            loaded.load_weights((n, t.clone()) for n, t in tensors.items())
        load(traced, tensors, got)
        assert differing(want, got) == []
        assert not traced.recipes
        unread.append(set(traced.unread))
        lifted = catalog.lift(traced.fragments)
        assert len(lifted) < len(traced.fragments)
        assert sum(prod(f.extent) for f in lifted) == sum(prod(f.extent) for f in traced.fragments)
        if rank == 0:
            drop_one_by_one(traced, tensors, replayed, want)
    assert set.intersection(*unread) == set()  # every checkpoint tensor is wanted somewhere


def differing(want: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> list[str]:
    return [n for n, t in want.items() if not torch.equal(storage_bytes(t), storage_bytes(got[n]))]


def drop_one_by_one(traced: Traced, tensors: dict, model: torch.nn.Module, want: dict[str, torch.Tensor]) -> None:
    """The comparison must see each of a few events that are left out, in the storage that lacks it."""
    for i in range(0, len(traced.fragments), 7):
        got = randomized(model)
        load(replace(traced, fragments=traced.fragments[:i] + traced.fragments[i + 1 :]), tensors, got)
        assert differing(want, got) == [traced.fragments[i].root]


def test_building_on_meta_leaves_a_live_model_and_the_process_alone():
    from vllm.model_executor.layers import rotary_embedding

    from xfer.engines.meta_model import fake_rank, make_config, make_meta_model, make_model

    vllm_config = make_config(QWEN3_MOE, tp=2)
    with fake_rank(vllm_config, 0):
        live = make_model(vllm_config, "cpu")
        context = dict(vllm_config.compilation_config.static_forward_context)
        cached = dict(rotary_embedding._ROPE_DICT)
        meta = make_meta_model(vllm_config)
    assert all(p.is_meta for p in meta.parameters())
    assert not any(t.is_meta for _, t in [*live.named_parameters(), *live.named_buffers()])
    assert dict(rotary_embedding._ROPE_DICT) == cached
    assert dict(vllm_config.compilation_config.static_forward_context) == context
    from vllm.distributed import parallel_state

    assert parallel_state._TP is None and parallel_state._WORLD is None


def test_specs_of_a_folder_are_read_from_headers(tmp_path):
    from safetensors.torch import save_file

    from xfer.engines.hf_spec import checkpoint_specs
    from xfer.errors import LayoutError

    save_file({"b": torch.zeros(2, 3, dtype=torch.bfloat16)}, tmp_path / "1.safetensors")
    save_file({"a": torch.zeros((), dtype=torch.float32)}, tmp_path / "2.safetensors")
    assert [(s.name, s.shape, s.dtype) for s in checkpoint_specs(tmp_path)] == [
        ("a", (), "float32"),
        ("b", (2, 3), "bfloat16"),
    ]
    save_file({"a": torch.zeros(3)}, tmp_path / "3.safetensors")
    with pytest.raises(LayoutError) as e:
        checkpoint_specs(tmp_path)
    assert len(e.value.violations) == 1
