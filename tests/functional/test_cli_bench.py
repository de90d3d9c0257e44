"""`xfer bench` from a config.json alone: true layouts, every route of CPUs, every element compared, on this host and on emulated ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from examples.common import toy
from examples.common.ports import free_port
from tests.support import forge
from tests.support.hosts import Cluster, Host, missing
from tests.support.marks import BOTH
from tests.support.proc import PATIENCE, PYTHON, ROOT, environment
from xfer.cli import app, children

pytestmark = BOTH
CONFIG = toy.FAMILIES["qwen3_moe"] | {"vocab_size": 192}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def forked(monkeypatch):
    """The twelve processes of all routes are forked. Each would import torch anew."""

    def start(command, **how):
        if "xfer.cli.bench.rank" not in command:
            return subprocess.Popen(command, **how)
        own = environment(**{k: v for k, v in how["env"].items() if k.startswith("XFER_")})
        return forge.start(command[0], command[1:], own, ROOT, None, how["stderr"])

    monkeypatch.setattr(children, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": start}))


def xfer_bench(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["bench", *map(str, arguments)], env={"COLUMNS": "160"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_every_route_moves_every_bit_and_is_timed_beside_its_floor(folder, tmp_path, forked):
    data = tmp_path / "bench.json"
    sides = ("--trainer", f"{folder} world=2 tp=2 ep=2 etp=1", "--engine", "tp=1 replicas=2")
    code, text = xfer_bench(*sides, "--device", "cpu", "--repeats", 2, "--json", data, "--cache", tmp_path)
    assert code == 0, text
    assert text.count("all equal") == 3
    found = json.loads(data.read_text())["bench"]
    assert found["title"] and found["devices"] == ["cpu"] * 4 and found["host"] == [0] * 4
    assert [h.keys() for h in found["hosts"]] == [{"versions", "hardware", "settings"}]
    routes = {r["route"]: r for r in found["routes"]}
    assert [*routes] == ["pull", "gloo", "packed"]
    for name, r in routes.items():
        assert r["wrong"] == 0 and not r["error"] and not r["floor_error"], r
        assert all(len(r[k]) == 2 for k in ("transfer_s", "outage_s", "call_s", "verified_s"))
        assert (len(r["floor_s"]) == 2 and min(r["floor_s"]) > 0) == (name != "packed")
        assert r["bytes"] == sum(r["carried"].values()) > 0 and r["first_s"] > 0 and r["first_s"] not in r["call_s"]
    assert "peer" in routes["pull"]["carried"] and [*routes["gloo"]["carried"]] == ["gloo"]
    assert routes["pull"]["bytes"] == routes["gloo"]["bytes"] < routes["packed"]["bytes"]


def test_mistakes_are_listed_before_anything_starts(folder):
    sides = ("--trainer", f"{folder} world=2 tp=3", "--engine", "tp=1", "--route", "nccl", "--device", "cpu")
    code, text = xfer_bench(*sides, "--deadline", 0, "--trainer-hosts", 2)
    assert code == 2
    assert "--route nccl: on this device pull, gloo, packed" in text and "--deadline" in text and "tp" in text
    assert "--trainer-hosts 2: at most 1" in text
    sides = ("--trainer", f"{folder} world=2", "--route", "pull", "--device", "cpu")
    code, text = xfer_bench(*sides, "--rendezvous", "h0:1")
    assert code == 2 and "tcp://HOST:PORT" in text and "--trainer-hosts 2 is needed" in text


MBIT = 400


def begun(said: Path, python: str, env: dict[str, str], host: Host | None, *arguments: object):
    """Start `xfer bench` on one host of several. said: where it prints."""
    run = ["-m", "xfer", "bench", "--device", "cpu", *map(str, arguments)]
    with open(said, "w") as out:
        own = environment(XFER_TOKEN="a token for tests", COLUMNS="160", **env)
        return forge.start(python, run, own, said.parent, out, out, host)


def test_trainers_refit_engines_of_other_hosts_and_of_their_own(folder, tmp_path):
    """By gloo from two hosts with Megatron-Bridge alone to two with vLLM alone; on hosts with both sides each worker also pulls."""
    if why := missing():
        pytest.skip(why)
    sides = ("--trainer", f"{folder} world=2 tp=2 ep=2 etp=1", "--engine", "tp=1 replicas=2", "--repeats", 2)

    def bench(hosts: list[Host], sides_of: str, *more: object) -> tuple[str, dict, dict]:
        data, pythons = tmp_path / "bench.json", (PYTHON[side] for side in sides_of.split())
        where = ("--rendezvous", "tcp://h0:29600", "--size", len(hosts), "--json", data, "--cache", tmp_path, *more)
        ran = [begun(tmp_path / h.name, p, h.env(), h, *sides, *where) for h, p in zip(hosts, pythons)]
        codes = [p.wait(300 * PATIENCE) for p in ran]
        text, *others = [(tmp_path / h.name).read_text() for h in hosts]
        assert not any(codes) and text.count("all equal") == 1, text
        assert all("done: h0 prints the table" in t for t in others), others
        found = json.loads(data.read_text())["bench"]
        (r,) = found["routes"]
        assert r["wrong"] == 0 and not r["error"] and not r["floor_error"] and len(r["floor_s"]) == 2
        assert r["bytes"] == sum(r["carried"].values()) > 0 and len(found["hosts"]) == len(hosts)
        sent_s = r["carried"]["gloo"] / 2 / (MBIT * 1e6 / 8)  # by each of two network cards
        assert min(*r["floor_s"], *r["transfer_s"]) > 0.8 * sent_s, r
        return text, found, r

    with Cluster(4, mbit=MBIT) as cluster:
        text, found, r = bench(cluster.hosts, "trainer trainer engine engine", "--route", "gloo")
        assert "trainers on h0 cpu; h1 cpu" in text and "workers on h2 cpu; h3 cpu" in text
        assert found["host"] == [0, 1, 2, 3] and [*r["carried"]] == ["gloo"]
        text, found, r = bench(cluster.hosts[:2], "trainer engine", "--route", "pull", "--trainer-hosts", 2)
        assert found["host"] == [0, 1, 0, 1] and r["carried"].keys() == {"gloo", "peer"} and "by peer" in text


def test_hosts_that_are_asked_different_things_are_told_what_differs(folder, tmp_path):
    at = ("--rendezvous", f"tcp://127.0.0.1:{free_port()}", "--size", 2, "--repeats", 3)
    sides = [("--trainer", f"{folder} world={i + 1}", *at) for i in range(2)]
    ran = [begun(tmp_path / f"h{i}", sys.executable, {"XFER_HOST": f"h{i}"}, None, *sides[i]) for i in range(2)]
    assert [p.wait(300 * PATIENCE) for p in ran] == [1, 1]
    for text in ((tmp_path / f"h{i}").read_text() for i in range(2)):
        assert f"{folder} world=1 on h0" in text and f"{folder} world=2 on h1" in text and "--repeats" not in text
