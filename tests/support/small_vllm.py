"""Arguments of the small vLLM engines that tests start in a process: one list for `LLM` and `AsyncLLM`. No engine is made here."""

import os
from functools import cache


@cache
def fork_workers() -> None:
    """Before an engine is made, in a process that has no threads yet: its core and workers are forked from here, as vLLM does on
    GPUs, and so do not each import vLLM anew, which takes longer than all that tests ask of them. vLLM's CPU platform
    overwrites the setting whenever an engine is configured."""
    from vllm.platforms.cpu import CpuPlatform

    checked = CpuPlatform.check_and_update_config.__func__

    def check(cls, config) -> None:
        checked(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check)


def arguments(model: str, **more) -> dict:
    """For `LLM(**…)` and `AsyncEngineArgs(**…)`; `more` replaces. xfer's backend, no tokenizer, no compilation, and a prefix
    cache, so that a stale one would show."""
    common = dict(
        skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=128, max_num_seqs=4, block_size=32, seed=0,
        disable_log_stats=True, enable_prefix_caching=True, weight_transfer_config={"backend": "xfer"},
    )  # fmt: skip
    return {"model": model, **common, **more}


def asynchronous(model: str, **more):
    """An AsyncLLM. Call it in the coroutine in whose loop it is to run."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments(model, **more)))
