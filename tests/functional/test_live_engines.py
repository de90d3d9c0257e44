"""Live vLLM engines of set-ups that a refit has to see through, bit for bit. The truth is vLLM's own loader, twice: the engine under test
starts from checkpoint A, another one from B. The first is refitted to B, filled with noise wherever a refit must write, and refitted
back to A."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]
pytest.importorskip("vllm")
import transformers  # noqa: E402

from examples.common import toy  # noqa: E402
from examples.common.ports import free_port  # noqa: E402
from tests.support import block_fp8, checkpoints, refit_stage  # noqa: E402
from tests.support.families import FAMILIES  # noqa: E402
from tests.support.proc import Child, Children  # noqa: E402
from tests.support.refit_stage import differ  # noqa: E402
from xfer.engines.hf_spec import canonical_specs  # noqa: E402
from xfer.trace.fragment import TensorSpec  # noqa: E402


@dataclass(frozen=True)
class Case:
    """`layout`: of the engine. `extra`: checkpoint tensors that transformers does not name. `keep`: engine tensors (globs) that no refit
    changes; `frozen`: the checkpoint's (globs) that they come from, which trainers lack, or (`sent`) have other values of. `half`: what
    the plan says of an engine tensor of which they have a part. `fp8`: engines load what the oracle in numpy made of the trainers'
    checkpoint. `adapter`: prompts are also asked with a LoRA. `drafter`: config of one with a checkpoint of its own. `copied`:
    checkpoint tensors that repeat another one. `tokenizer`: the model needs its processor."""

    config: dict
    layout: dict = field(default_factory=dict)
    fp32: tuple[str, ...] = ()
    extra: tuple[TensorSpec, ...] = ()
    keep: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    sent: bool = False
    half: str = ""
    copied: dict[str, str] = field(default_factory=dict)
    fp8: bool = False
    adapter: bool = False
    tokenizer: bool = False
    drafter: dict | None = None

    def specs(self) -> list[TensorSpec]:
        named = (*canonical_specs(self.config), *self.extra)
        return [replace(s, dtype="float32") if matches(s.name, self.fp32) else s for s in named]


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, p) for p in patterns)


def family(name: str) -> dict:
    return next(f.config for f in FAMILIES if f.name == name)


GLM = {**family("GLM-4.5"), "num_nextn_predict_layers": 1}
DRAFTER = dict(speculative_config={"method": "mtp", "num_speculative_tokens": 1})


def mtp_layer(config: dict) -> tuple[TensorSpec, ...]:
    """The checkpoint's layer of the drafter: one more of the last kind, and what joins it to the model."""
    last, n, wide = config["num_hidden_layers"] - 1, config["num_hidden_layers"], config["hidden_size"]
    at = f"model.layers.{n}."
    layer = [s for s in canonical_specs(config) if s.name.startswith(f"model.layers.{last}.")]
    own = {"enorm.weight": (wide,), "hnorm.weight": (wide,), "eh_proj.weight": (wide, 2 * wide)}
    own |= {"shared_head.norm.weight": (wide,), "shared_head.head.weight": (config["vocab_size"], wide)}
    own |= {"embed_tokens.weight": (config["vocab_size"], wide)}
    return (
        *(replace(s, name=s.name.replace(f"model.layers.{last}.", at)) for s in layer),
        *(TensorSpec(at + name, shape, config["torch_dtype"]) for name, shape in own.items()),
    )


EAGLE = {**family("Llama"), "num_hidden_layers": 1}


def eagle_specs() -> list[TensorSpec]:
    """Of its checkpoint: layers of the model's kind, the first without a norm before it, and what joins both models."""
    at, wide = "model.layers.", EAGLE["hidden_size"]
    layers = (replace(s, name=s.name.removeprefix("model.")) for s in canonical_specs(EAGLE) if s.name.startswith(at))
    fc = TensorSpec("fc.weight", (wide, 2 * wide), EAGLE["torch_dtype"])
    return [*(s for s in layers if s.name != "layers.0.input_layernorm.weight"), fc]


IDEFICS = {
    "model_type": "idefics3", "architectures": ["Idefics3ForConditionalGeneration"], "torch_dtype": "bfloat16",
    "image_token_id": 5, "scale_factor": 2, "pad_token_id": 0, "tie_word_embeddings": False,
    "text_config": {k: v for k, v in family("Llama").items() if k != "architectures"},
    "vision_config": {
        "model_type": "idefics3_vision", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
    },
}  # fmt: skip

YOUNG = {
    "Kolibri 1": {
        **toy.config("qwen3"), "model_type": "kolibri1", "architectures": ["Kolibri1ForCausalLM"],
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 65,
    },
    "Apertus 1.5": {
        **toy.config("qwen3"), "model_type": "apertus1p5_text", "architectures": ["Apertus1p5TextForCausalLM"], "hidden_act": "xielu",
    },
}  # fmt: skip
"""Published after the releases in xfer/tested.py: transformers has them since 5.20.0 (October 2026) and 5.24.0 (November)."""

WIDE = dict(hidden_size=256, head_dim=128, num_attention_heads=4, num_key_value_heads=2, intermediate_size=640)

CASES = {
    "pp2": Case(toy.config("qwen3"), dict(pipeline_parallel_size=2)),
    "pp2 in FP8": Case(toy.config("qwen3", **WIDE), dict(pipeline_parallel_size=2, **block_fp8.ENGINE), fp8=True),
    "adapters": Case(toy.config("qwen3"), dict(enable_lora=True, max_loras=1, max_lora_rank=8, max_cpu_loras=1), adapter=True),
    "dp2 ep": Case(toy.config("qwen3_moe"), dict(data_parallel_size=2, enable_expert_parallel=True)),
    "drafter": Case(GLM, DRAFTER, extra=mtp_layer(GLM), fp32=("*.e_score_correction_bias",)),
    "drafter kept": Case(
        GLM, DRAFTER, extra=mtp_layer(GLM), fp32=("*.e_score_correction_bias",), keep=("draft.*",),
        frozen=("model.layers.4.*",), sent=True,
    ),
    "drafter of its own": Case(
        family("Llama"), dict(speculative_config={"method": "eagle", "num_speculative_tokens": 1}), keep=("draft.*",),
        drafter=EAGLE,
    ),
    "frozen tower": Case(
        IDEFICS, dict(skip_tokenizer_init=False, picture=IDEFICS["image_token_id"]), keep=("*vision_model*",),
        frozen=("*vision_model*",), tokenizer=True,
    ),
    "q without k and v": Case(
        toy.config("qwen3"), dict(tensor_parallel_size=2), keep=("*.3.self_attn.qkv_proj.weight",),
        frozen=("*.3.self_attn.[kv]_proj.weight",),
        half="model.layers.3.self_attn.qkv_proj.weight, all but model.layers.3.self_attn.q_proj.weight: kept by request",
    ),
    "drafter beside a tied trainer": Case(
        {**GLM, "tie_word_embeddings": True}, DRAFTER, fp32=("*.e_score_correction_bias",), frozen=("lm_head.weight",),
        extra=(*mtp_layer(GLM), TensorSpec("lm_head.weight", (GLM["vocab_size"], GLM["hidden_size"]), "bfloat16")),
        copied={"lm_head.weight": "model.embed_tokens.weight"},
    ),
    "A_log": Case(family("Nemotron-H"), fp32=("*.A_log",)),
    **{name: Case(config, dict(tensor_parallel_size=2)) for name, config in YOUNG.items()},
}  # fmt: skip


class Stage(refit_stage.Stage):
    """Two trainer ranks, the engine under test, and one for fresh loads. The processes serve all cases in turn."""

    def processes(self) -> list[Child]:
        self.trainers = Children(self.child(f"trainer{r}", "engine", "plain_main") for r in range(2))
        self.tested, self.truth = (self.child(name, "engine", "live_main") for name in ("engine", "truth"))
        return [*self.trainers, self.tested, self.truth]


@pytest.fixture(scope="module")
def stage(tmp_path_factory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("live"))
    yield stage
    stage.family.__exit__()


def own_name(key: str) -> str:
    """Of an observed checksum: the engine's name of the parameter, without whose it is."""
    return key.rpartition(" ")[2].rpartition(":")[2]


def written(case: Case, tmp_path: Path) -> list[Path]:
    """Checkpoints: where the engine starts and comes back to; what it is after a refit to the third, which differs from that only in
    what is frozen; and that one."""
    specs = case.specs()
    frozen = {s.name: 1 for s in specs if matches(s.name, case.frozen)}
    assert bool(frozen) == bool(case.frozen)
    folders = [
        checkpoints.write(tmp_path / name, case.config, specs, seed, seeds, case.copied)
        for name, seed, seeds in (("a", 1, {}), ("b", 2, frozen), ("trained", 2, {}))
    ]
    for folder in folders[:2] if case.tokenizer else ():
        checkpoints.write_processor(folder, case.config)
    return folders


def run(case: Case, stage: Stage, tmp_path: Path) -> None:
    start, second, trained = written(case, tmp_path)
    layout = dict(case.layout)
    if case.adapter:
        layout["adapter"] = str(checkpoints.write_adapter(tmp_path / "adapter", case.config))
    if case.drafter:
        folder = checkpoints.write(tmp_path / "drafter", case.drafter, eagle_specs(), 3, {})
        layout["speculative_config"] = {**layout["speculative_config"], "model": str(folder)}
    served = [block_fp8.serialize(str(f)) if case.fp8 else str(f) for f in (start, second)]
    stage.tested.say(do="start", model=served[0], load_format="auto", **layout)
    stage.truth.say(do="truth", folders=served[1:], layout=layout)
    port = free_port()
    leave = [] if case.sent else list(case.frozen)
    for r, t in enumerate(stage.trainers):
        t.say(do="build", folder=str(start), rank=r, world=2, port=port, leave=leave)
    for t in stage.trainers:
        t.expect("built")
    stage.tested.expect("started")
    want = {"a": stage.tested.ask("observe", "observed"), "b": stage.truth.expect("observed")}
    ranks = prod(layout.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data"))
    assert len({key.partition(":")[0] for key in want["a"]["checksums"]}) == ranks
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    stage.tested.ask("serve", "serving", rendezvous=rendezvous, replica=0, keep=list(case.keep))
    connected = stage.trainers.ask("connect", "connected", rendezvous=rendezvous, replicas=1)
    assert all(f": {case.half}" in c["plan"] for c in connected)
    stage.tested.ask("ready", "ready")
    for number, (name, folder) in enumerate((("b", trained), ("a", start)), 1):
        stage.trainers.ask("set", "set", seed=str(folder))
        reports = stage.trainers.ask("refit", "refitted", verify=True)
        assert all(r["verified"] and r["committed"] == [True] for r in reports), reports
        got = stage.tested.ask("observe", "observed")
        assert got["version"] == number
        assert not differ(want[name], got), f"after refit {number}: {differ(want[name], got)[:10]}"
        assert got["outputs"] == want[name]["outputs"], f"after refit {number}"
        if name == "b":
            kept = stage.tested.ask("scramble", "scrambled", seed=7)["kept"]
    assert stage.tested.ask("kept", "kept")["kept"] == kept
    same = {own_name(k) for k in want["a"]["checksums"].keys() - set(differ(want["a"], want["b"]))}
    assert {n for n in same if not matches(n, case.keep)} == set(), "equal parameters: the second refit proved little"
    assert bool(same) == bool(case.keep and not case.half), "what was to be kept is not what differs from a whole load"
    stage.trainers.ask("close", "closed")
    stage.tested.ask("stop", "stopped")


@pytest.mark.parametrize("name", CASES)
def test_a_refit_equals_a_fresh_load(name, stage, tmp_path):
    if name in YOUNG and CASES[name].config["model_type"] not in transformers.CONFIG_MAPPING:
        pytest.skip(
            f"transformers {transformers.__version__} is older than this family: put 5.24 or newer on PYTHONPATH"
        )
    with stage.case():
        run(CASES[name], stage, tmp_path)
