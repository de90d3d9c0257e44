"""The live bytes of an engine's model that has read its layout: those that refits keep, and noise in all others."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tests.support.replay import load
from xfer.engines.layout import EngineLayout
from xfer.engines.live import LiveStorages

if TYPE_CHECKING:
    from xfer.engines.vllm_layout import EngineModel
    from xfer.sglang.layout import SGLangModel


def checksum_kept(model: EngineModel | SGLangModel) -> str:
    """Digest of the bytes that no refit may change; equal before and after one."""
    digest = hashlib.blake2b(digest_size=16)
    for k in model.weights.layout.kept:
        digest.update(f"{k.root}:{k.start}:{k.stop}".encode())
        digest.update(model.weights.tensors[k.root][k.start : k.stop].cpu().numpy().tobytes())
    return digest.hexdigest()


def scramble(model: EngineModel | SGLangModel, seed: int) -> None:
    """Writes noise into every live byte that is not kept, so that bytes which a refit leaves out show."""
    kept: dict[str, list[tuple[int, int]]] = {}
    for k in model.weights.layout.kept:
        kept.setdefault(k.root, []).append((k.start, k.stop))
    for number, root in enumerate(model.weights.live.roots):
        storage = model.weights.live.tensors[root.name]
        saved = [(a, b, storage[a:b].clone()) for a, b in kept.get(root.name, ())]
        noise = torch.Generator(storage.device).manual_seed(seed * 1_000_003 + number)
        storage.random_(0, 256, generator=noise)
        for a, b, was in saved:
            storage[a:b].copy_(was)


def written(model: EngineModel | SGLangModel, catalog, tensors, rank: int = 0, twin=None) -> EngineLayout:
    """Fill a live model with noise, and `twin` with the same noise, then write `tensors` to the live one by its layout alone."""
    layout = model.read(catalog)
    # What a session publishes. It raises unless each byte has a class.
    layout.inventory(catalog.deriving((s.of, s.rule) for s in layout.derived), rank)
    scramble(model, 5)
    if twin is not None:
        storages = LiveStorages(twin).tensors
        for name, noise in model.weights.live.tensors.items():
            storages[name].copy_(noise)
    load(replace(layout.traced, recipes=()), tensors, model.weights.tensors)
    model.weights.run_recipes()
    return layout


def differ(live: torch.nn.Module, twin: torch.nn.Module) -> list[str]:
    """Names of the storages that do not have the same bytes in two models of the same tensors."""
    got, want = LiveStorages(live).tensors, LiveStorages(twin).tensors
    assert got.keys() == want.keys()
    return [n for n in want if not torch.equal(got[n], want[n])]
