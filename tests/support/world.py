"""A small world for tests of the session: threads of trainers that hold rows of tensors, engines whose workers hold columns. It stands in
for Megatron and vLLM only where the thing under test is the session itself (who says what when). All else is real.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from examples.common.ports import free_port
from tests.support.threads import all_good, run_ranks
from xfer.arguments import RefitOptions
from xfer.coordinator.coordinator import Coordinator
from xfer.coordinator.state import Options
from xfer.engines.layout import EngineLayout
from xfer.participants.controller import Controller
from xfer.participants.lane import Lane
from xfer.participants.trainer import TrainerSession
from xfer.participants.worker import WorkerSession
from xfer.plan.fabric import Site
from xfer.routes import Direct, Route, worker_side
from xfer.trace.fragment import Fill, Fragment, Root, Span, TensorSpec
from xfer.trace.traced import Traced
from xfer.trace.traced import TrainerLayout as ToyLayout

TOKEN = "token of the test world"
REFIT = dict(version=None, verify=True, wait="commit", min_replicas=None, deadline_s=None, delta=None, at_once=None)
HOST_PULL = False
"""For all worlds of a module that says so."""


def flat(t: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())


def turned(tensors: dict[str, torch.Tensor]) -> None:
    w = tensors["layers.0.w"]
    tensors["layers.0.w"] = w.t().contiguous().t() if w.is_contiguous() else w.contiguous()


def turned_within(t: torch.Tensor) -> None:
    """Other strides in the same object at the same address, same values."""
    values = t.clone()
    t.set_(t.untyped_storage(), 0, t.shape, t.t().contiguous().t().stride())
    t.copy_(values)


def specs_of(shapes: dict[str, tuple[int, ...]]) -> tuple[TensorSpec, ...]:
    return tuple(sorted(TensorSpec(n, tuple(s), "bfloat16") for n, s in shapes.items()))


def fragment(name: str, origin: tuple[int, ...], extent: tuple[int, ...], t: torch.Tensor) -> Fragment:
    """The box of the checkpoint tensor `name` that lies at the start of `t`, in a storage of the same name."""
    strides = tuple(0 if n == 1 else s * 2 for n, s in zip(extent, t.stride()))
    return Fragment(name, origin, extent, name, t.storage_offset() * 2, strides, "bfloat16")


SHAPES = {"layers.0.w": (24, 12), "layers.1.w": (24, 12), "embed": (36, 8), "norm": (12,)}


class ToySource:
    """Rank `rank` of `world` holds rows of every matrix and all of every vector, in bf16."""

    device = torch.device("cpu")
    reads_together = False

    def __init__(self, rank: int, world: int, shapes: dict[str, tuple[int, ...]] = SHAPES):
        self.rank, self.world, self.shapes = rank, world, shapes
        self.params: dict[str, torch.Tensor] = {}
        self.drained = 0
        self.fail: Exception | None = None
        self.set(0)

    def rows(self, n: int) -> tuple[int, int]:
        return self.rank * n // self.world, (self.rank + 1) * n // self.world

    @staticmethod
    def value(name: str, shape, version: int) -> torch.Tensor:
        """Every third version has new values in all elements. The others differ from version 0 in a few elements, which vary."""

        def noise(seed: int, n: int) -> torch.Tensor:
            g = torch.Generator().manual_seed(sum(map(ord, name)) * 100_000 + seed)
            return torch.randn(n, generator=g).to(torch.bfloat16)

        n = torch.Size(shape).numel()
        if version % 3 == 0:
            return noise(version, n).view(shape)
        out, some = noise(0, n), noise(version, n).argsort()[: max(1, n // 32)]
        out[some] = noise(version, len(some))
        return out.view(shape)

    def set(self, version: int) -> None:
        for name, shape in self.shapes.items():
            full = self.value(name, shape, version)
            lo, hi = self.rows(shape[0]) if len(shape) > 1 else (0, shape[0])
            self.params.setdefault(name, torch.empty_like(full[lo:hi])).copy_(full[lo:hi])

    def move(self) -> None:
        """Other storages with the same values. The old ones hold NaN, for those who still read them."""
        for name, old in list(self.params.items()):
            self.params[name] = old.clone()
            old.fill_(float("nan"))

    def turn(self) -> None:
        """Other strides, same values: only a new plan reads it rightly."""
        turned(self.params)

    def turn_within(self) -> None:
        turned_within(self.params["layers.0.w"])

    def export(self) -> None:
        """One tensor more, or less, which engines drop: other specs."""
        if self.params.pop("extra", None) is not None:
            self.shapes = {n: s for n, s in self.shapes.items() if n != "extra"}
        else:
            self.shapes = self.shapes | {"extra": (4, 4)}
            self.set(0)

    def drain(self) -> None:
        self.drained += 1
        if self.fail is not None:
            raise self.fail

    def read(self) -> ToyLayout:
        self._ptrs = self._now()
        roots = tuple(Root(n, self.params[n].untyped_storage().nbytes()) for n in self.shapes)
        fragments = []
        for name, shape in self.shapes.items():
            t = self.params[name]
            origin = (self.rows(shape[0])[0], 0) if len(shape) > 1 else (0,)
            fragments.append(fragment(name, origin, tuple(t.shape), t))
        tensors = {n: flat(self.params[n]) for n in self.shapes}
        return ToyLayout(Traced(specs_of(self.shapes), tuple(fragments)), roots, tensors)

    def _now(self):
        return [(t.data_ptr(), t.stride(), t.untyped_storage().nbytes()) for t in self.params.values()]

    def check(self) -> str:
        now = self._now()
        if now == self._ptrs:
            return "same"
        return "moved" if [n[1:] for n in now] == [p[1:] for p in self._ptrs] else "changed"

    def rebind(self):
        return self.read().tensors


class Meets(ToySource):
    """Meets all other ranks before it is ready, as ranks do that gather together. `breaks`: it raises "before" or "after" that."""

    def __init__(self, *which):
        super().__init__(*which)
        self.digest, self.breaks, self.late_s, self.computations = "same", "", 0.0, 0

    def read(self) -> ToyLayout:
        layout = super().read()
        return ToyLayout(replace(layout.traced, gathers=("g",)), layout.roots, layout.tensors)

    def compute(self, meet) -> None:
        self.point("before")
        meet(tuple(range(self.world)), self.digest)
        self.computations += 1
        self.point("after")

    def point(self, where: str) -> None:
        if where == "before":
            time.sleep(self.late_s)
        if where == self.breaks:
            raise RuntimeError("boom")


class ToyTaker:
    """Worker `rank` holds columns of every matrix, all of every vector, and two padding rows of `embed`. Adapter and weights in one."""

    weights = property(lambda self: self)
    device = torch.device("cpu")
    drop: tuple[str, ...] = ()
    version = None

    def __init__(self, rank: int, world: int, shapes: dict[str, tuple[int, ...]] = SHAPES):
        self.rank, self.world, self.shapes = rank, world, shapes
        self.live = {
            n: torch.full((s[0] + 2 * (n == "embed"), s[1] // world) if len(s) > 1 else s, 7.0, dtype=torch.bfloat16)
            for n, s in shapes.items()
        }
        self.spare = torch.full((12,), 7.0, dtype=torch.bfloat16)
        self.locked, self.began_with, self.paused = False, "whole", False

    def read(self, catalog) -> EngineLayout:
        # Refits write the locked tensor's bytes to a spare; the live ones hold NaN until the commit.
        tensors = {n: flat(t) for n, t in self.live.items()} | {"norm": flat(self.spare)}
        fragments, e = [], self.live["embed"]
        for name, (rows, *_) in self.shapes.items():
            t = self.live[name]
            origin = (0, self.rank * t.shape[1]) if t.dim() > 1 else (0,)
            fragments.append(fragment(name, origin, (rows, *t.shape[1:]), t))
        fill = Fill("embed", 36 * e.shape[1] * 2, (2, e.shape[1]), (e.shape[1] * 2, 2), "bfloat16", b"\0\0")
        self._places = self._now()
        sizes = [(n, self.live[n].numel() * 2) for n in self.shapes]
        return EngineLayout(
            roots=tuple(Root(n, size) for n, size in sizes),
            tensors=tensors,
            traced=Traced(specs_of(self.shapes), tuple(fragments), (fill,), reads=tuple(sorted(self.shapes))),
            footprint=tuple(Span(n, 0, size) for n, size in sizes),
            kept=(),
            staged=(),
        )

    @property
    def holds(self) -> str:
        return "mix" if self.locked else self.began_with

    def check(self, quick: bool = False) -> str:
        told = slice(1 if quick else 2)
        return "same" if [n[told] for n in self._now()] == [p[told] for p in self._places] else "changed"

    def _now(self) -> list:
        return [(t.data_ptr(), t.stride()) for t in self.live.values()]

    def rebind(self):
        return self.read(None).tensors

    def choose_lock(self) -> str:
        return "norm"

    def engage_lock(self) -> None:
        self.locked = True
        self.live["norm"].fill_(float("nan"))

    def release_lock(self) -> None:
        self.live["norm"].copy_(self.spare)
        self.locked, self.began_with = False, "whole"  # last: tests that wait for this read what lives right after

    def run_recipes(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def installs_after(self, event: threading.Event) -> None:
        """From now on: for calls that may return when the sources are free, but hear of the commit if that comes first. Short of
        what an installation may take."""
        release = self.release_lock
        self.release_lock = lambda: (event.wait(4.0), release())

    def wrong(self, version: int) -> list[str]:
        """Names whose live bytes are not exactly version `version`."""
        bad = []
        for n, s in self.shapes.items():
            want = ToySource.value(n, s, version)
            if want.dim() > 1:
                c = s[1] // self.world
                want = want[:, self.rank * c : (self.rank + 1) * c]
            if n == "embed":
                want = torch.cat([want, torch.zeros(2, want.shape[1], dtype=want.dtype)])
            if not torch.equal(self.live[n].view(torch.int16), want.contiguous().view(torch.int16)):
                bad.append(n)
        return bad


def trainer_session(
    source, rendezvous: str, token: str, *, replicas=1, deadline_s: float, drop=(), route=None, **direct
):
    """As `connect` makes one, with options of the direct route unless another is given."""
    route = route or Direct(**{"bucket_bytes": 4096, "cache_dir": None, **direct})
    options = route.options(Options(source.world, replicas, deadline_s, 0, tuple(drop)), source)
    return TrainerSession(source, rendezvous, token, options, route.side(source, tuple(drop)))


class ToyEngine:
    """Answers the calls of an EngineHandle with WorkerSessions in threads, as vLLM's collective calls would."""

    name = "toy engine"

    def __init__(self, workers: int, shapes=SHAPES):
        self.takers = [ToyTaker(i, workers, shapes) for i in range(workers)]
        self.sessions: list[WorkerSession] = []
        self.log: list[str] = []
        self.label = ""
        self.paused = self.open = self.in_step = self.keeps_caches = False
        self.fail: dict[str, Exception] = {}
        self._joining = threading.Lock()

    def _did(self, what: str) -> None:
        self.log.append(what)
        if what in self.fail:
            raise self.fail.pop(what)

    def _all(self, call) -> None:
        threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(self.takers))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()

    @property
    def engine(self):
        return self

    def stay_paused(self, *_, **__): ...

    refuse_own_loop = ask_paused = finish_ahead = assume_paused = hand_over_drafter = stay_paused

    def hold(self):
        return contextlib.nullcontext()

    def workers(self, timeout=0.0):
        return len(self.takers)

    def init(self, info, timeout):
        with self._joining:  # as an engine's core carries out one call after the other
            for s in self.sessions:
                s.close()
            self._init(info)

    def _init(self, info):
        where = info["rendezvous"], info["token"], info["deadline_s"], self.open, self.in_step
        self.sessions = [
            WorkerSession(t, worker_side, info["replica"], i, info["workers"], *where)
            for i, t in enumerate(self.takers)
        ]
        self._all(lambda i: self.sessions[i].join())

    def pause(self, timeout):
        self._did("pause")
        self.paused = True

    def resume(self, timeout):
        self._did("resume")
        self.paused = False

    def start_update(self, timeout, *, then=None):
        self._did("start")
        self.open = True

    def update(self, info, timeout):
        self._did("update")
        self._all(lambda i: self.sessions[i].receive(info["attempt"], info["deadline_s"]))

    def finish(self, version, timeout):
        self._did("finish")
        self.open = False
        if version is not None:
            self.label = version

    def set_version(self, text, timeout):
        self.label = text

    def get_version(self, timeout):
        return self.label

    def ranks_in_step(self, timeout=0.0):
        return self.in_step

    def assume_open_session(self):
        self.log.append("session was open")

    def reset_caches(self, timeout):
        self._did("reset")


def until_true(condition, seconds: float = 10.0):
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until
        time.sleep(0.005)
    return found


def good(results):
    """Return the first rank's result. Raises the first error of any rank."""
    return all_good(results)[0]


def raised(results, kind, *texts: str) -> list:
    """Every result is an error of this kind that contains `texts`."""
    for r in results:
        assert isinstance(r, kind), repr(r)
        for text in texts:
            assert text in str(r), str(r)
    return results


def ways(report) -> list[dict[str, int]]:
    """Bytes by route, for each replica."""
    return [{r.route: r.bytes for r in o.routes} for o in report.outcomes]


def kinds(report) -> list[str]:
    """The routes of each replica."""
    return ["+".join(sorted(x)) for x in ways(report)]


def right(world: World, version: int, replicas=None) -> None:
    """Every worker of these replicas (None: of all) holds exactly this version."""
    for i, engine in enumerate(world.engines):
        if replicas is None or i in replicas:
            assert [t.wrong(version) for t in engine.takers] == [[] for _ in engine.takers], f"replica {i}"


@dataclass
class World:
    """`trainers` threads and `replicas` engines of `workers` each, met at one rendezvous."""

    trainers: int = 2
    workers: int = 2
    replicas: int = 1
    deadline_s: float = 20.0
    shapes: dict = field(default_factory=lambda: dict(SHAPES))
    bucket_bytes: int = 4096
    cache_dir: str | None = None
    host_pull: bool = False
    relay: bool = False
    rdma: bool = False
    first_copies: bool = True
    drop: tuple[str, ...] = ()
    wait: bool = True
    fabric: Site | None = None
    sources: list[ToySource] = field(default_factory=list)
    sessions: list[TrainerSession] = field(default_factory=list)
    engines: list[ToyEngine] = field(default_factory=list)
    controllers: list[Controller] = field(default_factory=list)

    def connect(self) -> World:
        self.rendezvous = f"tcp://127.0.0.1:{free_port()}"
        self.sources = self.sources or [ToySource(i, self.trainers, self.shapes) for i in range(self.trainers)]
        self.engines = self.engines or [ToyEngine(self.workers, self.shapes) for _ in range(self.replicas)]
        self.controllers = [self.serve(e, i) for i, e in enumerate(self.engines)]
        self.sessions = [None] * self.trainers
        results = self.on_all(self._connect_one)
        for r in results:
            if isinstance(r, BaseException):
                self.close()
                raise r
        if not self.first_copies:  # replicas that join get their first weights from the trainers
            self.coordinator.options = replace(self.coordinator.options, first_copies=False)
        return self

    def serve(self, engine, replica: int) -> Controller:
        return Controller(engine, self.rendezvous, TOKEN, replica=replica, deadline_s=self.deadline_s)

    def _connect_one(self, i: int):
        how = dict(replicas=self.replicas, deadline_s=self.deadline_s, drop=self.drop, route=self.route(i))
        self.sessions[i] = trainer_session(self.sources[i], self.rendezvous, TOKEN, **how)
        self.sessions[i].open(self.wait)

    def route(self, _: int) -> Route:
        direct = {f: getattr(self, f) for f in ("bucket_bytes", "cache_dir", "relay", "rdma", "fabric")}
        return Direct(host_pull=self.host_pull or HOST_PULL, **direct)

    @property
    def coordinator(self) -> Coordinator:
        return self.sessions[0]._server.coordinator

    def phase(self, replica: int) -> str:
        return self.coordinator.replicas[replica].phase.value

    def epochs(self) -> list[int]:
        return [r.epoch for r in self.coordinator.replicas.values()]

    def order(self) -> list[list[int]]:
        """By replica, the replicas from which it reads."""
        return [[i for i, _ in r.sources if i != r.index] for r in self.coordinator.replicas.values()]

    def steps(self, replica: int):
        return self.lane(replica).plane._routed.place.steps

    def lane(self, replica: int = 0, worker: int = 0) -> Lane:
        return self.engines[replica].sessions[worker]._lane_

    def armed(self) -> bool:
        """Whether a refit is open in which all workers have armed."""
        refit = self.coordinator.refit
        return bool(refit) and all(len(part.armed) == part.replica.size for part in refit.parts.values())

    def later(self, what: Callable[[], object]) -> None:
        """Call `what` on the rendezvous' thread, after what has come by now. A wait there stands for a process that is stopped."""
        self.sessions[0]._server.loop.call_soon_threadsafe(what)

    def leave(self, replica: int) -> None:
        """The processes of a replica close their sessions."""
        self.controllers[replica].close()
        for s in self.engines[replica].sessions:
            s.close()
        gone = self.coordinator.replicas[replica]
        until_true(lambda: gone.phase.value == "lost" and not gone.workers)

    def come(self, replica: int, engine: ToyEngine | None = None) -> Controller:
        """A new engine joins as this replica."""
        self.engines[replica] = engine or ToyEngine(self.workers, self.shapes)
        self.controllers[replica] = self.serve(self.engines[replica], replica)
        return self.controllers[replica]

    def on_all(self, call, ranks=None) -> list:
        """call(i) on every trainer's thread; results or the exceptions they raised."""
        ranks = range(self.trainers) if ranks is None else ranks
        return run_ranks(len(ranks), lambda k: call(ranks[k]), max(60.0, self.deadline_s * 6))

    def refit(self, weights: int | None = None, ranks=None, **kw) -> list:
        options = REFIT | kw
        if weights is not None:
            for s in self.sources:
                s.set(weights)

        return self.on_all(lambda i: self.sessions[i].refit(RefitOptions(**options)), ranks)

    def start(self, weights: int | None = None, ranks=None, **kw) -> Callable[[], list]:
        """Begin a refit on threads. The result waits for them and returns what `refit` returns."""
        out: list = []
        thread = threading.Thread(target=lambda: out.extend(self.refit(weights, ranks, **kw)), daemon=True)
        thread.start()

        def results(seconds: float = 60.0) -> list:
            thread.join(seconds)
            assert not thread.is_alive(), "the refit hangs"
            return out

        results.running = thread.is_alive
        return results

    def commits(self, weights: int, /, replicas=None, **kw):
        """A refit of these weights, after which all workers (of `replicas`) hold exactly them. Its report."""
        report = good(self.refit(weights, **kw))
        right(self, weights, replicas)
        return report

    def fails(self, weights: int | None, kind, /, *texts: str, within: float = 15.0, ranks=None, **kw) -> list:
        """A refit in which every rank raises an error of this kind that contains `texts`, within so many seconds."""
        began = time.monotonic()
        results = self.refit(weights, ranks, **kw)
        assert time.monotonic() - began < within, f"took {time.monotonic() - began:.1f} s"
        return raised(results, kind, *texts)

    def close(self) -> None:
        for c in self.controllers:
            c.close()
        for e in self.engines:
            for s in e.sessions:
                s.close()
        for s in self.sessions:
            if s is not None:
                s.close()

    def __enter__(self):
        return self.connect()

    def __exit__(self, *exc):
        self.close()
