"""What a Megatron trainer with FP8 parameters holds, as a checkpoint in block FP8: by Bridge's own export, which exports values. So bytes
of values and of scales are given to it as numbers from 0 to 255, each a parameter of the nominal dtype. All ranks take part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

SIDE = 128
"""Of a block."""


def checkpoint(trainer) -> dict[str, torch.Tensor]:
    """Tensors on the CPU: float8_e4m3fn with `…_scale_inv` beside it where the trainer (train_loop.Trainer) is in FP8, else as exported."""
    trainer.settle()
    out = _through(trainer, lambda parts, p: torch.zeros_like(parts["rowwise_data"]), lambda p: p)
    codes, *planes = (
        _through(trainer, lambda parts, p, k=k: _plane(parts, p.shape, k), lambda p: torch.full_like(p, torch.nan))
        for k in range(5)
    )
    for name in codes:
        if bool(codes[name].float().isnan().any()):
            continue
        out[name] = _bytes(codes[name]).view(torch.float8_e4m3fn)
        scales = torch.stack([_bytes(p[name]) for p in planes], -1).view(torch.float32).squeeze(-1)
        out[f"{name}_scale_inv"] = own = scales[::SIDE, ::SIDE].contiguous()
        assert torch.equal(_spread(own, scales.shape), scales), f"{name}: a block has several scales"
    return out


def _plane(parts: dict, shape: torch.Size, k: int) -> torch.Tensor:
    """uint8 [M, K]: the codes, or byte k - 1 of the scale of each element."""
    if k == 0:
        return parts["rowwise_data"]
    own = parts["rowwise_scale_inv"].contiguous().view(torch.uint8).unflatten(-1, (-1, 4))[..., k - 1]
    return _spread(own, shape)


def _spread(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Each block's number for each of its elements."""
    rows = blocks.repeat_interleave(SIDE, 0)[: shape[0]]
    return rows.repeat_interleave(SIDE, 1)[:, : shape[1]]


def _bytes(numbers: torch.Tensor) -> torch.Tensor:
    exact = numbers.float()
    assert bool(((exact >= 0) & (exact <= 255) & (exact == exact.round())).all())
    return exact.to(torch.uint8).contiguous()


def _through(trainer, quantized: Callable, plain: Callable) -> dict[str, torch.Tensor]:
    """Bridge's export with other weights in place of the parameters. `quantized`: of the parts of one in FP8, uint8."""

    def weight(p: torch.Tensor) -> torch.Tensor:
        if not hasattr(p, "get_metadata"):
            return plain(p.detach()) if p.is_floating_point() else p
        given = quantized(p.get_metadata(), p).to(p.dtype)
        for name, value in vars(p).items():  # Megatron's marks
            if not name.startswith("_"):
                setattr(given, name, value)
        return given

    tasks = [
        t if t is None or t.param_weight is None else dataclasses.replace(t, param_weight=weight(t.param_weight))
        for t in trainer.bridge.get_conversion_tasks(trainer.chunks)
    ]
    with torch.no_grad():
        stream = trainer.bridge.export_hf_weights(trainer.chunks, cpu=True, show_progress=False, conversion_tasks=tasks)
        return {name: tensor.detach().clone().contiguous() for name, tensor in stream}
