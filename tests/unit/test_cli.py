"""The `xfer` command as typed: text from elsewhere is printed to the letter, options that cannot work are refused at once."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from xfer.cli import app, plan
from xfer.cli.doctor import look, meeting
from xfer.cli.doctor.facts import Checkup, HostFacts, Interface, Resolved
from xfer.cli.examples import FOLDER
from xfer.cli.layouts import processes
from xfer.coordinator import messages as m
from xfer.errors import HandshakeError, XferError
from xfer.plan import planner
from xfer.rendezvous import client as rendezvous
from xfer.routes import default_cache_dir

ROOT = Path(__file__).resolve().parents[2]
ODD = "[rendezvous] of [/tmp/x] [red]"
"""Markup would swallow it, or fail at it."""
WHERE = "tcp://127.0.0.1:1"


def xfer(*arguments: str):
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "300", "XFER_TOKEN": "a token for tests"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def test_doctor_meets_as_its_options_say(monkeypatch):
    attend = Mock(side_effect=lambda terms, facts: Checkup((facts,)))
    monkeypatch.setattr(meeting, "attend", attend)
    xfer("doctor", "--rendezvous", WHERE, "--size", "3", "--timeout", "7", "--seconds", "0.2", "--listen")
    assert attend.call_args.args[0] == meeting.Terms(WHERE, "a token for tests", 3, 7.0, 0.2, True)


def test_plan_traces_and_plans_as_its_options_say(monkeypatch):
    looked, traced, plans = Mock(return_value=({}, {})), Mock(), Mock(side_effect=XferError("far enough"))
    traced.return_value = [SimpleNamespace(catalog=None, ranks=())] * 2
    monkeypatch.setattr(processes, "look", looked)
    monkeypatch.setattr(plan, "both", lambda *_: {})
    monkeypatch.setattr(plan, "traced", traced)
    monkeypatch.setattr(planner, "plan_replicas", plans)
    more = "--relay --bucket-mib 32 --jobs 3 --cache folder --trainer-python a --engine-python b"
    done = xfer(*PLAN, *more.split())
    assert done.exit_code == 1 and "far enough" in done.output
    assert looked.call_args.args == ({"trainer": "a", "engine": "b"},)
    assert traced.call_args.args[2] == "folder" and traced.call_args.args[4] == 3
    assert plans.call_args.kwargs["relay"] is True and plans.call_args.kwargs["bucket_bytes"] == 32 << 20


@pytest.mark.parametrize(
    "words",
    [["doctor"], ["status", WHERE], ["plan", "--trainer", "qwen3-4b world=1", "--engine", "tp=1"]],
    ids=" ".join,
)
def test_a_command_without_torch_says_in_one_line_what_to_install(words):
    run = "import sys; sys.modules['torch'] = None; sys.argv[0] = 'xfer'; from xfer.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", run, *words], capture_output=True, text=True, timeout=60, cwd=ROOT,
        env={**os.environ, "XFER_TOKEN": "a token for tests"},
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    assert "needs torch" in done.stderr and "pip install torch" in done.stderr


def status(monkeypatch, *options: str, reply=None, end: BaseException | None = None):
    """`xfer status` of a rendezvous that answers with `reply`, or where `end` is raised."""
    client = Mock(**{"take.side_effect": end, "take.return_value": reply})
    monkeypatch.setattr(rendezvous, "RendezvousClient", lambda *a, **k: client)
    done = xfer("status", WHERE, *options)
    assert client.close.called or not client.take.called
    return done


def test_status_prints_what_it_is_told_to_the_letter(monkeypatch):
    reply = m.StatusReply(0, ODD, (ODD,), (m.PartyStatus(ODD, ODD, ODD),), ())
    assert status(monkeypatch, reply=reply).output.count(ODD) == 5
    done = status(monkeypatch, end=HandshakeError(ODD, [ODD], where="rendezvous"))
    assert done.exit_code == 1 and f"[rendezvous] {ODD}" in done.output and f"- {ODD}" in done.output


def test_status_as_data_has_all_that_is_printed(monkeypatch, tmp_path):
    party = m.PartyStatus("trainer 0", ODD, "moving", 1, 2, 3)
    reply = m.StatusReply(7, ODD, (ODD,), (party,), ((0, "v"), (1, 5)))
    expected = {
        "attempt": 7, "state": ODD, "waiting_for": [ODD],
        "processes": [dict(label="trainer 0", host=ODD, phase="moving", wave=1, bytes_done=2, bytes_planned=3)],
        "versions": [{"replica": 0, "version": "v"}, {"replica": 1, "version": 5}],
    }  # fmt: skip
    done = status(monkeypatch, "--json", "-", reply=reply)
    assert done.exit_code == 0 and json.loads(done.output) == {"status": expected}
    done = status(monkeypatch, "--json", str(tmp_path / "x"), reply=reply)
    assert done.output == "" and json.loads((tmp_path / "x").read_text()) == {"status": expected}


def test_status_can_be_interrupted_at_any_time(monkeypatch):
    assert status(monkeypatch, "--watch", "1", end=KeyboardInterrupt()).exit_code == 0
    monkeypatch.setattr(rendezvous, "RendezvousClient", Mock(side_effect=KeyboardInterrupt))
    assert xfer("status", WHERE).exit_code == 130


def test_a_timeline_prints_what_it_reads_to_the_letter(tmp_path):
    kept = [dict(attempt=1, session=s, host=ODD, moments=[[1.0, ODD, ODD]]) for s in ("s" + ODD, "t" + ODD)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, kept)))
    assert xfer("timeline", str(tmp_path)).output.count(ODD) == 6  # host, who, what, the session and both
    assert xfer("timeline", str(tmp_path), "--attempt", "2").output.count(ODD) == 2
    (tmp_path / f"{ODD.replace('/', '')}.jsonl").write_text("{}")
    done = xfer("timeline", str(tmp_path))
    assert done.exit_code == 1 and "[rendezvous] of [tmpx] [red].jsonl, line 1, is no timeline" in done.output


def test_the_command_says_its_version():
    done = xfer("--version")
    assert done.exit_code == 0 and done.output.startswith("xfer 0.")


def test_doctor_exits_with_1_if_there_are_problems_and_writes_its_json(monkeypatch, tmp_path):
    for code, running in ((1, False), (0, True)):
        there = (Interface("eth0", ("10.0.0.1",), running=running),)
        facts = HostFacts(ODD, "i", ODD, "m", 1, Resolved(ODD, ("10.0.0.1",)), interfaces=there)
        monkeypatch.setattr(look, "look", Mock(return_value=facts))
        done = xfer("doctor", "--json", str(tmp_path / "x.json"))
        assert done.exit_code == code and ODD in done.output, done.output
        assert json.loads((tmp_path / "x.json").read_text())["doctor"]["problems"] == code
        done = xfer("doctor", "--json", "-")
        assert done.exit_code == code and json.loads(done.output)["doctor"]["hosts"][0]["label"] == ODD


# ---- calls that cannot work


HUGE = "9" * 30
DEEP = [f"{'[' * n}{']' * n}" for n in (70, 900, 100_000)]
CONFIG = str(FOLDER / "qwen3-4b.json")
NOWHERE = ("~nobody-of-that-name/x", "x" * 5000)
PLAN = ("plan", "--trainer", f"{CONFIG} world=2", "--engine", "tp=2")


@pytest.mark.parametrize(
    "said, call",
    [
        *((odd, ("status", WHERE, odd)) for odd in "--timeout=nan --timeout=0 --timeout=-1 --watch=-1 --watch=inf --watch=nan".split()),
        ("is not of the form tcp://HOST:PORT", ("doctor", "--rendezvous", "10.0.0.1")),
        ("at least 8 characters", ("doctor", "--rendezvous", WHERE, "--token", "short")),
        ("--timeout=nan", ("doctor", "--rendezvous", WHERE, "--timeout", "nan")),
        ("--listen goes with --rendezvous", ("doctor", "--listen")),
        *(("there is no folder", (*call, "--json", "/no/such/folder/x")) for call in (("doctor",), ("status", WHERE))),
        ("--size", ("doctor", "--size", "0")),
        (f'is a model\'s config; give it as --trainer "{CONFIG} world=', ("plan", CONFIG)),
        *((p[:30], ("plan", "--trainer", f"{p} world=2", "--engine", "tp=2")) for p in NOWHERE),
        *((p[:30], (*PLAN[:4], f"{p} tp=2")) for p in NOWHERE),
        *((p[:30], (*PLAN, "--fabric", p)) for p in NOWHERE),
        *(("cannot be written", (*PLAN, f"--html={p}")) for p in (NOWHERE[1], "none/x")),
        ("cannot be written", (*PLAN, "--json=.")),
        ("none cannot be read", ("plan", "--trainer", "none world=2", *PLAN[3:], "--json=.")),  # told with the other mistakes
        ("1099511627776", (*PLAN, "--bucket-mib", "99999999999999")),
        ("/nope: there is no such program", (*PLAN, "--trainer-python", "/nope", "--engine-python", "/nope")),
    ],
    ids=lambda x: None if isinstance(x, str) else " ".join(x)[:60],
)  # fmt: skip
def test_a_call_that_cannot_work_is_refused_before_anything_is_done(tmp_path, monkeypatch, said, call):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(look, "look", Mock(side_effect=AssertionError("it looked")))
    monkeypatch.setattr(rendezvous, "RendezvousClient", Mock(side_effect=AssertionError("it called")))
    done = xfer(*call)
    assert done.exit_code == 2 and said in " ".join(done.output.split()), done.output


def refused(said: str, trainer: str = f"{CONFIG} world=2", engine: str = "tp=2", *more: str) -> None:
    done = xfer("plan", "--trainer", trainer, "--engine", engine, *more)
    assert done.exit_code == 2 and said in done.output, done.output


@pytest.mark.parametrize(
    "value, said", [(HUGE, "an integer of 100 bits"), ('"\\ud800"', "has no UTF-8 form"), *((d, "are 64 deep at most") for d in DEEP)],
    ids=["huge", "no UTF-8", "deep", "deeper", "deepest"],
)  # fmt: skip
def test_what_no_message_could_carry_is_a_mistake_of_the_call(tmp_path, value, said):
    """On the command line and in each of the files that it names."""
    quoted = shlex.quote(value)
    refused(said, trainer=f"{CONFIG} world=2 provider.x={quoted}")
    refused(said, engine=f"tp={quoted}")
    files = {"config.json": f'{{"model_type": "qwen3", "x": {value}}}', "fabric.json": f'{{"host": [], "x": {value}}}'}
    if "ud800" not in value:  # TOML knows no such text
        files["fabric.toml"] = f"x = {value}\n[[host]]\ncount = 2\n"
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        if name == "config.json":
            refused(said, trainer=f"{tmp_path} world=2")
        else:
            refused(said, f"{CONFIG} world=2", "tp=2", "--fabric", str(tmp_path / name))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    for names in (value, f'{{"{value[1:-1]}": "x"}}') if "ud800" in value else (value,):
        (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {names}}}')
        refused("the names of the tensors in", trainer=f"{tmp_path} world=2")


def test_one_variable_says_where_everything_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XFER_CACHE", str(tmp_path))
    assert processes.cache_folder().parent == Path(default_cache_dir()) == tmp_path
