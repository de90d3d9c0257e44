"""HTTP requests, which carry the job's token, go straight to their server, whatever proxies the environment names."""

from pathlib import Path

import pytest

from examples.grpo.client import RolloutClient
from examples.grpo.replicas import healthy
from tests.support.http import serving
from xfer.engines.choose_handle import handle_for

ROOT = Path(__file__).resolve().parents[2]


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


def test_engines_and_rollouts_that_are_given_by_url_are_asked_without_a_proxy(proxied):
    with serving(lambda method, path, body: (200, {"world_size": 2, "groups": []})) as (url,):
        assert handle_for(url).workers(10.0) == 2
        assert healthy(url)
        assert RolloutClient([url], "token").post(url, "/sample", {})["groups"] == []
    assert not proxied


def test_no_other_http_client_is_in_the_package_or_its_examples():
    """`urlopen` takes proxies from the environment, as do the libraries that users know."""
    text = {p: p.read_text() for folder in ("xfer", "examples") for p in (ROOT / folder).rglob("*.py")}
    for client in ("urlopen(", "HTTPConnection(", "import requests", "import httpx", "import aiohttp"):
        assert not [str(p.relative_to(ROOT)) for p, t in text.items() if client in t], client
