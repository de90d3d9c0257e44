"""A refit that fails, with real processes and a real vLLM: trainers are plain DTensor processes, the engine is tensor and
expert parallel over two workers. Every point of failure is tested with small stand-ins: test_session_faults.py,
test_session_deaths.py.

Each case ends with the typed error on all trainer ranks, in time, and with an engine that either serves one whole version or
refuses to serve. The next refit is compared with what vLLM itself computed from the same checkpoint on disk. One engine
serves all cases.
"""

import time

import pytest
import torch

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")

from examples.common import toy  # noqa: E402
from examples.common.ports import free_port  # noqa: E402
from tests.support.proc import stop_all  # noqa: E402
from tests.support.refit_job import GRACE_S, Job, Observed, failed, good, until  # noqa: E402

FP32 = "model.layers.2.self_attn.q_norm.weight"


class Bench:
    """The shared engine, connected to trainers; `truth`: what vLLM computed from the checkpoint of seed 1."""

    def __init__(self, work):
        self.job = Job(work, "qwen3_moe")
        self.t = self.job.trainers
        self.a = self.job.engine("a", 2)
        self.whole, self.seed = False, 1  # whole: since the last refit that a test made or broke

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

    def ensure(self):
        if not self.whole:
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
        assert report["verified"] and self.serves_truth().version == report["version"]
        self.whole = True
        return report

    def serves_truth(self) -> Observed:
        now = self.a.observe()
        assert now.same(self.truth), now.differs(self.truth)
        return now

    def torn(self, surely: bool = True) -> str:
        """The controller refuses the engine's owner; a forced request is answered with NaN. Return the refusal. Unless it is `surely`
        torn, the failure may have come just before the first write."""
        if not surely and not self.a.state()["error"]:
            self.serves_truth()
            return ""
        text, forced = self.a.refused(), self.a.observe(force=True)
        assert forced.nan or not surely and forced.same(self.truth)
        return text

    def fail(self, **more):
        """Refit to other weights than the truth's; this is to fail."""
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


MISSING, EXTRA = "model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.9.unheard_of.weight"


@pytest.mark.parametrize(
    ("weights", "kind", "texts"),
    [
        (
            {"leave": [MISSING], "extra": [EXTRA]},
            "LayoutError",
            (MISSING, EXTRA, "needed by the engine's model", "unknown to the engine's model"),
        ),
        ({"fp32": [FP32]}, "CoverageError", (FP32, "narrow")),
    ],
)
def test_a_checkpoint_that_does_not_fit_the_engine_is_refused_on_both_sides(bench, weights, kind, texts):
    bench.whole = False
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


# ---- refits


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


def test_parameters_that_lie_elsewhere_are_found_again(b):
    """Another layout is tested below, with the digest fault."""
    b.t.ask("replace", "replaced", how="moved", ranks=[1])
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
    results = b.fail(verify=point == "checksum", deadline_s=deadline_s)
    failed(results, kind, named, text, within=2.0 + GRACE_S if action == "hang" else 10)
    if torn is False:
        b.serves_truth()
    else:
        refusal = b.torn(surely=torn is not None)
        assert torn is None or action != "raise" or "mix of two versions" in refusal
        assert point != "checksum" or b.a.state()["version"] is None
    if point == "wave":  # it stays torn when the next refit fails before it moves a byte
        failed(b.fail(ranks=[0, 1], deadline_s=2.0), "DeadlineExceeded", "trainer 2", within=2.0 + GRACE_S)
        b.torn()
        b.t.refit(ranks=[2])
    b.repaired()


# ---- processes that die


@pytest.mark.parametrize(("point", "rank"), [pytest.param("enter", 2, marks=pytest.mark.slow), ("moving", 0)])
def test_a_trainer_that_is_killed_is_named_and_the_job_can_start_again(b, point, rank):
    """The engine outlives its trainers: when they restart it joins them and the first refit repairs it. Trainer 0 has the
    rendezvous in its process."""
    b.t.ask("set", "set", seed=b.fresh_seed())
    b.t.fault(f"trainer:{rank}:{point}:kill@1")
    waiting = b.t.say(do="refit", deadline_s=20.0)
    results = [waiting[i].expect("refitted", "raised", timeout=60) for i in range(3) if i != rank]
    failed(results, "PeerLost", f"trainer {rank}", within=20.0)
    waiting[rank].expect("ended", timeout=20)
    if rank:
        until(lambda: f"trainer {rank}" in b.a.state()["lost"], 20, "the controller hears of it")
    else:
        until(lambda: b.a.state()["error"], 20, "the controller misses the rendezvous")
    for meet in (b.meet, b.repaired):  # another connection repairs nothing
        if point == "enter":
            b.serves_truth()
        else:
            b.torn(surely=False)
        meet()


@pytest.mark.slow
def test_replicas_whose_processes_die_leave_the_others_whole_and_can_come_back(b):
    """One refit to three replicas: a worker of the second dies while bytes move, a worker of the third at the commit. An engine
    with another number of workers takes the place of the second and is whole after its first refit."""
    job, t = b.job, b.t
    dying = {"moving": job.engine("b", 2), "commit": job.engine("c", 1)}
    again = job.engine("again", 1)
    for e in (*dying.values(), again):
        e.start(str(job.model), "dummy", ep=e.tp > 1)
    for e in (*dying.values(), again):
        e.started()
    t.fault("")
    t.restart_dead()
    good(job.meet([b.a, *dying.values()]))
    assert all(e.ready()["kind"] == "ready" for e in (b.a, *dying.values()))
    good(t.refit(1, verify=True))
    b.serves_truth()
    one_worker, seen = dying["commit"].observe(), dying["moving"].observe()
    assert seen.same(b.truth), seen.differs(b.truth)

    for point, e in dying.items():
        e.fault(f"worker:{e.tp - 1}:{point}:kill")
    began = time.monotonic()
    report = good(t.refit(b.fresh_seed(), min_replicas=1, deadline_s=20.0))
    assert time.monotonic() - began < 20.0 + GRACE_S
    assert report["committed"] == [True, False, False] == report["serving"]
    for i, error in enumerate(report["errors"][1:], 1):
        assert error.startswith(("PeerLost", "EngineLost")) and f"replica {i}" in error, error
    now = b.a.observe()
    assert now.version == report["version"] and not now.nan and not now.same(b.truth)
    for e in dying.values():
        until(lambda e=e: e.state()["error"], 20, f"{e.name} knows that it is lost")
        assert e.refused()
    stop_all([e.child for e in dying.values()])
    again.serve(job.rendezvous, 1)
    assert again.ready()["kind"] == "ready"
    report = good(t.refit(1, verify=True, min_replicas=2))
    assert report["committed"] == [True, True, False]
    b.serves_truth()
    back = again.observe()
    assert back.same(one_worker), back.differs(one_worker)
