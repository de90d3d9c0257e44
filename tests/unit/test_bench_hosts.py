"""Several hosts of `xfer bench` in one process: orders, answers and errors cross, and all are told how it ends."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from examples.common.ports import free_port
from tests.support.proc import PATIENCE
from xfer.cli.bench import hosts
from xfer.cli.bench.hosts import Attendance, BenchHost, Finish, leading
from xfer.cli.bench.rank import Task
from xfer.cli.bench.run import kept_port, placed
from xfer.cli.layouts.child import TraceTask
from xfer.cli.line import listeners
from xfer.errors import DeadlineExceeded, LayoutError, PeerLost, Unsupported, XferError

TOKEN = "a token for tests"
TASK = Task(
    role="worker", joint=1, world=2, trainers=1, devices=["cpu"] * 2, hosts=["h0", "h1"], pairs=[[0, 1]], meet=("h0", 1), route="gloo",
    drop=[], narrow=[], replicas=1, catalog=b"", inventory=b"",
)  # fmt: skip
LIMIT_S = 30 * PATIENCE


class Fake:
    """A process in this one."""

    def __init__(self, name: str, task: Task):
        self.name, self.task, self.stopped = name, task, threading.Event()
        self._orders = ThreadPoolExecutor(1)
        self.ready = self._orders.submit(self.begin)

    def begin(self) -> None:
        if self.name == "bad":
            raise Unsupported("no such device", ["worker 1: cuda:9"])

    def order(self, do: str, **how: Any) -> Future[Any]:
        return self._orders.submit(getattr(self, do), **how)

    def double(self, of: list[int]) -> list[int]:
        return [2 * x for x in of]

    def fail(self) -> None:
        raise LayoutError("torn", ["a", "b"], where="worker 1")

    def hang(self) -> None:
        self.stopped.wait(LIMIT_S)

    def stop(self) -> None:
        self.stopped.set()
        self._orders.shutdown(cancel_futures=True)


class Other:
    """Another host, on a thread. `end` is how it ended."""

    def __init__(self, at: str, name: str = "h1", asked: str = "x"):
        self.started: list[Fake] = []
        mine = Attendance(name, {"--trainer": asked}, 1, {}, {"cpus": 2})
        take_part = (hosts._take_part, at, TOKEN, LIMIT_S, "", BenchHost(mine, self.start), lambda text: None)
        self._ran = ThreadPoolExecutor(1).submit(*take_part)

    def start(self, kind: str, name: str, task: Any) -> Fake:
        if kind != "rank":
            raise OSError("no room")
        self.started.append(Fake(name, task))
        return self.started[-1]

    def end(self) -> Finish | BaseException | None:
        return self._ran.exception(LIMIT_S) or self._ran.result()


@pytest.fixture
def at() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def first(at: str, size: int = 2, deadline_s: float = LIMIT_S) -> AbstractContextManager[list[BenchHost]]:
    mine = Attendance("h0", {"--trainer": "x"}, 1, {}, {})
    return leading(listeners(at, TOKEN)[0], TOKEN, size, deadline_s, BenchHost(mine, lambda *_: Fake("here", TASK)))


def test_orders_answers_and_errors_cross_and_processes_end(at):
    other = Other(at)
    with first(at) as (h0, h1):
        assert (h0.has.name, h1.has.name, h1.has.machine) == ("h0", "h1", {"cpus": 2})
        two = [h1.start("rank", f"worker {i}", TASK) for i in (1, 2)]
        assert [p.ready.result(LIMIT_S) for p in two] == [None, None]
        slow, quick = two[0].order("hang"), two[1].order("double", of=[1, 2])
        assert quick.result(LIMIT_S) == [2, 4] and not slow.done()
        with pytest.raises(LayoutError, match="torn") as e:
            (failed := two[1].order("fail")).result(LIMIT_S)
        assert not failed.cancel() and not slow.cancel(), "an answer to nobody would end the line"
        assert (e.value.violations, e.value.where) == (("a", "b"), "worker 1")
        with pytest.raises(Unsupported, match="no such device"):
            h1.start("rank", "bad", TASK).ready.result(LIMIT_S)
        with pytest.raises(XferError, match="no room"):
            h1.start("engine", "layouts", TraceTask("engine", {}, {}, {})).ready.result(LIMIT_S)
        two[1].stop()
    assert other.end() == Finish("done: h0 prints the table", 0)
    assert [p.task for p in other.started] == [TASK] * 3 and all(p.stopped.is_set() for p in other.started)


def test_a_host_that_is_lost_fails_what_waits_for_it_and_what_is_asked_later(at):
    other = Other(at)
    with pytest.raises(typer.Exit), first(at) as (_, h1):
        process = h1.start("rank", "worker 1", TASK)
        process.ready.result(LIMIT_S)
        waits = process.order("hang")
        h1.start.__self__._out.sock.shutdown(socket.SHUT_RDWR)
        for asked in (waits, process.order("double", of=[1]), h1.start("rank", "worker 2", TASK).ready):
            with pytest.raises(PeerLost, match="h1 is gone"):
                asked.result(LIMIT_S)
        process.stop()
        raise typer.Exit(1)
    assert isinstance(e := other.end(), PeerLost) and "h0 is gone" in str(e), e
    assert all(p.stopped.is_set() for p in other.started)


@pytest.mark.parametrize("end", [typer.Exit(1), LayoutError("no such layer"), KeyboardInterrupt()], ids=repr)
def test_others_are_told_why_the_first_host_ends(at, end):
    other = Other(at)
    with pytest.raises(type(end)), first(at):
        raise end
    finish = other.end()
    assert finish.code == 1 and "h0" in finish.said and ("no such layer" in finish.said) == isinstance(end, LayoutError)


@pytest.mark.parametrize(
    "asked, seconds, error, said",
    [
        ({"h1": "x", "h2": "y"}, LIMIT_S, XferError, "--trainer: x on h0, h1; y on h2"),
        ({"h7": "x"}, 2 * PATIENCE, DeadlineExceeded, "only 2 of 3 hosts came within {seconds:g} s: h0, h7"),
    ],
    ids=["they are asked different things", "one does not come"],
)
def test_hosts_do_not_begin_together_and_all_are_told_why(at, asked, seconds, error, said):
    others = [Other(at, *host) for host in asked.items()]
    with pytest.raises(error) as e, first(at, 3, seconds):
        pass
    ends = [o.end() for o in others]
    for text in (str(e.value), *(end.said for end in ends)):
        assert said.format(seconds=seconds) in text
    assert all(end.code == 1 for end in ends)
    assert ("the same options" in str(e.value)) == (error is XferError)


@pytest.mark.parametrize(
    "trainers, workers, trainer_hosts, on",
    [
        (4, 4, None, [(4, 4)]),
        (8, 8, None, [(8, 0), (0, 8)]),
        (16, 8, None, [(8, 0), (8, 0), (0, 8)]),
        (8, 16, None, [(8, 0), (0, 8), (0, 8)]),
        (2, 2, None, [(1, 0), (1, 0), (0, 1), (0, 1)]),
        (8, 2, None, [(8, 0), (0, 2)]),
        (1, 8, None, [(1, 0), (0, 8)]),
        (12, 4, None, [(12, 0), (0, 4)]),
        (8, 4, 2, [(4, 2), (4, 2)]),
        (6, 3, 1, [(6, 0), (0, 2), (0, 1)]),
    ],
)
def test_trainers_are_on_the_first_hosts_and_workers_on_the_rest_or_both_on_all(trainers, workers, trainer_hosts, on):
    """on: numbers of trainers and of workers of each host."""
    of = [BenchHost(Attendance(f"h{i}", {}, 8, {}, {}), Other) for i in range(len(on))]
    job = SimpleNamespace(trainers=trainers, world=trainers + workers)
    places = placed(job, of, trainer_hosts, "cuda")
    both = [Counter(p.host.has.name for p in some) for some in (places[:trainers], places[trainers:])]
    assert [tuple(c[h.has.name] for c in both) for h in of] == on
    assert places[0].host is of[0] and {p.device for p in placed(job, of, trainer_hosts, "cpu")} == {"cpu"}
    for h, numbers in zip(of, on):
        mine = [p.device for p in places if p.host is h]
        assert mine == [f"cuda:{i % 8}" for i in range(sum(numbers))]


@pytest.mark.parametrize("choose", [lambda _: free_port(), kept_port], ids=["for tests", "by xfer bench"])
def test_a_port_that_was_chosen_is_its_listeners_alone(choose):
    with ExitStack() as stack:
        at = "127.0.0.1", choose(stack)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(at)  # as another choice would
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(at)
        with socket.create_server(at):
            socket.create_connection(at).close()
