"""`connect` and `serve` refuse arguments that cannot work, all at once, before they connect."""

import asyncio
import json
import re
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import xfer
from tests.support.connect import flat_connect
from tests.support.world import TOKEN, ToyEngine, ToySource
from xfer.engines.choose_handle import handle_for
from xfer.engines.handles import AsyncEngine, OfflineLLM
from xfer.engines.remote import CallableEngine, HttpEngine
from xfer.errors import HandshakeError, XferError
from xfer.participants.controller import Controller
from xfer.participants.trainer import TrainerSession
from xfer.rendezvous import channel
from xfer.report import RefitReport

NAN, INF = float("nan"), float("inf")
RAW = b"\xff\xfe of the environment".decode("utf-8", "surrogateescape")
ADDRESSES = ["h", "h:0", ":1", "h:99999", "a..b:1", f"{RAW}:1", "::1:1", "[::1:1", "::1]:1", "[one]:1", "[]:1"]
DOOR = {
    "rendezvous": [None, 29600, "http://h:1", "10.0.0.1:1", *(f"tcp://{x}" for x in ADDRESSES)],
    "token": [None, 8, "short", RAW],
}
SECONDS = [None, 0, -1.0, NAN, INF, "soon", [1]]
GLOBS = [None, "one", 3, {"a", "b"}, iter(["a"]), ["a", 1], [""]]
CONNECT = DOOR | {
    "trainer": [torch.nn.Linear(2, 2), [torch.nn.Linear(2, 2)], None],
    "engines": ["http://10.0.0.2:8000", None, ToyEngine(1)],
    "replicas": ["2", 2.5, 0, -1, 1 << 40],
    "bucket_bytes": [64e6, "1g", 0, 4095, (1 << 60) + 1, 1 << 70],
    "deadline_s": SECONDS,
    "drop": GLOBS,
    "narrow": GLOBS,
    "cache_dir": [5, b"here"],
    "fabric": [5, "/nonexistent.toml"],
    "route": [None, "Packed", ["direct"]],
}
SERVE = DOOR | {
    "replica": ["0", 0.5, -1, 1 << 31],
    "deadline_s": SECONDS,
    "keep": GLOBS,
    "pause_mode": ["Keep", None, ["keep"]],
    "engine_rendezvous": ["10.0.0.1:29600", 5],
    "headers": [{"Authorization": "Bearer x"}],  # of a URL only
    "pausemode": ["keep"],
}


@pytest.fixture
def ways(monkeypatch):
    """Both calls, with good arguments but for those given; neither may get as far as to begin."""

    def begun(*a, **k):
        raise AssertionError("arguments that cannot work were taken")

    monkeypatch.setattr(TrainerSession, "__init__", begun)
    monkeypatch.setattr(Controller, "__init__", begun)
    good = dict(rendezvous="tcp://127.0.0.1:1", token=TOKEN, deadline_s=1.0)
    return {
        "connect": lambda **bad: (xfer.connect if "route" in bad else flat_connect)(
            **{"trainer": ToySource(0, 1), **good, **bad}
        ),
        "serve": lambda **bad: xfer.serve(ToyEngine(1), **{**good, **bad}),
    }


@pytest.mark.parametrize(("way", "table"), [("connect", CONNECT), ("serve", SERVE)], ids=["connect", "serve"])
def test_arguments_that_cannot_work_are_named_before_anything_begins(ways, way, table):
    """Each alone, and all of them at once."""
    for name, values in table.items():
        for value in values:
            with pytest.raises(XferError, match=f"{way}\\(\\) was called with arguments that cannot work") as caught:
                ways[way](**{name: value})
            (line,) = caught.value.violations
            assert name.removeprefix("engine_") in line, (value, line)
    # A fabric is held against the ranks, which are not known here; a route has the options among the others.
    bad = {name: values[0] for name, values in table.items() if name not in ("fabric", "route")}
    with pytest.raises(XferError) as caught:
        ways[way](**bad)
    assert len(caught.value.violations) == len(bad), caught.value
    assert way == "serve" or re.search(r"Linear is no trainer adapter.*xfer.TensorTrainer\(module\)", str(caught.value))


def test_a_fabric_is_held_against_the_job_and_all_that_is_wrong_is_said(ways, tmp_path):
    path, host = tmp_path / "fabric.json", {"names": ["a"], "gpus": 4, "nvlink": 4e11, "nic": 5e10}
    path.write_text(json.dumps({"host": [host], "ranks": {"trainers": ["a:0-1"], "replicas": [["a:2"]]}}))
    with pytest.raises(XferError, match="places 2 trainers and 1 replicas; this job has 1 and 1"):
        ways["connect"](fabric=path)
    path.write_text(json.dumps({"host": [{**host, "nic": "fast"}]}))
    with pytest.raises(XferError) as caught:
        ways["connect"](fabric=path, deadline_s=-1)
    assert len(caught.value.violations) == 3  # the deadline, the file, and what is wrong in it


class Async:
    async def pause_generation(self, **_):
        """Whereby an AsyncLLM is told."""


ENGINES = {
    HttpEngine: "http://127.0.0.1:9",
    AsyncEngine: Async(),
    OfflineLLM: SimpleNamespace(llm_engine=None),
    CallableEngine: SimpleNamespace(**dict.fromkeys(CallableEngine._METHODS.values(), print)),
}
OPTIONS = {"name": "it", "pause_mode": "keep_cache", "headers": {}, "in_order": True, "workers": 1}
OPTIONS |= dict.fromkeys(("pause", "resume", "reset_prefix_cache"), print)


@pytest.mark.parametrize("kind", ENGINES, ids=lambda k: k.__name__)
def test_serve_takes_the_options_that_the_handle_of_the_engine_takes_and_names_all_others(ways, monkeypatch, kind):
    """One by one: the handle itself refuses exactly those that `serve` refuses; its docstring names each."""
    made = []
    monkeypatch.setattr(Controller, "__init__", lambda c, handle, *a, **k: made.append(handle))
    loop = asyncio.new_event_loop()
    for name, value in OPTIONS.items():
        where = {"loop": loop, "rendezvous": "tcp://127.0.0.1:1", "token": TOKEN}
        assert f"`{name}`" in xfer.serve.__doc__
        try:
            assert type(handle_for(ENGINES[kind], loop=loop, **{name: value})) is kind
        except TypeError:
            with pytest.raises(XferError, match=f"{name}=.*no option of {kind.__name__}; there are .*name"):
                xfer.serve(ENGINES[kind], **where, **{name: value})
        else:
            xfer.serve(ENGINES[kind], **where, **{name: value})
            assert type(made.pop()) is kind
    loop.close()
    with pytest.raises(XferError, match="an LLM's requests wait between its steps"):
        handle_for(ENGINES[OfflineLLM], pause_mode="wait")


@pytest.mark.parametrize(
    ("host", "why"),
    [("no-such-host.invalid", "does not know that name"), ("127.0.0.1", "another job.*not closed.*rank 0")],
)
def test_an_address_where_nobody_can_listen_says_why(host, why):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(HandshakeError, match=why):
        channel.listen(f"tcp://{host}:{taken.getsockname()[1]}", TOKEN)


def test_a_report_gives_loggers_the_seconds_of_a_fence_and_of_a_comparison_where_there_was_one():
    report = RefitReport(0, 1, 2.0, (), 0, 0, 0, 0, fence_s=0.25, compare_s=0.5)
    told = report.flatten()
    assert (told["xfer/fence_s"], told["xfer/compare_s"], told["xfer/call_s"]) == (0.25, 0.5, 2.0)
    assert not {"xfer/fence_s", "xfer/compare_s"} & replace(report, fence_s=0.0, compare_s=0.0).flatten().keys()
