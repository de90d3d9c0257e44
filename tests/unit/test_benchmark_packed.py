"""benchmarks.packed_gpu: a missing vLLM is reported before time is spent, and ranks wait for their turn."""

from __future__ import annotations

import queue
import sys
import threading
from argparse import Namespace

import pytest

from benchmarks import packed_gpu
from benchmarks.lib import packed_ranks


def begun(monkeypatch, go: threading.Event, seconds: float, ways: list[str]) -> tuple[list[str], str]:
    """Run a rank without its peers; returns the order of events and the rank's answer."""
    seen, answers = [], queue.Queue()

    class Nobody:
        def __init__(self, *_):
            raise RuntimeError("its turn")

    monkeypatch.setattr(packed_ranks, "SECONDS", 0.05)
    monkeypatch.setattr(packed_ranks, "TrainerRank", Nobody)
    imported = lambda: (seen.append(f"imported, told: {go.is_set()}"), go.set())  # noqa: E731
    monkeypatch.setattr(packed_ranks, "vllm_packed", imported)
    a = Namespace(device="cuda", seconds=seconds)
    packed_ranks.rank_main(0, "apart", (0, 1, 2, 3), None, a, ways, 0, None, answers, go)
    return seen, answers.get(timeout=1)[1]


def test_a_rank_waits_for_its_turn_as_long_as_the_command_may_take(monkeypatch):
    go = threading.Event()
    threading.Timer(0.3, go.set).start()
    assert "its turn" in begun(monkeypatch, go, 20.0, [])[1]


def test_a_rank_that_is_never_told_to_begin_says_so(monkeypatch):
    assert "were not told to begin within" in begun(monkeypatch, threading.Event(), 0.1, [])[1]


def test_vllm_is_imported_before_a_clock_runs(monkeypatch):
    """Here the import sets `go`, so that a rank that waited for it first would time out."""
    seen, said = begun(monkeypatch, threading.Event(), 20.0, [packed_ranks.VLLM])
    assert seen == ["imported, told: False"] and "its turn" in said


@pytest.mark.parametrize(
    "more, refused", [([], True), (["--no-vllm"], False), (["--quick"], False), (["--ways", "one"], False)]
)
def test_a_vllm_that_is_not_there_is_told_at_once(monkeypatch, more, refused):
    """It is reported before a process starts. If its row does not run, the missing GPUs are reported instead."""
    monkeypatch.setattr(sys, "argv", ["packed_gpu", *more])
    monkeypatch.setattr(packed_gpu, "find_spec", lambda name: None)
    monkeypatch.setattr(packed_gpu.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(packed_gpu, "Ranks", None)
    with pytest.raises(SystemExit, match="--no-vllm" if refused else "0 GPUs"):
        packed_gpu.main()
