"""Arguments of the small vLLM engines that tests start in a process: one list for `LLM` and `AsyncLLM`. No engine is made here."""

from examples.common.vllm_cpu import fork_workers as fork_workers


def arguments(model: str, **more) -> dict:
    """For `LLM(**…)` and `AsyncEngineArgs(**…)`; `more` replaces. xfer's backend, no tokenizer, no compilation, little memory, and a
    prefix cache, so that a stale one would show."""
    common = dict(
        skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=128, max_num_seqs=4, block_size=32, seed=0,
        disable_log_stats=True, enable_prefix_caching=True, num_gpu_blocks_override=64, weight_transfer_config={"backend": "xfer"},
        worker_extension_cls="tests.support.worker_probe.Probe",
    )  # fmt: skip
    return {"model": model, **common, **more}


def asynchronous(model: str, **more):
    """An AsyncLLM. Call it in the coroutine in whose loop it is to run."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments(model, **more)))
