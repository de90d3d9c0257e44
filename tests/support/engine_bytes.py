"""The live bytes of an EngineModel that has read its layout: those that refits keep, and noise in all others."""

from __future__ import annotations

import hashlib

import torch

from xfer.engines.vllm_layout import EngineModel


def checksum_kept(model: EngineModel) -> str:
    """Digest of the bytes that no refit may change; equal before and after one."""
    digest = hashlib.blake2b(digest_size=16)
    for k in model.layout.kept:
        digest.update(f"{k.root}:{k.start}:{k.stop}".encode())
        digest.update(model.tensors[k.root][k.start : k.stop].cpu().numpy().tobytes())
    return digest.hexdigest()


def scramble(model: EngineModel, seed: int) -> None:
    """Writes noise into every live byte that is not kept, so that bytes which a refit leaves out show."""
    kept: dict[str, list[tuple[int, int]]] = {}
    for k in model.layout.kept:
        kept.setdefault(k.root, []).append((k.start, k.stop))
    for number, root in enumerate(model._live.roots):
        storage = model._live.tensors[root.name]
        saved = [(a, b, storage[a:b].clone()) for a, b in kept.get(root.name, ())]
        noise = torch.Generator(storage.device).manual_seed(seed * 1_000_003 + number)
        storage.random_(0, 256, generator=noise)
        for a, b, was in saved:
            storage[a:b].copy_(was)
