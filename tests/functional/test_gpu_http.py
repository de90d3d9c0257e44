"""`vllm serve` on GPUs behind its URL, with CUDA graphs and torch.compile: requests under way, data-parallel ranks. Every byte of the
workers is compared with what vLLM's loader makes of the same weights.
"""

from __future__ import annotations

import ast
import contextlib
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.common.ports import free_port
from examples.grpo.client import ServeClient
from examples.grpo.replicas import healthy
from tests.support import gpu_shared
from tests.support.gpu_engine import PROMPTS
from tests.support.gpu_job import SHARED, Job, config, folded, gpus, site
from tests.support.grpo_processes import Group, until
from tests.support.proc import PATIENCE, ROOT

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.xdist_group("http"),
    pytest.mark.skipif(gpus() < 1, reason="needs a GPU"),
]

LONG = 150


@dataclass(frozen=True)
class Server:
    """`on`: the GPU of each data-parallel rank."""

    job: Job
    url: str
    on: tuple[int, ...]

    def ask(self, path: str, body: dict | None = None, **headers: str):
        """The answer of one route, posted to if there is a body. HTTPError as urllib raises it."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **headers})
        return json.loads(urllib.request.urlopen(request, timeout=120 * PATIENCE).read() or "null")

    def answer(self, prompt: list[int], tokens: int = 8, rank: int = 0) -> list:
        """Greedy tokens and what they were worth, by the route for tokens, of one data-parallel rank."""
        params = dict(temperature=0, max_tokens=tokens, logprobs=1, detokenize=False, ignore_eos=True)
        body = dict(token_ids=prompt, sampling_params=params)
        choice = self.ask("/inference/v1/generate", body, **{"X-data-parallel-rank": str(rank)})["choices"][0]
        return [choice["token_ids"], [round(c["logprob"], 5) for c in choice["logprobs"]["content"]]]

    def answers(self) -> list:
        """Of all ranks, which have to agree."""
        each = [[self.answer(p, rank=r) for p in PROMPTS] for r in range(len(self.on))]
        assert all(a == each[0] for a in each)
        return each[0]

    def call(self, method: str, **kwargs) -> list:
        """By worker; vLLM answers in text what is neither a list nor a dict."""
        said = self.ask("/collective_rpc", {"method": method, "kwargs": kwargs})["results"]
        return [ast.literal_eval(x) if isinstance(x, str) else x for x in said]

    def refit(self, seed: int) -> list:
        """The weights of `seed` by a verified refit that was pulled; what the server answers then."""
        report = self.job.verified(seed)
        routes = [k for k in report["scalars"] if k.startswith("route/") and k.endswith("_bytes")]
        assert routes == ["route/peer_bytes"], report["routes"]
        self.right(seed)
        return self.answers()

    def right(self, seed: int) -> None:
        for wrong, nbytes in self.call("xfer_wrong", config=self.job.config, seed=seed):
            assert wrong == [] and nbytes > 0, f"(name, wrong elements, elements): {wrong}"
        assert self.ask("/is_paused") == {"is_paused": False}


@contextlib.contextmanager
def serving(work: Path, on: tuple[int, ...]) -> Iterator[Server]:
    """A server and a trainer that meet. Both end with the block, and whatever they started."""
    on, port = tuple(folded(list(on))), free_port()
    with Job(work, config("qwen3")) as job:
        command = [str(ROOT / "examples/grpo/serve.sh"), str(job.folder), str(port)]
        command += f"--no-enforce-eager --data-parallel-size {len(on)}".split()
        command += f"--dtype bfloat16 --max-model-len 256 --gpu-memory-utilization 0.1 --kv-cache-memory-bytes {1 << 30}".split()
        command += ["--max-num-seqs", "8", "--compilation-config", '{"cudagraph_capture_sizes": [1, 2, 4, 8]}']
        command += ["--worker-extension-cls", "tests.support.gpu_probe.Probe"]
        env = dict(VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_LOGGING_LEVEL="WARNING")
        if len(set(on)) < len(on):
            env |= gpu_shared.environment(list(on))
            for option, value in gpu_shared.OPTIONS.items():
                command += [f"--{option.replace('_', '-')}", *([] if value is True else [value])]
        process = Group("server", command, work, **site("engine"), **env)
        try:
            job.start_trainers([on[0]])
            job.plain()
            server = Server(job, f"http://127.0.0.1:{port}", on)
            until(lambda: healthy(server.url), "the server is up", process, seconds=240)
            job.good("connect", "connected", rendezvous=f"tcp://127.0.0.1:{free_port()}", engines=[server.url])
            yield server
        finally:
            process.kill()


@pytest.mark.parametrize("on", [(0,), (0, 1)], ids=["one rank", "data-parallel ranks"])
def test_a_server_follows_with_a_request_under_way(on, tmp_path):
    """Also the example's own client, for a server that does not say which weights made a token."""
    if max(on) >= gpus() and not SHARED:
        pytest.skip("needs 2 GPUs, or XFER_SHARE_GPUS=1")
    with serving(tmp_path, on) as server:
        first, second = server.refit(1), server.refit(2)
        assert first != second
        client = ServeClient([server.url], server.job.token)
        client.version_of = lambda replica: "2"
        sampled = client.sample(PROMPTS, n=2, tokens=8, seed=1)
        assert [[(s.prompt, len(s.tokens)) for s in group] for group in sampled] == [
            [(tuple(p), 8)] * 2 for p in PROMPTS
        ]
        long: list = []
        request = threading.Thread(target=lambda: long.append(server.answer(PROMPTS[0], LONG)))
        request.start()
        time.sleep(0.1)
        assert server.refit(1) == first
        request.join(60)
        assert len(long[0][0]) == LONG
