"""A real vLLM engine for functional tests; commands are `Engine`'s methods."""

import gc
import os

from tests.support.in_loop import InLoop
from tests.support.proc import emit, methods, obey
from tests.support.small_vllm import arguments, fork_workers

PROMPTS = [[5, 6, 7, 8], list(range(10, 60)), [100, 3, 90, 17] * 12]


def start(model: str, load_format: str = "dummy", tp: int = 1, ep: bool = False, **more):
    from vllm import LLM

    fork_workers()
    return LLM(**arguments(model, load_format=load_format, tensor_parallel_size=tp, enable_expert_parallel=ep, **more))


def answers(llm, prompts: list[dict] | None = None, **how) -> list:
    """Greedy tokens and their logprobs. Prompts repeat, so the prefix cache has them."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=6, logprobs=1, detokenize=False, ignore_eos=True)
    # One at a time: the batch must not change the rounding.
    prompts = prompts or [{"prompt_token_ids": p} for p in PROMPTS]
    tokens = [o.outputs[0] for p in prompts for o in llm.generate([p], greedy, use_tqdm=False, **how)]
    return [[list(o.token_ids), [d[t].logprob for t, d in zip(o.token_ids, o.logprobs, strict=True)]] for o in tokens]


def pictures(token: int) -> list[dict]:
    """Prompts with one picture each, for which `token` stands."""
    from PIL import Image

    made = (Image.linear_gradient("L").resize((32, 32)).rotate(turn).convert("RGB") for turn in (0, 180))
    return [{"prompt_token_ids": [20, token, 30], "multi_modal_data": {"image": p}} for p in made]


def observe(llm) -> dict:
    """What the engine answers, and vLLM's own sha256 of every parameter. AssertionError if workers answer for another call."""
    first = llm.collective_rpc("xfer_echo", args=(1,))
    sums = llm.collective_rpc("compute_weight_checksums")
    second = llm.collective_rpc("xfer_echo", args=(2,))
    ranks = sorted(rank for _, rank in first)
    assert (first, second) == ([[1, r] for r in ranks], [[2, r] for r in ranks]), (first, second)
    named = {f"{i}: {k}": v for i, part in enumerate(sums) for k, v in part.items()}
    return dict(outputs=answers(llm), checksums=named)


def shut(llm) -> None:
    (llm if isinstance(llm, InLoop) else llm.llm_engine.engine_core).shutdown()


class Engine:
    llm = controller = None

    def made(self, **how):
        return start(**how)

    def observed(self, llm) -> dict:
        return observe(llm)

    def printed(self, lines: str) -> None:
        """Run the lines that a page prints for the engine."""
        fork_workers()
        theirs: dict = {}
        exec(lines, theirs)
        self.llm, self.controller = theirs["llm"], theirs["controller"]
        emit("printed")

    def reloaded(self, version: int, folders: list[str]) -> dict:
        """vLLM's checksums of this version, then those after vLLM's own loader has read each checkpoint."""
        self.controller.wait_version(version)
        sums = [self.llm.collective_rpc("compute_weight_checksums")]
        self.llm.collective_rpc("update_config", kwargs={"overrides": {"load_config": {"load_format": "auto"}}})
        for folder in folders:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            sums.append(self.llm.collective_rpc("compute_weight_checksums"))
        return dict(sums=sums)

    def start(self, **how) -> None:
        self.llm = self.made(**how)
        emit("started")

    def serve(self, **how) -> None:
        import xfer

        if self.controller is not None:
            self.controller.close()
        engine, loop = (self.llm.engine, {"loop": self.llm.loop}) if isinstance(self.llm, InLoop) else (self.llm, {})
        self.controller = xfer.serve(engine, **{"token": os.environ["XFER_TOKEN"], **loop, **how})
        emit("serving")

    def ready(self, timeout_s: float | None = None) -> None:
        self.controller.wait_ready(timeout_s)
        emit("ready")

    def state(self) -> None:
        c = self.controller
        error = f"{type(c.error).__name__}: {c.error}" if c.error else ""
        emit("state", version=c.version, error=error, lost=str(c.lost or ""))

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
            fresh = self.made(model=folder, load_format="auto", **layout)
            emit("observed", version="", **self.observed(fresh))
            shut(fresh)
            del fresh
            gc.collect()


if __name__ == "__main__":
    obey(*methods(Engine()))
