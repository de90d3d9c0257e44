"""Engines and trainers on the GPUs of this host, for tests and benchmarks. Both sides run in this interpreter's environment, or each in
its own: XFER_SITE_TRAINER and XFER_SITE_ENGINE are put before PYTHONPATH (Bridge wants another transformers than vLLM). Each process sees
all GPUs, its own first, since it must see a GPU to map its memory.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from examples.common import toy
from examples.common.ports import free_port
from tests.support import gpu_shared, proc
from tests.support.proc import ROOT, Child, Family

for _side in proc.PYTHON:
    if not os.path.exists(proc.PYTHON[_side]):
        proc.PYTHON[_side] = sys.executable

TOY = dict(
    hidden_size=256, intermediate_size=512, head_dim=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=500
)
"""vLLM's GPU kernels need heads of 64; vLLM pads this vocabulary."""
TOY_MOE = {**TOY, "moe_intermediate_size": 128}
TOY_MLA = dict(
    hidden_size=256, intermediate_size=512, num_attention_heads=16, num_key_value_heads=16, vocab_size=500,
    moe_intermediate_size=128, q_lora_rank=128, qk_nope_head_dim=128, v_head_dim=128,
)  # fmt: skip
"""Heads of DeepSeek's own sizes: FlashAttention takes keys and values of unequal widths in few sizes only."""


_FP8 = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])
BLOCK_FP8 = {"quantization_config": _FP8}
"""Of a model's config: the engine serves block FP8. Trainers are in bf16 and quantize."""
NO_HANDLES = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Environment of trainers whose memory cannot be mapped: all bytes go by NCCL."""


def nccl_host(name: str) -> dict[str, str]:
    """Another name of this host for NCCL, which refuses two ranks of one host on one GPU; two hosts it connects by network. In the
    environment of `Job.start_trainers`, "{rank}" becomes the rank."""
    return {"NCCL_HOSTID": name, "NCCL_MNNVL_ENABLE": "0"}


def host(name: str) -> dict[str, str]:
    """As `nccl_host`, and another name for xfer too."""
    return {"XFER_HOST": name, **nccl_host(name)}


def gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


SHARED = os.environ.get("XFER_SHARE_GPUS") == "1"
"""Ranks and workers share the GPUs that there are; without it, tests that need more are skipped. Bytes, layouts, graphs and tokens
are as with a GPU each. Links are not: NCCL goes by the network between ranks of one GPU, as between hosts."""


BESIDE = "PYTEST_XDIST_WORKER" in os.environ
"""Other tests run on these GPUs at the same time, so their free memory tells nothing about one test's processes."""


def folded(on: list[int]) -> list[int]:
    """The GPUs that are used for these."""
    return [g % gpus() for g in on] if SHARED else on


def megatron() -> bool:
    """Whether trainers have Megatron-Core: in a site of their own, another environment, or this one."""
    own = "XFER_SITE_TRAINER" in os.environ or proc.PYTHON["trainer"] != sys.executable
    return own or find_spec("megatron") is not None


def transformer_engine() -> bool:
    """Whether trainers have TransformerEngine, in one of the places where they may have Megatron-Core."""
    own = filter(None, os.environ.get("XFER_SITE_TRAINER", "").split(":"))
    there = any(os.path.exists(os.path.join(at, "transformer_engine")) for at in own)
    return there or find_spec("transformer_engine") is not None


def site(side: str) -> dict[str, str]:
    parts = [str(ROOT), os.environ.get(f"XFER_SITE_{side.upper()}", ""), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": ":".join(p for p in parts if p), "TORCHDYNAMO_DISABLE": "0", "XFER_CPU_RESIDENT": "0"}


class Engine:
    """A vLLM process whose workers lie on `on`, in that order. `env`: of that process. `module`: what it runs. `start`: of gpu_engine."""

    def __init__(self, job: Job, name: str, on: list[int], env: Mapping = {}, module: str = "gpu_engine", **start):
        on = folded(on)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = visible.split(",") if visible else range(gpus())
        first = list(dict.fromkeys((*on, *range(gpus()))))
        order = [seen[g] for g in first]
        if len(set(on)) < len(on):
            start = {**gpu_shared.OPTIONS, **start}
            env = {**env, **gpu_shared.environment([first.index(g) for g in on])}
        self.job, self.on = job, on
        self.child: Child = job.family.start(
            name, "engine", module, **{
                **site("engine"), "XFER_TOKEN": job.token, "CUDA_VISIBLE_DEVICES": ",".join(map(str, order)),
                "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_LOGGING_LEVEL": "WARNING", **env,
            },
        )  # fmt: skip
        self.child.expect("up", timeout=90)
        self.child.say(do="start", **{"tp": len(on), **start})

    def started(self, timeout: float = 240.0) -> dict:
        return self.child.expect("started", timeout=timeout)

    def ask(self, do: str, *kinds: str, timeout: float = 120.0, **command) -> dict:
        return self.child.ask(do, *kinds, timeout=timeout, **command)

    def wrong(self, **what) -> list:
        """By worker, the parameters that differ from what vLLM's loader makes of these weights."""
        got = self.ask("wrong", "judged", **what)
        assert all(n > 0 for n in got["bytes"])
        return got["wrong"]

    def observe(self) -> dict:
        return self.ask("observe", "observed")

    def tokens(self) -> list:
        return [tokens for tokens, _ in self.observe()["outputs"]]

    def is_as_fresh(self, folder: str, name: str = "fresh", **start) -> list:
        """Checks every byte of its parameters, and its tokens, beside an engine that loads this checkpoint. Returns the tokens."""
        fresh = self.job.engine(name, [0], **{"model": folder, "load_format": "auto", **start})
        fresh.started()
        (got,), (want,) = (e.ask("digests", "digests")["workers"] for e in (self, fresh))
        assert got.keys() == want.keys() and [n for n in want if got[n] != want[n]] == []
        answers = self.tokens()
        assert answers == fresh.tokens()
        fresh.child.stop()
        return answers


class Job:
    """`config`: an HF config of a family of examples.common.toy. `address`: address of trainer 0, as in URLs. `host_of`: see `Family`."""

    def __init__(self, work: Path, config: dict, address="127.0.0.1", host_of=lambda name: None):
        self.work, self.config, self.token = Path(work), config, secrets.token_hex(16)
        self.family, self.address = Family(self.work, host_of), address
        self.engines: list[Engine] = []
        self.trainers: list[Child] = []
        self.rendezvous = ""  # of the last meeting
        self.folder = self.work / "model"
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(config))

    def engine(self, name: str, on: list[int], **start) -> Engine:
        e = Engine(self, name, on, **{"model": str(self.folder), **start})
        self.engines.append(e)
        return e

    def start_trainers(self, on: list[int], module: str = "gpu_trainer", **env: str) -> None:
        """module: what a rank runs, of tests.support. `env`: "{rank}" in a value becomes the rank."""
        port, on = str(free_port()), folded(on)
        if SHARED and "NCCL_HOSTID" in env:
            env["NCCL_HOSTID"] += "-{rank}"
        for r, gpu in enumerate(on):
            self.trainers.append(
                self.family.start(
                    f"trainer{r}-{len(self.family.children)}", "trainer", module, **{
                        **site("trainer"), "XFER_TOKEN": self.token, "XFER_GPU": str(gpu), "RANK": str(r),
                        "LOCAL_RANK": str(gpu), "WORLD_SIZE": str(len(on)), "MASTER_ADDR": self.address.strip("[]"), "MASTER_PORT": port,
                        **{k: v.replace("{rank}", str(r)) for k, v in env.items()},
                    },
                )
            )  # fmt: skip
        for c in self.trainers:
            c.expect("up", timeout=120)

    def stop_trainers(self) -> None:
        for c in self.trainers:
            c.stop()
            self.family.children.remove(c)
        self.trainers = []

    def all(self, do: str, *kinds: str, timeout: float = 150.0, **command) -> list[dict]:
        for c in self.trainers:
            c.say(do=do, **command)
        return [c.expect(*kinds, "raised", timeout=timeout) for c in self.trainers]

    def good(self, do: str, *kinds: str, timeout: float = 150.0, **command) -> list[dict]:
        got = self.all(do, *kinds, timeout=timeout, **command)
        logs = "\n".join(c.tail(25) for c in (*self.trainers, *(e.child for e in self.engines)))
        assert not [g for g in got if g["kind"] == "raised"], f"{got}\n{logs}"
        return got

    def plain(self, backend: str = "gloo", **how) -> None:
        port = free_port()
        for r, c in enumerate(self.trainers):
            where = dict(rank=r, world=len(self.trainers), address=self.address, port=port, backend=backend)
            c.say(do="plain", config=self.config, **where, **how)
        for c in self.trainers:
            c.expect("built", timeout=120)

    def meet(self, engines: list[Engine], keep: Sequence[str] = (), serve: Mapping = {}, **connect) -> list[dict]:
        """Serve the engines and connect the trainers. `serve`, `connect`: more arguments of `xfer.serve` and `xfer.connect`."""
        self.rendezvous = f"tcp://{self.address}:{free_port()}"
        for i, e in enumerate(engines):
            e.ask("serve", "serving", rendezvous=self.rendezvous, replica=i, keep=keep, **serve)
        out = self.good("connect", "connected", rendezvous=self.rendezvous, replicas=len(engines), **connect)
        for e in engines:
            e.ask("ready", "ready")
        return out

    def pair(
        self,
        trainers: Sequence[int] = (0,),
        engine: Mapping = {},
        env: Mapping = {},
        build: Callable | None = None,
        **connect,
    ) -> Engine:
        """An engine on GPU 0 and trainers on these GPUs that have met. `engine`: as for `engine`; `env`: of the trainers; `build` makes
        their weights, plain ones by default; `connect`: as for `meet`."""
        made = self.engine("engine", [0], **engine)
        self.start_trainers(list(trainers), **env)
        (build or self.plain)()
        made.started()
        self.meet([made], **connect)
        return made

    def refit(self, seed: int | None = None, timeout: float = 150.0, **how) -> dict:
        """Sets the weights of `seed` and refits on all ranks. Returns the report of rank 0."""
        if seed is not None:
            self.good("set", "set", seed=seed)
        return self.good("refit", "refitted", timeout=timeout, **how)[0]

    def verified(self, seed: int | None = None, **how) -> dict:
        """The same, verified and committed by every replica."""
        report = self.refit(seed, verify=True, **how)
        assert report["verified"] and all(report["committed"]), report
        return report

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc) -> None:
        self.family.__exit__(*exc)


def config(family: str, **override) -> dict:
    sizes = TOY_MLA if "deepseek" in family else TOY_MOE if "moe" in family else TOY
    return toy.config(family, **{**sizes, **override})


def check(job: Job, engines: list[Engine], seed: int, report: dict, route: str) -> list:
    """Checks that a verified refit of the weights of `seed` used this route alone (or these: "a+b") and wrote every byte. Returns the
    engines' answers."""
    assert all(report["committed"]) and report["verified"], report
    assert {k.removeprefix("route/").removesuffix("_bytes") for k in report["scalars"] if k.startswith("route/") and
            k.endswith("_bytes")} == set(route.split("+")), report["routes"]  # fmt: skip
    for e in engines:
        wrong = e.wrong(config=job.config, seed=seed)
        assert wrong == [[]] * len(e.on), f"{e.child.name}: (name, wrong elements, elements) by worker: {wrong}"
    outputs = [e.observe() for e in engines]
    assert {o["version"] for o in outputs} == {report["version"]}
    return [o["outputs"] for o in outputs]
