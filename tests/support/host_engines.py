"""Real vLLMs on emulated hosts (hosts.py), refitted by trainers on other hosts, over NCCL's sockets on GPUs, gloo or NIXL on CPUs.

Trainers are on hosts 0 and 1, engines of one worker on hosts 2 and 3. Each host sees all GPUs and uses one; hosts share GPUs where there
are fewer. Hosts have names and process ids of their own, so neither xfer nor NCCL takes two ranks for ranks of one machine.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

from examples.common import toy
from examples.common.ports import free_port
from tests.support import gpu_job, refit_job
from tests.support.hosts import Cluster, Host
from tests.support.proc import PATIENCE, Child, cause
from tests.support.world import until_true
from xfer.coordinator.deadlines import CALL_GRACE_S

SECONDS = 2.0
"""In which all bytes of one replica pass a NIC."""
SHORT = 2 * SECONDS + 2 * PATIENCE
"""Deadline of a refit that is to reach it."""
FAR = 60.0 * PATIENCE
GRACE_S = CALL_GRACE_S + 5.0 * PATIENCE
"""Allowed beyond a deadline."""
NOWHERE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment of an engine that listens where no other host reaches it."""


class Bench:
    """`network`: more arguments of `Cluster`. After a test that fails, `whole` is False and `ensure` starts everything anew.

    A kind says: `config`; `transports`, the routes of a refit's bytes; `_begin`, which starts the `job`, the engines (`made`) and the
    `trainers`, which have weights, and names the file of `faults`; `_engine`, which begins to start engine i with these variables; `held`,
    digests of all parameters of engine i and what it answers; `holds`, whether engine i is, to the bit, what vLLM's own loader makes of the
    weights of a seed.
    """

    def __init__(self, work: Path, **network):
        self.work, self.network = work, network
        self.nbytes = sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in toy.specs(self.config))
        self.cluster: Cluster | None = None
        self.whole, self.seed = False, 1

    def ensure(self) -> None:
        if not self.whole:
            self.end()
            self.cluster = Cluster(4, mbit=self.nbytes * 8 / SECONDS / 1e6, **self.network).__enter__()
            self._begin(Path(tempfile.mkdtemp(dir=self.work)))
            self.connected(self.meet())
            self.right(1)
            self.whole = True

    def end(self) -> None:
        if self.cluster is not None:
            self.job.__exit__()
            self.cluster.__exit__()
            self.cluster = None

    def host_of(self, child: str) -> Host:
        """By the child's name: trainer0, trainer1, engine0 and engine1, and what follows a hyphen."""
        side, number = child.partition("-")[0][:-1], int(child.partition("-")[0][-1])
        return self.cluster.hosts[number + 2 * (side == "engine")]

    def env_of(self, host: int) -> dict[str, str]:
        """Variables of a rank on this host. Nothing of NCCL but its sockets can be taken by mistake."""
        off = {"NCCL_MNNVL_ENABLE": "0", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
        net = {"NCCL_HOSTID": f"h{host}", "NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none"}
        return off | net | {"NCCL_SOCKET_FAMILY": "AF_INET6" if self.cluster.ipv6 else "AF_INET"}

    # ---- starting

    @property
    def engines(self) -> list[Child]:
        return [e.child for e in self.made]

    def replace_engine(self, i: int, **env: str) -> None:
        self.engines[i].stop()
        self.job.family.children.remove(self.engines[i])
        self.made[i] = self._engine(i, **env)
        self.made[i].started()

    def meet(self, deadline_s: float = FAR, **connect) -> list[dict]:
        """Engines and trainers meet at a new rendezvous; what trainers say."""
        self.all("close", "closed")
        at = f"tcp://{self.cluster.hosts[0].in_url}:{free_port()}"
        for i, e in enumerate(self.engines):
            e.ask("serve", "serving", rendezvous=at, replica=i, deadline_s=deadline_s)
        return self.all("connect", "connected", rendezvous=at, replicas=2, deadline_s=deadline_s, **connect)

    # ---- refits

    def connected(self, said: list[dict]) -> None:
        logs = "\n".join(c.tail(25) for c in self.engines)
        assert [s["kind"] for s in said] == ["connected"] * 2, f"{said}\n{logs}"
        for e in self.engines:
            e.ask("ready", "ready")

    def all(self, do: str, *kinds: str, **command) -> list[dict]:
        for t in self.trainers:
            t.say(do=do, **command)
        return [t.expect(*kinds, "raised", timeout=150) for t in self.trainers]

    def begin(self, seed: int, **how) -> None:
        """Begins a refit to other weights."""
        self.whole = False
        self.all("set", "set", seed=seed)
        for t in self.trainers:
            t.say(do="refit", **how)

    def moving(self, *hosts: int, part: float = 0.25):
        """Returns a wait until this part of a replica's bytes has entered each of these hosts from now on."""
        before = [self.cluster.bytes_in(self.cluster.hosts[h]) for h in hosts]
        came = lambda: [self.cluster.bytes_in(self.cluster.hosts[h]) - b for h, b in zip(hosts, before)]  # noqa: E731
        return lambda: until_true(lambda: min(came()) > part * self.nbytes, FAR)

    def answers(self, ranks: tuple[int, ...] = (0, 1), within: float = FAR) -> list[dict]:
        said = [self.trainers[r].expect("refitted", "raised", timeout=within + 60) for r in ranks]
        assert all(s["seconds"] < within for s in said), said
        return said

    def refit(self, seed: int | None = None, **how) -> dict:
        """The report of a refit in which nothing goes wrong."""
        if seed is not None:
            self.all("set", "set", seed=seed)
        for t in self.trainers:
            t.say(do="refit", **{"deadline_s": FAR, "verify": True, **how})
        said = self.answers(within=2 * FAR)
        assert all(s["kind"] == "refitted" and s["committed"] == [True, True] for s in said), said
        by = {k for k in said[0]["scalars"] if k.startswith("route/") and k.endswith("_bytes")}
        assert by == {f"route/{t}_bytes" for t in self.transports}, said[0]["routes"]
        return said[0]

    def right(self, seed: int, **how) -> dict:
        """The next refit brings these weights, bit for bit, into both engines, and no byte into a host that does not need it."""
        self.fault("")
        before = [self.cluster.bytes_in(h) for h in self.cluster.hosts]
        report = self.refit(seed, **how)
        came = [self.cluster.bytes_in(h) - b for h, b in zip(self.cluster.hosts, before)]
        assert min(came[2:]) >= self.nbytes and max(came[:2]) < 0.2 * self.nbytes + (1 << 20), (self.nbytes, came)
        assert all(self.holds(i, seed) for i in range(2)), seed
        self.seed, self.whole = seed, True
        return {**report, "came": came[2:]}

    def other(self) -> int:
        """A seed of other weights than the last ones."""
        return 3 - self.seed

    def fault(self, text: str) -> None:
        """In trainers, xfer/faults.py."""
        cause(self.faults, text)


class GlooBench(Bench):
    """CPUs. The truth is what vLLM loaded from the checkpoint of seed 1."""

    transports = {"gloo"}
    config = toy.config("qwen3")

    def _begin(self, folder: Path) -> None:
        address = self.cluster.hosts[0].in_url
        self.job = refit_job.Job(folder, "qwen3", world=2, address=address, host_of=self.host_of)
        self.faults = self.job.trainers.faults
        self.made = [self._engine(i) for i in range(2)]
        self.job.trainers.build(self.config, address=address)
        for e in self.made:
            e.started()
        self.truth = self.made[0].observe()

    def _engine(self, i: int, **env: str):
        e = self.job.engine(f"engine{i}-{len(self.job.family.children)}", 1, **{**self.env_of(2 + i), **env})
        e.start(str(self.job.model), "auto")
        return e

    @property
    def trainers(self) -> list[Child]:
        return self.job.trainers.ranks

    def held(self, i: int):
        seen = self.made[i].observe()
        return seen.checksums, seen.outputs

    def holds(self, i: int, seed: int) -> bool:
        return self.made[i].observe().same(self.truth) == (seed == 1)


class NixlBench(GlooBench):
    """CPUs. Rows of short runs go by gloo."""

    transports = {"rdma", "gloo"}

    def _begin(self, folder: Path) -> None:
        self.cluster.show_nics()
        super()._begin(folder)

    def meet(self, **how) -> list[dict]:
        return super().meet(rdma=True, **how)


class NcclBench(Bench):
    """GPUs. The truth is what vLLM's loader makes of the weights of a seed in a second model beside the live one."""

    transports = {"nccl"}
    config = gpu_job.config(
        "qwen3", hidden_size=1024, intermediate_size=4096, num_attention_heads=16, num_key_value_heads=8, vocab_size=8000
    )  # fmt: skip

    def _gpu(self, host: int) -> int:
        """Engines begin at the first, trainers at the last."""
        return host - 2 if host > 1 and gpu_job.gpus() > 1 else (gpu_job.gpus() - 1 - host) % gpu_job.gpus()

    def _begin(self, folder: Path) -> None:
        self.job = gpu_job.Job(folder, self.config, self.cluster.hosts[0].in_url, self.host_of)
        self.faults = folder / "trainers.fault"
        self.made = [self._engine(i) for i in range(2)]
        env = {**gpu_job.NO_HANDLES, **self.env_of(0), "NCCL_HOSTID": "h{rank}", "XFER_FAULT_FILE": str(self.faults)}
        self.job.start_trainers([self._gpu(0), self._gpu(1)], **env)
        self.job.plain()
        for e in self.made:
            e.started()

    def _engine(self, i: int, **env: str):
        name, env = f"engine{i}-{len(self.job.family.children)}", {**self.env_of(2 + i), **env}
        return self.job.engine(name, [self._gpu(2 + i)], env=env, eager=True)

    @property
    def trainers(self) -> list[Child]:
        return self.job.trainers

    def held(self, i: int):
        return self.made[i].ask("digests", "digests")["workers"], self.made[i].observe()["outputs"]

    def holds(self, i: int, seed: int) -> bool:
        wrong = self.made[i].wrong(config=self.config, seed=seed)
        assert wrong == [[]], (seed, wrong)
        return True
