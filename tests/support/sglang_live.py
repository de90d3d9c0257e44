"""A live SGLang engine is refitted and must answer as a new engine does that loads the same weights.

    python -m tests.support.sglang_live FAMILY TP [OPTIONS]     # OPTIONS: JSON of further ServerArgs, such as {"ep_size": 2}
    python -m tests.support.sglang_live qwen3 2 '{"device": "cuda", "attention_backend": "triton"}'     # on a host with GPUs
    python -m tests.support.sglang_live qwen3 1 '{"dp_size": 2}' http     # a server of its own, by its URL
    python -m tests.support.sglang_live qwen3 1 '{}' in_place             # this pause_mode, in place of the default

Prints one line of JSON: what every data-parallel rank answers with weights of seed 1 (`first`), 2 and 1 again after refits, from a
`fresh` engine of seed 2, `torn` when it is resumed by force after a refit that no worker installed, and `repaired` by the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

import xfer
import xfer.errors
from examples.common import toy
from examples.common.ports import free_port
from xfer.sglang import SGLangEngine, SGLangServer

PROMPT = [3, 5, 7, 11, 13]
TOKENS = 8
TOKEN = "token of the live SGLang"


def settings(folder: str, tp: int, options: dict[str, Any]) -> dict[str, Any]:
    """SGLang's ServerArgs for an engine whose weights come from the checkpoint in `folder`."""
    defaults = dict(
        device="cpu", attention_backend="torch_native", mem_fraction_static=0.1, max_total_tokens=512, log_level="error",
        skip_tokenizer_init=True, random_seed=1,
    )  # fmt: skip
    return {"model_path": folder, "tp_size": tp, **defaults, **options}


class Server(SGLangServer):
    """`python -m sglang.launch_server` in processes of its own, asked over HTTP."""

    START_S = 300.0

    def __init__(self, args: dict[str, Any], **how: Any):
        port = free_port()
        super().__init__(f"http://127.0.0.1:{port}", **how)
        flags = [f for k, v in args.items() for f in (f"--{k.replace('_', '-')}", *([] if v is True else [str(v)]))]
        command = [sys.executable, "-m", "sglang.launch_server", "--port", str(port), *flags]
        self._process = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)
        until = time.monotonic() + self.START_S
        while not self._answers():
            if time.monotonic() > until or self._process.poll() is not None:
                self.shutdown()
                raise RuntimeError(f"the server did not start: {command}")
            time.sleep(0.5)

    def _answers(self) -> bool:
        with contextlib.suppress(xfer.errors.XferError):
            return bool(self._get("model_info"))
        return False

    def generate(self, **body: Any) -> dict[str, Any]:
        return self._ask("generate", **body)

    def shutdown(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def start(folder: str, tp: int, options: dict[str, Any], *door: str) -> SGLangEngine | Server:
    """Start an engine. `door`: "http" for a server, and a pause_mode."""
    args, how = settings(folder, tp, options), {"pause_mode": door[-1]} if door and door[-1] != "http" else {}
    if "http" in door:
        return Server(args, **how)
    import sglang

    return SGLangEngine(sglang.Engine(**args), **how)


def answer(engine: SGLangEngine | Server, rank: int) -> dict[str, Any]:
    """The tokens that follow PROMPT, the logprob of each, and the version, from one data-parallel rank."""
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    out = engine.generate(input_ids=PROMPT, sampling_params=sampling, return_logprob=True, routed_dp_rank=rank)
    probs = [p[0] for p in out["meta_info"]["output_token_logprobs"]]
    return {"tokens": out["output_ids"], "logprobs": probs, "version": out["meta_info"]["weight_version"]}


def main(family: str, tp: int, options: dict[str, Any], *door: str) -> None:
    out: dict[str, Any] = {}
    device, ranks = options.get("device", "cpu"), range(options.get("dp_size", 1))
    faults = Path(tempfile.mkdtemp(prefix="xfer-sglang-")) / "faults"
    os.environ["XFER_FAULT_FILE"] = str(faults)
    # SGLang's rotary kernel of GPUs takes heads of 64, 128, 256 or 512 elements.
    wide = {} if device == "cpu" or "head_dim" not in toy.config(family) else {"head_dim": 64}
    folders = {}
    for seed in (1, 2):
        folders[seed] = tempfile.mkdtemp(prefix="xfer-sglang-")
        toy.write_checkpoint(family, folders[seed], seed=seed, **wide)
    with contextlib.ExitStack() as stack:
        engine = start(folders[2], tp, options, *door)
        stack.callback(engine.shutdown)
        out["fresh"] = [answer(engine, r) for r in ranks]
    with contextlib.ExitStack() as stack:
        engine = start(folders[1], tp, options, *door)
        stack.callback(engine.shutdown)
        out["first"] = [answer(engine, r) for r in ranks]
        config, at = toy.config(family, **wide), f"tcp://127.0.0.1:{free_port()}"
        tensors = {n: t.to(device) for n, t in toy.tensors(config, 1).items()}

        def train(seed: int) -> None:
            for name, t in toy.tensors(config, seed).items():
                tensors[name].copy_(t)

        source = xfer.TensorTrainer(lambda: tensors, rank=0, world=1)
        controller = xfer.serve(engine, at, TOKEN, deadline_s=120.0)
        session = xfer.connect(source, at, TOKEN, deadline_s=120.0, route=xfer.Direct(cache_dir=None))
        stack.enter_context(controller)
        stack.enter_context(session)
        for name, seed in (("second", 2), ("again", 1)):
            train(seed)
            busy: list[dict[str, Any]] = []
            beside = [threading.Thread(target=lambda r=r: busy.append(answer(engine, r))) for r in ranks]  # noqa: B023  joined below
            for thread in beside:
                thread.start()
            report = session.refit(verify=True)
            for thread in beside:
                thread.join()
            if not engine.keeps_caches:
                # A prefix that the request beside the refit has left is computed in another way, and rounded otherwise.
                engine.reset_prefix_cache()
            out[name] = [answer(engine, r) for r in ranks]
            out[f"report of {name}"] = {"committed": report.committed, "verified": report.verified}
            out[f"beside {name}"] = [len(b["tokens"]) for b in busy]
        train(2)
        faults.write_text(",".join(f"worker:{rank}:commit:raise" for rank in range(engine.get_world_size())))
        try:
            session.refit()
        except xfer.errors.XferError as e:
            out["failed"] = str(e)
        faults.unlink()
        engine.resume_generation()
        out["torn"] = [answer(engine, r) for r in ranks]
        session.refit(verify=True)
        out["repaired"] = [answer(engine, r) for r in ranks]
    print(json.dumps(out), flush=True)


if __name__ == "__main__":
    assert torch.cuda.is_available() or os.environ.get("SGLANG_CPU_OMP_THREADS_BIND")
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}, *sys.argv[4:])
