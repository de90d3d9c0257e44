"""A real vLLM engine under xfer's control, for tests of failures; does what the test says on standard input.

    {"do": "start", "model", "tp", …}   {"do": "serve", "rendezvous", "replica", …}   {"do": "ready"}
    {"do": "observe"}   {"do": "force"}   {"do": "state"}   {"do": "generate"}   {"do": "generated"}

Unlike vllm_main.py it survives many connections, asks each worker apart, and can generate while commands come in.
"""

import os
import threading
import time
import traceback

from tests.support.proc import commands, emit
from tests.support.small_vllm import fork_workers


class Echo:
    """Mixed into vLLM's workers (`worker_extension_cls`): a call whose answer tells which call and which worker it
    was."""

    def xfer_echo(self, number: int) -> list[int]:
        return [self.rank, number]

    def xfer_pid(self) -> int:
        return os.getpid()


def start(model: str, tp: int, load_format: str, ep: bool = False):
    from vllm import LLM

    fork_workers()
    return LLM(
        model=model,
        load_format=load_format,
        skip_tokenizer_init=True,
        tensor_parallel_size=tp,
        enable_expert_parallel=ep,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=128,
        max_num_seqs=4,
        block_size=32,
        seed=0,
        disable_log_stats=True,
        enable_prefix_caching=True,
        num_gpu_blocks_override=64,
        weight_transfer_config={"backend": "xfer"},
        worker_extension_cls="tests.support.refit_engine.Echo",
    )


PROMPTS = [[5, 6, 7, 8], list(range(10, 60)), [100, 3, 90, 17] * 12]


def answers(llm) -> list:
    """Greedy tokens and logprobs of prompts that are asked again and again, so that the prefix cache has them."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=6, logprobs=1, detokenize=False, ignore_eos=True)
    # One at a time: the batch must not change the rounding.
    tokens = [llm.generate([{"prompt_token_ids": p}], greedy, use_tqdm=False)[0].outputs[0] for p in PROMPTS]
    return [[list(o.token_ids), [d[t].logprob for t, d in zip(o.token_ids, o.logprobs, strict=True)]] for o in tokens]


def observe(llm, number: int) -> dict:
    """vLLM's own checksums per worker, greedy tokens with logprobs, and two calls that must be answered for
    themselves."""
    first = llm.collective_rpc("xfer_echo", args=(number,))
    sums = llm.collective_rpc("compute_weight_checksums")
    second = llm.collective_rpc("xfer_echo", args=(-number,))
    outputs = answers(llm)
    return dict(outputs=outputs, checksums=sums, echo=[first, second])


class Generating:
    """The owner's loop: one prompt after another, each inside `serving()`, so that refits get their turn."""

    def __init__(self, controller, llm):
        self.log: list[tuple[float, str, list[int]]] = []
        self.refused = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(controller, llm), daemon=True)
        self._thread.start()

    def _run(self, controller, llm) -> None:
        from vllm import SamplingParams

        from xfer.errors import EngineLost

        params = SamplingParams(temperature=0, max_tokens=4, detokenize=False, ignore_eos=True)
        while not self._stop.is_set():
            try:
                with controller.serving() as engine:
                    version = controller.version
                    out = engine.generate([{"prompt_token_ids": [5, 6, 7, 8]}], params, use_tqdm=False)
                self.log.append((time.monotonic(), version, list(out[0].outputs[0].token_ids)))
            except EngineLost:
                self.refused += 1
                time.sleep(0.05)

    def stop(self) -> list:
        self._stop.set()
        self._thread.join(30)
        return self.log


def main() -> None:
    import xfer

    llm = controller = loop = None
    number = 0
    emit("up")
    for c in commands():
        do = c.pop("do")
        began = time.monotonic()
        number += 1
        try:
            if do == "start":
                llm = start(**c)
                emit("started", pids=llm.collective_rpc("xfer_pid"))
            elif do == "serve":
                if controller is not None:
                    controller.close()
                controller = xfer.serve(llm, **{"token": os.environ["XFER_TOKEN"], **c})
                emit("serving")
            elif do == "ready":
                controller.wait_ready(c.get("timeout_s"))
                emit("ready")
            elif do == "observe":
                if controller is None:
                    emit("observed", version="", **observe(llm, number))
                else:
                    with controller.serving() as engine:
                        emit("observed", version=controller.version, **observe(engine, number))
            elif do == "force":
                emit("forced", **observe(llm, number))  # behind xfer's back
            elif do == "state":
                emit(
                    "state",
                    version=controller.version,
                    error=f"{type(controller.error).__name__}: {controller.error}" if controller.error else "",
                    lost=str(controller.lost or ""),
                )
            elif do == "generate":
                loop = Generating(controller, llm)
                emit("generating")
            elif do == "generated":
                emit("generated", log=loop.stop(), refused=loop.refused)
        except Exception as e:
            traceback.print_exc()
            emit("raised", type=type(e).__name__, text=str(e), seconds=time.monotonic() - began)


if __name__ == "__main__":
    main()
