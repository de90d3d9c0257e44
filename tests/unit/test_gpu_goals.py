"""Of scripts/gpu_goals.py and bench_gpu_floor.py: goals are judged by the figures that results have, wrong bytes are never met, every
step is a command that its script takes, and copy engines are given each taker's bytes once."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import gpu_goals
from bench_gpu_floor import copies

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"


def goals(name: str, which: str = "") -> dict[str, gpu_goals.Judged]:
    found = json.loads((RESULTS / name).read_text())
    return {j.goal: j for at, result in gpu_goals.results(found) if which in at for j in gpu_goals.judged(result)}


def test_figures_of_pages_are_what_goals_are_judged_by():
    """Each is told on the page beside the file."""
    packed = goals("gpu_2026-11-22_packed_late.json")
    assert round(packed["packed, colocated: one by one / bucketed + flattened"].ours) == 105
    assert packed["packed, apart: of NCCL's broadcast rate"].how == "169.6 / 180.6 ms"
    hidden = goals("gpu_2026-11-22_layerwise_late.json")
    assert {n: round(hidden[f"layer-wise, {n} ranks: hidden, by events"].ours, 3) for n in (2, 4)} == {
        2: 0.773,
        4: 0.814,
    }
    assert [hidden[f"layer-wise, {n} ranks: hidden, by events"].met for n in (2, 4)] == [False, True]
    timed = goals("gpu_2026-11-25_layerwise.json")
    shares = {p: timed[f"layer-wise, 2 ranks: hidden, by the timeline, {p}"] for p in ("overlap", "pull")}
    assert {p: (round(j.ours, 3), j.met) for p, j in shares.items()} == {
        "overlap": (0.864, True),
        "pull": (0.769, False),
    }
    one = goals("gpu_2026-11-23_cache.json")
    verified = one["4b, plain, TP1, on 1 GPU: verified / plain transfer"]
    assert (verified.limit, verified.how, verified.met) == (1.25, "6.00 / 5.12 ms", True), "both sum on one GPU"
    row = goals("gpu_2026-11-23_rows.json")["4b, one, TP1: 2 replicas in a row / one"]
    assert row.how == "24.24 / 21.43 ms" and row.met
    tp2 = goals("gpu_2026-11-22_wire_sessions.json", "TP2")
    assert round(tp2["4b, plain, TP2: transfer, ms"].ours, 2) == 11.97
    assert tp2["4b, plain, TP2: verified / plain transfer"].limit == 1.1
    plane = goals("gpu_2026-11-26_four.json", "73055e9")
    assert {n: round(plane[f"data plane, {n}: peer, ms"].ours, 2) for n in ("4b", "30b", "replicas")} == {
        "4b": 10.54, "30b": 81.26, "replicas": 155.57,
    }  # fmt: skip
    assert not plane["data plane, 30b: peer, ms"].met and plane["data plane, 4b: peer, ms"].met
    assert plane["data plane, relay: row / one copy out"].how == "168.80 (relay, 128 parts) / 155.25 ms"


def test_every_result_can_be_read():
    for path in RESULTS.glob("gpu_*.json"):
        for _, result in gpu_goals.results(json.loads(path.read_text())):
            gpu_goals.judged(result)


def transport(wrong: int = 0, **ms: float) -> dict:
    return {"meta": {}, "cases": [{"case": "4b", "ms": {k: [v] for k, v in ms.items()}, "wrong": {"peer": wrong}}]}


def test_a_goal_is_met_at_its_limit_and_never_with_wrong_bytes(tmp_path, capsys, monkeypatch):
    at = {j.goal: j.met for j in gpu_goals.judged(transport(floor=10.0, peer=10.6, p2p=20.0, nccl=17.0))}
    assert at == {
        "data plane, 4b: wrong elements": True,
        "data plane, 4b: peer, ms": True,
        "data plane, 4b: p2p, of NCCL's rate": True,
    }
    for changed, goal in (
        (transport(floor=10.0, peer=10.61, p2p=20.0, nccl=17.0), "peer, ms"),
        (transport(floor=10.0, peer=10.6, p2p=20.1, nccl=17.0), "p2p, of NCCL's rate"),
        (transport(1, floor=10.0, peer=10.6, p2p=20.0, nccl=17.0), "wrong elements"),
    ):
        assert [j.goal for j in gpu_goals.judged(changed) if not j.met] == [f"data plane, 4b: {goal}"]
        file = tmp_path / "x.json"
        file.write_text(json.dumps({"a run": changed}))
        monkeypatch.setattr(sys, "argv", ["gpu_goals.py", str(file)])
        assert gpu_goals.main() == 1
        assert f"{goal} |" in capsys.readouterr().out.partition("**missed**")[0].splitlines()[-1]


def session(
    command: str, gpus: int, floor: float = 0.0, text: str = "9 bytes, wrong: none (0.1 s)", **transfer: float
) -> dict:
    raw = {
        name: [{"scalars": {"transfer_s": s / 1e3, "outage_s": s / 1e3, "call_s": s / 1e3, "bytes": 8e9}}]
        for name, s in transfer.items()
    }
    if floor:
        raw["floor"] = {"gb_per_s": 4e9 / floor / 1e6}
    command = f"python scripts/bench_gpu_session.py {command}"
    return {"meta": {"command": command, "gpus": gpus}, "rows": [["every byte compared", text]], "raw": raw}


def test_whole_refits_are_judged_by_their_layout_and_the_floor_of_their_own_run():
    found = {j.goal: j for j in gpu_goals.judged(session("--tp 2", 4, floor=10.2, refit=12.1, verified=13.0))}
    transfer = found.pop("4b, plain, TP2: transfer, ms")
    assert not transfer.met and transfer.how == "floor 10.20"
    assert found.pop("4b, plain, TP2: verified / plain transfer").met
    assert [j.met for j in found.values()] == [True], found
    shared = gpu_goals.judged(session("--model 30b --tp 2", 2, floor=10.0, refit=10.9))
    assert {j.goal: j.met for j in shared}["30b, plain, TP2, on 2 GPUs: transfer / floor"]
    wrong = gpu_goals.judged(session("--tp 2", 4, text="9 bytes, wrong: ['layers.0'] (0.1 s)", refit=11.0))
    assert [j.goal for j in wrong if not j.met] == ["4b, plain, TP2: comparisons of every byte that failed"]
    for smaller in ("--model toy --tp 2", "--tp 2 --layers 16"):
        assert not gpu_goals.judged(session(smaller, 4, refit=1.0)), "no goal is of such a size"


@pytest.mark.parametrize("step", gpu_goals.STEPS, ids=lambda s: s.name)
def test_every_step_is_a_command_that_its_script_takes(step, monkeypatch):
    name, *given_ = shlex.split(step.command)

    class Parsed(Exception):
        pass

    parse = argparse.ArgumentParser.parse_args

    def stop(self, *a, **kw):
        raise Parsed(parse(self, *a, **kw))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [name, *given_, "--out", "x.json"])
    with pytest.raises(Parsed):
        import_module(name.removesuffix(".py")).main()


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_steps_for_so_many_gpus_show_what_only_so_many_can(gpus):
    names = [s.name for s in gpu_goals.fitting(gpus)]
    assert {1: "one", 2: "pair", 4: "transport", 8: "transport8"}[gpus] in names
    assert not {1: {"pair"}, 2: {"session4b", "one"}, 4: {"transport8", "pair"}, 8: {"transport"}}[gpus] & set(names)


@pytest.fixture
def behind():
    """As in a process that a shell began with "&"."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_run_goes_on_where_the_last_one_stopped_and_begins_nothing_that_cannot_end(
    tmp_path, monkeypatch, capsys, behind
):
    script = tmp_path / "scripts" / "bench.py"
    script.parent.mkdir()
    script.write_text(
        "import os, sys, time\n"
        "what, out = sys.argv[1], sys.argv[-1]\n"
        "if what == 'bad': raise SystemExit('no such GPU')\n"
        "open(out, 'w').write('{}')\n"
        "again = os.path.exists(out.replace('.json', '.part.json'))\n"
        "try: time.sleep(60 if what == 'stuck' and not again else 0)\n"
        "except KeyboardInterrupt: raise SystemExit('its engines are ended')\n"
    )
    seconds = {"a": 30, "bad": 30, "stuck": 8, "long": 900, "b": 30}
    steps = tuple(gpu_goals.Step(n, 1, s, f"bench.py {n}") for n, s in seconds.items())
    monkeypatch.setattr(gpu_goals, "HERE", script.parent)
    monkeypatch.setattr(gpu_goals, "STEPS", steps)
    out = tmp_path / "out"
    assert gpu_goals.run(out, 1, minutes=5) == ["long"]
    told = capsys.readouterr().out
    assert "bad: exit code 1" in told and "no such GPU" in told
    assert "stuck: not over after 8 s" in told and "its engines are ended" in told
    assert sorted(f.name for f in out.glob("*.json")) == ["a.json", "b.json", "stuck.part.json"]
    assert gpu_goals.run(out, 1, minutes=60) == [] and (out / "stuck.json").exists()
    told = capsys.readouterr().out
    assert all(f"bench.py {n} " in told for n in ("long", "bad", "stuck")) and "bench.py a " not in told


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 60), st.integers(1, 9))
def test_copy_engines_are_given_the_bytes_of_each_taker_once_and_takers_take_turns(takers, sources, nbytes, piece):
    out = copies(takers, sources, nbytes, piece)
    share = -(-nbytes // sources)
    for taker in range(takers):
        got = Counter((c.source, c.at + i) for c in out if c.taker == taker for i in range(c.nbytes))
        assert sum(got.values()) == nbytes and set(got.values()) == {1}
        assert all(at < share for _, at in got)
    assert all(0 < c.nbytes <= piece for c in out)
    if nbytes >= sources * sources:  # else some sources have nothing
        assert [c.taker for c in out[:takers]] == list(range(takers))
        assert len({c.source for c in out[:takers]}) == min(takers, sources)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_floor_is_measured_and_what_was_copied_compared(tmp_path):
    last = torch.cuda.device_count() - 1
    command = [sys.executable, str(ROOT / "scripts" / "bench_gpu_floor.py"), *f"--sources {last} 0 --takers 0".split()]
    out = tmp_path / "floor.json"
    subprocess.run([*command, "--gib", "0.6", "--repeats", "3", "--out", str(out)], check=True, timeout=120)
    found = json.loads(out.read_text())
    assert found["wrong"] == 0 and len(found["ms"]) == 3 and found["gb_per_s"] > 1
