"""Weights of a seed, made on a device: the same bits in every process on GPUs of one kind, whatever part is kept."""

from __future__ import annotations

import hashlib
from math import sqrt

import torch

from examples.common import toy


def names(config: dict) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """(name, shape, dtype) of every tensor of the checkpoint of an HF config (families of examples.common.toy)."""
    return [(n, tuple(s), d) for n, s, d in toy.specs(config)]


def value(name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: torch.device) -> torch.Tensor:
    """Norms near 1, matrices at 1/sqrt(fan-in): models that answer with finite numbers. Random in every bit that counts."""
    number = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:6], "little")
    g = torch.Generator(device).manual_seed(number)
    x = torch.empty(shape, dtype=torch.float32, device=device).normal_(generator=g)
    if "norm" in name.rsplit(".", 2)[-2]:
        x = x.mul_(0.1).add_(1)
    else:
        x = x.div_(sqrt(shape[-1])) if len(shape) > 1 else x.mul_(0.01)
    return x.to(dtype)
