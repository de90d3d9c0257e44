"""Threads of a session: it may end while one of them starts (Python cannot join a thread that has not started), and they take turns more
often during refits."""

import ctypes
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

from xfer.background import BackgroundCall
from xfer.direct import late
from xfer.rendezvous import channel as c
from xfer.turns import INTERVAL_S, SLACK_NS, quick_turns, short_sleeps


@pytest.fixture
def held(monkeypatch):
    """Return a function that calls `begin`. Just before a thread of this name starts, another thread calls `then`."""

    def meanwhile(name: str, begin, then) -> None:
        start, calls = threading.Thread.start, []

        def late_start(thread: threading.Thread) -> None:
            if thread.name.startswith(name):
                calls.append(BackgroundCall(then))
                calls[0].ended(time.monotonic() + 0.2)  # it may wait for the start, or be done without
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", late_start)
        begin()
        (call,) = calls
        call.take(time.monotonic() + 10)

    return meanwhile


class _End(socket.socket):
    """One end of a socket pair, which has no TCP options."""

    def setsockopt(self, *_) -> None: ...


def test_a_connections_reader(held):
    """The coordinator closes at the moment when a client has proved the token."""
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


# ---- turns


def test_turns_are_as_before_after_the_last_of_several():
    before, inside, leave = sys.getswitchinterval(), threading.Event(), threading.Event()
    quick = lambda: abs(sys.getswitchinterval() - INTERVAL_S) < 1e-6  # noqa: E731

    def other():
        with quick_turns():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with quick_turns():
        thread.start()
        assert inside.wait(30) and quick()
    assert quick()  # the other is still inside
    leave.set()
    thread.join()
    assert abs(sys.getswitchinterval() - before) < 1e-6
    sys.setswitchinterval(1e-5)
    try:
        with quick_turns():
            assert sys.getswitchinterval() < 2e-5  # quicker already
    finally:
        sys.setswitchinterval(before)


@pytest.mark.skipif(sys.platform != "linux", reason="the slack of timers is Linux's")
def test_sleeps_are_short_in_the_thread_that_asks_for_it_and_in_no_other():
    slack = lambda: ctypes.CDLL(None).prctl(30)  # noqa: E731 (PR_GET_TIMERSLACK)
    before, inside = slack(), []
    thread = threading.Thread(target=lambda: inside.extend([short_sleeps(), slack()]))
    thread.start()
    thread.join()
    assert inside == [True, SLACK_NS] and slack() == before
