"""What is promised when a refit fails, with real processes and a real vLLM: trainers are plain DTensor processes, the
engine is tensor and expert parallel over two workers. (The same with small stand-ins: test_session_protocol.py.)

Every case ends with the typed error on all trainer ranks, in time, and with an engine that either serves one whole
version or refuses to serve; then the next refit is checked against what vLLM itself computed from the same checkpoint
on disk. One engine serves all cases but those that kill it; each case leaves it at the truth.
"""

import os
import signal
import time

import pytest
import torch

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")

from examples.common import toy  # noqa: E402
from examples.common.ports import free_port  # noqa: E402
from tests.support.proc import stop_all  # noqa: E402
from tests.support.refit_job import GRACE_S, Job, failed, good, until  # noqa: E402

SLOW = pytest.mark.slow  # stand-ins have every point: test_session_protocol.py, test_session_deaths.py
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
        now = self.a.observe()
        assert report["verified"] and now.version == report["version"]
        assert now.same(self.truth), now.differs(self.truth)
        self.whole = True
        return report

    def serves_truth(self):
        now = self.a.observe()
        assert now.same(self.truth), now.differs(self.truth)

    def torn(self) -> str:
        """Refused to its owner, NaN to whoever goes past the refusal."""
        text = self.a.refused()
        assert self.a.observe(force=True).nan
        return text

    def torn_or_untouched(self):
        """After a failure that may have come just before the first write: torn, or the old version; nothing between."""
        if not self.a.state()["error"]:
            self.serves_truth()
            return
        self.a.refused()
        forced = self.a.observe(force=True)
        assert forced.nan or forced.same(self.truth)

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
    failed(
        results,
        "LayoutError",
        missing,
        extra,
        "needed by the engine's model",
        "unknown to the engine's model",
        within=30,
    )
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


def test_the_first_refit_of_trainers_whose_norms_differ_moves_nothing(bench):
    bench.meet(weights={"drifted": [1]})
    one = "one content on trainers 0, 2, another on trainer 1"
    failed(bench.t.refit(), "VerificationError", "norm.weight", one, "nothing was moved", within=30)
    bench.serves_truth()
    bench.repaired()


def test_training_that_never_reaches_the_engine_is_an_error_or_is_said_once(bench):
    """A model as PEFT names it: its frozen weights are sent under the checkpoint's names, its adapters are dropped."""
    bench.connected = False
    peft, dropped = {"peft": True, "trains": ["*lora_*"]}, {"drop": ["*lora_*"]}
    results = bench.job.meet([bench.a], peft, **dropped)
    failed(results, "CoverageError", "q_proj.lora_A.default.weight", "drop= names all of them", within=30)
    assert bench.a.ready()["type"] == "CoverageError"
    bench.meet(weights={**peft, "trains": ["*lora_*", "model.norm.weight"]}, **dropped)
    said = []
    for _ in range(4):
        bench.t.ask("step", "stepped", names=["*lora_*"])
        good(bench.t.refit())
        logs = [c.log_path.read_text() for c in bench.t.ranks]
        said.append([log.count("sent the weights that the engines already have") for log in logs])
    assert said == [[0, 0, 0], [0, 0, 0], [1, 0, 0], [1, 0, 0]]
    bench.meet()
    bench.repaired()


def test_who_does_not_fit_is_refused_at_the_door_and_may_come_again(bench):
    """Trainers that disagree about the job all hear it; a wrong world, token or replica number ends its owner's knock
    only, and the right ones join the same rendezvous."""
    job, t = bench.job, bench.t
    t.build(job.config)

    def wait():
        job.rendezvous = f"tcp://127.0.0.1:{free_port()}"
        return t.say([0, 1], do="connect", rendezvous=job.rendezvous, deadline_s=40.0)

    def knock(**wrong):
        return t.connect(job.rendezvous, ranks=[2], **wrong)

    def answers(waiting):
        return [c.expect("connected", "raised", timeout=60) for c in waiting]

    waiting = wait()
    all_three = knock(bucket_bytes=1 << 20) + answers(waiting)
    failed(all_three, "HandshakeError", "bucket_bytes", str(1 << 20), str(64 << 20), "trainer 2", within=20)
    waiting = wait()
    failed(knock(world=4), "HandshakeError", "4 trainer ranks", within=10)
    failed(knock(token="not the token of this job"), "HandshakeError", "different tokens", within=10)
    for wrong, text in (({"replica": 7}, "replica 7"), ({"token": "not the token of this job"}, "different tokens")):
        bench.a.serve(job.rendezvous, **wrong)
        refused = bench.a.ready()
        assert refused["type"] == "HandshakeError" and text in refused["text"], refused
    bench.a.serve(job.rendezvous)
    good(knock() + answers(waiting))
    assert bench.a.ready()["kind"] == "ready"
    bench.connected = True
    bench.repaired()


def test_trainers_whose_direct_connect_is_refused_connect_packed_at_once_at_the_same_rendezvous(bench):
    """Again and again, with the same processes. The engine is served again, since its replica was refused too."""
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


def test_connecting_ends_at_its_deadline_and_names_who_has_not_come(bench):
    job, t = bench.job, bench.t
    bench.connected = False
    t.build(job.config)
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    for ranks, texts in (
        ([0, 2], ("trainer 1: it has not called xfer.connect()",)),
        (None, ("replicas [0]", "xfer.serve()")),
    ):
        results = t.connect(rendezvous, ranks=ranks, deadline_s=2.0)
        failed(results, "DeadlineExceeded", *texts, within=2.0 + GRACE_S)


# ---- when all goes well


def test_each_worker_receives_the_bytes_of_its_written_class(b):
    """Matrices are cut in two or, experts, dealt out; vectors and routers lie on both. Counted here from the config
    alone."""
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


def test_a_prompt_in_the_prefix_cache_is_answered_by_the_new_weights(b):
    other = b.fresh_seed()
    good(b.t.refit(other))
    b.a.observe()
    before = b.a.observe()  # now from the prefix cache
    assert before.outputs != b.truth.outputs
    b.repaired()
    good(b.t.refit(other, verify=True))
    again = b.a.observe()
    assert again.same(before), again.differs(before)
    b.repaired()


def test_the_engine_generates_while_trainers_train_and_no_answer_is_a_mix(b):
    good(b.t.refit(b.fresh_seed()))
    b.a.ask("generate", "generating")
    slept = b.t.ask("sleep", "slept", seconds=3.0)
    good(b.t.refit(b.fresh_seed()))
    time.sleep(0.5)
    good(b.t.refit(1))
    time.sleep(0.5)
    got = b.a.ask("generated", "generated")
    began, ended = max(s["began"] for s in slept), min(s["ended"] for s in slept)
    seconds = {int(t - began) for t, _, _ in got["log"] if began <= t < ended}
    assert seconds >= {0, 1, 2}, f"answers only in seconds {sorted(seconds)} of a step of 3 s"
    answers = {}
    for _, version, tokens in got["log"]:
        answers.setdefault(version, set()).add(tuple(tokens))
    assert len(answers) == 3 and all(len(a) == 1 for a in answers.values()), answers
    assert len({a for s in answers.values() for a in s}) == 3 and not got["refused"]
    b.serves_truth()


@pytest.mark.parametrize("how", ["moved", "changed"])
def test_parameters_that_lie_elsewhere_are_found_again(b, how):
    b.t.ask("replace", "replaced", how=how, ranks=[1])
    b.repaired()


# ---- failures before a byte has moved: the engine serves what it served


def test_a_trainer_that_raises_in_drain_stops_all_with_its_error(b):
    b.t.ask("fail", "will fail", ranks=[1], text="layer 3 was offloaded")
    failed(b.fail(), "RebindError", "layer 3 was offloaded", "trainer 1", within=10)
    b.serves_truth()
    b.t.ask("fail", "will not fail", ranks=[1], text="")
    b.repaired()


def test_a_worker_that_raises_before_it_is_armed(b):
    b.a.fault("worker:1:arm:raise@1")
    failed(b.fail(), "XferError", "injected fault at arm", "replica 0 worker 1", within=10)
    b.serves_truth()
    b.repaired()


@pytest.mark.parametrize("who", ["worker:0", pytest.param("trainer:1", marks=SLOW)])
def test_a_plan_that_differs_on_one_rank_moves_nothing(b, who):
    b.t.ask("replace", "replaced", how="changed")
    (b.t if who.startswith("trainer") else b.a).fault(f"{who}:digest:flip@1")
    failed(b.fail(), "PlanMismatch", who.replace(":", " "), "nothing was moved", within=10)
    b.serves_truth()
    b.repaired()


def test_a_call_on_some_ranks_only_ends_at_the_deadline_and_names_the_others(b):
    results = b.fail(ranks=[0, 2], deadline_s=2.0)
    failed(results, "DeadlineExceeded", "trainer 1: it has not called nccl_xfer_refit()", "2.0 s", within=2.0 + GRACE_S)
    b.serves_truth()
    failed(b.t.refit(ranks=[1]), "DeadlineExceeded", within=2.0)  # too late for that one: told so at once
    b.repaired()


# ---- failures in the middle: nobody gets an answer from a mix


@pytest.mark.parametrize(
    "fault",
    [
        "trainer:1:moving:raise@1",
        "worker:0:wave:raise@1",
        pytest.param("worker:1:moving:raise@1", marks=SLOW),
        pytest.param("worker:0:done:raise@1", marks=SLOW),
    ],
)
def test_a_rank_that_raises_in_the_middle(b, fault):
    who, index, point, _ = fault.split(":")
    (b.t if who == "trainer" else b.a).fault(fault)
    failed(b.fail(), "XferError", f"injected fault at {point}", f"{who} {index}", within=10)
    if who == "trainer":
        b.torn_or_untouched()
    else:
        assert "mix of two versions" in b.torn()
    b.repaired()


def test_norms_that_drifted_on_one_trainer_are_found_by_verify_which_names_them(b):
    """Also where the engine's workers took none of them from that trainer."""
    b.t.ask("set", "set", seed=b.fresh_seed())
    b.t.ask("step", "stepped", ranks=[1], names=["*norm.weight"])
    good(b.t.refit())
    results = b.t.refit(verify=True)
    failed(results, "VerificationError", "norm.weight", "another on trainer 1", "was not committed", within=20)
    assert "mix of two versions" in b.torn()
    b.repaired()


@pytest.mark.parametrize("who", ["worker:1", pytest.param("trainer:1", marks=SLOW)])
def test_a_checksum_that_differs_is_never_committed(b, who):
    (b.t if who.startswith("trainer") else b.a).fault(f"{who}:checksum:flip@1")
    failed(b.fail(verify=True), "VerificationError", "worker", "was not committed", within=10)
    assert b.a.state()["version"] is None
    assert "VerificationError" in b.torn() or "was not committed" in b.torn()
    b.repaired()


@pytest.mark.parametrize("who", ["worker:1", pytest.param("trainer:1", marks=SLOW)])
def test_a_rank_that_hangs_in_the_middle(b, who):
    (b.t if who.startswith("trainer") else b.a).fault(f"{who}:moving:hang@1")
    failed(b.fail(deadline_s=2.0), "DeadlineExceeded", f"{who.replace(':', ' ')}: still moving", within=2.0 + GRACE_S)
    b.torn()
    b.repaired()


def test_a_trainer_process_that_is_stopped_in_the_middle(b):
    b.t.fault("trainer:1:moving:hang@1")  # until it is stopped
    b.t.ask("set", "set", seed=b.fresh_seed())
    waiting = b.t.say(do="refit", deadline_s=3.0)
    time.sleep(1.5)
    stopped = b.t.ranks[1].proc.pid
    os.kill(stopped, signal.SIGSTOP)
    try:
        results = [waiting[i].expect("refitted", "raised", timeout=60) for i in (0, 2)]
        failed(results, "DeadlineExceeded", "trainer 1: still moving", within=3.0 + GRACE_S)
        b.torn()
    finally:
        os.kill(stopped, signal.SIGCONT)
    failed(
        [waiting[1].expect("refitted", "raised", timeout=60)], "DeadlineExceeded", "trainer 1: still moving", within=60
    )
    b.repaired()


def test_trainer_0_with_the_rendezvous_in_it_is_stopped(b):
    """Its connections stay open and nothing comes over them. Each other process ends by itself and names the silent one."""
    b.t.fault("trainer:0:moving:stop@1")
    b.t.ask("set", "set", seed=b.fresh_seed())
    waiting = b.t.say(do="refit", deadline_s=3.0)
    b.t.stopped(0)
    try:
        results = [waiting[i].expect("refitted", "raised", timeout=60) for i in (1, 2)]
        failed(results, "DeadlineExceeded", "trainer 0", "does not answer", within=3.0 + GRACE_S)
        until(lambda: b.a.state()["error"], 20, "the engine's controller has given up")
        assert "does not answer" in b.a.refused()
        forced = b.a.observe(force=True)
        assert forced.nan or forced.same(b.truth)  # it may have stopped before its word to begin had left
    finally:
        os.kill(waiting[0].proc.pid, signal.SIGCONT)
    assert waiting[0].expect("refitted", "raised", timeout=60)["kind"] == "raised"
    b.repaired()  # the same job, nothing started again


def test_a_torn_engine_stays_torn_when_the_next_refit_fails_before_it_moves_a_byte(b):
    b.a.fault("worker:1:moving:raise@1")
    failed(b.fail(), "XferError", "injected fault", within=10)
    b.a.fault("worker:0:arm:raise@1")
    failed(b.fail(), "XferError", "injected fault at arm", within=10)
    b.torn()
    failed(b.fail(ranks=[0, 1], deadline_s=2.0), "DeadlineExceeded", "trainer 2", within=2.0 + GRACE_S)
    b.torn()
    b.t.refit(ranks=[2])
    b.repaired()


# ---- processes that die


POINTS = ("plan", "link", "enter", "moving", "wave", "done")
DIES = {("enter", 2), ("moving", 0)}
"""Where a trainer dies in every run, and which one; all ranks at all points in slow ones. 0 takes the rendezvous with it."""


@pytest.mark.parametrize(
    ("point", "rank"),
    [pytest.param(p, r, marks=[] if (p, r) in DIES else SLOW) for p in POINTS for r in range(3)],
)
def test_a_trainer_that_is_killed_is_named_and_the_job_can_start_again(b, point, rank):
    """The engine outlives its trainers: at their restart it joins them and the first refit makes it whole."""
    if point in ("plan", "link"):
        b.t.ask("replace", "replaced", how="changed")
    b.t.ask("set", "set", seed=b.fresh_seed())
    b.t.fault(f"trainer:{rank}:{point}:kill@1")
    b.connected = False
    waiting = b.t.say(do="refit", deadline_s=20.0)
    results = [waiting[i].expect("refitted", "raised", timeout=60) for i in range(3) if i != rank]
    failed(results, "PeerLost", f"trainer {rank}", within=20.0)
    waiting[rank].expect("ended", timeout=20)
    began = point in ("moving", "wave", "done")
    if began:
        if not rank:  # nobody tells the controller; it finds the connection lost
            until(lambda: b.a.state()["error"], 20, "the controller misses the rendezvous")
        b.torn_or_untouched()
    elif rank:
        b.serves_truth()
        assert f"trainer {rank}" in b.a.state()["lost"]
    else:
        until(lambda: b.a.state()["error"] or b.a.state()["lost"], 20, "the controller misses the rendezvous")
        if point == "enter" and not b.a.state()["error"]:  # no other trainer had entered: it was not armed
            b.serves_truth()
        else:  # without the rendezvous its controller cannot know that not a byte had moved
            b.a.refused()
            assert b.a.observe(force=True).same(b.truth)
    b.meet()
    if began:
        b.torn_or_untouched()  # another connection does not make it whole
    else:
        b.serves_truth()
    b.repaired()


def test_replicas_whose_processes_die_leave_the_others_whole_and_can_come_back(b):
    """One refit to three replicas. A worker of one dies while bytes move, one of another at the commit. The third goes on. An
    engine with another number of workers takes a dead one's place, is whole after its first refit, and dies with its
    controller while armed."""
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
    one_worker = dying["commit"].observe()
    seen = dying["moving"].observe()
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
    # All ranks raise when more is asked for than is left.
    failed(
        t.refit(b.fresh_seed(), min_replicas=2, deadline_s=20.0), "PeerLost", "1 of 3 replicas committed", within=20.0
    )
    assert not b.a.observe().nan

    again.serve(job.rendezvous, 1)
    assert again.ready()["kind"] == "ready"
    report = good(t.refit(1, verify=True, min_replicas=2))
    assert report["committed"] == [True, True, False]
    b.serves_truth()
    back = again.observe()
    assert back.same(one_worker), back.differs(one_worker)

    again.fault("worker:0:arm:hang")
    t.ask("set", "set", seed=b.fresh_seed())
    waiting = t.say(do="refit", min_replicas=1, deadline_s=20.0)
    time.sleep(1.5)
    os.killpg(again.child.proc.pid, signal.SIGKILL)
    report = good([c.expect("refitted", "raised", timeout=60) for c in waiting])
    assert report["committed"] == [True, False, False] and report["errors"][1].startswith("PeerLost")
    good(t.refit(1, verify=True, min_replicas=1))
    b.serves_truth()
