"""The rollout: one vLLM replica in a process of its own, under xfer's control, that samples for whoever asks by HTTP.

    python -m examples.grpo.rollout --model FOLDER --rendezvous tcp://10.0.0.1:29600 --listen 10.0.0.2:8000

POST /sample {"prompts": [[int]], "n", "tokens", "seed"} -> {"groups": [[{prompt, tokens, logprobs, spans}]]}. JSON both
ways; whoever asks must know the job's token. Nothing here knows the trainer, the task or GRPO.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer

import xfer
from xfer.participants.controller import Controller


@dataclass(frozen=True)
class Nodes:
    """A vLLM over several nodes: this is number `rank` of `count`, and they meet at `master`, HOST:PORT of number 0."""

    count: int
    rank: int
    master: str

    def settings(self) -> dict:
        host, _, port = self.master.rpartition(":")
        return dict(nnodes=self.count, node_rank=self.rank, master_addr=host, master_port=int(port))


def settings(model: str, *, tp: int, dtype: str, max_samples: int, max_model_len: int = 64, ep: bool = False, **more):
    """What vLLM is started with, on every node of it alike."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        more = {"enforce_eager": True, "block_size": 32, **more}
    else:  # CUDA graphs of two batch sizes: all samples at once is what this loop asks for
        more = {"compilation_config": {"cudagraph_capture_sizes": [max(1, max_samples // 4), max_samples]}, **more}
    return dict(
        model=model, load_format="dummy", skip_tokenizer_init=True, tensor_parallel_size=tp, enable_expert_parallel=ep, dtype=dtype,
        max_model_len=max_model_len, max_num_seqs=max_samples, seed=0, disable_log_stats=True,
        weight_transfer_config={"backend": "xfer"}, **more,
    )  # fmt: skip


def start(model: str, **more):
    from vllm import LLM

    return LLM(**settings(model, **more))


def follow(model: str, **more) -> None:
    """A further node of a vLLM: its workers, and nothing that answers. Returns when they have ended. They join xfer by
    themselves when the first node's engine is told to."""
    from vllm import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    workers = MultiprocExecutor(
        EngineArgs(**settings(model, **more)).create_engine_config(headless=True), monitor_workers=False
    )
    workers.start_worker_monitor(inline=True)


def password(token: str) -> str:
    """The password that clients send. It follows from the token, which clients need not know."""
    return hmac.new(token.encode(), b"rollout", hashlib.sha256).hexdigest()


class Rollout:
    """`join`: puts `llm` under xfer's control and returns the controller."""

    def __init__(self, llm, join: Callable[[], Controller]):
        self.llm, self._join = llm, join
        self.controller = join()

    def tend(self) -> None:
        """Trainers come and go: when they have gone, what they brought is served on, and we wait for the next ones at the
        same rendezvous. Called between requests, by the thread that samples."""
        c = self.controller
        if c.lost is not None or (c.error is not None and not c.torn):  # gone, or none came in the time we waited
            print(f"waiting for trainers: {c.lost or c.error}", file=sys.stderr, flush=True)
            self.controller.close()
            self.controller = self._join()

    def sample(self, prompts: list[list[int]], n: int, tokens: int, seed: int) -> dict:
        from vllm import SamplingParams

        # Temperature 1 and nothing cut off: then what is drawn from is what the trainer computes.
        params = SamplingParams(
            n=n, temperature=1.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False, seed=seed,
        )  # fmt: skip
        with self.controller.serving() as llm:  # refits wait outside
            version = str(self.controller.version)  # samples name their weights as vLLM does: by text
            done = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return {"groups": [[_said(p, o, version) for o in r.outputs] for p, r in zip(prompts, done, strict=True)]}

    def answer(self, path: str, body: dict) -> dict:
        if path != "/sample":
            raise KeyError(path)
        return self.sample(**body)


def _said(prompt: list[int], o, version: str) -> dict:
    """vLLM 0.25 does not say which weights made a token; the controller, which alone changes them, does."""
    spans = getattr(o, "weight_versions", None)
    return {
        "prompt": prompt,
        "tokens": list(o.token_ids),
        "logprobs": [d[t].logprob for t, d in zip(o.token_ids, o.logprobs, strict=True)],
        "spans": [[s.version, s.start, s.end] for s in spans] if spans else [[version, 0, len(o.token_ids)]],
    }


def listen(rollout: Rollout, address: str, token: str) -> None:
    """Serve requests, one after the other, until the process is told to end."""
    expected = f"Bearer {password(token)}"

    class Handler(BaseHTTPRequestHandler):
        timeout = 60  # for a client that connects and says nothing

        def do_POST(self) -> None:
            if not hmac.compare_digest(self.headers.get("Authorization", ""), expected):
                return self._reply(403, {"error": "this rollout is of a job with another token"})
            try:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._reply(200, rollout.answer(self.path, body))
            except Exception as e:
                self._reply(500, {"error": f"{type(e).__name__}: {e}"})

        def _reply(self, code: int, body: dict) -> None:
            text = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_) -> None:
            pass

    host, _, port = address.rpartition(":")

    class Server(HTTPServer):
        def service_actions(self) -> None:
            rollout.tend()

    with Server((host, int(port)), Handler) as server:
        server.serve_forever()


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder with config.json; weights come by the first refit")
    parser.add_argument("--rendezvous", required=True, help="tcp://HOST:PORT of trainer rank 0")
    parser.add_argument("--listen", required=True, help="HOST:PORT of the interface that the trainers reach")
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--ep", action="store_true", help="whole experts on each rank")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-samples", type=int, default=256, help="answers that are sampled at once")
    parser.add_argument("--nodes", type=int, default=1, help="over how many nodes this replica's ranks lie, evenly")
    parser.add_argument("--node-rank", type=int, default=0, help="which of them this is; number 0 listens")
    parser.add_argument("--master", default="", help="HOST:PORT of number 0, where they meet")
    parser.add_argument("--max-model-len", type=int, default=64, help="tokens of a prompt and its answer, at most")
    return parser


def main() -> None:
    args, token = arguments().parse_args(), os.environ["XFER_TOKEN"]
    more = dict(
        max_samples=args.max_samples, max_model_len=args.max_model_len, tp=args.tp, ep=args.ep, dtype=args.dtype
    )
    if args.nodes > 1:
        more |= Nodes(args.nodes, args.node_rank, args.master).settings()
    if args.node_rank:
        return follow(args.model, **more)
    llm = start(args.model, **more)

    def join() -> Controller:
        return xfer.serve(llm, rendezvous=args.rendezvous, token=token, replica=args.replica)

    rollout = Rollout(llm, join)
    version = rollout.controller.wait_version()  # the first refit: until then the weights are random
    print(f"rollout {args.replica} serves version {version}", file=sys.stderr, flush=True)
    listen(rollout, args.listen, token)


if __name__ == "__main__":
    main()
