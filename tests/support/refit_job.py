"""Light trainers and real vLLM engines as child processes, and what every test of a refit between them asks. The truth is what the engine
computes when vLLM's own loader has loaded a checkpoint of seed 1."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from examples.common import toy
from examples.common.ports import free_port
from tests.support.hosts import Host
from tests.support.proc import PATIENCE, Child, Family, cause
from xfer.coordinator.deadlines import CALL_GRACE_S

GRACE_S = CALL_GRACE_S + 5.0 * PATIENCE
"""What may be added to a refit's deadline: what the session promises, and some seconds of a busy machine."""


@dataclass(frozen=True)
class Observed:
    """What one engine computes. `checksums`: vLLM's own digest of every parameter, by worker and name."""

    version: str
    outputs: list
    checksums: dict[str, str]

    @property
    def nan(self) -> bool:
        return all(math.isnan(x) for _, logprobs in self.outputs for x in logprobs)

    def same(self, other: Observed) -> bool:
        return (self.outputs, self.checksums) == (other.outputs, other.checksums)

    def differs(self, other: Observed) -> list[str]:
        a, b = self.checksums, other.checksums
        return [k for k in a.keys() | b.keys() if a.get(k) != b.get(k)] + ["outputs"] * (self.outputs != other.outputs)


class Engine:
    """An engine in a process of its own. `tp`: its workers."""

    def __init__(self, family: Family, name: str, tp: int, token: str, **env: str):
        self.tp, self.name, self.faults = tp, name, family.work / f"{name}.fault"
        env |= dict(XFER_TOKEN=token, XFER_FAULT_FILE=str(self.faults))
        self.child = family.start(name, "engine", "vllm_main", **env)

    def start(self, model: str, load_format: str, **more) -> None:
        self.child.say(do="start", model=model, tp=self.tp, load_format=load_format, **more)

    def started(self) -> None:
        self.child.expect("started")

    def serve(self, rendezvous: str, replica: int = 0, **more) -> None:
        """Begin to join; `ready` ends it."""
        self.ask("serve", "serving", timeout=30, rendezvous=rendezvous, replica=replica, **{"deadline_s": 40.0, **more})

    def ready(self, timeout_s: float = 60.0) -> dict:
        return self.ask("ready", "ready", "raised", timeout=timeout_s + 10, timeout_s=timeout_s)

    def ask(self, do: str, *kinds: str, timeout: float = 60.0, **more) -> dict:
        return self.child.ask(do, *kinds, timeout=timeout, **more)

    def observe(self, force: bool = False) -> Observed:
        """Return the engine's version, outputs and checksums, read inside `serving()`."""
        e = self.ask("observe", "observed", force=force)
        return Observed(e["version"], e["outputs"], e["checksums"])

    def refused(self) -> str:
        """The error with which the controller keeps its owner out; AssertionError when it lets them in."""
        e = self.ask("observe", "observed", "raised")
        assert e["kind"] == "raised" and e["type"] == "EngineLost", e
        return e["text"]

    def fault(self, text: str) -> None:
        cause(self.faults, text)

    def state(self) -> dict:
        return self.ask("state", "state")


class Trainers:
    """`world` ranks of plain_main. Commands go to all of them at once."""

    def __init__(self, family: Family, world: int, token: str):
        self.family, self.world, self.token, self.starts = family, world, token, 0
        self.faults = family.work / "trainers.fault"
        self.ranks = [self._start(i) for i in range(world)]

    def _start(self, rank: int) -> Child:
        self.starts += 1
        env = dict(XFER_TOKEN=self.token, XFER_FAULT_FILE=str(self.faults), XFER_FAULT_HANG_S="4")
        return self.family.start(f"trainer{rank}-{self.starts}", "engine", "plain_main", **env)

    def fault(self, text: str) -> None:
        cause(self.faults, text)

    def restart_dead(self) -> None:
        for i, c in enumerate(self.ranks):
            if c.proc.poll() is not None:
                self.ranks[i] = self._start(i)

    def say(self, ranks=None, **command) -> list[Child]:
        picked = [self.ranks[i] for i in (range(self.world) if ranks is None else ranks)]
        for c in picked:
            c.say(**command)
        return picked

    def ask(self, do: str, *kinds: str, ranks=None, timeout: float = 90.0, **command) -> list[dict]:
        return [c.expect(*kinds, timeout=timeout) for c in self.say(ranks, do=do, **command)]

    def build(self, config: dict, **more) -> None:
        port = free_port()
        for i, c in enumerate(self.ranks):
            c.say(do="build", config=config, rank=i, world=self.world, port=port, **more)
        for c in self.ranks:
            c.expect("built", timeout=60)

    def connect(self, rendezvous: str, ranks=None, **more) -> list[dict]:
        how = dict(rendezvous=rendezvous, deadline_s=40.0) | more
        return self.ask("connect", "connected", "raised", ranks=ranks, **how)

    def refit(self, seed: int | None = None, ranks=None, **more) -> list[dict]:
        """Weights of `seed`, then the call, on these ranks; their reports or errors."""
        if seed is not None:
            self.ask("set", "set", seed=seed)
        return self.ask("refit", "refitted", "raised", ranks=ranks, **more)


class Job:
    """Engines and trainers that meet, again and again, each time at another rendezvous. `address`: of trainer 0."""

    def __init__(
        self,
        work: Path,
        family: str,
        world: int = 3,
        address: str = "127.0.0.1",
        host_of: Callable[[str], Host | None] = lambda name: None,
        **override,
    ):
        self.config = toy.config(family, **override)
        self.model = Path(work) / "model"
        toy.write_checkpoint(family, self.model, seed=1, **override)
        self.token = secrets.token_hex(16)
        self.family, self.address = Family(work, host_of), address
        self.trainers = Trainers(self.family, world, self.token)
        self.rendezvous = ""

    def engine(self, name: str, tp: int, **env: str) -> Engine:
        return Engine(self.family, name, tp, self.token, **{"XFER_FAULT_HANG_S": "4", **env})

    def meet(self, engines: list[Engine], weights: dict | None = None, **connect) -> list[dict]:
        """Trainers and engines connect, the first engine as replica 0. Results of the trainers."""
        self.trainers.build(self.config, address=self.address, **(weights or {}))
        self.rendezvous = f"tcp://{self.address}:{free_port()}"
        for i, e in enumerate(engines):
            e.serve(self.rendezvous, i)
        return self.trainers.connect(self.rendezvous, replicas=len(engines), **connect)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc) -> None:
        self.family.__exit__(*exc)


def good(results: list[dict]) -> dict:
    """Report of the first rank, when all have one."""
    assert all(r["kind"] in ("refitted", "connected") for r in results), [r for r in results if r["kind"] == "raised"]
    return results[0]


def failed(results: list[dict], kind: str, *texts: str, within: float) -> None:
    """Every rank raised `kind`, in time, and each text is in its message."""
    for r in results:
        assert r["kind"] == "raised" and r["type"] == kind, r
        assert r["seconds"] < within, f"{r['seconds']:.1f} s, not within {within:.1f} s: {r['text']}"
        for t in texts:
            assert t in r["text"], f"{t!r} is not in: {r['text']}"


def a_refit(job: Job, seed: int, **more) -> dict:
    """Weights of `seed` into the one engine, verified."""
    report = good(job.trainers.refit(seed, verify=True, **more))
    assert report["verified"] and report["serving"] == [True]
    return report


def until(condition, seconds: float, what: str) -> None:
    end = time.monotonic() + seconds * PATIENCE
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.05)
