"""Of scripts/bench_packed_gpu.py: what is missing is said before time is spent, and ranks wait for their turn."""

from __future__ import annotations

import queue
import sys
import threading
from argparse import Namespace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import bench_packed_gpu
import bench_packed_ranks


def begun(monkeypatch, go: threading.Event, seconds: float, ways: list[str]) -> tuple[list[str], str]:
    """What happened in what order, and what a rank answered; nobody is there to talk with."""
    seen, answers = [], queue.Queue()

    class Nobody:
        def __init__(self, *_):
            raise RuntimeError("its turn")

    monkeypatch.setattr(bench_packed_ranks, "SECONDS", 0.05)
    monkeypatch.setattr(bench_packed_ranks, "TrainerRank", Nobody)
    imported = lambda: (seen.append(f"imported, told: {go.is_set()}"), go.set())  # noqa: E731
    monkeypatch.setattr(bench_packed_ranks, "vllm_packed", imported)
    a = Namespace(device="cuda", seconds=seconds)
    bench_packed_ranks.rank_main(0, "apart", (0, 1, 2, 3), None, a, ways, 0, None, answers, go)
    return seen, answers.get(timeout=1)[1]


def test_a_rank_waits_for_its_turn_as_long_as_the_command_may_take(monkeypatch):
    go = threading.Event()
    threading.Timer(0.3, go.set).start()
    assert "its turn" in begun(monkeypatch, go, 20.0, [])[1]


def test_a_rank_that_is_never_told_to_begin_says_so(monkeypatch):
    assert "were not told to begin within" in begun(monkeypatch, threading.Event(), 0.1, [])[1]


def test_vllm_is_imported_before_a_clock_runs(monkeypatch):
    """Else the rank is never told to begin: here that comes with the import."""
    seen, said = begun(monkeypatch, threading.Event(), 20.0, [bench_packed_ranks.VLLM])
    assert seen == ["imported, told: False"] and "its turn" in said


@pytest.mark.parametrize(
    "more, refused", [([], True), (["--no-vllm"], False), (["--quick"], False), (["--ways", "one"], False)]
)
def test_a_vllm_that_is_not_there_is_told_at_once(monkeypatch, more, refused):
    """Before a process is started; where its row is not asked for, only the GPUs are missing here."""
    monkeypatch.setattr(sys, "argv", ["bench_packed_gpu.py", *more])
    monkeypatch.setattr(bench_packed_gpu, "find_spec", lambda name: None)
    monkeypatch.setattr(bench_packed_gpu.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(bench_packed_gpu, "Ranks", None)
    with pytest.raises(SystemExit, match="--no-vllm" if refused else "0 GPUs"):
        bench_packed_gpu.main()
