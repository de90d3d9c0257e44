"""Background calls: deadlines, errors, and results that come too late."""

import threading
import time
import weakref

import pytest
import torch

from tests.support.threads import soon
from xfer import background
from xfer.background import BackgroundCall
from xfer.errors import LayoutError, XferError


def raises(error: BaseException):
    def call():
        raise error

    return call


def test_a_call_begins_after_its_event_and_returns_its_result_without_gradients_and_keeps_nothing():
    class Held:
        x = torch.ones(1, requires_grad=True)

        def call(self) -> torch.Tensor:
            time.sleep(0.05)
            return self.x * 2

    held, after = Held(), threading.Event()
    seen, call = weakref.ref(held), BackgroundCall(held.call, after=after)
    del held
    assert not call.ended(time.monotonic() + 0.1) and not call.over
    after.set()
    result = call.take(soon())
    assert call.over and not result.requires_grad and call.seconds >= 0.15 and call not in background._given_up
    assert seen() is None


def test_errors_are_raised_where_the_call_is_waited_for_and_wrapped_if_asked():
    own, foreign = LayoutError("odd"), ValueError("boom")
    with pytest.raises(LayoutError) as e:
        BackgroundCall(raises(own), None, "trainer 3", "it failed").wait(soon())
    assert e.value is own and own.where == "trainer 3"
    with pytest.raises(XferError, match="it failed: ValueError: boom") as e:
        BackgroundCall(raises(foreign), None, "trainer 3", "it failed").wait(soon())
    assert e.value.where == "trainer 3" and e.value.__cause__ is foreign
    call = BackgroundCall(raises(foreign))
    assert call.ended(soon()) and call.error is foreign
    with pytest.raises(ValueError, match="boom"):
        call.take(soon())


def test_waiting_ends_by_the_deadline_or_soon_after_it_makes_no_sense():
    go_on = threading.Event()
    call, began = BackgroundCall(lambda: go_on.wait(20)), time.monotonic()
    assert not call.wait(soon(0.1)) and not call.wait(soon(), lambda: True, 0.2)
    assert 0.3 <= time.monotonic() - began < 10 and not call.over
    go_on.set()
    assert call.wait(soon()) and call.result is True


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_result_that_comes_when_nobody_waits_is_undone(cancelled):
    go_on, undone = threading.Event(), []
    call = BackgroundCall(lambda: go_on.wait(20) and "made", undo=undone.append)
    with pytest.raises(TimeoutError):
        call.take(soon(20 if cancelled else 0.1), lambda: cancelled)
    assert call in background._given_up and not undone
    go_on.set()
    assert call._left.wait(20)
    assert undone == ["made"] and call not in background._given_up


def test_a_result_that_comes_at_the_last_moment_is_taken_or_undone_but_never_both():
    for _ in range(200):
        undone = []
        call = BackgroundCall(lambda: time.sleep(0.001) or "made", undo=undone.append)
        try:
            taken = [call.take(soon(0.001))]
        except TimeoutError:
            taken = []
        assert call._left.wait(20)
        assert taken + undone == ["made"] and call not in background._given_up


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_while_the_thread_starts_leaves_a_call_that_can_be_waited_for(monkeypatch, when):
    start, known, ran = background._thread.start_new_thread, [], threading.Event()

    def interrupted(run, args) -> None:
        if when == "after":
            start(run, args)
            assert ran.wait(20)
        raise KeyboardInterrupt

    monkeypatch.setattr(background._thread, "start_new_thread", interrupted)
    with pytest.raises(KeyboardInterrupt):
        BackgroundCall(ran.set, register=known.append)
    monkeypatch.undo()
    (call,) = known
    assert call.ended(soon()) and ran.is_set() == (when == "after")
    if when == "before":
        call._run()  # the system may still get to it
        assert not ran.is_set()
