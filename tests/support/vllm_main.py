"""A real vLLM engine for functional tests; does what the test says on standard input.

{"do": "start", "model", "tp", "load_format", …}   {"do": "serve", "rendezvous", "replica"}   {"do": "ready"}
{"do": "observe", "force"}   {"do": "scramble", "seed"}   {"do": "kept"}   {"do": "watch"}   {"do": "grown"}
{"do": "state"}   {"do": "generate"}   {"do": "generated"}
{"do": "truth", "folders", "layout"}   {"do": "rpc", "method", "args"}   {"do": "handle", "calls"}
"""

import gc
import os
import threading
import time

from tests.support.proc import emit, obey
from tests.support.small_vllm import arguments, fork_workers

PROMPTS = [[5, 6, 7, 8], list(range(10, 60)), [100, 3, 90, 17] * 12]


def start(model: str, load_format: str = "dummy", tp: int = 1, ep: bool = False, **more):
    from vllm import LLM

    fork_workers()
    return LLM(**arguments(model, load_format=load_format, tensor_parallel_size=tp, enable_expert_parallel=ep, **more))


def answers(llm, prompts: list[dict] | None = None, **how) -> list:
    """Greedy tokens and their logprobs, for prompts that are asked again and again, so that the prefix cache has them."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=6, logprobs=1, detokenize=False, ignore_eos=True)
    # One at a time: the batch must not change the rounding.
    prompts = prompts or [{"prompt_token_ids": p} for p in PROMPTS]
    tokens = [llm.generate([p], greedy, use_tqdm=False, **how)[0].outputs[0] for p in prompts]
    return [[list(o.token_ids), [d[t].logprob for t, d in zip(o.token_ids, o.logprobs, strict=True)]] for o in tokens]


def observe(llm) -> dict:
    """What the engine answers, and vLLM's own sha256 of every parameter, by worker and name. AssertionError if workers answer for
    another call, as they do after one that vLLM should not have been sent."""
    first = llm.collective_rpc("xfer_echo", args=(1,))
    sums = llm.collective_rpc("compute_weight_checksums")
    second = llm.collective_rpc("xfer_echo", args=(2,))
    ranks = sorted(rank for _, rank in first)
    assert (first, second) == ([[1, r] for r in ranks], [[2, r] for r in ranks]), (first, second)
    return dict(
        outputs=answers(llm), checksums={f"{i}: {k}": v for i, part in enumerate(sums) for k, v in part.items()}
    )


class Generating:
    """The owner's loop: one prompt after another, each inside `serving()`, so that refits get their turn."""

    def __init__(self, controller):
        self.log: list[tuple[float, str, list[int]]] = []
        self.refused = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(controller,), daemon=True)
        self._thread.start()

    def _run(self, controller) -> None:
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

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)


class Engine:
    llm = controller = None

    def made(self, **how):
        return start(**how)

    def observed(self, llm) -> dict:
        return observe(llm)

    def start(self, **how) -> None:
        self.llm = self.made(**how)
        emit("started")

    def serve(self, **how) -> None:
        import xfer

        if self.controller is not None:
            self.controller.close()
        self.controller = xfer.serve(self.llm, **{"token": os.environ["XFER_TOKEN"], **how})
        emit("serving")

    def ready(self, timeout_s: float | None = None) -> None:
        self.controller.wait_ready(timeout_s)
        emit("ready")

    def state(self) -> None:
        c = self.controller
        error = f"{type(c.error).__name__}: {c.error}" if c.error else ""
        emit("state", version=c.version, error=error, lost=str(c.lost or ""))

    def generate(self) -> None:
        self.loop = Generating(self.controller)
        emit("generating")

    def generated(self) -> None:
        self.loop.stop()
        emit("generated", log=self.loop.log, refused=self.loop.refused)

    def observe(self, force: bool = False) -> None:
        if self.controller is None:
            emit("observed", version="", **self.observed(self.llm))
        else:
            with self.controller.serving(force=force):
                emit("observed", version=self.controller.version, **self.observed(self.llm))

    def scramble(self, seed: int) -> None:
        with self.controller.serving():
            emit("scrambled", kept=self.llm.collective_rpc("xfer_scramble", args=(seed,)))

    def kept(self) -> None:
        with self.controller.serving():
            emit("kept", kept=self.llm.collective_rpc("xfer_kept"))

    def watch(self) -> None:
        self.llm.collective_rpc("xfer_forget_peak")
        emit("watching")

    def grown(self) -> None:
        emit("grown", bytes=self.llm.collective_rpc("xfer_grown"))

    def truth(self, folders: list[str], layout: dict) -> None:
        """What a fresh engine is that loads each of these checkpoints."""
        for folder in folders:
            fresh = start(folder, "auto", **layout)
            emit("observed", version="", **observe(fresh))
            fresh.llm_engine.engine_core.shutdown()
            del fresh
            gc.collect()

    def rpc(self, method: str, args: list) -> None:
        """Call a method of every worker; see `worker_extension_cls`."""
        emit("answered", answers=self.llm.collective_rpc(method, args=tuple(args)))

    def handle(self, calls: list[list]) -> None:
        """Make a controller's calls, each a name with its arguments."""
        from xfer.engines.choose_handle import handle_for

        handle = handle_for(self.llm)
        answers = [getattr(handle, name)(*args) for name, *args in calls]
        emit("handled", answers=answers, version=self.llm.get_weight_version())


if __name__ == "__main__":
    e = Engine()
    obey(
        e.start,
        e.serve,
        e.ready,
        e.observe,
        e.state,
        e.generate,
        e.generated,
        e.scramble,
        e.kept,
        e.watch,
        e.grown,
        e.truth,
        e.rpc,
        e.handle,
    )
