"""The gate: on the tokens that were sampled, how far the trainer's logprobs are from the engine's, step by step.

Both computed them from what must be the same weights, so all that may lie between them is rounding. `error` is
mean(exp|d|), 1 when they agree; `kl` estimates KL(engine || trainer) as mean(exp(d) - 1 - d), never negative; d is
trainer minus engine. What it cannot see is said in docs/guide.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from xfer.errors import XferError


@dataclass(frozen=True)
class Gap:
    """`worst`: the largest |d| of any token."""

    tokens: int
    error: float
    kl: float
    worst: float


def sums(trainer: torch.Tensor, engine: torch.Tensor) -> torch.Tensor:
    """Logprobs of the same tokens, any equal shapes -> float64 [4]: count, sum exp|d|, sum of KL terms, max |d|."""
    d = trainer.double() - engine.double()
    a = d.abs()
    return torch.stack([d.new_tensor(d.numel()), a.exp().sum(), (d.exp() - 1 - d).sum(), a.max()])


def added(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """All parts, which `sums` returned, as one: counts and sums add up, the largest |d| is the maximum."""
    both = torch.stack([torch.zeros(4, dtype=torch.float64), *parts])
    return torch.cat([both[:, :3].sum(0), both[:, 3:].amax(0)])


def gap(total: torch.Tensor) -> Gap:
    count, error, kl, worst = total.tolist()
    return Gap(int(count), error / count, kl / count, worst)


@dataclass(frozen=True)
class Row:
    """One step of the curve, as it stands in the file: one JSON object a line. Seconds of the refit: of the whole call, of the
    bytes, of the engine's pause (report.py)."""

    step: int
    version: str
    reward: float
    error: float
    kl: float
    worst: float
    refit_s: float
    step_s: float
    transfer_s: float = 0.0
    outage_s: float = 0.0


class GateFired(XferError):
    """Trainer and engine disagree about the same tokens."""


class Gate:
    """Keeps the curve in `path`, and stops the run at the first step whose error is above `limit`."""

    def __init__(self, limit: float, path: Path | None):
        self.limit, self.path = limit, path

    def keep(self, row: Row) -> None:
        if self.path is not None:
            with self.path.open("a") as f:
                f.write(json.dumps(asdict(row)) + "\n")

    def judge(self, step: int, seen: Gap) -> None:
        # Written so that NaN fires, too: it is what a torn engine answers.
        if not seen.error <= self.limit:
            raise GateFired(
                f"step {step}: mean(exp|logprob difference|) over {seen.tokens} tokens is {seen.error:.6g}, above {self.limit:g}",
                [
                    f"the worst token differs by {seen.worst:.4g}, KL is {seen.kl:.4g}",
                    "docs/guide.md, 'When the gate fires', says what to look at and in which order",
                ],
            )


def read_curve(path: Path) -> list[Row]:
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()]
