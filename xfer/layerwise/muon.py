"""Muon: momentum, made orthogonal by Newton-Schulz steps (K. Jordan's quintic iteration), for matrices.

A small reference implementation. Any torch optimizer that updates one parameter at a time works in its place. This module does not
use owners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import overload

import torch
import torch.distributed as dist

from xfer.errors import Unsupported
from xfer.layerwise.ownership import NEWTON_SCHULZ_STEPS

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of X <- aX + b(XX')X + c(XX')²X, as published with Muon: singular values converge near 1 in a few steps."""

Pieces = Callable[[torch.nn.Parameter], "tuple[dist.ProcessGroup, int] | None"]


def newton_schulz(
    matrix: torch.Tensor, steps: int = NEWTON_SCHULZ_STEPS, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Makes matrices nearly orthogonal.

    Args:
        matrix: [..., rows, columns], any floating dtype.
        steps: Number of iterations.
        dtype: Dtype of the computation. Default: the matrix's, or fp32 for 16-bit matrices on a CPU, which has no fast 16-bit
            products.

    Returns:
        A tensor of the same shape and dtype, with all singular values near 1 (0.7 to 1.2).
    """
    if dtype is None:
        dtype = torch.float32 if matrix.device.type == "cpu" and matrix.dtype.itemsize < 4 else matrix.dtype
    a, b, c = QUINTIC
    x = matrix.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    return (x.mT if tall else x).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Updates parameters of at least two dims; more dims are a batch of matrices (the last two dims).

    Args:
        lr: Learning rate. The root-mean-square of an update is about 0.2 lr, as with AdamW, for any shape.
        weight_decay: Decoupled weight decay.
        pieces: For matrices of which this rank holds a part (tensor parallel): parameter -> (process group, dim that is cut
            evenly, in rank order), None for whole ones. The momentum is then gathered over that group, so that the update is that
            of the whole matrix. All ranks of the group must step the same parameters in the same order.
        compute_dtype: Dtype of the Newton-Schulz steps, see `newton_schulz`; bf16 is much faster on GPUs, and usual there.

    Raises:
        Unsupported: Some parameters have fewer than two dims; give them to another optimizer.
    """

    def __init__(
        self,
        params,
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        steps: int = NEWTON_SCHULZ_STEPS,
        pieces: Pieces | None = None,
        compute_dtype: torch.dtype | None = None,
    ):
        self._pieces, self._dtype = pieces, compute_dtype
        defaults = dict(lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, steps=steps)
        super().__init__(params, defaults)

    @staticmethod
    def refuses(params: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """One line for each (name, parameter) that Muon cannot update."""
        return [
            f"{name} of shape {tuple(p.shape)}: Muon updates matrices; give it to another optimizer, such as Adam"
            for name, p in params
            if p.dim() < 2
        ]

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        flat = self.refuses(("a parameter", p) for p in self.param_groups[-1]["params"])
        if flat:
            self.param_groups.pop()
            raise Unsupported("Muon updates matrices", flat)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates all parameters that have a gradient.

        Args:
            closure: Called first, with gradients enabled; computes the loss and the gradients.

        Returns:
            The result of `closure`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)
        return loss

    def _update(self, p: torch.nn.Parameter, grad: torch.Tensor, group: dict) -> None:
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        m = state["momentum_buffer"]
        m.mul_(group["momentum"]).add_(grad)
        seen = grad.add(m, alpha=group["momentum"]) if group["nesterov"] else m
        piece = self._pieces(p) if self._pieces is not None else None
        how = group["steps"], self._dtype
        update = newton_schulz(seen, *how) if piece is None else _of_whole(seen, *how, *piece)
        whole = list(p.shape[-2:])
        if piece is not None:
            whole[piece[1] - p.dim()] *= piece[0].size()
        if group["weight_decay"]:
            p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(update, alpha=-group["lr"] * 0.2 * max(whole) ** 0.5)


def _of_whole(
    part: torch.Tensor, steps: int, dtype: torch.dtype | None, group: dist.ProcessGroup, dim: int
) -> torch.Tensor:
    """This rank's part of the update of the whole matrix. Fused rows are in another order than in the whole matrix; the
    iteration commutes with that permutation."""
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    whole = newton_schulz(torch.cat(parts, dim), steps, dtype)
    return whole.chunk(group.size(), dim)[group.rank()]
