"""benchmarks.goals and gpu_floor: results are judged by their own figures, wrong bytes never meet a goal, and every step of
--run is a command that its benchmark accepts. The floor copies every destination's bytes once."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter
from importlib import import_module

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import goals
from benchmarks.gpu_floor import copies
from benchmarks.lib.packed_ranks import FLAT, PACKED, RAW


def transport(wrong: int = 0, **ms: float) -> dict:
    return {"meta": {}, "cases": [{"case": "4b", "ms": {k: [v] for k, v in ms.items()}, "wrong": {"peer": wrong}}]}


def session(command: str, gpus: int, floor: float = 0.0, text: str = "9 bytes, wrong: none (0.1 s)", **transfer: float):
    raw = {
        name: [{"scalars": {**dict.fromkeys(("transfer_s", "outage_s", "call_s"), ms / 1e3), "bytes": 8e9}}]
        for name, ms in transfer.items()
    }
    if floor:
        raw["floor"] = {"gb_per_s": 4e9 / floor / 1e6}
    command = f"python -m benchmarks.gpu_session {command}"
    return {"meta": {"command": command, "gpus": gpus}, "rows": [["every byte compared", text]], "raw": raw}


def packed(wrong: int = 0) -> dict:
    def case(name: str, wrong: int = 0, **ms: float) -> dict:
        rows = [{"way": w, "ms": [v], "wrong": 0, "extra_bytes": [1, 20]} for w, v in ms.items()]
        rows[0]["wrong"] = wrong
        return {"case": name, "rows": rows}

    apart = case("apart", wrong, **{"one by one": 1500.0, PACKED: 180.0, RAW: 160.0})
    return {"meta": {"bucket": 10}, "cases": [apart, case("colocated", **{"one by one": 1000.0, FLAT: 100.0})]}


OVERLAP = {
    "exposed_ms": {"blocking": 10.0, "depth 1": 1.5}, "hidden": {"depth 1": 0.85}, "received": [102, 0], "lacked": [100, 0],
    "timeline": {"blocking": [{"exposed_ms": 9.0}, {"exposed_ms": 10.0}], "depth 1": [{"exposed_ms": 2.5}, {"exposed_ms": 1.0}]},
}  # fmt: skip
LAYERWISE = [
    {"ranks": 2, "overlap": OVERLAP, "exact": [{"model": "fp32", "steps": 50, "ways": ["a", "b"], "differ": ["b"]}]}
]
RELAY = dict(floor=10.0, peer=10.5, p2p=180.0, nccl=170.0)
RELAY |= {"one destination pulls": 155.0, "relay, 64 parts": 181.0, "relay, 128 parts": 169.0}
CHAIN = {"one replica": 20.0, "relay chain": 24.0}


@pytest.mark.parametrize(
    "results, missed, figures",
    [
        (transport(floor=10.0, peer=10.6, p2p=20.0, nccl=17.0), set(), {}),
        (transport(floor=10.0, peer=10.61, p2p=20.0, nccl=17.0), {"data plane, 4b: peer, ms"}, {}),
        (transport(floor=10.0, peer=10.6, p2p=20.1, nccl=17.0), {"data plane, 4b: p2p, of NCCL's rate"}, {}),
        (transport(1, floor=10.0, peer=10.6, p2p=20.0, nccl=17.0), {"data plane, 4b: wrong elements"}, {}),
        (transport(**RELAY), set(), {"one copy out": 1.09}),
        (session("--tp 2", 4, floor=10.2, refit=12.1, verified=13.0), {"4b, plain, TP2: transfer, ms"}, {"verified / plain": 1.07}),
        (session("--model 30b --tp 2", 2, floor=10.0, refit=10.9), set(), {"30b, plain, TP2, on 2 GPUs: transfer / floor": 1.09}),
        (session("--tp 2", 4, text="9 bytes, wrong: ['layers.0'] (0.1 s)", refit=11.0),
         {"4b, plain, TP2: comparisons of every byte that failed"}, {}),
        (session("--tp 1 --trainers one", 3, **CHAIN), {"4b, one, TP1: 2 replicas in a relay chain / one"}, {"relay chain / one": 1.2}),
        (packed(), {"packed, apart: of NCCL's broadcast rate"}, {f"colocated: one by one / {FLAT}": 10, "colocated: memory, buckets": 2.0}),
        (packed(3), {"packed, apart: of NCCL's broadcast rate", "packed, apart: wrong elements"}, {}),
        (LAYERWISE, {"layer-wise, 2 ranks: fp32, ways that differ", "layer-wise, 2 ranks: hidden, by the timeline, overlap"},
         {"hidden, by events": 0.85, "by the timeline": 0.75, "bytes planned / lacked": 1.02}),
    ],
)  # fmt: skip
def test_results_are_judged_by_their_own_figures(results, missed, figures):
    found = goals.judged(results)
    assert {j.goal for j in found if not j.met} == missed and any(j.met for j in found)
    for goal, figure in figures.items():
        (ours,) = {round(j.ours, 2) for j in found if goal in j.goal}
        assert ours == figure, (goal, ours)


def test_zero_bytes_are_judged_and_sizes_without_a_goal_are_not():
    zero = session("--model toy --tp 1 --trainers nothing", 1, **{"zero bytes": 0.55})
    assert [j.met for j in goals.judged(zero) if "zero bytes" in j.goal] == [False]
    for smaller in ("--model toy --tp 2", "--tp 2 --layers 16"):
        assert not goals.judged(session(smaller, 4, refit=1.0))


def test_a_missed_goal_is_printed_and_the_exit_code_is_1(tmp_path, capsys, monkeypatch):
    file, missed = tmp_path / "x.json", transport(1, floor=10.0, peer=10.6, p2p=20.0, nccl=17.0)
    file.write_text(json.dumps({"a day": {"a run": missed, "more": [{"ranks": 2}]}, "note": "text"}))
    monkeypatch.setattr(sys, "argv", ["goals", str(file)])
    assert goals.main() == 1
    assert "wrong elements |" in capsys.readouterr().out.partition("**missed**")[0].splitlines()[-1]


@pytest.mark.parametrize("step", goals.STEPS, ids=lambda s: s.name)
def test_every_step_is_a_command_that_its_benchmark_accepts(step, monkeypatch):
    name, *given_ = shlex.split(step.command)

    class Parsed(Exception):
        pass

    parse = argparse.ArgumentParser.parse_args

    def stop(self, *a, **kw):
        raise Parsed(parse(self, *a, **kw))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [name, *given_, "--out", "x.json"])
    with pytest.raises(Parsed):
        import_module(f"benchmarks.{name}").main()


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 60), st.integers(1, 9))
def test_every_destination_gets_its_bytes_once_and_destinations_take_turns(destinations, sources, nbytes, piece):
    out = copies(destinations, sources, nbytes, piece)
    share = -(-nbytes // sources)
    for destination in range(destinations):
        got = Counter((c.source, c.at + i) for c in out if c.destination == destination for i in range(c.nbytes))
        assert sum(got.values()) == nbytes and set(got.values()) == {1}
        assert all(at < share for _, at in got)
    assert all(0 < c.nbytes <= piece for c in out)
    if nbytes >= sources * sources:  # else some sources have nothing
        assert [c.destination for c in out[:destinations]] == list(range(destinations))
        assert len({c.source for c in out[:destinations]}) == min(destinations, sources)
