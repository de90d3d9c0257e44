"""Timelines of refits: kept when asked for, of every process, in the order in which things must happen."""

from __future__ import annotations

import os
import threading
from collections import deque

import pytest
from typer.testing import CliRunner

from tests.support.world import World
from xfer.cli import app
from xfer.errors import XferError
from xfer.participants import timeline


def refitted(versions: int) -> None:
    with World(2, 2) as w:
        for version in range(1, versions + 1):
            results = w.refit(version)
            assert all(not isinstance(r, BaseException) for r in results), results
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):  # what workers write when their engine has gone on
            thread.join(30)


def shown(*arguments: str):
    return CliRunner().invoke(app, ["timeline", *arguments], env={"COLUMNS": "200"})


def test_moments_of_all_processes_come_in_the_order_in_which_things_happen(tmp_path, monkeypatch):
    monkeypatch.setenv(timeline.VARIABLE, str(tmp_path / "new"))
    monkeypatch.setattr(timeline, "_moments", deque())
    refitted(2)
    for attempt in (1, 2):
        (moments,) = timeline.of_attempt(timeline.read(tmp_path / "new"), attempt).values()
        at = {(x.who, x.what): x.at for x in moments}
        for trainer in ("trainer 0", "trainer 1"):
            steps = ("called", "drained", "looked at its storages", "ready", "go", "bytes have moved", "done")
            assert sorted(steps, key=lambda s: at[trainer, s]) == list(steps)
        for worker in ("replica 0 worker 0", "replica 0 worker 1"):
            ways = (
                (worker, "in update"), (worker, "its device is idle"), (worker, "looked at its storages: armed"), (worker, "go"),
                (worker, "bytes have moved"), (worker, "done"), (worker, "installed"),
            )  # fmt: skip
            assert sorted(ways, key=at.__getitem__) == list(ways)
            assert at[timeline.HUB, "all trainers are ready"] < at[worker, "go"]
            assert at[worker, "bytes have moved"] < at[timeline.HUB, "replica 0: decided"] < at[worker, "installed"]
        assert at[timeline.HUB, "replica 0: decided"] < at["replica 0 controller", "its engine serves"]
    result = shown(str(tmp_path / "new"))
    assert result.exit_code == 0 and "refit 2 on" in result.output, result.output
    for what in ("replica 0: go was sent", "start is over", "its engine serves"):
        assert what in result.output
    assert shown(str(tmp_path / "new"), "--attempt", "7").exit_code == 1
    over = shown(str(tmp_path / "new"), "--median", "--skip", "0")
    assert over.exit_code == 0 and "medians on" in over.output and "its engine serves" in over.output, over.output
    none = shown(str(tmp_path / "new"), "--median")
    assert none.exit_code == 1 and "2 refits are there, --skip 2 leaves none" in none.output, none.output
    both = shown(str(tmp_path / "new"), "--median", "--attempt", "1")
    assert both.exit_code == 2 and "give one of the two" in both.output, both.output
    assert "was XFER_TIMELINE set" in shown(str(tmp_path / "new"), "--median", "--session", "never").output


def test_a_job_that_was_started_again_does_not_mix_with_the_one_before(tmp_path, monkeypatch):
    """Both number their refits from one."""
    monkeypatch.setenv(timeline.VARIABLE, str(tmp_path))
    monkeypatch.setattr(timeline, "_moments", deque())
    refitted(2)
    (first,) = timeline.of_session(timeline.read(tmp_path))[1]
    refitted(1)
    moments, names = timeline.of_session(timeline.read(tmp_path))
    assert len(names) == 2 and names[0] == first and {x.attempt for x in moments} == {1}
    (once,) = timeline.of_attempt(moments).values()
    assert [x.what for x in once if x.who == "trainer 0"].count("called") == 1
    result, before = shown(str(tmp_path)), shown(str(tmp_path), "--session", first)
    assert "refit 1 on" in result.output and all(n in result.output for n in names), result.output
    assert "refit 2 on" in before.output and before.exit_code == 0, before.output
    none = shown(str(tmp_path), "--session", "never")
    assert none.exit_code == 1 and all(n in none.output for n in names), none.output


def test_medians_are_of_each_moment_after_the_first_of_its_refit():
    """Also of moments that a refit has twice, or only some refits have."""
    moments = []
    for attempt, (begin, far) in enumerate([(10.0, 9.0), (20.0, 1.0), (30.0, 3.0), (40.0, 2.0)], 1):
        at = [(0.0, "a"), (far, "b"), (far + 0.5, "b")] + ([(far + 1.0, "c")] if attempt == 3 else [])
        moments += [timeline.Moment(begin + t, "w", what, "h", attempt) for t, what in at]
    (found,) = timeline.typical(moments[::-1], skip=1).values()
    assert [(x.at, x.what, x.least, x.most, x.count) for x in found] == [
        (0.0, "a", 0.0, 0.0, 3), (2.0, "b", 1.0, 3.0, 3), (2.5, "b", 1.5, 3.5, 3), (4.0, "c", 4.0, 4.0, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "module, who", [("controller", "replica 0 controller"), ("worker", "replica 0 worker 1"), ("trainer", "trainer 1")]
)
def test_each_kind_of_process_writes_what_it_noted(module, who, tmp_path, monkeypatch):
    """In production each is a process of its own, here all are one: so only one kind writes at a time."""

    class Silent:
        ASIDE_S, HUB, mark = timeline.ASIDE_S, timeline.HUB, staticmethod(timeline.mark)

        @staticmethod
        def write(attempt, session="", wait_s=0.0):
            pass

    monkeypatch.setenv(timeline.VARIABLE, str(tmp_path))
    monkeypatch.setattr(timeline, "_moments", deque())
    for other in {"controller", "worker", "trainer"} - {module}:
        monkeypatch.setattr(f"xfer.participants.{other}.timeline", Silent)
    refitted(1)
    (moments,) = timeline.of_attempt(timeline.read(tmp_path), 1).values()
    assert who in {x.who for x in moments}


def test_what_another_thread_of_the_process_takes_first_is_no_error(tmp_path, monkeypatch):
    """It was: after a commit, in a worker, which made a good replica a torn one."""

    class Shared(deque):
        def __bool__(self) -> bool:
            return True  # as it was when it was asked; the last is gone by now

    monkeypatch.setenv(timeline.VARIABLE, str(tmp_path))
    monkeypatch.setattr(timeline, "_moments", Shared([(1.0, "coordinator", "x"), (2.0, "coordinator", "y")]))
    timeline.write(1)
    (moments,) = timeline.of_attempt(timeline.read(tmp_path), 1).values()
    assert [x.what for x in moments] == ["x", "y"]


def test_nothing_is_kept_that_was_not_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv(timeline.VARIABLE, str(tmp_path))  # too late: processes look when they start
    refitted(1)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_costs_no_refit(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(timeline.VARIABLE, str(tmp_path / "file"))
    monkeypatch.setattr(timeline, "_moments", deque())
    refitted(2)
    assert caplog.text.count("no timeline is kept any more") == 1


def entries(folder, monkeypatch, count: int) -> bytes:
    """A file of one process with that many refits in it."""
    monkeypatch.setenv(timeline.VARIABLE, str(folder))
    monkeypatch.setattr(timeline, "_moments", deque())
    for attempt in range(1, count + 1):
        timeline.mark("coordinator", "x")
        timeline.mark("coordinator", "y\n\u2028")
        timeline.write(attempt, "s")
    (file,) = folder.iterdir()
    return file.read_bytes()


def test_each_refit_is_written_by_one_call(tmp_path, monkeypatch):
    """So whoever reads while refits run finds whole lines."""
    lines, write = [], os.write
    monkeypatch.setattr(os, "write", lambda to, data: (lines.append(data), write(to, data))[1])
    whole = entries(tmp_path, monkeypatch, 3)
    assert len(lines) == 3 and b"".join(lines) == whole and all(x.endswith(b"\n") for x in lines)


def test_a_file_that_ends_anywhere_gives_its_whole_lines_and_a_note(tmp_path, monkeypatch):
    whole = entries(tmp_path, monkeypatch, 2)
    (file,) = tmp_path.iterdir()
    ends = [i for i, c in enumerate(whole) if c == ord("\n")]
    for cut in range(len(whole) + 1):
        notes = []
        file.write_bytes(whole[:cut])
        found = list(timeline.read(tmp_path, notes.append))
        assert [x.attempt for x in found] == [1, 1, 2, 2][: 2 * sum(e <= cut for e in ends)]
        torn = cut not in (0, *ends, *(e + 1 for e in ends))
        assert len(notes) == torn and all(file.name in n and "in part" in n for n in notes), (cut, notes)
    file.write_bytes(whole[:-9])
    result = shown(str(tmp_path))
    assert result.exit_code == 0 and "refit 1 on" in result.output and "is there in part only" in result.output


def test_what_a_full_disk_takes_in_part_is_the_last(tmp_path, monkeypatch, caplog):
    write = os.write
    monkeypatch.setattr(os, "write", lambda to, data: write(to, data[: len(data) // 2]))
    whole = entries(tmp_path, monkeypatch, 3)
    assert caplog.text.count("no timeline is kept any more") == 1 and whole.count(b"attempt") == 1
    assert list(timeline.read(tmp_path)) == [] and "is there in part only" in caplog.text


@pytest.mark.parametrize(
    "line",
    [b'{"attempt": 1}', b"{", b"3", b'{"attempt": 1e999, "host": "h", "moments": []}', b"[" * 100_000, b"\xff\xfe", b"",
     b'{"attempt": 1, "host": "h", "moments": [[%s, "coordinator", "x"]]}' % (b"9" * 400)],
    ids=["keys", "half", "number", "infinite", "deep", "bytes", "empty", "huge"],
)  # fmt: skip
def test_a_file_that_is_something_else_is_named(tmp_path, line):
    (tmp_path / "a.jsonl").write_bytes(
        b'{"attempt": 1, "host": "h", "moments": [[0.5, "coordinator", "x"]]}\n' + line + b"\n"
    )
    with pytest.raises(XferError, match=r"a\.jsonl.* is no timeline.*move (it|that file) out of"):
        list(timeline.read(tmp_path))


def test_a_folder_called_like_a_timeline_is_named(tmp_path):
    (tmp_path / "a.jsonl").mkdir()
    result = shown(str(tmp_path))
    assert result.exit_code == 1 and "a.jsonl is no timeline: Is a directory; move it out of" in result.output
