"""A thread that is only being started cannot be joined; who ends a session must not come upon one."""

import socket
import subprocess
import sys
import threading

import pytest
import torch

from xfer.direct import late
from xfer.rendezvous import channel as c


@pytest.fixture
def held(monkeypatch):
    """Gives a function: while threads of this name are held just before their start, call the other one on a thread of
    its own, let the start happen, and raise what it raised."""
    start = threading.Thread.start

    def meanwhile(name: str, begin, then) -> None:
        before, go, over = threading.Event(), threading.Event(), threading.Event()
        raised: list[BaseException] = []

        def late_start(thread: threading.Thread) -> None:
            if thread.name.startswith(name):
                before.set()
                go.wait(10)
            start(thread)

        def run() -> None:
            before.wait(10)
            try:
                then()
            except BaseException as e:
                raised.append(e)
            over.set()

        monkeypatch.setattr(threading.Thread, "start", late_start)
        start(threading.Thread(target=run, daemon=True))
        beginning = threading.Thread(target=begin, daemon=True)
        start(beginning)
        assert before.wait(10)
        over.wait(0.2)  # it may wait for the start, or be done without
        go.set()
        assert over.wait(10)
        beginning.join(10)
        if raised:
            raise raised[0]

    return meanwhile


class _End(socket.socket):
    """One of a pair, which has no TCP options."""

    def setsockopt(self, *_) -> None: ...


def test_a_connections_reader(held):
    """A coordinator that closes in the moment in which a client proved the token at its door."""
    ours, theirs = socket.socketpair()
    with theirs:
        one = c.Channel(_End(fileno=ours.detach()), "client")
        end = lambda: (one.close(), one.join(5.0))  # noqa: E731
        held("xfer-read", lambda: one.start(lambda message: None, lambda reason: None), end)


def test_routes_that_are_closed_late(held, monkeypatch):
    class Never:
        def close(self) -> bool:
            return False

        def stop(self) -> None: ...

    monkeypatch.setattr(late, "_held", {})
    monkeypatch.setattr(late, "_exiting", threading.Event())

    def end() -> None:
        for thread in late.stop():
            thread.join(5.0)

    held("xfer-late", lambda: late.close_later(Never(), "trainer 0", 0, torch.device("cpu")), end)


def test_an_exiting_process_ends_the_threads_that_close_late():
    """The script registers its check first, so it runs after the handler of `late`."""
    script = """
import atexit, threading, torch
atexit.register(lambda: print([t.name for t in threading.enumerate() if t.name == "xfer-late"]))
from xfer.direct import late
class Never:
    def close(self): return False
    def stop(self): pass
late.close_later(Never(), "trainer 0", 0, torch.device("cpu"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
