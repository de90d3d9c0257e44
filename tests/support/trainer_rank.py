"""What a trainer process does when a test asks for it, whatever it trains with: connect, step, refit, export, close."""

from __future__ import annotations

import os
import time

import torch

import xfer
from tests.support.connect import flat_connect
from tests.support.proc import emit
from xfer.errors import XferError
from xfer.trace.slots import local as held


class Rank:
    """Commands of one rank, for `proc.obey`. A subclass makes `trainer` in its `build`, and says what is refitted."""

    trainer = session = None

    def source(self) -> object:
        """What `xfer.connect` takes as the trainer."""
        raise NotImplementedError

    def connect(self, otherwise: dict | None = None, fenced: bool = False, **how) -> None:
        """otherwise: options of a second connection, which follows at once if the first one is refused. fenced: the optimizer waits for
        publishes, and marks what it changes."""
        began, failed = time.monotonic(), ""
        options = {"trainer": self.source(), "token": os.environ["XFER_TOKEN"], **how}
        try:
            self.session = flat_connect(**options)
        except XferError as e:
            if otherwise is None:
                raise
            failed = type(e).__name__
            self.session = flat_connect(**{**options, **otherwise})
        if fenced:
            self.session.fence_before(self.trainer.optimizer)
        emit("connected", plan=self.session.explain(), failed=failed, seconds=time.monotonic() - began)

    def step(self) -> None:
        emit("stepped", loss=self.trainer.step())

    def export(self, folder: str) -> None:
        self.trainer.export(folder)
        emit("exported")

    def refit(self, **how) -> None:
        emit("refitted", **self.refitted(**how))

    def refitted(self, **how) -> dict:
        """What the report of a refit says."""
        began = time.monotonic()
        r = xfer.nccl_xfer_refit(self.session, **how)
        return dict(
            version=r.version, verified=r.verified, seconds=time.monotonic() - began, bytes=r.bytes, sent=r.bytes_sent,
            extra=r.extra_bytes, rules=list(r.rules), scalars=r.flatten(""), routes=r.routes(), text=str(r.outcomes),
            committed=[o.committed for o in r.outcomes], serving=[o.serving for o in r.outcomes],
            errors=[f"{type(o.error).__name__}: {o.error}" if o.error else "" for o in r.outcomes],
            per_worker=[list(o.bytes_per_worker) for o in r.outcomes], phases=[dict(o.phases) for o in r.outcomes],
        )  # fmt: skip

    def nudge(self, every: int = 997) -> None:
        """Flips the lowest bit of each `every`-th element of all tensors, which are in bf16."""
        for p in self.trainer.parameters.values():
            held(p).view(torch.int16).view(-1)[::every] ^= 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        emit("nudged")

    def close(self) -> None:
        if self.session is not None:
            self.session.close()
        self.session = None
        emit("closed")
