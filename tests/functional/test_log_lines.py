"""A job logs one line at INFO for each event, and none for a message or a tensor."""

import logging
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

import xfer
from examples.common.ports import free_port
from tests.functional.test_versions import Job
from tests.support.connect import flat_connect
from tests.support.world import TOKEN, ToyEngine, ToySource, World, good, until_true
from xfer import logs
from xfer.cli import app

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def said(caplog, monkeypatch):
    """Return a function that returns the lines logged so far."""
    caplog.set_level(logging.INFO, "xfer")
    monkeypatch.setattr(logs, "EVERY_S", 0.2)
    return lambda: [f"{r.levelname} {r.getMessage()}" for r in caplog.records if r.name == "xfer"]


def shape(line: str) -> str:
    return re.sub(r"127\.0\.0\.1:\d+|\d+(\.\d+)?(e-\d+)? (GB/s|ms|s|kB)\b|(?<= on )\S+$", "_", line)


def test_a_job_says_a_line_for_each_thing_that_happens_and_one_a_refit(said, monkeypatch):
    # The fixture's 0.2 s are for tests of lines about waiting: on a busy machine a worker installs longer, which adds one.
    monkeypatch.setattr(logs, "EVERY_S", 60.0)
    with Job(trainers=2) as j:
        j.controllers[0].wait_ready(20.0)
        started = {
            "INFO xfer: listening at tcp://_ for 2 trainers and 1 replica",
            "INFO xfer: 2 of 2 trainers have joined",
            "INFO xfer: replica 0 has joined: 1 worker on _",
            "INFO xfer: replica 0 worker 0 has joined tcp://_, locked by norm",
            "INFO xfer: replica 0 planned: _ a refit, 100 % direct, in _",
            "INFO xfer: replica 0 is ready at tcp://_, with 1 worker",
        }
        until_true(lambda: started <= {*map(shape, said())})
        for version in (1, 2):
            before = len(said())
            report = good(j.refit())
            assert sorted(map(shape, said()[before:])) == [
                f"INFO xfer: replica 0 serves version {version}, outage _",
                f"INFO xfer: version {version} committed by 1 of 1 replica: _ in _, _ by gloo; outage _",
            ], said()[before:]
            assert f"INFO xfer: {report}" in said(), "it is the report's own line"
        j.on_all(lambda i: j.sessions[i].close())
        until_true(lambda: "INFO xfer: replica 0 goes on serving version 2: trainer" in "\n".join(said()))
    after = said()
    assert not [x for x in after if not x.startswith("INFO ")], "a job that ends well warns about nothing"
    assert sum("goes on serving" in x for x in after) == 1


def test_processes_that_are_missing_are_said_while_others_wait_and_by_status(said):
    where = dict(rendezvous=f"tcp://127.0.0.1:{free_port()}", token=TOKEN, deadline_s=20.0)
    before, pool, came = set(threading.enumerate()), ThreadPoolExecutor(5), {}

    def come(rank: int) -> None:
        came[rank] = pool.submit(flat_connect, trainer=ToySource(rank, 4), replicas=2, **where)

    def waits_for(*texts: str) -> None:
        until_true(lambda: any(all(t in x for t in texts) for x in said()))

    def status_says(*texts: str) -> None:
        env = {"COLUMNS": "200", "XFER_TOKEN": TOKEN}
        shown = CliRunner().invoke(app, ["status", where["rendezvous"]], env=env).output
        assert ("waiting for" in shown) == bool(texts) and all(t in shown for t in texts), shown

    controllers = [xfer.serve(ToyEngine(1), **where)]
    come(1)
    waits_for(f"replica 0: no answer from {where['rendezvous']}; has trainer rank 0 called xfer.connect()?, for ")
    waits_for("trainer 1: no answer from ")
    come(0)
    joined = "2 of 4 trainers have joined, 0 of 2 replicas are ready"
    waits_for(f"{joined}; waiting for trainers 2 to 3: not connected", "replica 1: not connected")
    waits_for("replica 0: waiting at tcp://", " for trainers and for a plan, with 1 worker, for ")
    status_says(
        "waiting for trainers 2 to 3: not connected; has xfer.connect() been called there?",
        "waiting for replica 1: not connected; has xfer.serve() been called there?",
    )
    come(2), come(3)
    waits_for("4 of 4 trainers have joined, 1 of 2 replicas are ready; waiting for replica 1: not connected")
    controllers.append(xfer.serve(ToyEngine(1), replica=1, **where))
    sessions = [came[rank].result(20) for rank in range(4)]
    until_true(lambda: "xfer-waiting" not in {t.name for t in set(threading.enumerate()) - before})
    number = len(said())
    threading.Event().wait(0.5)
    status_says()
    assert not [x for x in said()[number:] if "waiting" in x], "nobody waits any more"
    first = pool.submit(xfer.nccl_xfer_refit, sessions[0])
    texts = [f"trainer {i}: it has not called nccl_xfer_refit()" for i in (1, 2, 3)]
    waits_for("the refit to version 1 takes ", "waiting for ", *texts)
    status_says("refit attempt 1", *texts)
    World(trainers=4).on_all(lambda i: xfer.nccl_xfer_refit(sessions[i]), ranks=[1, 2, 3])
    assert first.result(20).committed == 2
    World(trainers=4).on_all(lambda i: sessions[i].close())
    for c in controllers:
        c.close()


def test_a_trainer_that_dies_is_warned_of_and_a_replica_that_a_refit_missed_and_not_an_engine_that_leaves(said):
    with Job(trainers=1, replicas=3) as j:
        good(j.refit())
        j.controllers[2].close()
        until_true(lambda: any("takes part no more" in x for x in said()))
        assert not [x for x in said() if not x.startswith("INFO ")], said()
        j.engines[1].fail["start"] = RuntimeError("not now")
        good(j.refit(min_replicas=1))
        (warned,) = [x for x in said() if "committed by 1 of 3 replicas" in x]
        assert warned.startswith("WARNING "), warned
        assert "replica 1 did not commit, serves version 1: XferError: RuntimeError: not now" in warned, warned
        j.sessions[0]._session.party.channel.close()  # as when its process is killed
        until_true(lambda: any(x.startswith("WARNING xfer: replica 0 goes on serving version 2: ") for x in said()))


PROCESS = """
import logging, os, sys
{configured}
from xfer import logs
logs.show(); logs.show()
log = logging.getLogger("xfer")
log.debug("xfer: quiet"); log.info("xfer: news"); log.warning("xfer: careful")
"""
CONFIGURED_LATER = """
logging.basicConfig(format="by the user: %(message)s"); log.warning("xfer: once")
"""
OWN = "logging.getLogger('xfer').addHandler(logging.StreamHandler())"
VLLM = """
handler = logging.StreamHandler(); handler.setFormatter(logging.Formatter("(Worker_TP1 pid=7) %(levelname)s %(message)s"))
handler.setLevel({level}); logging.getLogger("vllm").addHandler(handler)
"""
TIME = r"\d\d-\d\d \d\d:\d\d:\d\d"


BASIC = "logging.basicConfig(format='%(message)s'{})"
BY_VLLM = [r"\(Worker_TP1 pid=7\) INFO xfer: news", r"\(Worker_TP1 pid=7\) WARNING xfer: careful"]
QUIET, NEWS, CAREFUL = (f"{TIME} {x}" for x in ("DEBUG xfer: quiet", "INFO xfer: news", "WARNING xfer: careful"))


@pytest.mark.parametrize(
    ("configured", "level", "shows"),
    [
        ("", "", [NEWS, CAREFUL]),
        ("", "warning", [CAREFUL]),
        ("", "DEBUG", [QUIET, NEWS, CAREFUL]),
        ("", "loud", [f"{TIME} WARNING xfer: XFER_LOG_LEVEL=loud is no level.*", NEWS, CAREFUL]),
        (BASIC.format(""), "", ["xfer: careful"]),
        (BASIC.format(", level='INFO'"), "", ["xfer: news", "xfer: careful"]),
        (BASIC.format(""), "INFO", ["xfer: news", "xfer: careful"]),
        (OWN, "", ["xfer: news", "xfer: careful"]),
        (OWN + "; logging.getLogger('xfer').setLevel('ERROR')", "", []),
        ("logging.getLogger('xfer').addHandler(logging.NullHandler())", "", []),
        ("logging.getLogger('xfer').setLevel('WARNING')", "", [CAREFUL]),
        (VLLM.format(level=20), "", BY_VLLM),
        (VLLM.format(level=40), "", []),
        (VLLM.format(level=40), "INFO", BY_VLLM),
    ],
)
def test_lines_are_shown_once_and_as_the_process_is_configured(configured, level, shows):
    """The user's configuration comes first, in vLLM's processes vLLM's handlers; else lines show the time."""
    env = {k: v for k, v in os.environ.items() if k != "XFER_LOG_LEVEL"} | {"PYTHONPATH": str(ROOT)}
    env |= {"XFER_LOG_LEVEL": level} if level else {}
    code = PROCESS.format(configured=configured)
    if not configured:
        code, shows = code + CONFIGURED_LATER, [*shows, "by the user: xfer: once"]
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    lines = done.stderr.splitlines()
    assert done.returncode == 0, done.stderr
    assert len(lines) == len(shows) and all(re.fullmatch(want, line) for want, line in zip(shows, lines)), done.stderr
