"""Handles on vLLM's asynchronous engine, in this process and behind its HTTP server: the calls exist under their names,
a pause freezes a request that is under way, and the request ends after the resume with all its tokens.
"""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]
pytest.importorskip("vllm")

from examples.common import toy  # noqa: E402
from examples.common.ports import free_port  # noqa: E402
from xfer.engines.choose_handle import handle_for  # noqa: E402
from xfer.errors import EngineLost, Unsupported  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 96
ENV = {
    "XFER_CPU_RESIDENT": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
UPDATE = {"attempt": 1, "deadline_s": 5.0}


def a_refit(handle, during):
    """The controller's calls; no session is connected, so nothing is received and nothing may raise."""
    assert handle.workers(60) == 1
    handle.pause(60)
    during()
    handle.set_version("xfer:mixed", 60)
    handle.start_update(60)
    handle.update(UPDATE, 60)
    handle.finish("42", 60)
    handle.reset_caches(60)
    handle.resume(60)


def test_async_llm(tmp_path, monkeypatch):
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    toy.write_checkpoint("qwen3", tmp_path)
    asyncio.run(_async_llm(str(tmp_path)))


async def _async_llm(folder):
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=folder, skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=128,
            max_num_seqs=4, block_size=32, disable_log_stats=True, weight_transfer_config={"backend": "xfer"},
        )
    )  # fmt: skip
    try:
        handle = handle_for(engine)
        got: list[int] = []

        async def request():
            params = SamplingParams(temperature=0, max_tokens=TOKENS, detokenize=False, ignore_eos=True,
                                    output_kind=RequestOutputKind.DELTA)  # fmt: skip
            async for out in engine.generate({"prompt_token_ids": [5, 6, 7]}, params, "r"):
                got.extend(out.outputs[0].token_ids)

        running = asyncio.create_task(request())
        while len(got) < 4:
            await asyncio.sleep(0.01)

        def frozen():
            time.sleep(0.3)
            before = len(got)
            time.sleep(0.7)
            assert len(got) == before < TOKENS

        await asyncio.to_thread(a_refit, handle, frozen)
        await asyncio.wait_for(running, 60)
        assert len(got) == TOKENS and await engine.get_weight_version() == "42"
        await engine.pause_generation(mode="keep", clear_cache=False)  # by its owner
        await asyncio.to_thread(a_refit, handle, lambda: None)
        assert await engine.is_paused()
        await engine.resume_generation()
        await asyncio.to_thread(a_refit, handle, lambda: None)
        assert not await engine.is_paused() and not handle.ranks_in_step()
        with pytest.raises(Unsupported):  # from the engine's own loop it would wait for itself
            handle.pause(5)
    finally:
        engine.shutdown()


@pytest.fixture
def server(tmp_path):
    toy.write_checkpoint("qwen3", tmp_path)
    port = free_port()
    flags = f"--model {tmp_path} --served-model-name toy --skip-tokenizer-init --enforce-eager --dtype bfloat16"
    flags += f" --max-model-len 128 --max-num-seqs 4 --block-size 32 --host 127.0.0.1 --port {port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags.split()]
    command += ["--weight-transfer-config", '{"backend": "xfer"}']
    env = {**os.environ, **ENV, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2)
                break
            except OSError:
                if process.poll() is not None:
                    pytest.fail((tmp_path / "log").read_text()[-3000:])
                time.sleep(0.25)
        else:
            pytest.fail("the server did not come up\n" + (tmp_path / "log").read_text()[-3000:])
        yield url, process
    finally:
        process.terminate()
        process.wait(60)


def ask(url, path, body=None):
    request = urllib.request.Request(
        url + path, json.dumps(body).encode() if body else None, {"Content-Type": "application/json"}
    )
    return json.loads(urllib.request.urlopen(request, timeout=120).read())


def test_http_server(server):
    url, process = server
    handle = handle_for(url)
    body = {"model": "toy", "prompt": [5, 6, 7], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"detokenize": False, "return_token_ids": True}
    answer: list[dict] = []
    request = threading.Thread(target=lambda: answer.append(ask(url, "/v1/completions", body)))

    def frozen():
        assert ask(url, "/is_paused")["is_paused"] is True
        request.start()
        time.sleep(1.0)
        assert not answer

    a_refit(handle, frozen)
    request.join(60)
    assert answer and answer[0]["usage"]["completion_tokens"] == TOKENS
    assert ask(url, "/is_paused")["is_paused"] is False and ask(url, "/weight_info")["weight_version"] == "42"
    ask(url, "/pause?mode=keep", {"by": "its owner"})
    a_refit(handle, lambda: None)
    assert ask(url, "/is_paused")["is_paused"] is True and not handle.ranks_in_step()
    process.terminate()
    process.wait(60)
    with pytest.raises(EngineLost):
        handle.pause(30)
