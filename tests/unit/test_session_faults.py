"""Faults that tests set, in a process of several threads: the Nth pass is one pass, and a process that stops is stopped."""

import threading
import time
from collections import Counter

import pytest

from xfer.participants import faults


class Slowly(Counter):
    """Others run between a count and what is done with it."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        time.sleep(0.002)


def test_of_threads_that_pass_a_point_together_one_meets_its_fault(tmp_path, monkeypatch):
    """A trainer's lanes of two replicas pass at once; both were taken for the second, and who was to die lived."""
    path, threads = tmp_path / "faults", 4
    path.write_text("trainer:2:moving:kill@1")
    monkeypatch.setenv("XFER_FAULT_FILE", str(path))
    monkeypatch.setattr(faults, "_passed", Slowly())
    met: list[bool] = []
    start = threading.Barrier(threads)

    def lane() -> None:
        start.wait(20)
        met.append(faults.wants("trainer", 2, "moving"))

    some = [threading.Thread(target=lane) for _ in range(threads)]
    for t in some:
        t.start()
    for t in some:
        t.join(20)
    assert sorted(met) == [False] * (threads - 1) + [True]


@pytest.mark.parametrize("action", ["kill", "stop"])
def test_no_thread_passes_a_point_while_its_process_is_being_stopped(monkeypatch, action):
    """A replica committed with a trainer that was taken for stopped: the kernel had come to the thread of its lane last."""
    monkeypatch.setenv("XFER_FAULT", f"trainer:2:moving:{action}")
    begun, events = threading.Event(), []
    monkeypatch.setattr(faults.os, "kill", lambda *a: (begun.set(), time.sleep(0.2), events.append("stopped")))
    lane = threading.Thread(target=faults.point, args=("trainer", 2, "moving"))
    lane.start()
    assert begun.wait(20)
    faults.point("trainer", 2, "done")
    events.append("passed")
    lane.join(20)
    assert events == ["stopped", "passed"]
