"""EngineModel over vLLM's own model classes, without an engine: options, refusals and drafters. Layouts: test_engine_families.py."""

import json
import logging
import os
import re
import sys
import types
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from examples.common import toy  # noqa: E402
from tests.support import block_fp8, checkpoints  # noqa: E402
from tests.support.engine_bytes import differ, scramble, written  # noqa: E402
from tests.support.families import FAMILIES  # noqa: E402
from xfer.engines import vllm_cpu  # noqa: E402
from xfer.engines.hf_spec import canonical_specs, checkpoint_specs  # noqa: E402
from xfer.engines.live import LiveStorages  # noqa: E402
from xfer.engines.meta_model import fake_rank, make_config, make_model  # noqa: E402
from xfer.engines.vllm_layout import EngineModel  # noqa: E402
from xfer.errors import LayoutError, Unsupported  # noqa: E402
from xfer.trace.catalog import Catalog  # noqa: E402
from xfer.trace.fragment import TensorSpec  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By family: a folder with a checkpoint, its tensors, and the catalog of trainers that have all of them."""
    made = {}
    for family in ("qwen3", "qwen3_tied", "qwen3_moe"):
        folder = str(tmp_path_factory.mktemp(family))
        tensors = toy.write_checkpoint(family, folder, seed=3, vocab_size=152)  # padded to 192
        made[family] = folder, tensors, Catalog(checkpoint_specs(folder))
    return made


@contextmanager
def rank_of(folder, tp=1, rank=0, **options):
    """Yields the config and the model, with real storage, of one tensor-parallel rank."""
    vllm_cpu.install()
    config = make_config(folder, tp=tp, pp=1, dp=1, ep=False, **options)
    with fake_rank(config, rank):
        yield config, make_model(config, "cpu")


@contextmanager
def model_of(folder, **options):
    """Yields the config, the model and what xfer makes of it."""
    with rank_of(folder, **options) as (config, live):
        yield config, live, EngineModel(config, live, CPU)


def test_a_head_that_vllm_unties_takes_the_embedding_of_a_tied_trainer(folders, tmp_path):
    """vLLM 0.32 looks into the checkpoint on disk: with a head there, a tied config gives two layouts."""
    from safetensors.torch import save_file

    _, tensors, catalog = folders["qwen3_tied"]  # without a head
    (tmp_path / "config.json").write_text(json.dumps(toy.config("qwen3_tied", vocab_size=152)))
    head = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file({**tensors, "lm_head.weight": head}, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    for tie_again in (False, True):
        with rank_of(str(tmp_path), tp=2, rank=1, load_format="auto") as (config, live):
            assert config.model_config.word_embeddings_untied_by_checkpoint
            if tie_again:  # as vLLM does when the two turn out equal
                live.lm_head.weight = live.model.embed_tokens.weight
            model = EngineModel(config, live, CPU)
            packed = model.loader()  # gives vLLM's loader only the tensors that trainers send
            if tie_again:
                packed.accept(catalog)
            else:
                with pytest.raises(LayoutError, match="has a head of its own") as error:
                    packed.accept(catalog)
                assert [v.split(":")[0] for v in error.value.violations] == ["lm_head.weight"]
            layout = written(model, catalog, tensors)
            assert ("lm_head.weight" in {r.name for r in layout.roots}) is not tie_again
            assert torch.equal(live.lm_head.weight, live.model.embed_tokens.weight)
            assert {s.name for s in layout.traced.specs} == tensors.keys()


def processed(config, model):
    """Do what vLLM does after loading."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    process_weights_after_loading(model, config.model_config, CPU)
    return model


def written_as_loaded(config, live, catalog, tensors, method, rank):
    """Write to an engine in block FP8, compare with vLLM's own load of such a checkpoint, and return the layout and what it wants."""
    model, suffix = EngineModel(config, live, CPU), block_fp8.SCALES[method]
    derived = model.read(catalog).derived
    wanted = {(s.of, s.rule) for s in derived}
    served = block_fp8.serialized(tensors, wanted, suffix=suffix)
    both = {s.name: served[s.of if s.dtype != "float32" else s.of + suffix] for s in derived}
    reference = make_model(config, "cpu")
    layout = written(model, catalog.deriving(wanted), {**tensors, **both}, rank)
    reference.load_weights((n, t) for n, t in served.items())
    assert differ(live, processed(config, reference)) == []
    return layout, wanted


@pytest.mark.parametrize("method", block_fp8.ENGINES)
def test_an_engine_in_block_fp8_is_written_as_its_loader_writes_it_and_needs_scales(method, tmp_path, monkeypatch):
    """On the packed route, if the twin cannot be traced, vLLM would load the values alone."""
    wide = dict(hidden_size=256, head_dim=128, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
    wide |= dict(moe_intermediate_size=256, num_experts=16)
    tensors = toy.write_checkpoint("qwen3_moe", tmp_path / "model", **wide)
    catalog = Catalog(checkpoint_specs(tmp_path / "model"))
    with (
        kernels_of_cpus(),
        model_of(str(tmp_path / "model"), tp=2, rank=1, **block_fp8.ENGINES[method]) as (config, live, model),
    ):
        processed(config, live)
        _, wanted = written_as_loaded(config, live, catalog, tensors, method, 1)
        assert len(wanted) == 2 * (4 + 1 + 16 * 3) and {r for _, r in wanted} == {"ieee"}
        packed = model.loader()
        packed.accept(catalog)
        assert packed._layerwise and packed._scales == {n: n + block_fp8.SCALES[method] for n, _ in wanted}
        monkeypatch.setattr(EngineModel, "_twin", Mock(side_effect=Unsupported("no twin", ["here: why"])))
        with pytest.raises(Unsupported, match="cannot refit this engine") as error:
            packed.accept(catalog)
        lines = error.value.violations
        assert lines and all("is FP8 with scales in" in x and "Unsupported: no twin: here: why" in x for x in lines)


LATENT = dict(hidden_size=256, intermediate_size=256, moe_intermediate_size=256, n_routed_experts=16)
LATENT |= dict(num_hidden_layers=2, q_lora_rank=128, kv_lora_rank=256, qk_nope_head_dim=64, v_head_dim=64)


@contextmanager
def kernels_of_cpus():
    """Other tests of this process may have let vLLM choose kernels as on GPUs (engines/vllm_ranks.py). Those do not run here."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as oracle
    from vllm.model_executor.layers.quantization import fp8
    from vllm.platforms import PlatformEnum

    kernels = {PlatformEnum.CPU: [CPUFp8BlockScaledMMKernel]}
    experts = patch.object(fp8, "select_fp8_moe_backend", oracle.select_fp8_moe_backend)
    with patch.dict(linear._POSSIBLE_FP8_BLOCK_KERNELS, kernels), experts:
        yield


@contextmanager
def latent(folder, method="fp8", ignored=(), **rank):
    """Yields what `model_of` does for DeepSeek-V3 in block FP8, processed as vLLM does after loading, its catalog and tensors."""
    tensors = toy.write_checkpoint("deepseek_v3", folder, **LATENT)
    quantized = {**block_fp8.CONFIGS[method], "quant_method": method}
    quantized |= {"ignored_layers": [*ignored]} if ignored else {}
    made = model_of(str(folder), hf_overrides={"quantization_config": quantized}, **rank)
    with kernels_of_cpus(), made as (config, live, model):
        processed(config, live)
        yield config, live, model, Catalog(checkpoint_specs(str(folder))), tensors


@pytest.mark.parametrize(
    ("method", "tp", "rank"), [("fp8", 1, 0), ("fp8", 2, 1), ("compressed-tensors", 2, 0)], ids=lambda x: str(x)
)
def test_what_latent_attention_computes_from_fp8_after_loading_is_computed_at_each_refit(method, tp, rank, tmp_path):
    """vLLM decodes with W_UV and W_UK_T, which it makes of kv_b_proj. Out of FP8 they are new tensors, out of bf16 views."""
    with latent(tmp_path / "model", method, tp=tp, rank=rank) as (config, live, model, catalog, tensors):
        layout, wanted = written_as_loaded(config, live, catalog, tensors, method, rank)
        assert {n for n, _ in wanted} >= {n for n in tensors if n.endswith("kv_b_proj.weight")}
        (root,) = {r.target for r in layout.traced.recipes if ".layers.0." in r.target}
        made = {n for n, slot in LiveStorages(live).slots.items() if slot.root == root}
        assert {n.rpartition(".")[2] for n in made} == {"W_UV", "W_UK_T"} and len(layout.traced.recipes) == 2
        if tp == 1:  # a group of this process alone
            layers = {m.layer_name: m for m in reversed([*live.modules()]) if hasattr(m, "layer_name")}
            config.compilation_config.static_forward_context.update(layers)
            model.read(catalog)
            assert model.weights.choose_lock() == "model.norm.weight"
            model.weights.engage_lock()
            assert all(t.isnan().all() for t in model.forward())
            model.weights.release_lock()
            assert all(t.isfinite().all() for t in model.forward())
            with pytest.raises(LayoutError, match="weights of two versions") as error:
                EngineModel(config, live, CPU, keep=["*.kv_b_proj.*"]).read(catalog)
            said = r"computed from .*kv_b_proj.weight\|fp8-\S+, which keep= holds back from .*kv_b_proj.weight"
            assert error.value.violations and all(re.search(said, v) for v in error.value.violations)
            kept = EngineModel(config, live, CPU, keep=["*.kv_b_proj.*", "*.W_U*"]).read(catalog)
            assert not kept.traced.recipes


def test_latent_attention_in_block_fp8_with_kv_b_proj_in_bf16_decodes_with_views(tmp_path):
    layers = [f"model.layers.{i}.self_attn.kv_b_proj" for i in range(LATENT["num_hidden_layers"])]
    with latent(tmp_path / "model", ignored=layers) as (_, _, model, catalog, tensors):
        layout = model.read(catalog)
        wanted = {s.of for s in layout.derived}
        assert {n for n in tensors if n.endswith("_proj.weight")} - wanted == {f"{layer}.weight" for layer in layers}
        assert not layout.traced.recipes


def _reads_a_value(weight):
    return weight * weight.float().max().item()


def _runs_a_kernel(weight):
    return torch.ops.xfer_tests.doubled(weight)


@pytest.mark.parametrize("how", [_reads_a_value, _runs_a_kernel])
def test_what_vllm_makes_of_fp8_in_a_way_that_cannot_be_run_again_is_refused(how, tmp_path, monkeypatch, request):
    """Kernels of other libraries may talk to other ranks, or write what no trace sees."""
    from vllm.model_executor.layers.attention import mla_attention

    library = torch.library.Library("xfer_tests", "FRAGMENT")
    request.addfinalizer(library._destroy)
    library.define("doubled(Tensor x) -> Tensor")
    for device in ("CPU", "Meta"):
        library.impl("doubled", lambda x: x + x, device)
    split = mla_attention.get_and_maybe_dequant_weights
    monkeypatch.setattr(mla_attention, "get_and_maybe_dequant_weights", lambda *a, **k: how(split(*a, **k)))
    with latent(tmp_path / "model") as (config, live, model, catalog, _):
        with pytest.raises(LayoutError, match="a refit would leave parts of this model") as error:
            model.read(catalog)
        said = "made after loading, in a storage of its own, and not redone after a refit"
        assert [v.rpartition(".")[2].partition(";")[0] for v in error.value.violations] == [
            f"{n}: {said}" for n in ("W_UV", "W_UK_T") * LATENT["num_hidden_layers"]
        ]
        layout = EngineModel(config, live, CPU, keep=["*.W_U*"]).read(catalog)
        assert not layout.traced.recipes and {k.root.rpartition(".")[2] for k in layout.kept} >= {"W_UV"}


@pytest.mark.parametrize("name", ["cpu_offload_gb", "offload_group_size"])
def test_weights_that_vllm_offloads_are_refused_on_both_routes(folders, name):
    folder, _, catalog = folders["qwen3"]
    with model_of(folder) as (config, _, model):
        setattr(config.offload_config.uva if name.startswith("cpu") else config.offload_config.prefetch, name, 2)
        for take in (model.read, model.loader().accept):
            with pytest.raises(Unsupported, match="weight offloading") as error:
                take(catalog)
            assert error.value.violations == (f"{name}=2: start vLLM without it",)


def test_what_a_forward_computes_from_weights_and_keeps_is_refused_then(folders):
    """vLLM has layers that do so, at their first forward or when they have loaded; a KV cache is no such thing."""
    folder, _, catalog = folders["qwen3_moe"]
    with model_of(folder) as (config, live, model):
        attention = live.model.layers[1].self_attn.attn
        config.compilation_config.static_forward_context["layer"] = attention
        attention.kv_cache = torch.zeros(2, 8)
        attention.scales = attention.kv_cache[:1]
        model.read(catalog)
        assert model.weights.check() == "same"
        made = {"attn.cached": attention, "mlp.gate.cached": live.model.layers[1].mlp.gate}
        for name, holder in made.items():
            setattr(holder, name.rpartition(".")[2], live.model.norm.weight.float())
        for ask in (model.weights.check, lambda: model.weights.check(quick=True), lambda: model.read(catalog)):
            with pytest.raises(Unsupported, match="outside its parameters and buffers") as error:
                ask()
            named = [v.split(": ")[0] for v in error.value.violations[:-1]]
            assert named == ["model.layers.1.self_attn.attn.cached", "model.layers.1.mlp.gate.cached"]
        EngineModel(config, live, CPU, keep=["*.attn.cached", "*.experts.gate.cached"]).read(catalog)


def test_a_twin_takes_no_live_layers_place_where_ops_find_layers_by_name(folders, monkeypatch):
    """As vLLM's HpcRopeNorm, which only its own package of kernels can build."""
    from vllm.model_executor.model_loader import utils

    make, registry = utils.initialize_model, {}
    stand_in = types.ModuleType("vllm.stand_in")
    stand_in.layers = registry
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)

    def registers(*args, **kwargs):
        model = make(*args, **kwargs)
        registry.update({name: m for name, m in model.named_modules() if name.endswith("norm")})
        return model

    folder, _, catalog = folders["qwen3"]
    with model_of(folder) as (_, live, model):
        registry["model.norm"] = live.model.norm
        monkeypatch.setattr(utils, "initialize_model", registers)
        model.read(catalog)
        assert registry == {"model.norm": live.model.norm}


def test_keep_and_drop(folders):
    folder, _, whole = folders["qwen3_moe"]
    with model_of(folder) as (config, live, model):
        kept = live.model.norm.weight.detach().clone()
        some = Catalog(tuple(s for s in whole.specs if s.name != "model.norm.weight"))
        with pytest.raises(LayoutError, match="families that do not match"):
            model.read(some)
        layout = EngineModel(config, live, CPU, keep=["model.norm.*"]).read(some)
        assert "model.norm.weight" in {k.root for k in layout.kept} and torch.equal(kept, live.model.norm.weight)
        with pytest.raises(LayoutError, match="the engine's own names") as error:
            EngineModel(config, live, CPU, keep=["model.layers.0.*.q_proj.*"]).read(whole)
        assert "did you mean model.layers.0.self_attn.qkv_proj.weight?" in error.value.violations[0]
        unknown = "model.layers.4.eh_proj.weight"
        more = Catalog(tuple(sorted((*whole.specs, TensorSpec(unknown, (128, 256), "bfloat16")))))
        with pytest.raises(LayoutError) as error:
            model.read(more)
        assert error.value.violations == (f"{unknown}: in the trainers' checkpoint, unknown to the engine's model",)
        EngineModel(config, live, CPU, drop=["model.layers.4.*"]).read(more)


def test_a_drafter_that_loads_the_embedding_too_leaves_it_to_the_head_of_a_tied_trainer(tmp_path):
    """Qwen3-Next's drafter reads the served model's embedding and head, whatever becomes of them then. Neither is its alone."""
    family = next(f.config for f in FAMILIES if f.name == "Qwen3-Next")
    tied = canonical_specs({**family, "tie_word_embeddings": True})
    shape = next(s.shape for s in tied if s.name == "model.embed_tokens.weight")
    last, wide = f"model.layers.{family['layer_types'].index('full_attention')}.", family["hidden_size"]
    drafted = [replace(s, name=s.name.replace(last, "mtp.layers.0.")) for s in tied if s.name.startswith(last)]
    joins = {"fc": (wide, 2 * wide), "norm": (wide,), "pre_fc_norm_hidden": (wide,), "pre_fc_norm_embedding": (wide,)}
    drafted += [TensorSpec(f"mtp.{n}.weight", s, "bfloat16") for n, s in joins.items()]
    sent, head = [*tied, *drafted], TensorSpec("lm_head.weight", shape, "bfloat16")
    checkpoints.write(tmp_path, {**family, "tie_word_embeddings": True}, [*sent, head], 3, {})
    how = dict(load_format="auto", speculative_config={"method": "mtp", "num_speculative_tokens": 1})
    with rank_of(str(tmp_path), tp=2, rank=1, **how) as (config, live):
        assert config.model_config.word_embeddings_untied_by_checkpoint
        draft = make_model(config, "cpu", config.speculative_config.draft_model_config)
        draft.model.embed_tokens = live.model.embed_tokens  # as vLLM does when both are loaded
        draft.lm_head = live.lm_head
        tensors = checkpoints.trained(sent, 4, {})
        model = EngineModel(config, live, CPU)
        model.draft = draft
        layout = written(model, Catalog(tuple(sorted(sent))), tensors)
        assert {s.name for s in layout.traced.specs} == tensors.keys()
        assert torch.equal(live.lm_head.weight, live.model.embed_tokens.weight) and live.lm_head.weight.isfinite().all()
        rows = live.lm_head.shard_indices
        vocabulary = tensors["model.embed_tokens.weight"][rows.org_vocab_start_index : rows.org_vocab_end_index]
        assert torch.equal(live.lm_head.weight[: len(vocabulary)], vocabulary)
        assert torch.equal(draft.model.norm.weight, tensors["mtp.norm.weight"])


def test_unit_norms_that_a_sleep_took_are_named(monkeypatch):
    """Norms without a weight keep ones as a plain attribute, in memory that sleep(level=2) gives back. Here their bytes are overwritten."""
    monkeypatch.setattr(EngineModel, "_may_sleep", lambda self: True)
    monkeypatch.setattr("xfer.kernels.cuda_driver.mapped", lambda address: True)
    gemma = next(f.config for f in FAMILIES if f.name == "Gemma4")
    catalog = Catalog(canonical_specs(gemma))
    with model_of(gemma) as (_, live, model):
        model.read(catalog)
        scramble(model, 5)  # what refits write anew may be lost
        assert model.weights.check() == "same"
        live.model.layers[1].self_attn.v_norm.weight.data.zero_()
        with pytest.raises(Unsupported, match="did it sleep at level 2") as error:
            model.weights.check()
        assert error.value.violations[0] == "model.layers.1.self_attn.v_norm.weight: a plain attribute"
        assert len(error.value.violations) == 2


def test_a_drafter_with_a_checkpoint_of_its_own_has_to_be_kept(folders, tmp_path):
    folder, _, catalog = folders["qwen3"]
    config = {**json.loads((Path(folder) / "config.json").read_text()), "num_hidden_layers": 1}
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    how = {"method": "eagle", "model": str(tmp_path), "num_speculative_tokens": 1}
    with model_of(folder, speculative_config=how) as (config, _, model):
        with pytest.raises(Unsupported, match="has a drafter"):
            model.read(catalog)
        model.draft = make_model(config, "cpu", config.speculative_config.draft_model_config)
        with pytest.raises(LayoutError, match="drafter does not take") as error:
            model.read(catalog)
        assert "draft.* in keep=" in error.value.violations[-1]
        model.keep = ("draft.*",)
        layout = model.read(catalog)
        kept = {k.root for k in layout.kept if "request" in k.reason}
        assert "draft.model.fc.weight" in kept and all(root.startswith("draft.") for root in kept)
        drafted = ({s.root for s in spans if s.root.startswith("draft.")} for spans in (layout.footprint, layout.kept))
        assert next(drafted) == next(drafted)


def test_drafts_that_are_looked_up_in_the_prompt_need_no_drafter(folders):
    folder, _, catalog = folders["qwen3"]
    how = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    with model_of(folder, speculative_config=how) as (config, _, model):
        assert config.speculative_config.draft_model_config is not None
        model.read(catalog)
        model.loader().accept(catalog)


def test_a_class_that_cannot_be_built_on_meta_is_refused_with_its_line(folders, monkeypatch):
    """Its constructor needs a value of a weight."""
    from vllm.model_executor.models.qwen2 import Qwen2MLP

    build = Qwen2MLP.__init__

    def reads(self, *args, **kwargs):
        build(self, *args, **kwargs)
        self.largest = self.down_proj.weight.max().item()

    folder, _, catalog = folders["qwen3"]
    with model_of(folder) as (_, _, model):
        monkeypatch.setattr(Qwen2MLP, "__init__", reads)
        with pytest.raises(Unsupported, match="cannot be built on meta") as error:
            model.read(catalog)
    line = reads.__code__.co_firstlineno + 2
    assert error.value.violations[0].startswith(f"Qwen2MLP.reads ({__name__}, line {line}): RuntimeError: ")


def test_a_kind_of_warning_is_one_line(monkeypatch):
    """vLLM's loader warns of each tensor that has another dtype than its parameter."""
    olmo = next(f.config for f in FAMILIES if f.name == "OLMo2")
    names = tuple(canonical_specs(olmo))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    vllm = logging.getLogger("vllm")
    with model_of(olmo) as (_, _, model):
        monkeypatch.setattr(vllm, "handlers", [handler])
        monkeypatch.setattr(vllm, "level", logging.WARNING)
        vllm.manager._clear_cache()
        model.read(Catalog(tuple(replace(s, dtype="float32") for s in names)))
        model.read(Catalog(names))
    (line,) = [x for x in said if "dtype" in x]
    count, _, quoted = line.partition(" times while xfer read the layout: ")
    assert int(count) > 10 and quoted.count("Attempted to load weight") == 3
