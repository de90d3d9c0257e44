"""Muon and Adam by owners on a small transformer that learns to add, with a loss curve. Needs torch and xfer only, no GPU.

torchrun --nproc-per-node 4 examples/muon_layerwise.py
torchrun --nproc-per-node 4 examples/muon_layerwise.py --blocking      # the same losses, to the last bit
python examples/muon_layerwise.py                                      # one process, no owners
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from xfer.layerwise import LayerWiseOptimizer, Muon, ParamGroup

DIGITS, WIDTH, TOKENS = 2, 64, 13  # "47+85=132": ten digits, + = and padding


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Adder(nn.Module):
    def __init__(self, layers: int):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.05)
        self.place = nn.Parameter(0.02 * torch.randn(3 * DIGITS + 3, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)  # tied


def batch(step: int, rank: int, rows: int = 64) -> torch.Tensor:
    """int64 [rows, 3 * DIGITS + 3]: two numbers, their sum backwards (carries come first)."""
    g = torch.Generator().manual_seed(1000 * step + rank)
    a, b = torch.randint(0, 10**DIGITS, (2, rows), generator=g)
    digits = lambda n, k: torch.stack([n // 10**i % 10 for i in range(k)], 1)  # noqa: E731
    sign = lambda n: torch.full((rows, 1), n)  # noqa: E731
    return torch.cat([digits(a, DIGITS), sign(10), digits(b, DIGITS), sign(11), digits(a + b, DIGITS + 1)], 1)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    said = model(tokens[:, :-1])[:, -(DIGITS + 1) :]
    return F.cross_entropy(said.flatten(0, 1), tokens[:, -(DIGITS + 1) :].flatten())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--layers", type=int, default=3)
    options.add_argument("--blocking", action="store_true", help="gather at the end of step(), not during the forward")
    given = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    several = "RANK" in os.environ
    if several:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if several else 0
    net = Adder(given.layers)
    model = DistributedDataParallel(net) if several else net

    matrices = [p for p in net.blocks.parameters() if p.dim() == 2]
    others = [p for p in net.parameters() if all(p is not m for m in matrices)]
    optimizer = LayerWiseOptimizer(
        model,
        [
            ParamGroup(matrices, Muon, {"lr": 0.02}, cost="newton_schulz"),
            ParamGroup(others, torch.optim.Adam, {"lr": 3e-3}),
        ],
        overlap=not given.blocking,
        bucket_bytes=100_000,
        clip_grad=1.0,
    )
    if rank == 0:
        table = optimizer.ownership["dense"]
        for r in range(table.size):
            print(f"rank {r} owns {len(table.of(r)):2} parameters, {table.nbytes[r]:7,} bytes")
    every = max(1, given.steps // 20)
    for step in range(given.steps):
        loss = loss_of(model, batch(step, rank))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if several:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        if rank == 0 and (step % every == 0 or step == given.steps - 1):
            print(f"step {step:4}  loss {mean:.6f}  {'#' * int(25 * mean)}", flush=True)
    optimizer.drain()  # now every rank has every parameter
    with torch.no_grad():
        tokens = batch(given.steps, 0, rows=500)
        right = (net(tokens[:, :-1])[:, -(DIGITS + 1) :].argmax(-1) == tokens[:, -(DIGITS + 1) :]).all(1)
    if rank == 0:
        print(f"{right.float().mean():.1%} of 500 sums are right")
    optimizer.close()
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
