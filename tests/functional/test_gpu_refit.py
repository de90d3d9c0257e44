"""Whole refits between GPU processes: plain trainers, real vLLM with CUDA graphs and torch.compile. After each, every byte of every worker
is compared with what vLLM's own loader makes of the same weights, and data-parallel ranks answer. Cases that need more GPUs than there are
are skipped, or share them with XFER_SHARE_GPUS=1 (gpu_shared.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from examples.common.ports import free_port
from tests.support.block_fp8 import serialize
from tests.support.gpu_job import (
    BESIDE,
    BLOCK_FP8,
    NO_HANDLES,
    SHARED,
    Engine,
    Job,
    check,
    config,
    gpus,
    host,
    nccl_host,
)
from tests.support.refit_job import until

pytest.importorskip("vllm")
GPUS = gpus()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU")]


@dataclass(frozen=True)
class Case:
    """GPUs of the trainers, and of each replica's workers."""

    name: str
    family: str
    trainers: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...]
    engine: dict = field(default_factory=dict)
    route: str = "peer"
    env: dict = field(default_factory=dict)  # of the trainers
    connect: dict = field(default_factory=dict)
    engine_env: dict = field(default_factory=dict)
    group: str = "gloo"  # the trainers' own
    way: str = ""  # how whole tensors come together
    config: dict = field(default_factory=dict)  # of the model, beside its family's

    @property
    def needs(self) -> int:
        return 1 + max((*self.trainers, *(g for r in self.replicas for g in r)))

    @property
    def shares(self) -> bool:
        """Whether its ranks can share GPUs. If NCCL carries the bytes, both sides must be different hosts to xfer as well."""
        by_nccl = "nccl" in self.route or (self.route == "packed" and not self.connect.get("colocated"))
        return SHARED and (not by_nccl or "XFER_HOST" in self.env)


EAGER = dict(eager=True)
PACKED = dict(route="packed", connect=dict(route="packed"))
MAPPED = dict(route="packed", connect=dict(route="packed", colocated=True))
APART = dict(env=host("t"), engine_env=host("e"))


def small(way: dict) -> dict:
    """Several buckets even of a toy."""
    return {**way, "connect": {**way["connect"], "bucket_bytes": 1 << 20}}


APART_SMALL = {**small(PACKED), **APART}
PULLED, ROUNDS = "by copies out of the trainers' storages", "from what trainers send in rounds"
UNMAPPED = dict(route="nccl", env=NO_HANDLES)
UNMAPPED_APART = {**UNMAPPED, **APART, "env": {**NO_HANDLES, **host("t")}}
RELAYED_APART = {**UNMAPPED_APART, "route": "nccl+relay", "connect": dict(relay=True)}
ONE_CONNECTION = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""As Megatron asks for on older GPUs: all kernels of a process are in one queue."""
CONNECTED_ONCE = dict(
    route="nccl", env={**NO_HANDLES, **ONE_CONNECTION, **host("t{rank}")}, engine_env={**ONE_CONNECTION, **host("e")}
)
IN_ROUNDS = dict(env={**NO_HANDLES, **nccl_host("t{rank}")}, engine_env=nccl_host("e"), group="nccl", way=ROUNDS)
NOT_DECODED_BY = ("kv_b_proj.weight",)
"""MLA decodes with tensors that it made of this one after loading."""
FP8_MOE = {**BLOCK_FP8, "num_experts": 16}
"""vLLM quantizes the router, too, whose kernel wants multiples of 16."""
FLASHINFER = dict(moe_backend="flashinfer_cutlass", flashinfer=True, enable_flashinfer_autotune=False)
"""Lays experts out anew after loading. Where FlashInfer is not installed, its kernel is a stand-in (tests/support/kernels); what vLLM
does to weights for it is vLLM's own."""
TRITON = dict(moe_backend="triton")
ANEW = {**EAGER, **FLASHINFER, "ep": True}
WHOLE_BLOCKS = {**FP8_MOE, "head_dim": 128, "moe_intermediate_size": 256}
"""So that each rank's part consists of them."""
CASES = [
    Case("one GPU for both", "qwen3", (0,), ((0,),)),
    Case("dense, side by side", "qwen3_tied", (1,), ((0,),)),
    Case("experts, one GPU for both", "qwen3_moe", (0,), ((0,),)),
    Case("dense, TP2", "qwen3", (2, 3), ((0, 1),)),
    Case("block FP8, dense", "qwen3", (1,), ((0,),), config=BLOCK_FP8),
    Case("block FP8, experts, one GPU for both", "qwen3_moe", (0,), ((0,),), TRITON, config=FP8_MOE),
    Case("experts laid out anew, one GPU for both", "qwen3_moe", (0,), ((0,),), FLASHINFER),
    Case("block FP8, experts laid out anew, one GPU for both", "qwen3_moe", (0,), ((0,),), FLASHINFER, config=FP8_MOE),
    Case("block FP8, experts over two GPUs laid out anew", "qwen3_moe", (0, 1), ((0, 1),), ANEW, config=WHOLE_BLOCKS),
    Case("dense, TP4, colocated", "qwen3", (0, 1, 2, 3), ((0, 1, 2, 3),)),
    Case("experts cut, colocated", "qwen3_moe", (0, 1, 2, 3), ((0, 1, 2, 3),), dict(ep=True)),
    Case("experts, two replicas", "qwen3_moe", (2, 3), ((0,), (1,)), EAGER),
    Case("a relay chain", "qwen3", (1,), ((0,), (1,), (0,)), EAGER, route="peer+relay", connect=dict(relay=True)),
    Case("MLA, one GPU for both", "deepseek_v3", (0,), ((0,),)),
    Case("data parallel", "qwen3", (0, 1), ((0, 1),), dict(dp=2, tp=1)),
    Case("data parallel, experts shared", "qwen3_moe", (0, 1), ((0, 1),), dict(dp=2, tp=1, ep=True)),
    Case("by NCCL", "qwen3", (2, 3), ((0, 1),), EAGER, **UNMAPPED),
    Case("as on two hosts", "qwen3_moe", (1,), ((0,),), EAGER, **UNMAPPED_APART),
    Case("two to TP2, as on two hosts", "qwen3", (0, 1), ((0, 1),), EAGER, **UNMAPPED_APART),
    Case("one GPU, by NCCL, as on three hosts, one connection", "qwen3", (0, 0), ((0,),), EAGER, **CONNECTED_ONCE),
    Case("two replicas on one GPU, as on two hosts", "qwen3", (0,), ((0,), (0,)), EAGER, **UNMAPPED_APART),
    Case("a relay ring, as on two hosts", "qwen3", (1,), ((0,), (0,)), EAGER, **RELAYED_APART),
    Case(
        "block FP8, packed, mapped, one GPU for both", "qwen3", (0,), ((0,),), EAGER, config=BLOCK_FP8, **small(MAPPED)
    ),
    Case(
        "block FP8, packed, experts, as on two hosts",
        "qwen3_moe",
        (0, 0),
        ((0,),),
        {**EAGER, "moe_backend": "triton"},
        config=FP8_MOE,
        **small(PACKED),
        **APART,
    ),
    Case("packed, by NCCL", "qwen3_moe", (1,), ((0,),), EAGER, **PACKED),
    Case("packed, two to TP2", "qwen3_moe", (2, 3), ((0, 1),), EAGER, **PACKED),
    Case("packed, two to TP2, as on two hosts", "qwen3_moe", (0, 1), ((0, 1),), EAGER, **PACKED, **APART),
    Case("packed, two on one GPU, mapped", "qwen3_moe", (0, 0), ((0,),), EAGER, way=PULLED, **small(MAPPED)),
    Case("packed, two on one GPU, as on two hosts", "qwen3_tied", (0, 0), ((0,),), EAGER, way=PULLED, **APART_SMALL),
    Case("packed in rounds, as on three hosts", "qwen3_moe", (0, 0), ((0,),), EAGER, **small(PACKED), **IN_ROUNDS),
]


@contextmanager
def met(case: Case, work: Path) -> Iterator[tuple[Job, list[Engine]]]:
    """The case's trainers and engines, in one session."""
    if case.needs > GPUS and not case.shares:
        pytest.skip(f"needs {case.needs} GPUs")
    with Job(work, config(case.family, **case.config)) as job:
        how = dict(env=case.engine_env, **case.engine)
        engines = [job.engine(f"engine{i}", list(on), **how) for i, on in enumerate(case.replicas)]
        job.start_trainers(list(case.trainers), **case.env)
        job.plain(case.group)
        for e in engines:
            e.started()
        job.meet(engines, **case.connect)
        yield job, engines


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES])
def test_refits_are_bit_exact_and_tokens_follow(case: Case, tmp_path):
    with met(case, tmp_path) as (job, engines):
        report = job.refit(1, verify=True)
        assert case.way in report["plan"], report["plan"]
        first = check(job, engines, 1, report, case.route)
        # Noise in every live byte, so that a refit that leaves anything out cannot pass.
        kept = [e.ask("scramble", "scrambled", seed=5)["kept"] for e in engines]
        second = check(job, engines, 2, job.refit(2, verify=True), case.route)
        assert [e.ask("kept", "kept")["kept"] for e in engines] == kept
        assert first != second, "other weights must answer otherwise, or the tokens prove nothing"
        job.good("move", "moved")
        again = check(job, engines, 1, job.refit(1, verify=True), case.route)
        assert again == first
        for e in engines if not case.engine.get("eager") else ():
            unheard = [n for n in e.ask("deaf", "heard")["deaf"] if not n.endswith(NOT_DECODED_BY)]
            assert not unheard, f"captured graphs read other memory than refits write: {unheard}"
        if "peer" in case.route:
            offloaded = job.good("offload", "offloaded")
            assert BESIDE or all(o["back"] >= 0.9 * o["bytes"] - (4 << 20) for o in offloaded), offloaded
            assert check(job, engines, 2, job.refit(2, verify=True), case.route) == second


STAGED = [
    Case("pulled, one GPU for both", "qwen3", (0,), ((0,),)),
    Case("sent, as on two hosts", "qwen3", (1,), ((0,),), **UNMAPPED_APART),
    Case("a relay chain", "qwen3", (1,), ((0,), (1,)), EAGER, route="peer+relay", connect=dict(relay=True)),
]


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in STAGED])
def test_staged_refits_are_bit_exact(case: Case, tmp_path):
    """All bytes, and what changed. A change is taken back by the next refit, so that every byte is known."""
    with met(case, tmp_path) as (job, engines):
        how = dict(verify=True, stage=True)
        first = check(job, engines, 1, job.refit(1, **how), case.route)
        for e in engines:
            e.ask("scramble", "scrambled", seed=5)
        report = job.refit(2, **how)
        second = check(job, engines, 2, report, case.route)
        assert first != second and {"stage_s", "apply_s"} <= report["scalars"].keys()
        assert report["scalars"]["scratch_bytes"] >= report["bytes"]
        for e in engines if not case.engine.get("eager") else ():
            assert not e.ask("deaf", "heard")["deaf"], "captured graphs read other memory than refits write"
        whole = job.refit(**how, delta="auto")["bytes"]
        job.good("change", "changed", share=0.01)
        changed = job.refit(**how, delta="auto")
        back = job.refit(2, **how, delta="auto")
        assert check(job, engines, 2, back, case.route) == second
        if "relay" not in case.route:
            assert changed["verified"] and max(changed["bytes"], back["bytes"]) < whole / 4
        assert check(job, engines, 1, job.refit(1, verify=True), case.route) == first


def test_experts_that_a_backend_repacks_are_refused_by_name(tmp_path):
    """Marlin's repacking is an operator of its own, of which no trace knows where it moves bytes."""
    with Job(tmp_path, config("qwen3_moe", **FP8_MOE)) as job:
        engine = job.engine("engine", [0], moe_backend="marlin", eager=True)
        job.start_trainers([0])
        job.plain()
        engine.started()
        rendezvous = f"tcp://127.0.0.1:{free_port()}"
        engine.ask("serve", "serving", rendezvous=rendezvous, replica=0)
        (got,) = job.all("connect", "connected", rendezvous=rendezvous, replicas=1)
        assert got["kind"] == "raised" and got["type"] == "Unsupported", got
        assert "MoE backend MARLIN lays FP8 experts out anew, and" in got["text"]
        assert "start vLLM with moe_backend='triton'" in got["text"]


FP8_ENGINES = {"dense": ("qwen3", BLOCK_FP8, {}), "experts": ("qwen3_moe", FP8_MOE, dict(moe_backend="triton"))}


@pytest.mark.parametrize("kind", FP8_ENGINES)
def test_an_engine_in_block_fp8_is_a_fresh_one_on_a_quantized_checkpoint(kind, tmp_path):
    """Quantized by the rule that the report names. If DeepGEMM is installed, vLLM quantizes again after loading, by powers of two."""
    family, served, how = FP8_ENGINES[kind]
    with Job(tmp_path, config(family, **served)) as job:
        engine = job.pair(engine=dict(eager=True, **how))
        answers = []
        for seed in (1, 2):
            (rule,) = job.verified(seed)["rules"]
            out = tmp_path / f"export{seed}"
            job.good("export", "exported", folder=str(out))
            answers.append(engine.is_as_fresh(serialize(str(out), rule), f"fresh{seed}", eager=True, **how))
            engine.ask("scramble", "scrambled", seed=5)
        assert answers[0] != answers[1], "other weights must answer otherwise, or the tokens prove nothing"


def test_samples_are_of_the_version_that_they_are_labelled_with(tmp_path):
    """Generation runs on through 12 refits; with CUDA graphs on, every sample is wholly of its label's weights."""
    with Job(tmp_path, config("qwen3")) as job:
        engine = job.pair([1 if GPUS > 1 else 0])
        truth = {}
        for seed in (1, 2, 3):
            job.refit(seed, version=f"first-{seed}")
            truth[seed] = [o[0] for o in engine.observe()["outputs"]]
        assert len({str(t) for t in truth.values()}) == 3
        engine.ask("generate", "generating")
        for k in range(12):
            job.refit(k % 3 + 1, version=f"{k}-{k % 3 + 1}", pause=0.15)
        log = engine.ask("generated", "generated")["log"]
        wrong = [(v, out) for v, out in log if out != truth.get(int(v[-1]) if v[-1].isdigit() else 0)]
        assert not wrong, wrong[:3]
        assert len({v for v, _ in log}) >= 6, "the samples must be of many versions"


PROMPT, LONG, AROUND = [5, 6, 7, 8], 240, 3
"""LONG: tokens of a request that takes a hundred times as long as a refit's pause. AROUND: requests that end between two refits."""


def flown(engine: Engine, what: str, so_far) -> dict:
    seen: list[dict] = []

    def there() -> bool:
        seen.append(engine.ask("flown", "flown"))
        return so_far(seen[-1])

    until(there, 60, what)
    return seen[-1]


def flew_well(mode: str, log: list, truth: dict[int, list[int]], versions: list[int]) -> None:
    """Checks that each answer is of one version, or interrupted as `mode` says. `versions`: in the order of the refits."""
    seen, met = [], 0
    for tokens, why in log:
        of = next((v for v in truth if tokens == truth[v]), None)
        if of is not None:
            seen += [of] if seen[-1:] != [of] else []
            continue
        met += 1
        assert seen, (mode, tokens, truth)
        old = truth[seen[-1]]
        assert mode != "wait", (mode, seen, tokens, truth)
        ended = ("abort", True) if mode == "abort" else ("length", False)
        assert (why, len(tokens) < LONG) == ended, (mode, why, tokens)
        assert tokens[:4] == old[:4] and (mode == "keep" or tokens == old[: len(tokens)]), (mode, seen, tokens, old)
    assert seen == versions and (mode == "wait") == (met == 0), (mode, seen, versions, met)


@pytest.mark.slow
def test_requests_under_way_across_refits_are_of_one_version_or_what_the_pause_says(tmp_path):
    """A request, under way at each refit, ends under the old weights ("wait"), is dropped ("abort"), or goes on under new ones ("keep")."""
    with Job(tmp_path, config("qwen3")) as job:
        engine = job.engine("engine", [0], asynchronous=True)
        job.start_trainers([1 if GPUS > 1 else 0])
        job.plain()
        engine.started()
        for mode in ("wait", "abort", "keep"):
            job.meet([engine], serve=dict(pause_mode=mode))
            truth, versions = {}, [2]
            for seed in (1, 2):
                job.refit(seed)
                truth[seed] = engine.ask("answer", "answered", prompt=PROMPT, tokens=LONG)["tokens"]
            assert truth[1][:4] != truth[2][:4], "other weights must answer otherwise, or the tokens prove nothing"
            engine.ask("fly", "flying", prompt=PROMPT, tokens=LONG)
            flown(engine, "the first answers", lambda f: f["ended"] >= 1)
            for seed in (1, 2, 1, 2):
                job.good("set", "set", seed=seed)
                flown(engine, "a request is under way", lambda f: 4 < f["now"] < LONG // 2)
                assert all(job.refit()["committed"])
                before = engine.ask("flown", "flown")["ended"]
                flown(engine, "answers of the new weights", lambda f, n=before + AROUND: f["ended"] >= n)
                versions.append(seed)
            flew_well(mode, engine.ask("land", "landed")["log"], truth, versions)
            job.good("close", "closed")
