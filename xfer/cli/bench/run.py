"""Has the processes of `xfer bench` started, refits between them by each route, and collects what was measured."""

from __future__ import annotations

import socket
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

import xfer
from xfer.cli.bench.hosts import BenchHost
from xfer.cli.bench.rank import Task
from xfer.cli.children import Child, Process, on_all
from xfer.cli.layouts.processes import TracedSide
from xfer.errors import XferError
from xfer.plan.options import PlanOptions
from xfer.plan.planner import Drafts
from xfer.plan.program import row_wire_bytes
from xfer.rendezvous.client import host_identity
from xfer.routes import BUCKET_BYTES

ROUTES = {"cpu": ("pull", "gloo", "packed"), "cuda": ("pull", "nccl", "packed")}


@dataclass(frozen=True, slots=True)
class Job:
    """The layouts and options of a benchmark.

    Attributes:
        sources, destinations: Layouts of the trainers, and of one replica's workers.
        replicas: Number of equal replicas.
        drop, narrow: Arguments of connect.
    """

    sources: TracedSide
    destinations: TracedSide
    replicas: int
    drop: tuple[str, ...] = ()
    narrow: tuple[str, ...] = ()

    @property
    def trainers(self) -> int:
        return len(self.sources.ranks)

    @property
    def workers(self) -> int:
        """Number of workers of one replica."""
        return len(self.destinations.ranks)

    @property
    def world(self) -> int:
        return self.trainers + self.replicas * self.workers


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs. `device`: torch's name, on that host."""

    host: BenchHost
    device: str


def placed(job: Job, hosts: Sequence[BenchHost], trainer_hosts: int | None, device: str) -> list[Place]:
    """Spread the trainers over the first hosts and the workers over the rest, or both over all.

    Args:
        trainer_hosts: Number of hosts with trainers. None: in proportion to the number of trainers, but not all of several hosts.
        device: "cpu" or "cuda". Processes of a host take its GPUs in turn.
    """
    size, workers, taken = len(hosts), job.world - job.trainers, Counter[str]()
    k = trainer_hosts or max(1, min(size - 1, round(size * job.trainers / job.world)))
    first = k % size
    on = [hosts[i * k // job.trainers] for i in range(job.trainers)]
    on += [hosts[first + i * (size - first) // workers] for i in range(workers)]
    places = []
    for host in on:
        number = taken[host.has.name] % host.has.gpus if device == "cuda" else 0
        places.append(Place(host, f"cuda:{number}" if device == "cuda" else "cpu"))
        taken[host.has.name] += 1
    return places


@dataclass(frozen=True, slots=True)
class RouteResult:
    """The measurements of one route, in seconds; lists have one entry per timed refit.

    Attributes:
        route: The route that was asked for.
        error: Why it did not run to its end; "" if it did.
        bytes: Bytes that all workers received in a refit.
        carried: Route -> bytes that it carried.
        floor_s: The slowest rank's raw transfer of the same bytes.
        floor_error: Why there is no floor; "" if there is one.
        first_s: The call of the first refit, in which links are opened.
        transfer_s, outage_s, call_s: Clocks of the reports of trainer rank 0.
        verified_s: The transfer clock of refits with verify=True.
        wrong: Wrong elements over all workers, after the first and after the last refit.
        examples: Some tensors with wrong elements.
        explained: What trainer rank 0 says of bytes and routes (`Session.explain`).
    """

    route: str
    error: str = ""
    bytes: int = 0
    carried: Mapping[str, int] | None = None
    floor_s: Sequence[float] = ()
    floor_error: str = ""
    first_s: float = 0.0
    transfer_s: Sequence[float] = ()
    outage_s: Sequence[float] = ()
    call_s: Sequence[float] = ()
    verified_s: Sequence[float] = ()
    wrong: int = 0
    examples: Sequence[str] = ()
    explained: str = ""

    @property
    def gb_per_s(self) -> float:
        return self.bytes / statistics.median(self.transfer_s) / 1e9 if self.transfer_s else 0.0


def pair_bytes(job: Job, bucket_bytes: int) -> list[list[int]]:
    """Bytes on the wire from each trainer to each process, in the plans that sessions make of these layouts."""
    out = np.zeros((job.trainers, job.world), np.int64)
    drafts = Drafts()
    for replica in range(job.replicas):
        options = PlanOptions(
            bucket_bytes=bucket_bytes, rotation=replica, rotations=job.replicas, drop=job.drop, narrow=job.narrow
        )
        plan = drafts.plan(job.sources.catalog, job.sources.ranks, job.destinations.ranks, options)
        first = job.trainers + replica * job.workers
        for rows in plan.rows():
            moved = rows[rows["src"] >= 0]
            np.add.at(out, (moved["src"], first + moved["dst"] - job.trainers), row_wire_bytes(moved))
    return out.tolist()


class EngineOfWorkers:
    """One replica, as `xfer.serve` takes an engine: it hands calls on to the workers' processes. It serves no requests."""

    def __init__(self, workers: Sequence[Process]):
        self._workers = workers

    def get_world_size(self) -> int:
        return len(self._workers)

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        for joined in [w.order("join", info={**request["init_info"], "index": i}) for i, w in enumerate(self._workers)]:
            joined.result()

    def update_weights(self, request: dict[str, Any]) -> None:
        info = request["update_info"]
        on_all(self._workers, "receive", attempt=info["attempt"], deadline_s=info["deadline_s"])

    def _nothing(self) -> None: ...

    start_weight_update = finish_weight_update = pause_generation = resume_generation = reset_prefix_cache = _nothing


def start_rank(token: str, name: str, task: Task) -> Child:
    """Start a process on this host."""
    env = {"XFER_TOKEN": token, "OMP_NUM_THREADS": "1"}
    if task.route in ("nccl", "gloo"):  # workers must not read trainers' memory
        if task.role == "worker":
            env["XFER_HOST"] = f"{host_identity()}-engines"
        else:
            env |= dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")
    return Child(name, [sys.executable, "-m", "xfer.cli.bench.rank"], task, env)


def bench(
    job: Job,
    route: str,
    places: Sequence[Place],
    at: str,
    token: str,
    repeats: int,
    deadline_s: float,
    say: Callable[[str], None],
) -> RouteResult:
    """Refit by one route between new processes.

    Args:
        job: The layouts.
        route: One of `ROUTES`.
        places: One place per process: the trainers, then the workers of each replica. Trainer 0 is on this host.
        at: Name or address by which processes reach this host.
        token: The secret of the sessions, the same on all hosts.
        repeats: Number of timed refits, after two that are not timed; as many again with verify=True.
        deadline_s: Seconds for connecting, and for each refit.
        say: Called with what is being done.
    """
    found: dict[str, Any] = {"route": route}
    bucket = BUCKET_BYTES[places[0].device.partition(":")[0]]
    hosts = [p.host.has.name for p in places]
    with ExitStack() as stack:
        common: dict[str, Any] = dict(
            world=job.world, trainers=job.trainers, devices=[p.device for p in places], hosts=hosts, pairs=pair_bytes(job, bucket),
            meet=(at, kept_port(stack)), route=route, drop=list(job.drop), narrow=list(job.narrow), replicas=job.replicas,
            catalog=job.sources.catalog.to_bytes(),
        )  # fmt: skip
        children: list[Process] = []
        for joint, place in enumerate(places):
            mine = joint < job.trainers
            inventory = (
                job.sources.ranks[joint] if mine else job.destinations.ranks[(joint - job.trainers) % job.workers]
            )
            role = "trainer" if mine else "worker"
            task = Task(role=role, joint=joint, inventory=inventory.to_bytes(), **common)
            name = f"{role} {joint}" + (f" on {hosts[joint]}" if len(set(hosts)) > 1 else "")
            children.append(place.host.start("rank", name, task))
            stack.callback(children[-1].stop)
        try:
            say(f"{route}: starting {job.world} processes")
            for c in children:
                c.ready.result()
            if route != "packed":
                say(f"{route}: floor")
                try:
                    slowest = zip(*on_all(children, "floor", repeats=repeats))
                    found["floor_s"] = [max(x) for x in slowest]
                except XferError as e:
                    found["floor_error"] = e.message
            trainers, workers = children[: job.trainers], children[job.trainers :]
            rendezvous = f"tcp://{f'[{at}]' if ':' in at else at}:{kept_port(stack)}"
            for r in range(job.replicas):
                engine = EngineOfWorkers(workers[r * job.workers : (r + 1) * job.workers])
                serving = xfer.serve(engine, rendezvous, token, replica=r, deadline_s=deadline_s)
                stack.enter_context(serving)
            say(f"{route}: connecting")
            on_all(trainers, "connect", rendezvous=rendezvous, deadline_s=deadline_s)

            def refit(times: int, verify: bool = False) -> list[dict[str, float]]:
                return [on_all(trainers, "refit", verify=verify)[0] for _ in range(times)]

            on_all(trainers, "train", seed=1)
            (first,) = refit(1)
            say(f"{route}: every element is compared")
            wrong = sum(map(Counter, on_all(workers, "wrong", seed=1)), Counter[str]())
            say(f"{route}: {repeats} refits, and {repeats} verified")
            warm, verified = refit(repeats + 2)[2:], refit(repeats + 2, True)[2:]
            on_all(trainers, "train", seed=2)
            refit(1, True)
            wrong = sum(map(Counter, on_all(workers, "wrong", seed=2)), wrong)
            found["explained"] = trainers[0].order("explain").result()
            on_all(trainers, "close")
            routes = {k: int(n) for k, n in warm[-1].items() if k.startswith("route/") and k.endswith("_bytes")}
            carried = {k.removeprefix("route/").removesuffix("_bytes"): n for k, n in routes.items()}
            found |= {
                "bytes": int(first["bytes"]), "carried": carried, "first_s": first["call_s"],
                **{k: [x[k] for x in warm] for k in ("transfer_s", "outage_s", "call_s")},
                "verified_s": [x["transfer_s"] for x in verified], "wrong": sum(wrong.values()), "examples": sorted(wrong)[:8],
            }  # fmt: skip
        except XferError as e:
            found["error"] = str(e)
    return RouteResult(**found)


def kept_port(stack: ExitStack) -> int:
    """A free port, which no other process gets until `stack` ends. One that sets SO_REUSEADDR, as a rendezvous does, can listen there."""
    sock = stack.enter_context(socket.socket())
    sock.bind(("", 0))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # only now: nobody else is at this port
    return int(sock.getsockname()[1])
