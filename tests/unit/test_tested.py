"""The versions of the frameworks that xfer is tested with: one list for the installation, docs/status.md and the warnings."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support import tested_table
from xfer import tested
from xfer.plan.fabric_file import read_toml

ROOT = Path(__file__).resolve().parents[2]


def test_the_status_page_has_the_table_of_tested_versions():
    (found,) = tested_table.PLACE.findall(tested_table.PAGE.read_text())
    assert found == tested_table.table(), "python -m tests.support.tested_table writes it anew"


def test_extras_begin_with_the_oldest_tested_versions_and_name_no_newest():
    extras = read_toml((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    oldest = min(tested.TRAINERS, key=lambda t: number(t.core))
    assert extras["megatron"] == [f"megatron-core>={oldest.core}", f"megatron-bridge>={oldest.bridge}"]
    assert extras["vllm"] == [f"vllm>={min((e.vllm for e in tested.ENGINES), key=number)}"]


def test_releases_that_were_tested_together_are_silent_and_others_get_one_line():
    """A patch release is one of its release; a core with the Bridge of another pair was not tested."""
    for t in tested.TRAINERS:
        assert tested.untested_trainer(t.core, t.bridge) is None
        assert tested.untested_trainer(f"{minor(t.core)}.99", f"{minor(t.bridge)}.0rc1") is None
        others = [o.bridge for o in tested.TRAINERS if minor(o.bridge) != minor(t.bridge)]
        for pair in ((t.core, "99.0.0"), ("99.0.0", t.bridge), *((t.core, b) for b in others)):
            line = tested.untested_trainer(*pair)
            assert all(word in line for word in (*pair, *map(str, tested.TRAINERS))) and "\n" not in line
    for e in tested.ENGINES:
        assert tested.untested_engine(f"{e.vllm}+cpu") is None
    line = tested.untested_engine("99.0.0")
    assert all(word in line for word in ("99.0.0", *map(str, tested.ENGINES))) and "\n" not in line


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_trainer_warns_of_an_untested_pair(monkeypatch, caplog, rank):
    from xfer.trainers import megatron

    t = tested.TRAINERS[0]
    monkeypatch.setattr(megatron, "_wrong_installation", lambda bridge: [])  # no process groups here
    monkeypatch.setattr(megatron, "_wrong_groups", lambda chunks, bridge: [])
    monkeypatch.setattr(megatron.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(megatron.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(megatron, "_wrong_bridge", lambda bridge: [])
    for core in (t.core, None, "99.0.0"):  # None: a checkout that says no version
        monkeypatch.setitem(sys.modules, "megatron.core", SimpleNamespace(__version__=core))
        monkeypatch.setitem(sys.modules, "megatron.bridge", SimpleNamespace(__version__=t.bridge))
        megatron.MegatronTrainer([torch.nn.Linear(2, 2)], None)
    lines = [r.getMessage() for r in caplog.records if r.name == "xfer"]
    assert lines == [f"xfer: {tested.untested_trainer('99.0.0', t.bridge)}"][rank:]


@pytest.mark.engine
@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_worker_warns_of_an_untested_engine(monkeypatch, caplog, rank):
    from xfer.engines import vllm_worker

    worker = vllm_worker.XferWeightTransferEngine.__new__(vllm_worker.XferWeightTransferEngine)
    worker.parallel_config, worker.session = SimpleNamespace(rank=rank, world_size=2, world_size_across_dp=2), None
    worker.layout, worker.device = None, torch.device("cpu")
    for version in (vllm_worker.vllm.__version__, "99.0.0"):
        monkeypatch.setattr(vllm_worker.vllm, "__version__", version)
        with pytest.raises(AttributeError, match="vllm_config"):  # what comes next
            worker._join(SimpleNamespace(workers=2))
    lines = [r.getMessage() for r in caplog.records if r.name == "xfer"]
    assert lines == [f"xfer: {tested.untested_engine('99.0.0')}"][rank:]


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
