"""TransformerEngine's kernels of FP8 parameters in numpy, for a machine without a GPU. All the rest is TransformerEngine's own."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

from tests.support.block_fp8 import SIDE, te_quantized, to_bfloat16, to_e4m3


def install() -> None:
    """Put them in place for the life of this process, and torch's Adam in place of the fused one."""
    import megatron.core.optimizer
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor import float8_blockwise_tensor as blocks
    from transformer_engine.pytorch.tensor import utils

    megatron.core.optimizer.Adam = _Adam

    def update(quantizer, src, dst, *, noop_flag=None):
        parts = dst.get_metadata()
        codes, scales = te_quantized(src.detach().float().numpy(), quantizer.force_pow_2_scales)
        parts["rowwise_data"].copy_(torch.from_numpy(codes))
        parts["rowwise_scale_inv"][:, : scales.shape[1]] = torch.from_numpy(scales)
        if dst._columnwise_data is not None:
            dst._create_columnwise()
        return dst

    def quantize(quantizer, tensor):
        empty = quantizer.make_empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return update(quantizer, tensor, empty)

    def transposed(data, dtype, out=None):
        new = data.t().contiguous()
        return new if out is None else out.copy_(new)

    def dequantize(t, *, dtype=None):
        values, scales = t._rowwise_data.view(torch.float8_e4m3fn).float(), t._rowwise_scale_inv
        each = scales.repeat_interleave(SIDE, 0)[: values.shape[0]].repeat_interleave(SIDE, 1)[:, : values.shape[1]]
        return (values * each).to(dtype or t.dtype)

    blocks.Float8BlockwiseQTensor.dequantize = dequantize
    blocks.Float8BlockQuantizer.update_quantized = update
    blocks.Float8BlockQuantizer.quantize_impl = quantize
    tex.fp8_transpose = transposed
    tex.fp8_block_scaling_compute_partial_amax = partial_amax
    tex.fp8_block_scaling_partial_cast = partial_cast
    utils.multi_tensor_applier = lambda op, buffer, lists, *args: compute_scales(lists, *args)


def gather_one_by_one() -> None:
    """Run each of Megatron-Core's coalesced collectives by itself: gloo makes one of those, and converts dtypes if they differ."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    works: list[dist.Work] = []

    def noted(collective):
        return lambda *args, **how: works.append(collective(*args, **{**how, "async_op": True}))

    @contextmanager
    def together(group, async_ops=False, **_):
        works.clear()
        mine: list[dist.Work] = []
        yield SimpleNamespace(wait=lambda: [w.wait() for w in mine])
        mine += works
        if not async_ops:
            for w in mine:
                w.wait()

    buffers._coalescing_manager = together
    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(buffers, name, noted(getattr(buffers, name)))


class _Adam(torch.optim.AdamW):
    """Torch's in place of TransformerEngine's, with the arguments that Megatron-Core gives that."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, **_):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def _blocks(h: int, w: int, start: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Block of each of the elements start..start + n of an [h, w] matrix: rows, columns."""
    row, column = np.divmod(np.arange(start, start + n), w)
    return row // SIDE, column // SIDE


def partial_amax(master, amax, h, w, start, block_len):
    size = np.abs(master.detach().float().numpy().reshape(-1))
    np.maximum.at(amax.numpy(), _blocks(h, w, start, master.numel()), size)


def partial_cast(master, out, scale, h, w, start, block_len, dtype):
    x = to_bfloat16(master.detach().float().numpy().reshape(-1)) * scale.numpy()[_blocks(h, w, start, master.numel())]
    out.copy_(torch.from_numpy(to_e4m3(x)).view(out.shape))


def compute_scales(lists, largest, pow2, epsilon):
    for amax, scale, inverse in zip(*lists):
        a = np.maximum(amax.numpy(), np.float32(epsilon))
        s = np.where(a > 0, np.float32(largest) / np.where(a > 0, a, np.float32(1)), np.float32(1)).astype(np.float32)
        if pow2:
            s = (s.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
        scale.copy_(torch.from_numpy(s))
        inverse.copy_(torch.from_numpy(np.float32(1) / s))
