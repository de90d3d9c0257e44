"""Random checkpoints of any family that transformers can name, written as a trainer would export them. Engine
environment only: its transformers knows all families."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import sqrt
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.one_process import random_weights
from xfer.trace.fragment import TensorSpec


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
    folder: Path,
    config: dict,
    specs: Iterable[TensorSpec],
    seed: int,
    seeds: Mapping[str, int],
    copied: Mapping[str, str] = {},
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


def write_processor(folder: Path, config: dict) -> None:
    """A tokenizer of one word per token, and what else the processor of an Idefics 3 checkpoint needs."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
    words = {f"t{i}": i for i in range(config["text_config"]["vocab_size"])}
    for number, token in enumerate(special, config["image_token_id"]):
        del words[f"t{number}"]
        words[token] = number
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="t0", bos_token="t1", eos_token="t2", pad_token="t0",
        additional_special_tokens=list(special),
    ).save_pretrained(str(folder))  # fmt: skip
    side, patch = config["vision_config"]["image_size"], config["vision_config"]["patch_size"]
    images = dict(image_processor_type="Idefics3ImageProcessor", do_image_splitting=False, size={"longest_edge": side})
    images |= dict(max_image_size={"longest_edge": side}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    seq = (side // patch) ** 2 // config["scale_factor"] ** 2
    (folder / "processor_config.json").write_text(
        json.dumps(dict(processor_class="Idefics3Processor", image_seq_len=seq))
    )
