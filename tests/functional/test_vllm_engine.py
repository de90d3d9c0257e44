"""A real vLLM engine on CPU, tensor parallel over two workers: the plug-in, residency, the layout read in live workers,
the lock, and the calls that a controller makes. One engine start per family; the checks share it.
"""

import json
import math
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")

from examples.common import toy  # noqa: E402
from xfer.engines.handles import OfflineLLM  # noqa: E402

HERE = Path(__file__).resolve().parent
PROMPTS = [[5, 6, 7, 8, 9], list(range(10, 50)), [100, 3, 150, 17] * 12]
ENV = {
    "XFER_CPU_RESIDENT": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def start(folder, *, tp=2, load_format="auto", **options):
    from vllm import LLM

    return LLM(
        model=str(folder), load_format=load_format, skip_tokenizer_init=True, tensor_parallel_size=tp,
        enforce_eager=True, dtype="bfloat16", max_model_len=128, max_num_seqs=4, seed=0, block_size=32,
        disable_log_stats=True, weight_transfer_config={"backend": "xfer"}, worker_extension_cls="vllm_probe.Probe",
        **options,
    )  # fmt: skip


def stop(llm):
    llm.llm_engine.engine_core.shutdown()


def answers(llm):
    """Greedy tokens and their logprobs per prompt, with no help from the prefix cache."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=1, detokenize=False, ignore_eos=True)
    out = []
    for prompt in PROMPTS:
        o = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0]
        out.append((tuple(o.token_ids), tuple(d[t].logprob for t, d in zip(o.token_ids, o.logprobs, strict=True))))
    return out


@pytest.fixture(scope="module")
def environment():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENV.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]))
        patch.syspath_prepend(str(HERE))
        yield patch


@pytest.mark.parametrize(("workers", "rank"), [(2, 1), (4, 3)])
def test_one_of_several_data_parallel_processes_is_a_replica_of_its_own(workers, rank):
    """An `LLM` reaches the workers of its own rank only, and counts those; an AsyncLLM all of them."""
    from xfer.engines.vllm_worker import XferWeightTransferEngine

    worker = XferWeightTransferEngine.__new__(XferWeightTransferEngine)
    worker.parallel_config, worker.workers = SimpleNamespace(rank=1, world_size=2, data_parallel_index=1), workers
    assert worker.worker_rank() == rank


def test_an_in_process_worker_is_called_on_its_own_device(monkeypatch):
    """An `LLM` with its worker in its own process is called by a thread of xfer's, and the device of a new thread is cuda:0. (This
    machine has no GPU, so the call that sets a thread's device is replaced.)"""
    from xfer.engines.vllm_worker import XferWeightTransferEngine

    thread, calls = threading.local(), []

    def called(name):
        return lambda *args: calls.append((name, getattr(thread, "device", "cuda:0")))

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(thread, "device", str(device)))
    worker = XferWeightTransferEngine.__new__(XferWeightTransferEngine)
    worker.device, worker.session = torch.device("cuda:1"), SimpleNamespace(receive=called("receive"))
    monkeypatch.setattr(worker, "_join", called("join"))
    llm = SimpleNamespace(
        llm_engine=SimpleNamespace(vllm_config=None),
        init_weight_transfer_engine=lambda request: worker.init_transfer_engine(request["init_info"]),
        start_weight_update=called("vLLM's start"),
        finish_weight_update=called("vLLM's finish"),
        update_weights=lambda request: worker.update_weights(request["update_info"]),
    )
    handle = OfflineLLM(llm)
    handle.init({}, 10.0)
    handle.start_update(10.0)
    handle.update({"attempt": 1, "deadline_s": 1.0}, 10.0)
    assert calls == [(name, "cuda:1") for name in ("join", "vLLM's start", "receive")]


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe", "deepseek_v3"])
def engine(request, environment, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    toy.write_checkpoint(request.param, folder / "1", seed=1)
    toy.write_checkpoint(request.param, folder / "2", seed=2)
    # Experts over both workers, as every MoE deployment has them; the dense family splits its matrices.
    llm = start(folder / "1", enable_expert_parallel=request.param != "qwen3")
    yield request.param, llm, folder
    stop(llm)


def rpc(llm, method, *args):
    return llm.collective_rpc(method, args=args)


def test_layout_lock_and_calls(engine):
    """One test, since each part starts from what the one before left; the parts are named below."""
    family, llm, folder = engine
    one, two = str(folder / "1"), str(folder / "2")
    truth = answers(llm)
    the_plugin_is_in_every_worker(llm)
    a_layout_covers_every_byte(llm, one, family)
    what_vllm_loaded_is_what_the_trace_says(llm, one, two)
    other_families_are_refused(llm, one)
    names_and_lock_agree_between_workers(llm, one)
    a_torn_engine_answers_nan(llm, truth)
    noise_and_a_load_by_layout(llm, one, two, truth)
    identity_of_storages(llm)
    a_controllers_calls(llm)


def the_plugin_is_in_every_worker(llm):
    assert rpc(llm, "xfer_worker_rank") == [[0, "XferWeightTransferEngine"], [1, "XferWeightTransferEngine"]]
    for total, empty in rpc(llm, "xfer_live_bytes"):
        assert empty == [] and total > 0


def a_layout_covers_every_byte(llm, folder, family):
    for worker, (seen, (total, _)) in enumerate(
        zip(rpc(llm, "xfer_read", folder), rpc(llm, "xfer_live_bytes"), strict=True)
    ):
        assert seen["error"] == "", seen
        assert seen["footprint"] == total == sum(seen["roots"].values())
        assert 0 < seen["kept_bytes"] < total and all("no checkpoint tensor" in r for r in seen["kept"])
        assert not any(r.split(":")[0].endswith("weight") for r in seen["kept"])
        if family == "deepseek_v3":  # MLA's absorbed projections follow kv_b_proj
            assert any("kv_b_proj" in root for _, root in seen["aliases"])
        if family == "qwen3_moe":  # experts of the other worker are not read
            experts = {n.split("experts.")[1].split(".")[0] for n in seen["reads"] if "experts." in n}
            assert experts == {str(e) for e in range(4 * worker, 4 * worker + 4)}


def what_vllm_loaded_is_what_the_trace_says(llm, one, two):
    """vLLM itself loaded checkpoint 1 from disk, so its live bytes judge the trace; and the weights are resident at
    all."""
    assert rpc(llm, "xfer_differs", one) == [[], []]
    assert all(len(bad) > 5 for bad in rpc(llm, "xfer_differs", two))


def other_families_are_refused(llm, folder):
    for seen in rpc(llm, "xfer_read", folder, ["model.norm.weight"], ["model.layers.9.extra.weight"]):
        assert seen["error"] == "LayoutError" and "families that do not match" in seen["message"]
        text = "\n".join(seen["violations"])
        assert "model.norm.weight: needed" in text and "model.layers.9.extra.weight: in the trainers'" in text
    for seen in rpc(llm, "xfer_read", folder, ["model.norm.weight"], [], ["model.norm.*"]):
        assert seen["error"] == "" and any("model.norm.weight: kept by request" in r for r in seen["kept"])


def names_and_lock_agree_between_workers(llm, folder):
    rpc(llm, "xfer_read", folder)
    assert rpc(llm, "xfer_call", "check") == ["same", "same"]
    first, second = rpc(llm, "xfer_call", "choose_lock")
    assert first == second == "model.norm.weight"
    rpc(llm, "xfer_call", "rebind")  # to the lock's scratch, as sessions do then
    assert rpc(llm, "xfer_call", "check") == ["same", "same"]


def a_torn_engine_answers_nan(llm, truth):
    rpc(llm, "xfer_call", "engage_lock")
    assert all(math.isnan(p) for _, logprobs in answers(llm) for p in logprobs)
    rpc(llm, "xfer_call", "release_lock")
    assert answers(llm) == truth


def noise_and_a_load_by_layout(llm, one, two, truth):
    """Every byte but the kept ones is overwritten; the layout alone brings both checkpoints back."""
    kept = rpc(llm, "xfer_kept")
    rpc(llm, "xfer_scramble", 3)
    assert rpc(llm, "xfer_kept") == kept
    rpc(llm, "xfer_call", "engage_lock")
    rpc(llm, "xfer_load", two)
    assert all(math.isnan(p) for _, logprobs in answers(llm) for p in logprobs)
    rpc(llm, "xfer_call", "release_lock")
    assert rpc(llm, "xfer_differs", two) == [[], []]
    other = answers(llm)
    assert other != truth and not any(math.isnan(p) for _, logprobs in other for p in logprobs)
    rpc(llm, "xfer_load", one)
    rpc(llm, "xfer_call", "release_lock")
    assert answers(llm) == truth and rpc(llm, "xfer_kept") == kept


def identity_of_storages(llm):
    rpc(llm, "xfer_move_norm")
    assert rpc(llm, "xfer_call", "check") == ["moved", "moved"]
    rpc(llm, "xfer_call", "rebind")
    assert rpc(llm, "xfer_call", "check") == ["same", "same"]


def a_controllers_calls(llm):
    """Every call of a refit reaches vLLM by its real name; without a connected session nothing is received, nothing
    raises, and the executor's answers still belong to their calls."""
    handle = OfflineLLM(llm)
    assert handle.workers(30) == 2
    handle.pause(30)
    handle.set_version("xfer:mixed", 30)
    handle.start_update(30)
    handle.update({"attempt": 1, "deadline_s": 5.0}, 60)
    handle.update({"no such": "field"}, 60)
    handle.finish("7", 30)
    handle.reset_caches(30)
    handle.resume(30)
    assert llm.get_weight_version() == "7"
    assert [rank for rank, _ in rpc(llm, "xfer_worker_rank")] == [0, 1]


def test_without_residency_the_layout_is_refused(environment, tmp_path):
    toy.write_checkpoint("qwen3_moe", tmp_path, seed=1)
    environment.setenv("XFER_CPU_RESIDENT", "0")
    llm = start(tmp_path, tp=1)
    try:
        (seen,) = rpc(llm, "xfer_read", str(tmp_path))
    finally:
        stop(llm)
        environment.setenv("XFER_CPU_RESIDENT", "1")
    assert seen["error"] in ("LayoutError", "Unsupported") and "XFER_CPU_RESIDENT=1" in json.dumps(seen["violations"])
