"""`xfer bench` from a config.json alone: true layouts, processes of this host, every route of CPUs, every element compared."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from examples.common import toy
from tests.support import forge
from tests.support.marks import BOTH
from tests.support.proc import ROOT, environment
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
    assert {"versions", "hardware", "settings", "title"} <= found.keys() and found["devices"] == ["cpu"] * 4
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
    code, text = xfer_bench(*sides, "--deadline", 0)
    assert code == 2
    assert "--route nccl: on this device pull, gloo, packed" in text and "--deadline" in text and "tp" in text
