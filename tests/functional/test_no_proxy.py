"""HTTP requests, which carry the job's token, go straight to their server, whatever proxies the environment names."""

import os
import subprocess
import sys

from tests.support.http import serving
from tests.support.proc import PATIENCE, ROOT

ASKS = """
import sys
from examples.grpo.client import RolloutClient
from examples.grpo.replicas import healthy
from xfer.engines.choose_handle import handle_for
assert handle_for(sys.argv[1]).workers(10.0) == 2
assert healthy(sys.argv[1])
assert RolloutClient(sys.argv[1:], "token").post(sys.argv[1], "/sample", {})["groups"] == []
"""


def test_engines_and_rollouts_that_are_given_by_url_are_asked_without_a_proxy():
    """In a process that finds the proxies when it starts, as openers are made at import."""
    seen: list[str] = []
    with serving(
        lambda *_: (200, {"world_size": 2, "groups": []}),
        lambda method, path, body: (502, seen.append(f"{method} {path} {body}")),
    ) as (url, proxy):
        names = ("http_proxy", "https_proxy", "all_proxy")
        env = {k: v for k, v in os.environ.items() if k.lower() not in ("no_proxy", "request_method")}
        env |= {form(name): proxy for name in names for form in (str.lower, str.upper)} | {"PYTHONPATH": str(ROOT)}
        words = [sys.executable, "-c", ASKS, url]
        done = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120 * PATIENCE)
    assert done.returncode == 0 and not seen, (seen, done.stderr)


def test_no_other_http_client_is_in_the_package_or_its_examples():
    """`urlopen` takes proxies from the environment, as do the libraries that users know."""
    text = {p: p.read_text() for folder in ("xfer", "examples") for p in (ROOT / folder).rglob("*.py")}
    for client in ("urlopen(", "HTTPConnection(", "import requests", "import httpx", "import aiohttp"):
        assert not [str(p.relative_to(ROOT)) for p, t in text.items() if client in t], client
