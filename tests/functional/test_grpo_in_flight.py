"""Requests that are under way when a refit comes are drained, aborted and asked again, or continued; each token says which weights made
it. Truth of `continue`: what the engine answers, after the refit, to the prompt with the old weights' tokens behind it."""

import asyncio
import time

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]
pytest.importorskip("vllm")

from examples.common.ports import free_port  # noqa: E402
from examples.grpo.in_flight import InFlight  # noqa: E402
from tests.support import small_vllm  # noqa: E402
from tests.support.proc import PATIENCE, environment  # noqa: E402
from tests.support.refit_job import Job, a_refit, good  # noqa: E402

PROMPT, LONG, SHORT = [5, 6, 7, 8], 400, 60


def test_the_policies(tmp_path, monkeypatch):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    with Job(tmp_path, "qwen3", world=2, num_hidden_layers=2, torch_dtype="float32") as job:
        asyncio.run(_the_policies(job))


async def _the_policies(job):
    engine = small_vllm.asynchronous(str(job.model), dtype="float32", max_model_len=512)
    try:
        for policy, tokens in (("drain", SHORT), ("abort", LONG), ("continue", LONG), ("keep_cache", LONG)):
            rendezvous = f"tcp://127.0.0.1:{free_port()}"
            flight = InFlight(engine, policy=policy, rendezvous=rendezvous, token=job.token, deadline_s=120 * PATIENCE)

            def meet(rendezvous=rendezvous, flight=flight):
                job.trainers.build(job.config)
                good(job.trainers.connect(rendezvous, deadline_s=120 * PATIENCE))
                flight.controller.wait_ready()

            await asyncio.to_thread(meet)
            await asyncio.to_thread(a_refit, job, 1)
            old = str(flight.controller.version)
            await asyncio.to_thread(job.trainers.ask, "set", "set", seed=2)
            # The engine is slow as long as this file is there, so that a long request has not ended when the refit begins.
            slow = job.family.work / f"slow-{policy}"
            if tokens == LONG:
                slow.touch()
                await engine.collective_rpc("xfer_slow", args=(str(slow), 5))
            asked = asyncio.create_task(flight.sample(PROMPT, tokens=tokens, temperature=0.0))
            end = time.monotonic() + 120 * PATIENCE
            while not (any(n > 3 for n in flight.under_way.values()) or asked.done()):
                assert time.monotonic() < end, flight.under_way
                await asyncio.sleep(0.005)
            good(await asyncio.to_thread(job.trainers.refit, verify=True))
            slow.unlink(missing_ok=True)
            new = str(flight.controller.version)
            assert old != new
            sample = await asyncio.wait_for(asked, 240 * PATIENCE)
            assert len(sample.tokens) == len(sample.logprobs) == tokens
            assert [i for s in sample.spans for i in range(s.start, s.end)] == list(range(tokens))
            whole = await flight.sample(PROMPT, tokens=tokens, temperature=0.0)
            assert whole.versions == (new,)
            if policy == "drain":
                assert sample.versions == (old,) and flight.again == 0 and sample.tokens != whole.tokens
            if policy == "abort":
                assert sample.versions == (new,) and flight.again >= 1 and sample.tokens == whole.tokens
            if policy in ("continue", "keep_cache"):
                assert sample.versions == (old, new) and flight.again == 0
            if policy == "continue":
                turn = sample.spans[0].end
                behind = [*PROMPT, *sample.tokens[:turn]]
                rest = await flight.sample(behind, tokens=tokens - turn, temperature=0.0)
                assert rest.tokens == sample.tokens[turn:]
                assert rest.logprobs == pytest.approx(sample.logprobs[turn:], abs=1e-3)
            await asyncio.to_thread(job.trainers.ask, "close", "closed")
            flight.controller.close()
    finally:
        engine.shutdown()
