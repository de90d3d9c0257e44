"""Timelines of refits: every process keeps one if asked to, and moments are in the order of the protocol."""

import json
import os
import threading
from collections import deque

import pytest
from typer.testing import CliRunner

from tests.support.world import World
from xfer import timeline
from xfer.cli import app, timelines
from xfer.errors import XferError


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Return a folder in which timelines are kept from now on."""
    keep_in(tmp_path / "timelines", monkeypatch)
    return tmp_path / "timelines"


@pytest.fixture(scope="module")
def two_refits(tmp_path_factory):
    """Return a folder with the timelines of two refits of one job."""
    folder = tmp_path_factory.mktemp("two")
    with pytest.MonkeyPatch.context() as patch:
        keep_in(folder, patch)
        refitted(2)
    return folder


def keep_in(folder, monkeypatch) -> None:
    monkeypatch.setenv(timeline.VARIABLE, str(folder))
    monkeypatch.setattr(timeline, "_moments", deque())


def refitted(versions: int) -> None:
    with World(2, 2) as w:
        for version in range(1, versions + 1):
            w.commits(version)
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):  # what workers write when their engine has gone on
            thread.join(30)


def shown(*arguments) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["timeline", *map(str, arguments)], env={"COLUMNS": "200"})
    return result.exit_code, result.output


STEPS = {
    "trainer": "called, drained, looked at its storages, ready, go, bytes have moved, done",
    "replica 0 worker": "in update, its device is idle, looked at its storages: armed, go, bytes have moved, done, installed",
}


def test_moments_of_all_processes_come_in_the_order_in_which_things_happen(two_refits):
    for attempt in (1, 2):
        (moments,) = timelines.of_attempt(timelines.read(two_refits), attempt).values()
        at = {(x.who, x.what): x.at for x in moments}
        decided = at[timeline.HUB, "replica 0: decided"]
        for i in range(2):
            for who, steps in STEPS.items():
                times = [at[f"{who} {i}", step] for step in steps.split(", ")]
                assert times == sorted(times), (who, i)
            name = f"replica 0 worker {i}"
            assert at[timeline.HUB, "all trainers are ready"] < at[name, "go"]
            assert at[name, "bytes have moved"] < decided < at[name, "installed"]
        assert decided < at["replica 0 controller", "its engine serves"]


@pytest.mark.parametrize(
    "arguments, code, texts",
    [
        ("", 0, ["refit 2 on", "replica 0: go was sent", "start is over", "its engine serves"]),
        ("--attempt 7", 1, ["was XFER_TIMELINE set"]),
        ("--median --skip 0", 0, ["medians on", "its engine serves"]),
        ("--median", 1, ["2 refits are there, --skip 2 leaves none"]),
        ("--median --attempt 1", 2, ["give one of the two"]),
        ("--median --session never", 1, ["was XFER_TIMELINE set"]),
    ],
)
def test_what_is_asked_for_is_printed_or_the_command_says_why_not(two_refits, arguments, code, texts):
    seen, text = shown(two_refits, *arguments.split())
    assert seen == code and all(x in text for x in texts), text


def test_a_timeline_as_data_and_as_a_trace_has_the_moments_that_are_printed(two_refits, tmp_path):
    data, trace = tmp_path / "data.json", tmp_path / "trace.json"
    code, text = shown(two_refits, "--json", data, "--trace", trace)
    assert code == 0 and "refit 2 on" in text, text
    (host,) = json.loads(data.read_text())["timeline"]["hosts"]
    (last,) = timelines.of_attempt(timelines.read(two_refits)).values()
    assert [timelines.Moment(**x) for x in host["moments"]] == last and host["host"] == last[0].host
    assert json.loads(shown(two_refits, "--json", "-")[1]) == json.loads(data.read_text())
    (host,) = json.loads(shown(two_refits, "--median", "--skip", 0, "--json", "-")[1])["timeline"]["hosts"]
    assert host["moments"][0]["count"] == 2

    events = json.loads(trace.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    told = {(names[e["tid"]], e["name"], e["args"]["attempt"]) for e in events if e["ph"] in "Xi"}
    assert told == {(x.who, x.what, x.attempt) for x in timelines.read(two_refits)}
    one = [e for e in json.loads(shown(two_refits, "--attempt", 1, "--trace", "-")[1])["traceEvents"] if e["ph"] != "M"]
    assert {e["args"]["attempt"] for e in one} == {1} and len({e["pid"] for e in one}) == 1


def test_a_slice_of_a_trace_ends_at_the_moment_whose_name_it_has():
    """It never begins before the refit: the first moment of each is an instant. Each host begins at 0."""
    at = [(5.0, "w", "a", "h", 1), (5.25, "w", "b", "h", 1), (9.0, "w", "a", "h", 2), (7.0, "x", "a", "g", 1)]
    events = [e for e in timelines.chrome_trace(timelines.Moment(*x) for x in at)["traceEvents"] if e["ph"] != "M"]
    assert [(e["ph"], e["name"], e["ts"], e.get("dur"), e["pid"]) for e in events] == [
        ("i", "a", 0.0, None, 1), ("X", "b", 0.0, 0.25e6, 1), ("i", "a", 0.0, None, 2), ("i", "a", 4e6, None, 1),
    ]  # fmt: skip


def test_a_job_that_was_started_again_does_not_mix_with_the_one_before(kept):
    """Both jobs number their refits from one."""
    refitted(2)
    (first,) = timelines.of_session(timelines.read(kept))[1]
    refitted(1)
    moments, names = timelines.of_session(timelines.read(kept))
    assert len(names) == 2 and names[0] == first and {x.attempt for x in moments} == {1}
    (once,) = timelines.of_attempt(moments).values()
    assert [x.what for x in once if x.who == "trainer 0"].count("called") == 1
    for arguments, code, texts in (
        ((), 0, ["refit 1 on", *names]),
        (("--session", first), 0, ["refit 2 on"]),
        (("--session", "never"), 1, names),
    ):
        seen, text = shown(kept, *arguments)
        assert seen == code and all(x in text for x in texts), text


def test_medians_are_of_each_moment_after_the_first_of_its_refit():
    """A moment may come twice in a refit, or in some refits only."""
    moments = []
    for attempt, (begin, far) in enumerate([(10.0, 9.0), (20.0, 1.0), (30.0, 3.0), (40.0, 2.0)], 1):
        at = [(0.0, "a"), (far, "b"), (far + 0.5, "b")] + ([(far + 1.0, "c")] if attempt == 3 else [])
        moments += [timelines.Moment(begin + t, "w", what, "h", attempt) for t, what in at]
    (found,) = timelines.typical(moments[::-1], skip=1).values()
    assert [(x.at, x.what, x.least, x.most, x.count) for x in found] == [
        (0.0, "a", 0.0, 0.0, 3), (2.0, "b", 1.0, 3.0, 3), (2.5, "b", 1.5, 3.5, 3), (4.0, "c", 4.0, 4.0, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "who"), [("controller", "replica 0 controller"), ("worker", "replica 0 worker 1"), ("trainer", "trainer 1")]
)  # fmt: skip
def test_each_kind_of_process_writes_what_it_noted(module, who, kept, monkeypatch):
    """Here all are threads of one process, so only one kind may write at a time."""

    class Silent:
        ASIDE_S, HUB, mark = timeline.ASIDE_S, timeline.HUB, staticmethod(timeline.mark)
        write = staticmethod(lambda attempt, session="", wait_s=0.0: None)

    for other in {"controller", "worker", "trainer"} - {module}:
        monkeypatch.setattr(f"xfer.participants.{other}.timeline", Silent)
    refitted(1)
    (moments,) = timelines.of_attempt(timelines.read(kept), 1).values()
    assert who in {x.who for x in moments}


def test_what_another_thread_of_the_process_takes_first_is_no_error(kept, monkeypatch):
    """It once raised in a worker after a commit, so that a good replica was taken for a torn one."""

    class Shared(deque):
        def __bool__(self) -> bool:
            return True  # as it was when it was asked; the last is gone by now

    monkeypatch.setattr(timeline, "_moments", Shared([(1.0, "coordinator", "x"), (2.0, "coordinator", "y")]))
    timeline.write(1)
    (moments,) = timelines.of_attempt(timelines.read(kept), 1).values()
    assert [x.what for x in moments] == ["x", "y"]


def test_nothing_is_kept_that_was_not_asked_for_and_a_folder_that_cannot_be_written_costs_no_refit(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv(timeline.VARIABLE, str(tmp_path))  # too late: processes look when they start
    refitted(1)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    keep_in(tmp_path / "file", monkeypatch)
    refitted(2)
    assert caplog.text.count("no timeline is kept any more") == 1


def entries(folder, count: int) -> bytes:
    """A file of one process with that many refits in it."""
    for attempt in range(1, count + 1):
        timeline.mark("coordinator", "x")
        timeline.mark("coordinator", "y\n\u2028")
        timeline.write(attempt, "s")
    (file,) = folder.iterdir()
    return file.read_bytes()


def test_a_file_that_ends_anywhere_gives_its_whole_lines_and_a_note(kept, monkeypatch):
    """Each refit is written by one call, so a reader finds whole lines while refits run."""
    lines, write = [], os.write
    monkeypatch.setattr(os, "write", lambda to, data: (lines.append(data), write(to, data))[1])
    whole = entries(kept, 2)
    assert len(lines) == 2 and b"".join(lines) == whole and all(x.endswith(b"\n") for x in lines)
    (file,) = kept.iterdir()
    ends = [i for i, c in enumerate(whole) if c == ord("\n")]
    for cut in range(len(whole) + 1):
        notes = []
        file.write_bytes(whole[:cut])
        found = list(timelines.read(kept, notes.append))
        assert [x.attempt for x in found] == [1, 1, 2, 2][: 2 * sum(e <= cut for e in ends)]
        torn = cut not in (0, *ends, *(e + 1 for e in ends))
        assert len(notes) == torn and all(file.name in n and "in part" in n for n in notes), (cut, notes)
    file.write_bytes(whole[:-9])
    code, text = shown(kept)
    assert code == 0 and "refit 1 on" in text and "is there in part only" in text


def test_what_a_full_disk_takes_in_part_is_the_last(kept, monkeypatch, caplog):
    write = os.write
    monkeypatch.setattr(os, "write", lambda to, data: write(to, data[: len(data) // 2]))
    whole = entries(kept, 3)
    assert caplog.text.count("no timeline is kept any more") == 1 and whole.count(b"attempt") == 1
    assert list(timelines.read(kept)) == [] and "is there in part only" in caplog.text


@pytest.mark.parametrize(
    "line",
    [b'{"attempt": 1}', b"{", b"3", b'{"attempt": 1e999, "host": "h", "moments": []}', b"[" * 100_000, b"\xff\xfe", b"",
     b'{"attempt": 1, "host": "h", "moments": [[%s, "coordinator", "x"]]}' % (b"9" * 400)],
    ids=["keys", "half", "number", "infinite", "deep", "bytes", "empty", "huge"],
)  # fmt: skip
def test_a_file_that_is_something_else_is_named(tmp_path, line):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"attempt": 1, "host": "h", "moments": [[0.5, "coordinator", "x"]]}\n' + line + b"\n")
    with pytest.raises(XferError, match=r"a\.jsonl.* is no timeline.*move (it|that file) out of"):
        list(timelines.read(tmp_path))
    file.unlink()
    file.mkdir()
    code, text = shown(tmp_path)
    assert code == 1 and "a.jsonl is no timeline: Is a directory; move it out of" in text
