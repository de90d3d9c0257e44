"""Runs the real coordinator and the real participants of a job in one thread at a time, by a fake clock and in a chosen order.

Inside `Simulation(seed)`, modules find this module's locks, queues, events, threads and clock in place of Python's. A thread that would
wait gives its turn to another one, which the seed chooses. The clock stands while some thread can go on. A run with the same seed and the
same calls repeats itself, turn by turn. Messages travel through queues instead of sockets, in order per connection; sends through `Link`
instead of gloo, pulls through cpu_peer.py. Threads of one process have its label as their `who`.
"""

from __future__ import annotations

import _thread as real_raw_threads
import contextlib
import ctypes
import gc
import itertools
import os
import queue as real_queue
import random
import sys
import threading as real_threading
import time as real_time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from types import SimpleNamespace

import pytest
import torch

# All modules with locks of their own are there before these are replaced.
import xfer.packed.trainer
import xfer.packed.worker
import xfer.plan.fabric_file  # noqa: F401
from xfer import api  # noqa: F401
from xfer.coordinator import messages as m
from xfer.coordinator.coordinator import Coordinator
from xfer.coordinator.events import Connected, Disconnected, Received, Tick
from xfer.direct import trainer, worker  # noqa: F401
from xfer.engines import choose_handle  # noqa: F401
from xfer.errors import DeadlineExceeded, PeerLost
from xfer.participants import refit
from xfer.rendezvous import client, server
from xfer.transport import group, routes

FOREVER = float("inf")
STEPS = 1_000_000
"""Turns of one simulation. More are a livelock."""

POLL_S = 0.01
"""The shortest sleep: loops that look again after less would fill minutes of the clock with turns."""


class Killed(BaseException):
    """Unwinds a thread at the end of the simulation."""


class Simulation:
    """A context manager; there is one at a time."""

    now_running: Simulation | None = None

    def __init__(self, seed: int = 0):
        self.random = random.Random(seed)
        self.now, self.turns, self.numbers = 1000.0, 0, itertools.count(1)
        self.trace = 0  # checksum of all turns
        self.why, self.ending = "", False  # why it cannot go on
        self.errors: list[Exception] = []  # that ended threads
        self.threads: list[Thread] = []
        self.stopped: set[str] = set()
        self.dead: set[str] = set()
        self.servers: dict[str, Server] = {}
        self.first: Callable[[], bool] | None = None  # what the main thread waits for: it goes on before all others
        self.channels: list[Channel] = []
        self.links: list[Link] = []
        self.groups: dict[str, tuple[dict, dict]] = defaultdict(lambda: ({}, {}))

    # ---- turns

    def block(self, ready: Callable[[], bool], until: float = FOREVER) -> bool:
        """Let others run until `ready()`, or until the clock shows `until`. Return whether it is ready."""
        me = self.running
        me.ready, me.until = ready, until
        self.hand_over(me)
        me.ready = _true  # holds nothing of what it waited for
        return ready()

    def turn(self) -> None:
        """A point at which another thread may go on first."""
        if self.random.random() < 0.3:
            self.block(_true)

    def hand_over(self, me: Thread | None) -> None:
        chosen = self._next()
        self.trace = zlib.crc32(f"{chosen.name} {chosen.who} {self.now}".encode(), self.trace)
        if chosen is me:
            return self._check(me)
        self.running = chosen
        chosen.baton.release()
        if me is not None:
            me.baton.acquire()
            self._check(me)

    def _check(self, me: Thread) -> None:
        if me is self.main and not self.ending:
            if self.errors:
                raise self.errors[0]
            assert not self.why, self.why
        if me.killed:
            raise Killed

    def _next(self) -> Thread:
        self.turns += 1
        if self.turns > STEPS:
            self.why = self.why or "the threads go round and round"
        while not self.why or self.ending:
            idle = self.stopped | self.dead
            able = [t for t in self.threads if t is self.main or t.who not in idle]
            if self.first is not None and self.first():
                return self.main
            left = able[:]
            while left:  # any of those that can go on, each as likely
                at = int(self.random.random() * len(left))
                chosen = left[at]
                if chosen.until <= self.now or chosen.ready():
                    return chosen
                left[at] = left[-1]
                left.pop()
            due = min((t.until for t in able), default=FOREVER)
            if due == FOREVER:
                self.why = "all threads wait for each other"
                break
            self.now = max(self.now, due)
        return self.main

    @contextlib.contextmanager
    def process(self, who: str) -> Iterator[None]:
        """Threads that start inside belong to this process, and so does the present one meanwhile."""
        me = self.running
        before, me.who = me.who, who
        try:
            yield
        finally:
            me.who = before

    def kill(self, who: str) -> None:
        """SIGKILL: no thread of it runs any more, and its connections break."""
        self.dead.add(who)
        for c in self.channels:
            if c.who == who:
                c.break_("connection reset by peer")
        for s in self.servers.values():
            if s.who == who:
                s.closing = True
                for c in self.channels:
                    c.break_("connection reset by peer")
        for link in self.links:
            if link.who == who:
                link.abort()

    def bury(self, kind: str) -> None:
        """The threads of dead processes of this kind end, and others may have their names."""
        gone = {who for who in self.dead if who.startswith(kind)}
        for t in self.threads:
            if t.who in gone:
                t.killed, t.ready, t.until = True, _true, self.now
        self.servers = {at: s for at, s in self.servers.items() if s.who not in gone}
        self.dead -= gone
        self.block(lambda: not any(t.who in gone for t in self.threads), self.now + 1.0)

    def let(self, turns: int) -> None:
        """Let others go on for so many turns."""
        until = self.turns + turns
        self.block(lambda: self.turns >= until, self.now + 1e-9)

    def must(self, good: bool, text: str) -> None:
        """An assertion on any thread, whatever that does with exceptions: the simulation fails by it."""
        if not good:
            self.errors.append(AssertionError(text))

    def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Let others go on until the moment at which `condition` holds."""
        self.first = condition
        try:
            assert self.block(condition, self.now + seconds), "that did not happen"
        finally:
            self.first = None

    def quiet(self) -> None:
        """Let happen all that happens without time."""
        self.block(lambda: False, self.now + 1e-9)

    def wait(self, seconds: float) -> None:
        self.block(lambda: False, self.now + seconds)

    # ---- begin and end

    def __enter__(self) -> Simulation:
        Simulation.now_running = self
        gc.disable()  # it would collect at moments that no seed chooses, and takes a sixth of the time
        self._processors = os.sched_getaffinity(0)
        # One thread runs at a time: to wake it on another processor would take longer.
        os.sched_setaffinity(0, {ctypes.CDLL(None).sched_getcpu()})
        self.main = self.running = Thread(target=None, name="MainThread")
        self.main.who = "test"
        self.threads.append(self.main)
        self._patches = pytest.MonkeyPatch()
        self.patch, self.patch_item = self._patches.setattr, self._patches.setitem
        doubles = {
            id(real_threading): THREADING,
            id(real_raw_threads): RAW_THREADS,
            id(real_time): TIME,
            id(real_queue): QUEUE,
            id(futures.Future): Future,
        }
        self._modules = set(sys.modules)
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] in ("xfer", "tests", "examples") and name != __name__:
                for key, value in list(vars(module).items()):
                    if (
                        double := Event() if type(value) is real_threading.Event else doubles.get(id(value))
                    ) is not None:
                        self.patch(module, key, double)
        self.patch(client, "dial", dial)
        self.patch(server, "_ended", {})
        self.patch(client, "_left", {})
        self.patch(client, "os", SimpleNamespace(environ=os.environ, getpid=lambda: _pid(self.running.who)))
        self.patch(refit, "_alive", lambda pid: pid not in map(_pid, self.dead))
        self.patch(sys.modules["xfer.participants.trainer"], "Server", Server)
        self.patch(routes, "open_group", open_group)
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.stopped.clear()
            self.dead.clear()
            for t in list(self.threads):
                if t is not self.main:
                    t.killed, t.ready, t.until = True, _true, self.now
            self.why, self.ending = "", True
            self.block(lambda: len(self.threads) == 1, self.now + 1e6)
        finally:
            self._patches.undo()
            Simulation.now_running = None
            gc.enable()
            os.sched_setaffinity(0, self._processors)
        late = {name for name in sys.modules.keys() - self._modules if name.split(".")[0] == "xfer"}
        assert not late, f"modules with locks of their own: import them before the simulation: {sorted(late)}"


def _pid(who: str) -> int:
    return zlib.crc32(who.encode()) & 0x3FFFFFFF


def _true() -> bool:
    return True


def _sim() -> Simulation:
    assert Simulation.now_running is not None, "a thread has outlived its simulation"
    return Simulation.now_running


def _running() -> object:
    return Simulation.now_running.running if Simulation.now_running is not None else "no simulation"


def _until(seconds: float | None) -> float:
    return FOREVER if seconds is None or seconds < 0 else _sim().now + seconds


# ---- threading, queue and time


class Thread:
    def __init__(self, group=None, target=None, name=None, args=(), kwargs=None, *, daemon=None):
        self.name, self.daemon = name or f"Thread-{next(_sim().numbers)}", daemon
        self._call = target, args, kwargs or {}
        self.baton = real_threading.Lock()
        self.baton.acquire()
        self.ready, self.until, self.killed, self.who = _true, FOREVER, False, ""
        self._started = self._over = False
        self.ident = id(self)

    def run(self) -> None:
        target, args, kwargs = self._call
        target(*args, **kwargs)

    def start(self) -> None:
        sim = _sim()
        self.who, self._started = sim.running.who, True
        sim.threads.append(self)
        self._real = real_threading.Thread(target=self._main, args=(sim,), name=self.name, daemon=True)
        self._real.start()
        sim.turn()

    def _main(self, sim: Simulation) -> None:
        self.baton.acquire()
        try:
            if not self.killed:
                self.run()
        except Killed:
            pass
        except Exception as e:
            sim.errors.append(e)
        finally:
            self._over, self._call = True, None
            sim.threads.remove(self)
            sim.hand_over(None)

    def is_alive(self) -> bool:
        return self._started and not self._over

    def join(self, timeout: float | None = None) -> None:
        assert self._started, "cannot join thread before it is started"
        if not self._over and Simulation.now_running is not None:
            _sim().block(lambda: self._over, _until(timeout))


class Timer(Thread):
    def __init__(self, interval, function, args=(), kwargs=None):
        super().__init__(target=lambda: self._fire(interval, function, args, kwargs or {}))
        self._off = Event()

    def _fire(self, interval, function, args, kwargs):
        if not self._off.wait(interval):
            function(*args, **kwargs)

    def cancel(self):
        self._off.set()


class Lock:
    def __init__(self):
        self._owner: object = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        sim = Simulation.now_running
        if sim is not None:
            sim.turn()
            if self._owner is not None and blocking:
                sim.block(lambda: self._owner is None, _until(timeout))
        if self._owner is not None:
            return False
        self._owner = _running()
        return True

    def release(self) -> None:
        assert self._owner is not None
        self._owner = None

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self):
        return self.acquire()

    def __exit__(self, kind=None, *_):
        if kind is not Killed or self._owner is _running():  # a thread that waits for the lock may be killed
            self.release()


class RLock(Lock):
    def __init__(self):
        super().__init__()
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        mine = self._owner is not None and self._owner is _running() or super().acquire(blocking, timeout)
        self._depth += mine
        return mine

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            super().release()


class Barrier(real_threading.Barrier):
    def __init__(self, parties: int, action=None, timeout: float | None = None):
        super().__init__(parties, action, timeout)
        self._cond = Condition()


class Condition:
    def __init__(self, lock: Lock | None = None):
        self._lock, self._told = lock or Lock(), 0
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self):
        return self._lock.__enter__()

    def __exit__(self, *exc):
        self._lock.__exit__(*exc)

    def wait(self, timeout: float | None = None) -> bool:
        told = self._told
        self._lock.release()
        try:
            return _sim().block(lambda: self._told > told, _until(timeout))
        finally:
            self._lock.acquire()

    def wait_for(self, predicate, timeout: float | None = None):
        until = _until(timeout)
        while not (result := predicate()) and _sim().now < until:
            self.wait(None if until == FOREVER else until - _sim().now)
        return result

    def notify(self, n: int = 1) -> None:
        self._told += 1

    notify_all = notify


class Event:
    def __init__(self):
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        if Simulation.now_running is not None:
            _sim().turn()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._set or Simulation.now_running is not None and _sim().block(self.is_set, _until(timeout))


class Future(futures.Future):
    def __init__(self):
        super().__init__()
        self._condition = Condition()


class Queue:
    def __init__(self, maxsize: int = 0):
        self.queue, self.mutex = deque(), Lock()

    def put(self, item, *_, **__) -> None:
        self.queue.append(item)
        if Simulation.now_running is not None:
            _sim().turn()

    def get(self, block: bool = True, timeout: float | None = None):
        if not self.queue and block:
            _sim().block(lambda: bool(self.queue), _until(timeout))
        if not self.queue:
            raise real_queue.Empty
        return self.queue.popleft()

    def empty(self) -> bool:
        return not self.queue


def _sleep(seconds: float) -> None:
    _sim().block(lambda: False, _sim().now + max(seconds, POLL_S))


def _now() -> float:
    return Simulation.now_running.now if Simulation.now_running is not None else real_time.monotonic()


TIME = SimpleNamespace(monotonic=_now, perf_counter=_now, time=_now, sleep=_sleep)
THREADING = SimpleNamespace(
    Thread=Thread, Timer=Timer, Lock=Lock, RLock=RLock, Condition=Condition, Event=Event, Barrier=Barrier,
    BrokenBarrierError=real_threading.BrokenBarrierError,
    current_thread=lambda: _sim().running, get_ident=lambda: _sim().running.ident,
    enumerate=lambda: list(_sim().threads),
)  # fmt: skip
RAW_THREADS = SimpleNamespace(
    start_new_thread=lambda call, args: Thread(target=call, args=args, name="xfer-background").start()
)
QUEUE = SimpleNamespace(Queue=Queue, SimpleQueue=Queue, Empty=real_queue.Empty)


# ---- the rendezvous


class Server(server.Server):
    """The server without sockets: what it sends and is fed goes through queues."""

    def __init__(self, rendezvous, token, options, mark=lambda text: None, prepare_thread=lambda: None):
        sim = _sim()
        assert rendezvous not in sim.servers, f"{rendezvous} is in use"
        sim.servers[rendezvous] = self
        self.mark, self.rendezvous, self.closing, self.who = mark, rendezvous, False, sim.running.who
        self.coordinator = Coordinator(options, f"session {len(sim.channels)}", sim.now, server._ended.get(rendezvous))
        self._connections: dict[int, Channel] = {}
        self._numbers, self._calls, self._alarm = itertools.count(1), deque(), None
        soon = self._calls.append
        later = lambda seconds, call, *args: Timer(seconds, soon, [lambda: call(*args)]).start()  # noqa: E731
        self.loop = SimpleNamespace(call_soon_threadsafe=soon, call_at=self._call_at, call_later=later)
        self._batch = {}
        self.feed(Tick())
        self._thread = Thread(target=self._serve, name="xfer-rendezvous")
        self._thread.start()

    def _call_at(self, when, call):
        return SimpleNamespace(when=lambda: when, cancel=lambda: None)

    def _send(self, send) -> None:
        data = m.encode(send.message)
        for n in send.clients:
            if n in self._connections:
                self._connections[n].heard.append(m.decode(data))

    def _serve(self) -> None:
        sim = _sim()
        while not self.closing:
            wake = self.coordinator.wake_at
            busy = lambda: self.closing or self._calls or any(c.sent for c in self._connections.values())  # noqa: E731
            sim.block(busy, FOREVER if wake is None else wake)
            some = [c for c in self._connections.values() if c.sent]
            if self._calls:
                self._calls.popleft()()
            elif some:
                c = sim.random.choice(some)
                message = c.sent.popleft()
                self.feed(Received(c.number, message) if message is not None else Disconnected(c.number, c.why))
            else:
                self.feed(Tick())

    def close(self, until: float = 0.0) -> None:
        sim, co = _sim(), self.coordinator
        sim.block(lambda: self.closing or not (0 in co.trainers or len(co.met) < co.options.trainers), until)
        sim.block(lambda: self.closing or co.refit is None, sim.now + 5.0)
        self.closing = True
        sim.servers.pop(self.rendezvous, None)
        self._remember()
        for c in self._connections.values():
            c.finish()


class Channel:
    """A client's connection."""

    theirs = False

    def __init__(self, served: Server, label: str):
        self.label, self.served = label, served
        self.who = _sim().running.who
        self.sent: deque[m.Message | None] = deque()
        self.heard: deque[m.Message | None] = deque()
        self.why, self.closed, self._reader = "", False, None
        self.number = next(served._numbers)
        served._connections[self.number] = self
        _sim().channels.append(self)
        self.finished = False
        self.said: list[m.Message] = []
        served.feed(Connected(self.number))

    def send(self, message: m.Message, seconds: float = 0.0) -> None:
        _sim().turn()
        if self.closed:
            raise PeerLost(f"cannot send {type(message).__name__} to {self.label}: connection closed")
        data = m.encode(message)
        if not self.finished:
            self.sent.append(m.decode(data))
            self.said.append(message)

    def ask(self, message: m.Message, until: float) -> m.Message:
        self.send(message)
        if not _sim().block(lambda: bool(self.heard), until):
            raise TimeoutError
        answer = self.heard.popleft()
        if answer is None:
            raise PeerLost(f"lost the connection to {self.label}: {self.why}")
        return answer

    def start(self, on_message, on_close) -> None:
        def read() -> None:
            while True:
                _sim().block(lambda: bool(self.heard) or self.closed)
                if not self.heard or (message := self.heard.popleft()) is None:
                    break
                on_message(message)
            self.close()
            on_close(self.why or "connection closed")

        self._reader = Thread(target=read, name=f"xfer-read-{self.label}")
        self._reader.start()

    def finish(self) -> None:
        """The server's end: what it said arrives, then the end."""
        if not self.finished:
            self.finished = True
            self.why = self.why or "connection closed by peer"
            self.heard.append(None)

    def break_(self, why: str) -> None:
        self.why = self.why or why
        self.heard.clear()
        self.close()
        self.heard.append(None)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.why = self.why or "connection closed"
            self.sent.append(None)

    def join(self, seconds: float) -> None:
        if self._reader is not None and self._reader is not _sim().running:
            self._reader.join(seconds)


def dial(rendezvous: str, token: str, deadline_s: float, given_up=lambda: False) -> Channel:
    sim = _sim()
    sim.block(lambda: rendezvous in sim.servers or given_up(), sim.now + deadline_s)
    if given_up():
        raise PeerLost(f"gave up connecting to {rendezvous}: closed by this process itself")
    if rendezvous not in sim.servers:
        raise DeadlineExceeded(f"no xfer rendezvous answered at {rendezvous} within {deadline_s:g} s")
    return Channel(sim.servers[rendezvous], rendezvous)


# ---- sends


class Link(group.Link):
    """A link whose messages are copied when they are posted. An abort of one rank breaks all that others wait for from it."""

    device, grouped = torch.device("cpu"), False

    def __init__(self, rank: int, labels: Sequence[str], ends: dict[int, Link], mail: dict):
        self.rank, self.size, self.labels, self.ends, self.mail = rank, len(labels), tuple(labels), ends, mail
        self.aborted, self.over, self.who = False, False, _sim().running.who
        ends[rank] = self
        _sim().links.append(self)

    def post(self, receives, sends):
        for tensor, peer, tag in sends:
            self._check(peer)
            self.mail.setdefault((self.rank, peer, tag), deque()).append(group.bytes_of(tensor).clone())
        _sim().turn()
        return [Pending(self, *r) for r in receives], [group.Arrived() for _ in sends]

    def _check(self, peer: int) -> None:
        if self.aborted or self.over:
            raise group.Aborted("the link was aborted", where=self.labels[self.rank])
        if self.ends[peer].aborted:
            raise PeerLost(f"lost the connection to {self.labels[peer]}", where=self.labels[self.rank])

    def warm(self, peers) -> None: ...

    def begin_broadcast(self, tensor, root, deadline):
        if self.rank != root:
            return self.post([(tensor, root, -1)], ())[0][0]
        self.post((), [(tensor, r, -1) for r in range(self.size) if r != root])
        return group.Arrived()

    def abort(self, seconds: float = 0.0) -> None:
        self.aborted = True

    def close(self) -> None:
        self.over = True

    def blame(self, pending) -> list[str]:
        return [f"waiting for {self.labels[p.peer]}" for p in pending if p.peer >= 0]


class Pending:
    def __init__(self, link: Link, tensor, peer: int, tag: int):
        self.link, self.tensor, self.peer, self.tag = link, tensor, peer, tag

    def wait(self, deadline: float) -> None:
        link = self.link
        box = link.mail.setdefault((self.peer, link.rank, self.tag), deque())
        over = lambda: box or link.aborted or link.over or link.ends[self.peer].aborted  # noqa: E731
        if not _sim().block(lambda: bool(over()), deadline):
            raise DeadlineExceeded("the deadline passed while bytes were moving", where=link.labels[link.rank])
        if link.aborted or not box:
            link._check(self.peer)
        group.bytes_of(self.tensor).copy_(box.popleft())


def open_group(store, rank, size, timeout, device="cpu", labels=(), cancelled=lambda: False, **_) -> Link:
    """Collective: all ranks meet in the store."""
    name = store.compare_set("group", "", str(next(_sim().numbers))).decode()
    ends, mail = _sim().groups[name]
    link = Link(rank, labels, ends, mail)
    store.set(f"here/{rank}", "1")
    for r in range(size):
        store.get(f"here/{r}")
    return link


@pytest.fixture
def simulated() -> Iterator[Simulation]:
    """For tests of worlds (world.py): without sockets, by the fake clock, in one order of events. $XFER_SEED chooses another one."""
    world = sys.modules["tests.support.world"]
    with Simulation(int(os.environ.get("XFER_SEED", "0"))) as sim:
        sim.patch(world, "free_port", lambda: next(sim.numbers))
        yield sim
