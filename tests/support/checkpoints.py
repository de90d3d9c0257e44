"""Random checkpoints of any family that transformers can name, written as a trainer would export them. Engine
environment only: its transformers knows all families."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import sqrt
from pathlib import Path

import torch
from safetensors.torch import save_file

from xfer.testing.world import random_weights
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


def write(folder: Path, config: dict, specs: Iterable[TensorSpec], seed: int, seeds: Mapping[str, int]) -> Path:
    """config.json and model.safetensors; `seeds` as in `trained`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(trained(specs, seed, seeds), str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
