"""A refit that fails, with real processes and a real vLLM of two workers. Every point of failure: test_session_faults.py. Each case ends
with the typed error on all trainer ranks, in time, and an engine that serves one whole version or refuses to serve. The next refit is
compared with what vLLM itself computed from the checkpoint."""

import pytest
import torch

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")

from examples.common import toy  # noqa: E402
from examples.common.ports import free_port  # noqa: E402
from tests.support.refit_job import GRACE_S, Job, failed, good, until  # noqa: E402

FP32 = "model.layers.2.self_attn.q_norm.weight"


class Bench:
    """The shared engine, connected to trainers; `truth`: what vLLM computed from the checkpoint of seed 1."""

    def __init__(self, work):
        self.job = Job(work, "qwen3_moe")
        self.t = self.job.trainers
        self.a = self.job.engine("a", 2)
        self.connected = False
        self.whole = True  # since the last refit that a test made or broke; False: a test before this one failed
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
        if not self.connected or not self.whole:
            self.meet()
            self.repaired()

    def fresh_seed(self) -> int:
        self.seed, self.whole = self.seed + 1, False
        return self.seed

    def repaired(self, **more):
        """The next refit brings the checkpoint's weights back, bit for bit."""
        self.whole = False
        self.t.fault("")
        self.a.fault("")
        self.reports = self.t.refit(1, verify=True, **more)
        report = good(self.reports)
        assert report["verified"] and self.serves_truth() == report["version"]
        self.whole = True
        return report

    def serves_truth(self) -> str:
        now = self.a.observe()
        assert now.same(self.truth), now.differs(self.truth)
        return now.version

    def torn_or_untouched(self) -> None:
        """The failure may have come just before the first write: the engine is torn or serves the old version."""
        if not self.a.state()["error"]:
            self.serves_truth()
            return
        self.a.refused()
        forced = self.a.observe(force=True)
        assert forced.nan or forced.same(self.truth)


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


MISSING, EXTRA = "model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.9.unheard_of.weight"


@pytest.mark.parametrize(
    ("weights", "kind", "texts"),
    [
        (
            {"leave": [MISSING], "extra": [EXTRA]}, "LayoutError",
            (MISSING, EXTRA, "needed by the engine's model", "unknown to the engine's model"),
        ),
        ({"fp32": [FP32]}, "CoverageError", (FP32, "narrow")),
    ],
)  # fmt: skip
def test_a_checkpoint_that_does_not_fit_the_engine_is_refused_on_both_sides(bench, weights, kind, texts):
    bench.connected = False
    failed(bench.job.meet([bench.a], weights), kind, *texts, within=30)
    engine = bench.a.ready()
    assert engine["type"] == kind and all(text in engine["text"] for text in texts)


def test_a_narrowing_that_connect_allows_is_rounded(bench):
    bench.meet(weights={"fp32": [FP32]}, narrow=[FP32])
    good(bench.t.refit(bench.fresh_seed(), verify=True))
    assert not bench.a.observe().same(bench.truth)
    bench.repaired()


def test_trainers_whose_direct_connect_is_refused_connect_packed_at_once_at_the_same_rendezvous(bench):
    """The engine is served again, since its replica was refused too."""
    job, t, a = bench.job, bench.t, bench.a
    t.build(job.config, fp32=[FP32])
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    for _ in range(2):
        a.serve(rendezvous)
        waiting = t.say(do="connect", rendezvous=rendezvous, deadline_s=40.0, otherwise={"route": "packed"})
        tries = []
        while not tries or tries[-1] != "ready" and len(tries) < 5:
            if tries:
                a.serve(rendezvous)
            said = a.ready()
            tries.append(said["kind"] if said["kind"] == "ready" else said["type"])
        assert tries[0] == "CoverageError" and tries[-1] == "ready", tries
        connected = [c.expect("connected", "raised", timeout=60) for c in waiting]
        assert [c.get("failed") for c in connected] == ["CoverageError"] * 3, connected
        report = good(t.refit(bench.fresh_seed(), verify=True))
        assert report["verified"] and report["serving"] == [True]
        t.ask("close", "closed")
    bench.meet()
    bench.repaired()


def test_each_worker_receives_the_bytes_of_its_written_class(b):
    """Matrices are cut in two, experts are divided; vectors and routers lie on both workers. Counted from the config alone."""
    report = b.repaired()
    expected = [0, 0]
    for name, shape, dtype in toy.specs(b.job.config):
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = (96, shape[0] - 96)  # vLLM pads 160 rows to 192, and padding does not travel
            parts = [r * nbytes // shape[0] for r in rows]
        else:
            parts = [nbytes if len(shape) == 1 or name.endswith("mlp.gate.weight") else nbytes // 2] * 2
        expected = [e + p for e, p in zip(expected, parts, strict=True)]
    assert report["per_worker"] == [expected] and sum(r["sent"] for r in b.reports) == sum(expected)


@pytest.mark.parametrize("how", ["moved", "changed"])
def test_parameters_that_lie_elsewhere_are_found_again(b, how):
    b.t.ask("replace", "replaced", how=how, ranks=[1])
    b.repaired()


@pytest.mark.parametrize(
    ("fault", "kind", "text", "torn"),
    [
        ("worker:1:arm:raise", "XferError", "injected fault at arm", False),
        ("worker:0:digest:flip", "PlanMismatch", "nothing was moved", False),
        ("trainer:1:moving:raise", "XferError", "injected fault at moving", None),
        ("worker:0:wave:raise", "XferError", "injected fault at wave", True),
        ("worker:1:moving:hang", "DeadlineExceeded", "still moving", True),
        ("worker:1:checksum:flip", "VerificationError", "was not committed", True),
    ],
)
def test_a_failure_is_named_on_all_ranks_and_no_request_is_answered_from_a_mix(b, fault, kind, text, torn):
    """torn: whether a byte had moved; None if that is not known."""
    role, rank, point, action = fault.split(":")
    if point == "digest":  # ranks compare digests of plans that they made anew
        b.t.ask("replace", "replaced", how="changed")
    (b.t if role == "trainer" else b.a).fault(f"{fault}@1")
    deadline_s = 2.0 if action == "hang" else 20.0
    named = role if point == "checksum" else f"{role} {rank}"
    results = b.t.refit(b.fresh_seed(), verify=point == "checksum", deadline_s=deadline_s)
    failed(results, kind, named, text, within=2.0 + GRACE_S if action == "hang" else 10)
    if torn is None:
        b.torn_or_untouched()
    elif torn:
        refusal = b.a.refused()
        assert b.a.observe(force=True).nan, "a request that is forced"
        assert action != "raise" or "mix of two versions" in refusal
        assert point != "checksum" or b.a.state()["version"] is None
    else:
        b.serves_truth()
    b.repaired()


def test_a_trainer_that_is_killed_is_named_and_the_job_can_start_again(b):
    """Trainer 0 has the rendezvous in its process. The engine outlives its trainers, and the first refit of new ones repairs it."""
    b.t.ask("set", "set", seed=b.fresh_seed())
    b.t.fault("trainer:0:moving:kill@1")
    b.connected = False
    first, *others = b.t.say(do="refit", deadline_s=20.0)
    failed([c.expect("refitted", "raised", timeout=60) for c in others], "PeerLost", "trainer 0", within=20.0)
    first.expect("ended", timeout=20)
    until(lambda: b.a.state()["error"], 20, "the controller misses the rendezvous")
    b.torn_or_untouched()
    b.meet()
    b.torn_or_untouched()  # another connection repairs nothing
    b.repaired()
