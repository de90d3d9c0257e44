"""Faults that tests set, in a process of several threads: the Nth pass is one pass, and a process that stops is stopped."""

import threading
import time
from collections import Counter

from xfer.participants import faults


class Slowly(Counter):
    """Others run between a count and what is done with it."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        time.sleep(0.002)


def test_of_threads_that_pass_a_point_together_one_meets_its_fault_and_none_passes_while_the_process_stops(monkeypatch):
    """A trainer's lanes of two replicas pass at once. Both were taken for the second; and the kernel stops threads one by one."""
    monkeypatch.setenv("XFER_FAULT", "trainer:2:moving:stop@1")
    monkeypatch.setattr(faults, "_passed", Slowly())
    begun, events, start = threading.Event(), [], threading.Barrier(4)
    monkeypatch.setattr(faults.os, "kill", lambda *a: (begun.set(), time.sleep(0.2), events.append("stopped")))

    def lane() -> None:
        start.wait(20)
        faults.point("trainer", 2, "moving")

    lanes = [threading.Thread(target=lane) for _ in range(4)]
    for t in lanes:
        t.start()
    assert begun.wait(20)
    faults.point("trainer", 2, "done")
    events.append("passed")
    for t in lanes:
        t.join(20)
    assert events == ["stopped", "passed"]
