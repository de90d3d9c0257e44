"""A real vLLM engine on CPU, tensor parallel over two workers: the plug-in, residency, the layout read in live workers,
the lock, and the calls that a controller makes. One engine per family, all started at once; its checks share it.
"""

import json
import math

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")

from examples.common import toy  # noqa: E402
from tests.support.proc import Family  # noqa: E402


class Engine:
    """A vLLM engine in a process of its own, without a session."""

    def __init__(self, processes: Family, name: str, family: str, **env: str):
        self.family, self.folder = family, processes.work / name
        for seed in (1, 2):
            toy.write_checkpoint(family, self.folder / str(seed), seed=seed)
        self.one, self.two = str(self.folder / "1"), str(self.folder / "2")
        self.child, self.started = processes.start(name, "engine", "vllm_main", **env), False

    def start(self, **how) -> None:
        probe = dict(
            load_format="auto", enable_prefix_caching=False, worker_extension_cls="tests.functional.vllm_probe.Probe"
        )
        self.child.say(do="start", model=self.one, **probe, **how)

    def ask(self, kind: str, **command) -> dict:
        if not self.started:
            self.child.expect("started")
            self.started = True
        self.child.say(**command)
        return self.child.expect(kind)

    def rpc(self, method: str, *args) -> list:
        return self.ask("answered", do="rpc", method=method, args=args)["answers"]

    def answers(self) -> list:
        """Greedy tokens and their logprobs per prompt."""
        return self.ask("observed", do="observe")["outputs"]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Experts over both workers, as every MoE deployment has them; the dense family splits its matrices."""
    with Family(tmp_path_factory.mktemp("engines")) as processes:
        made = {family: Engine(processes, family, family) for family in ("qwen3", "qwen3_moe", "deepseek_v3")}
        for family, engine in made.items():
            engine.start(tp=2, ep=family != "qwen3")
        made["not resident"] = Engine(processes, "not_resident", "qwen3_moe", XFER_CPU_RESIDENT="0")
        made["not resident"].start(tp=1)
        yield made


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_layout_lock_and_calls(engines, family):
    """One test, since each part starts from what the one before left; the parts are named below."""
    engine = engines[family]
    truth = engine.answers()
    the_plugin_is_in_every_worker(engine)
    a_layout_covers_every_byte(engine)
    what_vllm_loaded_is_what_the_trace_says(engine)
    other_families_are_refused(engine)
    names_and_lock_agree_between_workers(engine)
    a_torn_engine_answers_nan(engine, truth)
    noise_and_a_load_by_layout(engine, truth)
    identity_of_storages(engine)
    a_controllers_calls(engine)


def the_plugin_is_in_every_worker(engine):
    assert engine.rpc("xfer_worker_rank") == [[0, "XferWeightTransferEngine"], [1, "XferWeightTransferEngine"]]
    for total, empty in engine.rpc("xfer_live_bytes"):
        assert empty == [] and total > 0


def a_layout_covers_every_byte(engine):
    for worker, (seen, (total, _)) in enumerate(
        zip(engine.rpc("xfer_read", engine.one), engine.rpc("xfer_live_bytes"), strict=True)
    ):
        assert seen["error"] == "", seen
        assert seen["footprint"] == total == sum(seen["roots"].values())
        assert 0 < seen["kept_bytes"] < total and all("no checkpoint tensor" in r for r in seen["kept"])
        assert not any(r.split(":")[0].endswith("weight") for r in seen["kept"])
        if engine.family == "deepseek_v3":  # MLA's absorbed projections follow kv_b_proj
            assert any("kv_b_proj" in root for _, root in seen["aliases"])
        if engine.family == "qwen3_moe":  # experts of the other worker are not read
            experts = {n.split("experts.")[1].split(".")[0] for n in seen["reads"] if "experts." in n}
            assert experts == {str(e) for e in range(4 * worker, 4 * worker + 4)}


def what_vllm_loaded_is_what_the_trace_says(engine):
    """vLLM itself loaded checkpoint 1 from disk, so its live bytes judge the trace; and the weights are resident at
    all."""
    assert engine.rpc("xfer_differs", engine.one) == [[], []]
    assert all(len(bad) > 5 for bad in engine.rpc("xfer_differs", engine.two))


def other_families_are_refused(engine):
    for seen in engine.rpc("xfer_read", engine.one, ["model.norm.weight"], ["model.layers.9.extra.weight"]):
        assert seen["error"] == "LayoutError" and "families that do not match" in seen["message"]
        text = "\n".join(seen["violations"])
        assert "model.norm.weight: needed" in text and "model.layers.9.extra.weight: in the trainers'" in text
    for seen in engine.rpc("xfer_read", engine.one, ["model.norm.weight"], [], ["model.norm.*"]):
        assert seen["error"] == "" and any("model.norm.weight: kept by request" in r for r in seen["kept"])


def names_and_lock_agree_between_workers(engine):
    engine.rpc("xfer_read", engine.one)
    assert engine.rpc("xfer_call", "check") == ["same", "same"]
    first, second = engine.rpc("xfer_call", "choose_lock")
    assert first == second == "model.norm.weight"
    engine.rpc("xfer_call", "rebind")  # to the lock's scratch, as sessions do then
    assert engine.rpc("xfer_call", "check") == ["same", "same"]


def a_torn_engine_answers_nan(engine, truth):
    engine.rpc("xfer_call", "engage_lock")
    assert all(math.isnan(p) for _, logprobs in engine.answers() for p in logprobs)
    engine.rpc("xfer_call", "release_lock")
    assert engine.answers() == truth


def noise_and_a_load_by_layout(engine, truth):
    """Every byte but the kept ones is overwritten; the layout alone brings both checkpoints back."""
    kept = engine.rpc("xfer_kept")
    engine.rpc("xfer_scramble", 3)
    assert engine.rpc("xfer_kept") == kept
    engine.rpc("xfer_call", "engage_lock")
    engine.rpc("xfer_load", engine.two)
    assert all(math.isnan(p) for _, logprobs in engine.answers() for p in logprobs)
    engine.rpc("xfer_call", "release_lock")
    assert engine.rpc("xfer_differs", engine.two) == [[], []]
    other = engine.answers()
    assert other != truth and not any(math.isnan(p) for _, logprobs in other for p in logprobs)
    engine.rpc("xfer_load", engine.one)
    engine.rpc("xfer_call", "release_lock")
    assert engine.answers() == truth and engine.rpc("xfer_kept") == kept


def identity_of_storages(engine):
    engine.rpc("xfer_move_norm")
    assert engine.rpc("xfer_call", "check") == ["moved", "moved"]
    engine.rpc("xfer_call", "rebind")
    assert engine.rpc("xfer_call", "check") == ["same", "same"]


def a_controllers_calls(engine):
    """Every call of a refit reaches vLLM by its real name; without a connected session nothing is received, nothing
    raises, and the executor's answers still belong to their calls."""
    calls = (
        ("workers", 30), ("pause", 30), ("set_version", "xfer:mixed", 30), ("start_update", 30),
        ("update", {"attempt": 1, "deadline_s": 5.0}, 60), ("update", {"no such": "field"}, 60),
        ("finish", "7", 30), ("reset_caches", 30), ("resume", 30),
    )  # fmt: skip
    handled = engine.ask("handled", do="handle", calls=calls)
    assert handled["answers"][0] == 2 and handled["version"] == "7"
    assert [rank for rank, _ in engine.rpc("xfer_worker_rank")] == [0, 1]


def test_without_residency_the_layout_is_refused(engines):
    engine = engines["not resident"]
    (seen,) = engine.rpc("xfer_read", engine.one)
    assert seen["error"] in ("LayoutError", "Unsupported") and "XFER_CPU_RESIDENT=1" in json.dumps(seen["violations"])
