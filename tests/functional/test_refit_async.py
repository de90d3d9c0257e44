"""Refits into an `AsyncLLM` in this process, driven from another thread, with requests under way: bit for bit.

Trainers are plain processes (tests/support/plain_main.py). Truth: what the same engine computed from the checkpoint on
disk, loaded by vLLM itself, before anything was refitted; a refit of the same weights must bring exactly that back.
"""

import asyncio

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")

import xfer  # noqa: E402
from examples.common.ports import free_port  # noqa: E402
from tests.support import small_vllm  # noqa: E402
from tests.support.proc import environment  # noqa: E402
from tests.support.refit_job import Job, a_refit, good  # noqa: E402

PROMPTS = [[5, 6, 7, 8], list(range(10, 60)), [100, 3, 90, 17] * 12]
LONG = 100


def test_async_llm(tmp_path, monkeypatch):
    for name, value in environment(XFER_FAULT_FILE=str(tmp_path / "here.fault")).items():
        monkeypatch.setenv(name, value)
    with Job(tmp_path, "qwen3", world=2) as job:
        asyncio.run(_async_llm(job))


async def _async_llm(job):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = small_vllm.asynchronous(str(job.model), max_model_len=192)

    async def answer(name, prompt, tokens=6):
        params = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            logprobs=1,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async for out in engine.generate({"prompt_token_ids": prompt}, params, name):
            o = out.outputs[0]
        return [list(o.token_ids), [d[t].logprob for t, d in zip(o.token_ids, o.logprobs, strict=True)]]

    async def observe(name):
        answers = [await answer(f"{name}-{i}", p) for i, p in enumerate(PROMPTS)]
        return answers, await engine.compute_weight_checksums()

    try:
        truth = await observe("truth")
        rendezvous = f"tcp://127.0.0.1:{free_port()}"
        controller = xfer.serve(engine, rendezvous=rendezvous, token=job.token, deadline_s=60.0)

        def meet():
            job.trainers.build(job.config)
            good(job.trainers.connect(rendezvous))
            controller.wait_ready()

        await asyncio.to_thread(meet)
        await asyncio.to_thread(a_refit, job, 2)
        other = await observe("other")
        assert other[0] != truth[0] and other[1] != truth[1]
        assert await engine.get_weight_version() == "1"
        # A request that is under way freezes, and ends under the new weights with all its tokens.
        running = asyncio.create_task(answer("long", PROMPTS[0], LONG))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(a_refit, job, 1)
        assert len((await asyncio.wait_for(running, 60))[0]) == LONG
        again = await observe("again")
        assert again == truth
        assert await engine.get_weight_version() == "2" and controller.version == 2

        # A worker that raises in the middle: no request is answered until the next refit, and then the waiting one is.
        (job.family.work / "here.fault").write_text("worker:0:moving:raise@1")
        failed = await asyncio.to_thread(job.trainers.refit, 3, deadline_s=20.0)
        assert all(r["kind"] == "raised" and "injected fault" in r["text"] for r in failed), failed
        assert controller.torn and controller.error is not None
        frozen = asyncio.create_task(answer("frozen", PROMPTS[0]))
        await asyncio.sleep(1.0)
        assert not frozen.done()
        await asyncio.to_thread(a_refit, job, 1)
        assert await asyncio.wait_for(frozen, 60) == truth[0][0]
        assert await observe("last") == truth
        controller.close()
    finally:
        engine.shutdown()
