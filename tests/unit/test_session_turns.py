"""Turns are quick inside a refit, and as they were after the last of several."""

import ctypes
import queue
import sys
import threading
import time

import pytest

from xfer.session.turns import INTERVAL_S, SLACK_NS, quick_turns, short_sleeps, soon


def test_turns_are_as_before_after_the_last_one():
    before = sys.getswitchinterval()
    inside, leave = threading.Event(), threading.Event()

    def other():
        with quick_turns():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with quick_turns():
        thread.start()
        assert inside.wait(30) and abs(sys.getswitchinterval() - INTERVAL_S) < 1e-6
    assert abs(sys.getswitchinterval() - INTERVAL_S) < 1e-6  # the other is still inside
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


def test_what_comes_soon_is_taken_and_nobody_waits_for_longer():
    items: queue.SimpleQueue[int] = queue.SimpleQueue()
    threading.Timer(0.05, items.put, [7]).start()
    assert soon(items, time.monotonic() + 30) == 7
    began = time.monotonic()
    with pytest.raises(queue.Empty):
        soon(items, began + 0.05)
    assert 0.05 <= time.monotonic() - began < 10
    items.put(8)
    with pytest.raises(queue.Empty):
        soon(items, began)  # who expects nothing goes to where one sleeps
