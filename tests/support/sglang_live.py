"""A live SGLang engine is refitted and must answer as a new engine does that loads the same weights.

    python -m tests.support.sglang_live FAMILY TP [OPTIONS]     # OPTIONS: JSON of further ServerArgs, such as {"ep_size": 2}
    python -m tests.support.sglang_live qwen3 2 '{"device": "cuda", "attention_backend": "triton"}'     # on a host with GPUs

Prints one JSON line. `first`, `second`, `again`: the tokens and logprobs with the weights of seeds 1, 2, and 1 again, after a
start from a checkpoint and two refits. `fresh`: those of another engine that loads seed 2. `torn`: those after a refit that no
worker installed, when the engine is resumed by force. `repaired`: after the next refit, of seed 2.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

import xfer
import xfer.errors
from examples.common import toy
from examples.common.ports import free_port
from xfer.sglang import SGLangEngine

PROMPT = [3, 5, 7, 11, 13]
TOKENS = 8
TOKEN = "token of the live SGLang"


def start(folder: str, tp: int, options: dict[str, Any]):
    """Start an engine whose weights come from the checkpoint in `folder`."""
    import sglang

    defaults = dict(
        device="cpu", attention_backend="torch_native", mem_fraction_static=0.1, max_total_tokens=512, log_level="error",
        skip_tokenizer_init=True, random_seed=1,
    )  # fmt: skip
    return sglang.Engine(model_path=folder, tp_size=tp, **{**defaults, **options})


def answer(engine: SGLangEngine, **more: Any) -> dict[str, Any]:
    """The tokens that follow PROMPT, the logprob of each, and the version that the engine says it has."""
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    out = engine.generate(input_ids=PROMPT, sampling_params=sampling, return_logprob=True, **more)
    probs = [p[0] for p in out["meta_info"]["output_token_logprobs"]]
    return {"tokens": out["output_ids"], "logprobs": probs, "version": out["meta_info"]["weight_version"]}


class Weights:
    """The tensors of the checkpoint of a seed, on a device."""

    def __init__(self, family: str, device: str):
        self._config, self._device = toy.config(family), device
        self.tensors = {n: t.to(device) for n, t in toy.tensors(self._config, 1).items()}

    def set(self, seed: int) -> None:
        for name, t in toy.tensors(self._config, seed).items():
            self.tensors[name].copy_(t)


def main(family: str, tp: int, options: dict[str, Any]) -> None:
    out: dict[str, Any] = {}
    device = options.get("device", "cpu")
    faults = Path(tempfile.mkdtemp(prefix="xfer-sglang-")) / "faults"
    os.environ["XFER_FAULT_FILE"] = str(faults)
    folders = {}
    for seed in (1, 2):
        folders[seed] = tempfile.mkdtemp(prefix="xfer-sglang-")
        toy.write_checkpoint(family, folders[seed], seed=seed)
    fresh = SGLangEngine(start(folders[2], tp, options))
    out["fresh"] = answer(fresh)
    fresh.shutdown()
    engine = SGLangEngine(start(folders[1], tp, options))
    out["first"] = answer(engine)
    weights, at = Weights(family, device), f"tcp://127.0.0.1:{free_port()}"
    source = xfer.TensorTrainer(lambda: weights.tensors, rank=0, world=1)
    controller = xfer.serve(engine, at, TOKEN, deadline_s=120.0)
    with xfer.connect(source, at, TOKEN, deadline_s=120.0, route=xfer.Direct(cache_dir=None)) as session, controller:
        for name, seed in (("second", 2), ("again", 1)):
            weights.set(seed)
            busy: dict[str, Any] = {}
            beside = threading.Thread(target=lambda: busy.update(answer(engine)))  # noqa: B023  joined below
            beside.start()
            report = session.refit(verify=True)
            beside.join()
            out[name] = {**answer(engine), "committed": report.committed, "verified": report.verified}
            out[name]["beside"] = len(busy["tokens"])
        weights.set(2)
        faults.write_text(",".join(f"worker:{rank}:commit:raise" for rank in range(engine.get_world_size())))
        try:
            session.refit()
        except xfer.errors.XferError as e:
            out["failed"] = str(e)
        faults.unlink()
        engine.resume_generation()
        out["torn"] = answer(engine)
        session.refit(verify=True)
        out["repaired"] = answer(engine)
    engine.shutdown()
    print(json.dumps(out), flush=True)


if __name__ == "__main__":
    assert torch.cuda.is_available() or os.environ.get("SGLANG_CPU_OMP_THREADS_BIND")
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
