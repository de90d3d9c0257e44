"""Checkpoints of any family that transformers can name: their tensors, random ones written as a trainer would export them, and what
else a folder needs for a vision-language model. Engine environment only: its transformers knows all families."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import sqrt
from pathlib import Path

import torch
from safetensors.torch import save_file

from examples.common import toy
from tests.support.one_process import random_weights
from xfer.engines.hf_spec import canonical_specs
from xfer.trace.fragment import TensorSpec


def shapes(config: dict) -> list[toy.Spec]:
    """(name, shape, dtype) of every tensor: in closed form for the families of examples.common.toy, else as transformers names them."""
    if config["model_type"] in {family["model_type"] for family in toy.FAMILIES.values()}:
        return toy.specs(config)
    return [(s.name, s.shape, getattr(torch, s.dtype)) for s in canonical_specs(config)]


def trained(specs: Iterable[TensorSpec], seed: int, seeds: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Random weights of the size of trained ones, so that answers stay finite: matrices at 1 / sqrt(fan-in), norms
    near 1, whatever else is a vector small. `seeds`: of tensors that have another one."""
    out = {}
    for s in specs:
        x = random_weights([s], seeds.get(s.name, seed))[s.name].float()
        if x.dim() > 1:
            x = x / sqrt(x[0].numel())
        else:
            x = 1 + 0.1 * x if s.name.endswith("weight") else 0.1 * x
        out[s.name] = x.to(torch.bfloat16).to(getattr(torch, s.dtype))
    return out


def write(
    folder: Path, config: dict, specs: Iterable[TensorSpec], seed: int, seeds: Mapping, copied: Mapping = {}
) -> Path:
    """config.json and model.safetensors; `seeds` as in `trained`. `copied`: tensors that get the values of another one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = trained(specs, seed, seeds)
    tensors |= {name: tensors[of].clone() for name, of in copied.items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def write_adapter(folder: Path, config: dict, rank: int = 4) -> Path:
    """A LoRA of two projections of the first layer, in PEFT's format, large enough to change answers."""
    wide = config["hidden_size"]
    outs = {"self_attn.q_proj": (wide, config["num_attention_heads"] * config["head_dim"])}
    outs["mlp.down_proj"] = (config["intermediate_size"], wide)
    tensors = {}
    for name, (n_in, n_out) in outs.items():
        at = f"base_model.model.model.layers.0.{name}.lora_"
        for half, shape in (("A", (rank, n_in)), ("B", (n_out, rank))):
            spec = TensorSpec(f"{at}{half}.weight", shape, "bfloat16")
            tensors |= trained([spec], 3, {})
    folder.mkdir(parents=True)
    how = dict(peft_type="LORA", r=rank, lora_alpha=4 * rank, bias="none", target_modules=["q_proj", "down_proj"])
    (folder / "adapter_config.json").write_text(json.dumps(how))
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    return folder


IDEFICS = ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def write_processor(folder: Path, config: dict) -> None:
    """A tokenizer of one word per token, and what else the processor of an Idefics 3 or Qwen-VL checkpoint needs."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    idefics = config["model_type"] == "idefics3"
    special, first = (IDEFICS, config["image_token_id"]) if idefics else (QWEN, config["vision_start_token_id"])
    words = {f"t{i}": i for i in range(config.get("text_config", config)["vocab_size"])}
    for number, token in enumerate(special, first):
        del words[f"t{number}"]
        words[token] = number
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="t0", bos_token="t1", eos_token="t2", pad_token="t0",
        additional_special_tokens=list(special),
    ).save_pretrained(str(folder))  # fmt: skip
    files = _idefics(config) if idefics else _qwen(config)
    for name, content in files.items():
        (folder / f"{name}_config.json").write_text(json.dumps(content))


def _idefics(config: dict) -> dict[str, dict]:
    side, patch = config["vision_config"]["image_size"], config["vision_config"]["patch_size"]
    images = dict(image_processor_type="Idefics3ImageProcessor", do_image_splitting=False, size={"longest_edge": side})
    images |= dict(max_image_size={"longest_edge": side}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    seq = (side // patch) ** 2 // config["scale_factor"] ** 2
    return {
        "preprocessor": images, "processor": dict(processor_class="Idefics3Processor", image_seq_len=seq)
    }  # fmt: skip


def _qwen(config: dict) -> dict[str, dict]:
    tower, newer = config["vision_config"], config["model_type"] != "qwen2_5_vl"
    side = tower["patch_size"] * tower["spatial_merge_size"]
    how = dict(patch_size=tower["patch_size"], merge_size=tower["spatial_merge_size"], temporal_patch_size=2)
    how |= dict(size={"shortest_edge": side**2, "longest_edge": 4 * side**2}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    kind = "Qwen3VL" if newer else "Qwen2_5_VL"
    return {
        "preprocessor": {"image_processor_type": "Qwen2VLImageProcessorFast", **how},
        "video_preprocessor": {"video_processor_type": "Qwen3VLVideoProcessor" if newer else "Qwen2VLVideoProcessor", **how},
        "processor": dict(processor_class=f"{kind}Processor"),
    }  # fmt: skip
