"""HTTP requests, which carry the job's token, go straight to their server, whatever proxies the environment names."""

import json
from pathlib import Path

import pytest

import xfer
from examples.common.ports import free_port
from examples.grpo.client import RolloutClient
from examples.grpo.replicas import healthy
from tests.support.connect import flat_connect
from tests.support.http import serving
from tests.support.world import TOKEN, ToyEngine, ToySource

ROOT = Path(__file__).resolve().parents[2]


def routes(engine: ToyEngine):
    """vLLM's development routes, of an engine whose workers are threads of this process."""
    calls = {
        "/get_world_size": lambda body: {"world_size": engine.workers()},
        "/init_weight_transfer_engine": lambda body: engine.init(body["init_info"], 30.0),
        "/update_weights": lambda body: engine.update(body["update_info"], 30.0),
        "/pause": lambda body: engine.pause(30.0),
        "/resume": lambda body: engine.resume(30.0),
        "/start_weight_update": lambda body: engine.start_update(30.0),
        "/finish_weight_update": lambda body: engine.finish(None, 30.0),
        "/update_weight_version": lambda body: engine.set_version(body["new_version"], 30.0),
        "/weight_info": lambda body: {"weight_version": engine.label},
        "/is_paused": lambda body: {"is_paused": engine.paused},
        "/openapi.json": lambda body: {"paths": {}},
        "/reset_prefix_cache": lambda body: {"success": True},
        "/reset_encoder_cache": lambda body: {},
        "/health": lambda body: {},
        "/sample": lambda body: {"groups": []},
    }
    return lambda method, path, body: (200, calls[path.partition("?")[0]](json.loads(body or "{}")) or {})


@pytest.fixture
def proxied(monkeypatch):
    """The requests that reached a proxy which all the usual variables name."""
    seen: list[str] = []
    with serving(lambda method, path, body: (502, seen.append(f"{method} {path} {body}"))) as (proxy,):
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy)
            monkeypatch.setenv(name.upper(), proxy)
        for name in ("no_proxy", "NO_PROXY", "REQUEST_METHOD"):
            monkeypatch.delenv(name, raising=False)
        yield seen


def test_an_engine_that_is_given_by_url_is_asked_without_a_proxy(proxied):
    engine = ToyEngine(2)
    with serving(routes(engine)) as (url,):
        rendezvous = f"tcp://127.0.0.1:{free_port()}"
        with flat_connect(
            trainer=ToySource(0, 1), rendezvous=rendezvous, token=TOKEN, engines=[url], deadline_s=10.0
        ) as refit:
            assert xfer.nccl_xfer_refit(refit, verify=True).committed == 1
        for session in engine.sessions:
            session.close()
    assert not proxied and not any(t.wrong(0) for t in engine.takers)


def test_the_example_asks_its_rollouts_without_a_proxy(proxied):
    with serving(routes(ToyEngine(1))) as (url,):
        assert healthy(url)
        assert RolloutClient([url], TOKEN).post(url, "/sample", {}) == {"groups": []}
    assert not proxied


def test_no_other_http_client_is_in_the_package_or_its_examples():
    """`urlopen` takes proxies from the environment, as do the libraries that users know."""
    text = {p: p.read_text() for folder in ("xfer", "examples") for p in (ROOT / folder).rglob("*.py")}
    for client in ("urlopen(", "HTTPConnection(", "import requests", "import httpx", "import aiohttp"):
        assert not [str(p.relative_to(ROOT)) for p, t in text.items() if client in t], client
