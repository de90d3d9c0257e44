"""What is promised when a refit fails, with real processes and a real vLLM: trainers are plain DTensor processes, the engine
is tensor and expert parallel over two workers. (The same failures with small stand-ins: test_session_protocol.py.)

Every case ends with the typed error on all trainer ranks, in time, and with an engine that either serves one whole version
or refuses to serve; then the next refit is checked against what a fresh vLLM computed from the same checkpoint on disk.
One engine serves all cases but those that kill it, so they run in file order; each leaves it at the truth.
"""

import os
import signal
import time

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")

from tests.support.refit_job import GRACE_S, Job, failed, good  # noqa: E402

FP32 = "model.layers.2.self_attn.q_norm.weight"


class Bench:
    """The shared engine, connected to trainers; `truth`: what vLLM computed from the checkpoint of seed 1."""

    def __init__(self, work):
        self.job = Job(work, "qwen3_moe")
        self.t = self.job.trainers
        self.a = self.job.engine("a", 2)
        self.connected = False
        self.seed = 1

    def start(self):
        self.a.start(str(self.job.model), "auto", ep=True)
        self.a.started()
        self.truth = self.a.observe()
        assert not self.truth.nan

    def meet(self, **more):
        """Trainers and the engine at a new rendezvous; what is dead is started again."""
        self.t.fault("")
        self.a.fault("")
        self.t.restart_dead()
        good(self.job.meet([self.a], **more))
        assert self.a.ready()["kind"] == "ready"
        self.connected = True

    def ensure(self):
        if not self.connected:
            self.meet()
            self.repaired()

    def fresh_seed(self) -> int:
        self.seed += 1
        return self.seed

    def repaired(self, **more):
        """The next refit brings the checkpoint's weights back, bit for bit."""
        self.t.fault("")
        self.a.fault("")
        report = good(self.t.refit(1, verify=True, **more))
        now = self.a.observe()
        assert report["verified"] and now.version == report["version"]
        assert now.same(self.truth), now.differs(self.truth)
        return report

    def serves_truth(self):
        now = self.a.observe()
        assert now.same(self.truth), now.differs(self.truth)

    def torn(self) -> str:
        """Refused to its owner, NaN to whoever goes past the refusal."""
        text = self.a.refused()
        assert self.a.observe("force").nan
        return text

    def fail(self, **more):
        """A refit of other weights than the truth's, which is to fail."""
        return self.t.refit(self.fresh_seed(), **{"deadline_s": 20.0, **more})


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    b = Bench(tmp_path_factory.mktemp("refit_errors"))
    with b.job:
        b.start()
        yield b


@pytest.fixture
def b(bench):
    bench.ensure()
    return bench


# ---- connecting


def test_a_checkpoint_of_another_model_is_refused_with_both_sides_names(bench):
    missing, extra = "model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.9.unheard_of.weight"
    results = bench.job.meet([bench.a], {"leave": [missing], "extra": [extra]})
    failed(results, "LayoutError", missing, extra, "needed by the engine's model", "unknown to the engine's model", within=30)
    engine = bench.a.ready()
    assert engine["type"] == "LayoutError" and missing in engine["text"] and extra in engine["text"]


def test_a_narrowing_that_nobody_asked_for_is_refused_and_one_that_was_is_rounded(bench):
    results = bench.job.meet([bench.a], {"fp32": [FP32]})
    failed(results, "CoverageError", FP32, "narrow", within=30)
    assert bench.a.ready()["type"] == "CoverageError"
    bench.meet(weights={"fp32": [FP32]}, narrow=[FP32])
    good(bench.t.refit(bench.fresh_seed(), verify=True))
    assert not bench.a.observe().same(bench.truth)
    bench.repaired()


def test_who_does_not_fit_is_refused_at_the_door_and_may_come_again(bench):
    """Wrong bucket size, world, token and replica number; then the right ones join the same rendezvous."""
    job, t = bench.job, bench.t
    t.build(job.config)
    job.rendezvous = f"tcp://127.0.0.1:{_port()}"
    waiting = t.say([0, 1], do="connect", rendezvous=job.rendezvous, deadline_s=40.0)

    def knock(**wrong):
        return t.connect(job.rendezvous, ranks=[2], **wrong)

    failed(knock(bucket_bytes=1 << 20), "HandshakeError", "bucket_bytes", str(1 << 20), str(64 << 20), "trainer 2", within=10)
    failed(knock(world=4), "HandshakeError", "4 trainer ranks", within=10)
    failed(knock(token="not the token of this job"), "HandshakeError", "different tokens", within=10)
    for wrong, text in (({"replica": 7}, "replica 7"), ({"token": "not the token of this job"}, "different tokens")):
        bench.a.serve(job.rendezvous, **wrong)
        refused = bench.a.ready()
        assert refused["type"] == "HandshakeError" and text in refused["text"], refused
    bench.a.serve(job.rendezvous)
    good(t.connect(job.rendezvous, ranks=[2]) + [c.expect("connected", "raised", timeout=60) for c in waiting])
    assert bench.a.ready()["kind"] == "ready"
    bench.connected = True
    bench.repaired()


def _port():
    from tests.support.proc import free_port

    return free_port()
