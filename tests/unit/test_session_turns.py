"""The switch interval of threads is short during refits, and restored after the last of several."""

import ctypes
import sys
import threading

import pytest

from xfer.turns import INTERVAL_S, SLACK_NS, quick_turns, short_sleeps


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
