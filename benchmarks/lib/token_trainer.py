"""The trainer of benchmarks.tokens: one rank that computes, changes some elements of its weights, and refits. Commands are `Rank`'s
methods. On the GPU of XFER_GPU, or on the CPU where there is none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

import xfer
from benchmarks.lib.token_copies import Copier
from examples.common import toy
from tests.support import trainer_rank
from tests.support.proc import methods, obey
from xfer.errors import Unsupported

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("XFER_GPU", "0"))) if GPU else torch.device("cpu")
WIDTH = 4096 if GPU else 256
"""Rows and columns of the matrices that a step multiplies."""


def sync() -> None:
    if GPU:
        torch.cuda.synchronize(DEVICE)


class Rank(trainer_rank.Rank):
    _products = 0
    _copier = None

    def build(self, config: dict) -> dict:
        """The whole model on this rank, with random weights."""
        self.parameters = {n: toy.tensor(n, s, d, 1, DEVICE) for n, s, d in toy.specs(config)}
        return dict(bytes=sum(t.nbytes for t in self.parameters.values()))

    def source(self) -> xfer.TensorTrainer:
        return xfer.TensorTrainer(lambda: self.parameters, rank=0, world=1)

    def calibrate(self, step_ms: float) -> dict:
        """Choose how many products a step of so many milliseconds has."""
        kind = torch.bfloat16 if GPU else torch.float32
        self._a, self._b = (torch.randn(WIDTH, WIDTH, device=DEVICE).to(kind) for _ in range(2))
        self._c = torch.empty_like(self._a)
        some = 50
        for _ in range(2):
            began = time.perf_counter()
            self._multiply(some)
        self._products = max(1, round(some * step_ms / 1e3 / (time.perf_counter() - began)))
        return dict(products=self._products)

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self._a, self._b, out=self._c)
        sync()

    def _change(self, share: float) -> None:
        """Flip the last bit of this share of the elements, anywhere: the worst case of a delta."""
        for t in self.parameters.values():
            bits = t.view(torch.int16).view(-1)
            some = torch.randint(0, bits.numel(), (round(bits.numel() * share),), device=DEVICE)
            bits[some] = bits[some] ^ 1
        sync()

    def intervals(self, how: dict, publish: bool, share: float, pairs: int) -> dict:
        """Steps with a refit before them, and steps without, in turns.

        Args:
            how: Arguments of `refit` or `publish`.
            publish: Call `publish`, and the fence after the step.
            share: Share of the elements that change before each refit.
            pairs: How often.

        Returns:
            By interval: whether it has a refit, and monotonic seconds of its beginning, the end of the call, of the step, of the fence,
            and of the interval, by which the refit's outcome is known. And the flat reports, one for each refit whose outcome came with
            a report, and the refits' numbers. Or `refused`: why this mode cannot run.
        """
        call: Callable[..., xfer.RefitReport] = self.session.publish if publish else self.session.refit
        rows, reports = [], []
        try:
            for _ in range(2):  # the first one connects routes, and has no base for a delta
                self._change(share)
                call(**how)
                self.session.fence()
                self.session._session.settle()
        except (TypeError, Unsupported) as e:
            return dict(refused=f"{type(e).__name__}: {str(e).splitlines()[0]}")
        before = self.session._session.attempt
        for i in range(2 * pairs):
            refits = i % 2 == 0
            if refits:
                self._change(share)
            at = [time.monotonic()]
            report = call(**how) if refits else None
            at.append(time.monotonic())
            self._multiply(self._products)
            at.append(time.monotonic())
            self.session.fence()
            at.append(time.monotonic())
            self.session._session.settle()
            at.append(time.monotonic())
            rows.append([refits, *at])
            if report is not None and (whole := report.before if publish else report) is not None:
                reports.append({**whole.flatten(""), "extra_bytes": whole.extra_bytes, "routes": whole.routes()})
        return dict(rows=rows, reports=reports, refits=[before + 1, self.session._session.attempt])

    def offer(self, nbytes: int) -> dict:
        self._copier = Copier(DEVICE)
        return dict(handle=self._copier.offer(nbytes))

    def copy(self, handle: list, **pace) -> None:
        self._copier.begin(handle, **pace)

    def copied(self) -> dict:
        return dict(rate=self._copier.end())


if __name__ == "__main__":
    if GPU:
        torch.cuda.set_device(DEVICE)
    obey(*methods(Rank()))
