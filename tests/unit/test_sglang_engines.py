"""What xfer asks of an SGLang engine, by HTTP, and which of SGLang's settings it refuses. SGLang itself is not needed here."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.support.http import serving
from xfer.engines.choose_handle import handle_for
from xfer.errors import EngineLost, Unsupported, XferError
from xfer.sglang import SGLangServer
from xfer.sglang.plugin import CALL, answer
from xfer.sglang.settings import REFUSED, refuse


@pytest.fixture
def server():
    """SGLang's routes as far as a refit needs them."""
    made = SimpleNamespace(seen=[], heads=[], refused=set(), answer=[2.0], status={}, paused=False)

    def reply(method, path, body):
        if method == "GET":
            paused = path == "/ready" and made.paused
            return made.status.get(path, 503 if paused else 200), {"weight_version": "7"}
        given = json.loads(body)
        made.seen.append((path[1:], given))
        if path in ("/pause_generation", "/continue_generation"):
            made.paused = path == "/pause_generation"
        return (400 if path[1:] in made.refused else 200), made.answer if "name" in given else {}

    with serving(reply, heads=made.heads) as (made.url,):
        yield made


@pytest.mark.parametrize(
    "mode, answer, paused, status",
    [
        ("retract", [2.0], False, {}),
        ("in_place", [[2.0], [2.0]], False, {}),  # of two data-parallel ranks
        ("in_place", [2.0], True, {}),
        ("retract", [2.0], False, {"/ready": 503, "/ping": 503}),  # not well
        ("retract", [2.0], False, {"/ready": 404}),  # too old to say
    ],
)
def test_a_refit_is_sglangs_own_update_session_around_one_call_of_xfer(server, mode, answer, paused, status):
    """`paused`: by its owner, whose pause outlasts all. A refit drops also the caches which the next ones keep. A pause goes on while
    workers join."""
    server.answer, server.paused = answer, paused
    server.status |= status
    handle = handle_for(SGLangServer(server.url, headers={"Authorization": "Bearer key"}, pause_mode=mode))
    keeps = handle.keeps_caches
    assert keeps == (mode == "in_place") and handle.workers() == 2
    handle.init({"replica": 0}, 5)
    handle.pause(5)
    handle.start_update(5)
    handle.update({"attempt": 3, "deadline_s": 4.0}, 5)
    handle.finish("8", 5)
    handle.reset_caches(5)
    handle.resume(5)
    handle.init({}, 5)
    assert server.paused == paused
    handle.pause(5)
    handle.init({}, 5)
    call, bodies, free = "get_weights_by_name", [body for _, body in server.seen], not paused
    resume = ["continue_generation"] * free
    joined = [*["pause_generation"] * free, call, *resume]
    assert [route for route, _ in server.seen] == [
        call, *joined,
        "pause_generation", "begin_weight_update", call, "end_weight_update", "update_weight_version",  # a refit
        *["pause_generation"] * keeps, "flush_cache", *resume,
        *joined, "pause_generation", call,
    ]  # fmt: skip
    told = [json.loads(body["name"].removeprefix(CALL)) for body in bodies[1:] if "name" in body]
    update = {"call": "update", "info": {"attempt": 3, "deadline_s": 4.0}}
    again = {"call": "init", "info": {}}
    assert told == [{"call": "init", "info": {"replica": 0}}, update, again, again]
    modes = [body["mode"] for route, body in server.seen if route == "pause_generation"]
    drops = ["retract"] * keeps  # SGLang drops no cache of requests that run
    join = ["retract"] * free
    assert modes == [*join, mode, *drops, *join, mode]
    assert {"new_version": "8", "abort_all_requests": False} in bodies, "requests that run go on"
    assert handle.get_version(5) == "7" and {h["Authorization"] for h in server.heads} == {"Bearer key"}


def test_an_engine_without_xfer_a_cache_that_stays_and_a_server_that_is_gone_are_errors(server):
    handle = handle_for(SGLangServer(server.url))
    server.refused |= {"flush_cache", "begin_weight_update"}
    with pytest.raises(XferError, match="did not drop its prefix cache"):
        handle.reset_caches(5)
    with pytest.raises(XferError, match="/begin_weight_update answered 400"):
        handle.start_update(5)
    server.answer = []
    with pytest.raises(XferError, match="do not know xfer"):
        handle.workers(5)
    with pytest.raises(EngineLost, match="cannot be reached"):
        handle_for(SGLangServer("http://127.0.0.1:9")).workers(5)


@pytest.mark.parametrize("wrong", ({"url": "10.0.0.1:30000"}, {"url": "http://me:secret@host"}, {"pause_mode": "keep"}))
def test_an_address_or_a_pause_that_cannot_work_is_refused_without_its_password(wrong):
    with pytest.raises(Unsupported) as caught:
        SGLangServer(**{"url": "http://host:1", **wrong})
    assert "secret" not in str(caught.value)


def test_names_of_tensors_pass_the_hook():
    assert answer(lambda manager, request: (manager, request.name), "m", SimpleNamespace(name="a.b")) == ("m", "a.b")


def test_all_settings_that_stand_in_the_way_are_named_at_once_and_no_others():
    refuse(SimpleNamespace(**{field: allowed[-1] for field, allowed, _ in REFUSED}))
    refuse(SimpleNamespace())
    with pytest.raises(Unsupported) as caught:
        refuse(SimpleNamespace(**{field: "another" for field, _, _ in REFUSED}))
    assert [v.partition("=")[0] for v in caught.value.violations] == [field for field, _, _ in REFUSED]
