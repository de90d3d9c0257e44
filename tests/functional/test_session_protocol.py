"""Refits that succeed, in a simulation: versions, reports, labels, arguments, and leaving."""

import numpy as np
import pytest
import torch

from tests.support.simulation import simulated
from tests.support.world import ToyLayout, ToySource, World, good
from xfer import errors as e
from xfer.arguments import RefitOptions
from xfer.trace.traced import Traced
from xfer.transport.p2p import P2P

pytestmark = pytest.mark.usefixtures(simulated.__name__)


def test_a_byte_that_is_wrong_in_the_engine_is_refused_with_verify_and_only_then(monkeypatch):
    """In the live storage itself, after the transfer; no checksum is faked."""
    with World(trainers=2) as w:
        w.commits(1)
        run, engine = P2P.run, w.engines[0]

        def flip_one_bit(self, *args):
            out = run(self, *args)
            if self.link.rank == 2:  # the first worker
                engine.takers[0].live["layers.0.w"].view(torch.int16)[3, 2] ^= 1
            return out

        monkeypatch.setattr(P2P, "run", flip_one_bit)
        w.fails(2, e.VerificationError, "worker 0", verify=True)
        assert engine.paused and w.controllers[0].error is not None and engine.label == "xfer:mixed"
        assert all(torch.isnan(t.live["norm"]).all() for t in engine.takers)
        with pytest.raises(e.EngineLost), w.controllers[0].serving():
            pass
        good(w.refit(3, verify=False))
        assert [t.wrong(3) for t in engine.takers] == [["layers.0.w"], []], "what verify is for"
        monkeypatch.undo()
        w.commits(4, verify=True)
        assert not engine.paused and w.controllers[0].error is None
        for taker in engine.takers:  # padding comes from no tensor of the checkpoint
            taker.live["embed"][-1] = 5.0
        monkeypatch.setattr("xfer.kernels.torch_impl.TorchRows.fill", lambda self: None)
        w.fails(5, e.VerificationError, "constants", verify=True)
        monkeypatch.undo()
        w.commits(6, verify=True)


class Nothing(ToySource):
    """Owns nothing, where the other rank holds all rows."""

    def rows(self, n: int) -> tuple[int, int]:
        return (0, n) if self.rank else (0, 0)

    def read(self):
        layout = super().read()
        return layout if self.rank else ToyLayout(Traced((), ()), (), {})


def test_a_rank_that_owns_nothing_takes_part():
    with World(trainers=2, sources=[Nothing(i, 2) for i in range(2)]) as w:
        for version in (1, 2):
            w.commits(version)


# ---- arguments and labels

BAD = [
    *(dict(version=v) for v in ("x" * 300, "", "a\ud800", "xfer:mixed", 1.5)),
    *(dict(deadline_s=v) for v in (-1.0, 0, float("inf"), float("nan"))),
    *(dict(min_replicas=v) for v in (-1, 2)),
    *(dict(at_once=v) for v in (0, -1, 1.5)),
    dict(wait="decision"),
    dict(delta="all"),
]


def test_arguments_that_cannot_work_are_refused_and_cost_one_call():
    with World(trainers=2) as w:
        w.commits(1)
        for bad in BAD:
            w.fails(2, e.XferError, f"{next(iter(bad))}=", **bad)
            assert not w.engines[0].paused
        with pytest.raises(e.XferError) as caught:
            w.sessions[0].refit(RefitOptions(version="", deadline_s=-1, min_replicas=9))
        assert len(caught.value.violations) == 3, "all at once"
        w.fails(None, e.XferError, "version=", ranks=[1])  # the same call of the other rank
        for more in (
            {"verify": False},
            dict(verify=np.bool_(True), version=np.int64(7)),
            dict(verify=1, deadline_s=30),
        ):
            report = w.commits(3, **more)
            assert report.verified == bool(more["verify"]) and report.version == more.get("version", report.version)


def test_labels_go_on_from_what_the_engines_have_had():
    """Also those of trainers that start anew. What else labels do: test_versions.py."""
    with World(trainers=2) as w:
        assert [w.commits(2, version=v).version for v in (None, 7, "step", None)] == [1, 7, "step", 8]
        for s in (*reversed(w.sessions), *w.controllers):
            s.close()
        engine, w.engines, w.controllers = w.engines[0], [], []
    assert engine.label == "8"
    with World(trainers=1, engines=[engine]) as w:
        assert w.commits(3).version == 9 and engine.label == "9"
