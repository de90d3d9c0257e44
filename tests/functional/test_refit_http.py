"""Refits into `vllm serve` behind its URL, controlled by trainer 0 alone, with a request under way: bit for bit.

Truth: what the server computed from the checkpoint on disk, loaded by vLLM itself, before anything was refitted.
"""

import json
import re
import subprocess
import threading
import time
import urllib.request
from contextlib import contextmanager

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")

from examples.common.ports import free_port  # noqa: E402
from tests.support.proc import PYTHON, environment  # noqa: E402
from tests.support.refit_job import Job, a_refit, good, until  # noqa: E402

PROMPTS = [[5, 6, 7, 8], list(range(10, 60)), [100, 3, 90, 17] * 12]
LONG = 100


@contextmanager
def server(folder, work):
    port = free_port()
    flags = f"--model {folder} --served-model-name toy --skip-tokenizer-init --enforce-eager --dtype bfloat16"
    flags += f" --max-model-len 192 --max-num-seqs 4 --block-size 32 --host 127.0.0.1 --port {port}"
    command = [PYTHON["engine"], "-m", "vllm.entrypoints.openai.api_server", *flags.split()]
    command += ["--weight-transfer-config", '{"backend": "xfer"}']
    with open(work / "server.log", "w") as log:
        process = subprocess.Popen(
            command,
            env=environment(VLLM_SERVER_DEV_MODE="1", VLLM_LOGGING_LEVEL="INFO"),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
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
    got = ask(
        url,
        "/v1/completions",
        {
            "model": "toy",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "detokenize": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        },
    )
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
        said = (tmp_path / "server.log").read_text()
        joined = r"^\(Worker\S* pid=\d+\) INFO \d\d-\d\d [\d:]{8} \[.*\] xfer: replica 0 worker 0 has joined tcp://"
        assert re.search(joined, said, re.M), "the server's processes say what xfer does, as vLLM says it"
        lines = [x for x in job.trainers.ranks[0].log_path.read_text().splitlines() if " xfer: " in x]
        assert any(
            re.match(r"\d\d-\d\d [\d:]{8} INFO xfer: version 2 committed by 1 of 1 replica: ", x) for x in lines
        ), lines
        assert any("xfer: replica 0 serves version 1, outage" in x for x in lines), lines
        assert not [x for x in (*lines, *said.splitlines()) if " xfer: " in x and " INFO " not in x]
