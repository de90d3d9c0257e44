"""Faults that tests set: the Nth pass of a point is one pass, whoever else passes it at that moment."""

import threading
import time
from collections import Counter

from xfer.session import faults


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
