"""Weights of a Megatron model in FP8 as TransformerEngine's blockwise scaling has them, on a CPU: a stand-in for its class, all bytes in
one buffer, where Megatron-Core's distributed optimizer puts them. test_te_fp8.py has the class itself."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.block_fp8 import SIDE, te_quantized

PAD = 64
"""Elements to which Megatron-Core aligns each parameter in its buffer."""


class DType(IntEnum):
    """TransformerEngine 2.20's: such a member prints as its number."""

    kFloat8E4M3 = 7
    kFloat8E5M2 = 8


class Float8BlockwiseQTensor(torch.Tensor):
    """A stand-in for TransformerEngine's class of this name: a tensor of the nominal dtype with no bytes of its own."""

    @staticmethod
    def __new__(cls, like: torch.Tensor, parts: dict[str, Any]) -> Float8BlockwiseQTensor:
        t = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad
        )
        for name, part in parts.items():
            setattr(t, f"_{name}", part)
        return t

    def get_metadata(self) -> dict[str, Any]:
        names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
        return {n: getattr(self, f"_{n}") for n in (*names, "fp8_dtype", "quantizer", "is_2D_scaled")}

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{func}: nothing may read the values of this stand-in")


def padded(blocks: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scales of a grid of blocks."""
    return blocks[0], -(-blocks[1] // 4) * 4


class Fp8Weights:
    """The weights of TransformerEngine's linear layers in these chunks, in bf16 and FP8; one of both is in them. `pow2`: of scales."""

    def __init__(self, chunks: Sequence[torch.nn.Module], pow2: bool):
        layers = importlib.import_module("transformer_engine.pytorch")
        linear = (layers.Linear, layers.LayerNormLinear, layers.GroupedLinear)
        self._pow2 = pow2
        self._seats = [
            (module._parameters, key, p)
            for chunk in chunks
            for module in chunk.modules()
            if isinstance(module, linear)
            for key, p in module._parameters.items()
            if p is not None and key.startswith("weight")
        ]
        sizes = [-(-p.numel() // PAD) * PAD for *_, p in self._seats]
        buffer = torch.zeros(sum(sizes), dtype=torch.uint8)
        self._quantized = []
        for (_, _, p), part in zip(self._seats, buffer.split(sizes)):
            blocks = tuple(-(-n // SIDE) for n in p.shape)
            scales = torch.full(padded(blocks), torch.nan)
            q = Float8BlockwiseQTensor(
                p,
                dict(
                    rowwise_data=part[: p.numel()].view(p.shape), rowwise_scale_inv=scales, columnwise_data=None,
                    columnwise_scale_inv=None, is_2D_scaled=True, fp8_dtype=DType.kFloat8E4M3,
                    quantizer=SimpleNamespace(block_len=SIDE, force_pow_2_scales=pow2),
                ),
            )  # fmt: skip
            for name, value in vars(p).items():  # Megatron's marks
                setattr(q, name, value)
            self._quantized.append(q)

    def quantize(self) -> None:
        """Write the present bf16 weights in FP8."""
        for (_, _, p), q in zip(self._seats, self._quantized):
            codes, scales = te_quantized(p.detach().float().numpy(), self._pow2)
            parts = q.get_metadata()
            parts["rowwise_data"].copy_(torch.from_numpy(codes))
            parts["rowwise_scale_inv"][:, : scales.shape[1]] = torch.from_numpy(scales)

    def put(self, fp8: bool) -> None:
        """Have the modules hold these weights."""
        for (table, key, p), q in zip(self._seats, self._quantized):
            table[key] = q if fp8 else p
