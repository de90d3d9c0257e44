"""A small transformer in plain torch for tests of layer-wise optimizers, its data, and its parameter groups."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import checkpoint as dcp

from xfer.layerwise import Muon, ParamGroup

VOCAB, WIDTH, SEQ = 61, 40, 12


def run(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The layer in its own dtype, the result in that of `x`."""
    return layer(x.to(layer.weight.dtype)).to(x.dtype)


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        qkv = self.qkv(run(self.norm1, x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in qkv)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(run(self.norm2, x))))


class Transformer(nn.Module):
    """The head is the embedding's weight, read by this module and not by the one that has it. `late`: a module that is
    registered before all others and used after them."""

    def __init__(self, layers: int = 2, width: int = WIDTH, dtype: torch.dtype = torch.float32, seed: int = 7):
        super().__init__()
        torch.manual_seed(seed)
        self.late = nn.LayerNorm(width)
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.frozen = nn.Parameter(torch.full((width,), 0.5), requires_grad=False)
        self.to(dtype)
        self.narrow, self.swap = None, False

    def forward(self, tokens):
        x = self.embed(tokens) + self.frozen
        for block in reversed(self.blocks) if self.swap else self.blocks:
            x = block(x)
        x = run(self.late, x)
        if self.narrow is not None:
            x = x + run(self.narrow, x)
        return F.linear(x, self.embed.weight)


class MixedTransformer(Transformer):
    """bf16 matrices, fp32 norms, an fp16 projection: every dtype that models are trained in, side by side."""

    def __init__(self, **more):
        super().__init__(dtype=torch.bfloat16, **more)
        for m in self.modules():
            if isinstance(m, nn.LayerNorm):
                m.float()
        self.narrow = nn.Linear(WIDTH, WIDTH).half()


def groups(model: nn.Module, lr: float = 0.02) -> list[ParamGroup]:
    """Muon for the matrices of the blocks, Adam for everything else."""
    inside = {id(p) for p in model.blocks.parameters() if p.dim() == 2}
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        ParamGroup([p for p in trained if id(p) in inside], Muon, {"lr": lr}, cost="newton_schulz"),
        ParamGroup([p for p in trained if id(p) not in inside], torch.optim.Adam, {"lr": lr / 4, "foreach": False}),
    ]


class Everywhere:
    """The same optimizers without owners: every rank steps everything, 16-bit parameters by fp32 copies."""

    def __init__(self, model: nn.Module):
        self._targets = {p: self._target(p) for p in model.parameters() if p.requires_grad}
        self._inner = [g.optimizer([self._targets[p] for p in g.params], **g.options) for g in groups(model)]

    @staticmethod
    def _target(p: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(p.detach().float()) if p.dtype.itemsize < 4 else p

    def zero_grad(self) -> None:
        for p in self._targets:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for p, t in self._targets.items():
            if t is not p:
                t.grad = p.grad.float()
        for o in self._inner:
            o.step()
        for p, t in self._targets.items():
            if t is not p:
                p.copy_(t)


def batch(step: int, rank: int, rows: int = 4) -> torch.Tensor:
    """int64 [rows, SEQ + 1]: counting upwards from random starts."""
    g = torch.Generator().manual_seed(1_000_003 * step + rank)
    return (torch.randint(0, VOCAB, (rows, 1), generator=g) + torch.arange(SEQ + 1)) % VOCAB


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def backward(model: nn.Module, optimizer, number: int, rank: int = 0) -> float:
    """Compute gradients of a rank's batch number `number`. Returns the loss."""
    loss = loss_of(model, batch(number, rank))
    optimizer.zero_grad()
    loss.backward()
    return loss.item()


def step(model: nn.Module, optimizer, number: int, rank: int = 0) -> float:
    """Train one step on a rank's batch number `number`. Returns the loss."""
    loss = backward(model, optimizer, number, rank)
    optimizer.step()
    return loss


def digest_of(params: Iterable[torch.Tensor]) -> str:
    """Digest of the bytes of these tensors, in order."""
    h = hashlib.sha256()
    for p in params:
        h.update(p.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return h.hexdigest()


def digest(model: nn.Module) -> str:
    return digest_of(model.parameters())


def content(folder) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, read by torch alone."""
    known = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    out = {k: torch.empty(md.size, dtype=md.properties.dtype) for k, md in known.items()}
    dcp.load(out, checkpoint_id=str(folder), no_dist=True)
    return out
