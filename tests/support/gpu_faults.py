"""An engine and plain trainers on GPUs that faults are injected into, and the checks after each fault."""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.gpu_job import BESIDE, NO_HANDLES, Engine, Job, check, config, nccl_host
from tests.support.proc import PATIENCE, Child, cause, stopped
from tests.support.refit_job import until
from xfer.coordinator.deadlines import CALL_GRACE_S

FAR = 60.0
"""Deadline of a refit that must end long before it."""
SHORT = 5.0 * PATIENCE
"""Deadline of a refit that is to reach it."""
GRACE_S = CALL_GRACE_S + 5.0 * PATIENCE
"""Allowed beyond a deadline when a process does not answer."""
MODEL = config(
    "qwen3", hidden_size=1024, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=8,
    vocab_size=8000,
)  # fmt: skip
"""Some hundred MiB, so that memory that is not given back stands out from what drivers keep."""


@dataclass(frozen=True)
class Route:
    """`trainers`: GPU of each; the engine's is 0. `env`, `connect`: of the trainers. `served`: what the engine's config has more."""

    name: str
    trainers: tuple[int, ...]
    env: dict[str, str] = field(default_factory=dict)
    engine_env: dict[str, str] = field(default_factory=dict)
    connect: dict = field(default_factory=dict)
    served: dict = field(default_factory=dict)


def route(name: str, gpus: int) -> Route | None:
    """A route with as many trainers as there is room for: NCCL refuses two processes of a host on one GPU. On a single GPU each process
    is a host of its own to NCCL, but not to xfer."""
    if not gpus:
        return None
    if name == "peer":
        return Route(name, (gpus - 1, gpus - 1))
    if gpus == 1:
        return Route(name, (0, 0), {**NO_HANDLES, **nccl_host("trainer{rank}")}, nccl_host("engine"))
    return Route(name, tuple(range(1, min(gpus, 3))), NO_HANDLES)


class Bench:
    """All at the weights of `seed` after `right()`. A test that fails leaves `whole` False: the next starts everything anew."""

    def __init__(self, work: Path, route: Route):
        self.job, self.route, self.work = Job(work, MODEL | route.served), route, Path(work)
        self.engine: Engine | None = None
        self.whole, self.seed, self.tokens = False, 0, []

    # ---- starting

    def ensure(self) -> None:
        if not self.whole:
            self.start()

    def start(self) -> None:
        self.job.stop_trainers()
        self.begin_engine()
        self.begin_trainers()
        self.engine.started()
        self.job.meet([self.engine], **self.route.connect)
        self.right()

    def begin_engine(self) -> None:
        """A new one for the one that was; `started` waits for it."""
        if self.engine is not None:
            self.engine.child.stop()
            self.job.family.children.remove(self.engine.child)
            self.job.engines.remove(self.engine)
        self.fault("engine", "")
        env = {"XFER_FAULT_FILE": str(self.work / "engine.fault"), **self.route.engine_env}
        self.engine = self.job.engine(f"engine-{len(self.job.family.children)}-{self.seed}", [0], env=env, eager=True)

    def begin_trainers(self) -> None:
        self.fault("trainers", "")
        env = {"XFER_FAULT_FILE": str(self.work / "trainers.fault"), **self.route.env}
        self.job.start_trainers(list(self.route.trainers), **env)
        self.job.plain()

    def meet_anew(self) -> None:
        """The trainers' job started again, as after a death; the engine as it is."""
        self.job.stop_trainers()
        self.begin_trainers()
        self.job.meet([self.engine], **self.route.connect)

    # ---- a refit that goes wrong

    @property
    def packed(self) -> bool:
        return self.route.name == "packed"

    @property
    def trainers(self) -> list[Child]:
        return self.job.trainers

    def others(self, rank: int) -> list[int]:
        return [r for r in range(len(self.trainers)) if r != rank]

    def fault(self, who: str, text: str) -> None:
        """`who`: "trainers" or "engine"; `text` as in xfer/faults.py."""
        cause(self.work / f"{who}.fault", text)

    def begin(self, who: str, text: str, **how) -> None:
        """A refit to other weights, in which this happens."""
        self.whole, self.seed = False, self.seed + 1
        self.job.good("set", "set", seed=self.seed)
        self.fault(who, text)
        for c in self.trainers:
            c.say(do="refit", **how)

    def failed(
        self, ranks: list[int], kinds: tuple[str, ...], *texts: str, within: float, drained: bool = True
    ) -> None:
        """Checks that these trainers raised in time. `drained`: and that their errors say that no process reads their parameters."""
        for r in ranks:
            got = self.trainers[r].expect("refitted", "raised", timeout=within + 30)
            assert got["kind"] == "raised" and got["type"] in kinds, got
            assert got["seconds"] < within and (got["drained"] or not drained), got
            assert all(t in got["text"] for t in texts), got

    def only_these_ended(self, *culprits: Child) -> None:
        for c in (*self.trainers, self.engine.child):
            if c in culprits:
                until(lambda c=c: c.proc.poll() is not None, 20, f"{c.name} has ended")
            else:
                assert c.proc.poll() is None, f"{c.name} ended too\n{c.tail()}"

    def state(self) -> dict:
        return self.engine.ask("state", "state")

    def replaced_engine(self, free: int) -> None:
        """After a worker was killed: no other process ends, and another engine takes the replica's place. `free`: bytes of GPU 0 that were
        free before the first engine started."""
        self.only_these_ended()
        self.given_up()
        assert self.state()["error"]
        self.gets_free(0, 0, free + (1 << 30))  # its cache, at least
        self.begin_engine()
        self.engine.started()
        self.engine.ask("serve", "serving", rendezvous=self.job.rendezvous, replica=0)
        self.engine.ask("ready", "ready")
        self.right()

    def given_up(self) -> None:
        until(lambda: any(self.state()[k] for k in ("error", "lost")), 40, "the engine's controller has heard of it")

    def torn(self) -> bool:
        """Whether the engine answers NaN and its controller has an error. Checks that it answers as before otherwise."""
        self.given_up()
        now = self.engine.ask("force", "forced")["outputs"]
        torn = all(math.isnan(x) for _, logprobs in now for x in logprobs)
        assert torn or [t for t, _ in now] == self.tokens, now
        assert not torn or self.state()["error"]
        return torn

    def remade(self, give_back: bool) -> list[dict]:
        """Other memory under all parameters of all trainers; see gpu_trainer.Plain.remake."""
        self.whole = False
        return self.job.good("remake", "remade", give_back=give_back)

    def let_go_on(self, rank: int) -> None:
        os.kill(self.trainers[rank].proc.pid, signal.SIGCONT)

    def stopped(self, rank: int) -> None:
        until(lambda: stopped(self.trainers[rank].proc.pid), 30, f"trainer {rank} is stopped")

    # ---- and the next one

    def right(self) -> None:
        """The next refit brings new weights, bit for bit, by the route that is tested; and other answers."""
        self.fault("trainers", "")
        self.fault("engine", "")
        self.whole, self.seed = False, self.seed + 1
        report = self.job.refit(self.seed, verify=True, deadline_s=FAR)
        (outputs,) = check(self.job, [self.engine], self.seed, report, self.route.name)
        tokens = [t for t, _ in outputs]
        assert tokens != self.tokens, "other weights must answer otherwise, or the tokens prove nothing"
        self.tokens, self.whole = tokens, True

    # ---- memory

    def memory(self, rank: int, gpu: int | None = None) -> dict:
        """Of this trainer's GPU, or of another, as that process sees it."""
        self.trainers[rank].say(do="memory", **({} if gpu is None else {"gpu": gpu}))
        return self.trainers[rank].expect("memory", timeout=30)

    def room(self, rank: int) -> int:
        """Free bytes of this trainer's GPU. If the engine is there too: relative to the GPU's size, and with its torch's cache as free."""
        if self.route.trainers[rank]:
            return self.memory(rank)["free"]
        ((beside, _),) = self.engine.ask("memory", "memory")["workers"]
        return -beside

    def gets_free(self, rank: int, gpu: int, atleast: int, seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds * PATIENCE
        while not BESIDE and (free := self.memory(rank, gpu)["free"]) < atleast:
            assert time.monotonic() < end, f"{(atleast - free) >> 20} MiB of GPU {gpu} were not given back"
            time.sleep(0.2)
