"""Refits into an `AsyncLLM` in this process and into `vllm serve` behind its URL: bit for bit, with requests under way.

Trainers are plain processes (tests/support/plain_main.py). Truth: what the same engine computed from the checkpoint on disk,
loaded by vLLM itself, before anything was refitted; a refit of the same weights must bring exactly that back.
"""

import asyncio
import json
import os
import subprocess
import threading
import time
import urllib.request
from contextlib import contextmanager

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")

import xfer  # noqa: E402
from tests.support.proc import PYTHON, environment, free_port  # noqa: E402
from tests.support.refit_job import Job, good, until  # noqa: E402

PROMPTS = [[5, 6, 7, 8], list(range(10, 60)), [100, 3, 90, 17] * 12]
LONG = 100


def a_refit(job, seed, during=lambda: None, **more):
    """Weights of `seed` into the engine, while `during` runs here."""
    job.trainers.ask("set", "set", seed=seed)
    waiting = job.trainers.say(do="refit", verify=True, **more)
    during()
    report = good([c.expect("refitted", "raised", timeout=90) for c in waiting])
    assert report["verified"] and report["serving"] == [True]
    return report


# ---- AsyncLLM


def test_async_llm(tmp_path, monkeypatch):
    for name, value in environment(XFER_FAULT_FILE=str(tmp_path / "here.fault")).items():
        monkeypatch.setenv(name, value)
    with Job(tmp_path, "qwen3", world=2) as job:
        asyncio.run(_async_llm(job))


async def _async_llm(job):
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(
        model=str(job.model), skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=192, max_num_seqs=4,
        block_size=32, disable_log_stats=True, enable_prefix_caching=True, weight_transfer_config={"backend": "xfer"},
    ))  # fmt: skip

    async def answer(name, prompt, tokens=6):
        params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=1, detokenize=False, ignore_eos=True,
                                output_kind=RequestOutputKind.FINAL_ONLY)  # fmt: skip
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
        assert await engine.get_weight_version() == controller.version == "2"

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


# ---- vllm serve


@contextmanager
def server(folder, work):
    port = free_port()
    command = [PYTHON["engine"], "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "toy",
               "--skip-tokenizer-init", "--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "192", "--max-num-seqs", "4",
               "--block-size", "32", "--host", "127.0.0.1", "--port", str(port), "--weight-transfer-config", '{"backend": "xfer"}']  # fmt: skip
    with open(work / "server.log", "w") as log:
        process = subprocess.Popen(command, env=environment(VLLM_SERVER_DEV_MODE="1"), stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"

    def up():
        assert process.poll() is None, (work / "server.log").read_text()[-3000:]
        try:
            return urllib.request.urlopen(f"{url}/health", timeout=2)
        except OSError:
            return None

    try:
        until(up, 240, "the server is up")
        yield url
    finally:
        process.terminate()
        process.wait(60)


def ask(url, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    return json.loads(urllib.request.urlopen(request, timeout=120).read())


def complete(url, prompt, tokens=6):
    got = ask(url, "/v1/completions", {"model": "toy", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                                       "logprobs": 1, "detokenize": False, "return_token_ids": True, "return_tokens_as_token_ids": True})  # fmt: skip
    choice = got["choices"][0]
    return [choice["token_ids"], choice["logprobs"]["token_logprobs"]]


def test_vllm_serve_by_its_url(tmp_path):
    """Trainer 0 controls the server itself: `connect(engines=[url])`, no process of xfer's beside the server."""
    with Job(tmp_path, "qwen3", world=2) as job, server(job.model, tmp_path) as url:

        def observe():
            return [complete(url, p) for p in PROMPTS], ask(url, "/weight_checker", {"action": "checksum"})

        truth = observe()
        rendezvous = f"tcp://127.0.0.1:{free_port()}"
        job.trainers.build(job.config)
        waiting = [*job.trainers.say([0], do="connect", rendezvous=rendezvous, engines=[url], deadline_s=60.0),
                   *job.trainers.say([1], do="connect", rendezvous=rendezvous, deadline_s=60.0)]  # fmt: skip
        good([c.expect("connected", "raised", timeout=90) for c in waiting])
        a_refit(job, 2)
        other = observe()
        assert other[0] != truth[0] and other[1] != truth[1] and ask(url, "/weight_info")["weight_version"] == "1"
        long: list = []
        request = threading.Thread(target=lambda: long.append(complete(url, PROMPTS[0], LONG)))
        request.start()
        time.sleep(0.2)
        a_refit(job, 1)
        request.join(60)
        assert len(long[0][0]) == LONG
        again = observe()
        assert again == truth
        assert ask(url, "/weight_info")["weight_version"] == "2" and ask(url, "/is_paused")["is_paused"] is False
        job.trainers.ask("close", "closed")
        assert observe() == truth  # the trainers have left; what they brought is served on
