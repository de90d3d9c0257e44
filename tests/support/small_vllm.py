"""Small vLLM engines of tests: their arguments, and the answers of an `AsyncLLM`."""

import itertools

from examples.common.vllm_cpu import fork_workers as fork_workers


def arguments(model: str, **more) -> dict:
    """Arguments of `LLM` and `AsyncEngineArgs`; `more` replaces some. The prefix cache is on, so that a stale one shows."""
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


_requests = itertools.count()


async def answer(engine, prompt: list[int], tokens: int = 6, rank: int | None = None) -> list:
    """Ask an AsyncLLM, or one of its data-parallel ranks, for greedy tokens and their logprobs."""
    return parts(await output(engine, prompt, tokens, rank))


def parts(o) -> list:
    return [list(o.token_ids), [d[t].logprob for t, d in zip(o.token_ids, o.logprobs, strict=True)]]


async def output(engine, prompt: list[int], tokens: int = 6, rank: int | None = None):
    """Ask for the same, and return vLLM's `CompletionOutput`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    greedy = SamplingParams(temperature=0, max_tokens=tokens, logprobs=1, detokenize=False, ignore_eos=True)
    greedy.output_kind = RequestOutputKind.FINAL_ONLY
    request = {"prompt_token_ids": prompt}, greedy, f"r{next(_requests)}"
    async for out in engine.generate(*request, data_parallel_rank=rank):
        last = out.outputs[0]
    return last
