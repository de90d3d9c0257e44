"""The network that benchmarks.layerwise_gpu trains, its clock, and how to read a profiler's timeline."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Shape:
    """A transformer and one rank's batch [rows, tokens]. Heads have 128 channels, or `width` if that is less."""

    layers: int
    width: int
    vocab: int
    rows: int
    tokens: int

    @property
    def heads(self) -> int:
        return max(1, self.width // 128)


class Block(nn.Module):
    def __init__(self, s: Shape, device, matrix: torch.dtype, vector: torch.dtype):
        super().__init__()
        m, v = dict(device=device, dtype=matrix), dict(device=device, dtype=vector)
        self.heads = s.heads
        self.norm1, self.norm2 = nn.LayerNorm(s.width, **v), nn.LayerNorm(s.width, **v)
        self.qkv, self.out = nn.Linear(s.width, 3 * s.width, bias=False, **m), nn.Linear(s.width, s.width, **m)
        self.up, self.down = nn.Linear(s.width, 4 * s.width, **m), nn.Linear(4 * s.width, s.width, **m)

    def forward(self, x):
        dtype = self.up.weight.dtype
        h = self.norm1(x.to(self.norm1.weight.dtype)).to(dtype)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(a)
        h = self.norm2(x.to(self.norm2.weight.dtype)).to(dtype)
        return x + self.down(F.gelu(self.up(h), approximate="tanh"))


class Net(nn.Module):
    """A decoder whose head is the embedding's weight. matrix, vector: dtypes of 2-D and of 1-D parameters."""

    def __init__(self, s: Shape, device, matrix: torch.dtype, vector: torch.dtype, seed: int = 5):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(s.vocab, s.width, device=device, dtype=matrix)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(s, device, matrix, vector) for _ in range(s.layers))
        self.norm = nn.LayerNorm(s.width, device=device, dtype=vector)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x.to(self.norm.weight.dtype)).to(self.embed.weight.dtype)
        return F.linear(x, self.embed.weight)


def batch(s: Shape, step: int, rank: int, device) -> torch.Tensor:
    """int64 [rows, tokens + 1]: numbers that count up from random starts, so that the network can learn."""
    g = torch.Generator().manual_seed(1_000_003 * step + rank)
    start = torch.randint(0, s.vocab, (s.rows, 1), generator=g)
    made = (start + torch.arange(s.tokens + 1)) % s.vocab
    if torch.device(device).type != "cuda":
        return made
    # From pageable memory the host would wait for all queued work.
    return made.pin_memory().to(device, non_blocking=True)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def repeatable(on: bool) -> None:
    """Make equal runs on GPUs give equal bits, which is slower."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(on, warn_only=True)
    cuda = torch.backends.cuda
    for enable in (cuda.enable_cudnn_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_flash_sdp):
        enable(not on)  # their backward passes add in any order


# ---- clocks and timelines


class Clock:
    """Marks on the device's stream, and the milliseconds between two of them."""

    def __init__(self, cuda: bool):
        self.cuda = cuda

    def mark(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, a, b) -> float:
        if not self.cuda:
            return (b - a) * 1e3
        b.synchronize()
        return a.elapsed_time(b)


def union(spans: Iterable[Interval]) -> list[Interval]:
    """The union of `spans` as disjoint intervals, in order."""
    out: list[Interval] = []
    for a, b in sorted(spans):
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(b, out[-1][1]))
        elif b > a:
            out.append((a, b))
    return out


def uncovered(spans: Iterable[Interval], cover: Iterable[Interval]) -> float:
    """The length of the part of `spans` outside `cover`."""
    total, hidden = 0.0, union(cover)
    at = 0
    for a, b in union(spans):
        total += b - a
        while at < len(hidden) and hidden[at][1] <= a:
            at += 1
        i = at
        while i < len(hidden) and hidden[i][0] < b:
            total -= min(b, hidden[i][1]) - max(a, hidden[i][0])
            i += 1
    return total


@dataclass(frozen=True, slots=True)
class Timeline:
    """Milliseconds of a step in which a kernel or copy of a gather ran, and of those in which no other kernel ran.

    Medians if several steps were profiled (exposed_each): one pause of a host makes another rank's step-done signal wait.
    """

    gather_ms: float
    exposed_ms: float
    exposed_each: tuple[float, ...] = ()


def is_gather(name: str) -> bool:
    """Whether a kernel is NCCL's and moves bytes, or is the signal that owners have stepped.

    That signal is a sum of integers; gradients and norms are sums of floats.
    """
    name = name.lower()
    return "nccl" in name and ("reduce" not in name or "_u32" in name or "_i32" in name)


def timeline(trace: Path) -> Timeline:
    """Read a Chrome trace of torch's profiler over one step.

    Copies of a gather are those between devices, and those within a device on streams without other kernels.

    Raises:
        ValueError: The trace has no gather.
    """
    events = json.loads(trace.read_text())["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    spans = lambda gather: [(e["ts"], e["ts"] + e["dur"]) for e in kernels if is_gather(e["name"]) is gather]  # noqa: E731
    computing = {e.get("args", {}).get("stream") for e in kernels if not is_gather(e["name"])}
    mine = spans(True) + [
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") == "gpu_memcpy"
        and ("PtoP" in e["name"] or "DtoD" in e["name"] and e.get("args", {}).get("stream") not in computing)
    ]
    if not mine:
        raise ValueError(f"no kernel of a gather among {sorted({e['name'][:60] for e in kernels})}")
    return Timeline(uncovered(mine, []) / 1e3, uncovered(mine, spans(False)) / 1e3)
