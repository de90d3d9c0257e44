"""A real vLLM engine on GPUs, CUDA graphs and torch.compile as vLLM chooses; commands are `Engine`'s methods."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from benchmarks.lib.gpu_profile import noop
from tests.support import vllm_main
from tests.support.in_loop import InLoop
from tests.support.proc import emit, methods, obey

PROMPTS = vllm_main.PROMPTS


def start(
    model: str, tp=1, dp=1, ep=False, load_format="dummy", eager=False, asynchronous=False, compiled=True,
    flashinfer=False, **more,
):  # fmt: skip
    """Starts vLLM. `compiled`: False: CUDA graphs without torch.compile; engines of the same weights then give the same logprobs.
    `flashinfer`: give vLLM FlashInfer's kernel for experts in torch, if FlashInfer is not installed."""
    if flashinfer and find_spec("flashinfer") is None:
        _stand_in()
    if not entry_points(group="vllm.general_plugins", name="xfer"):
        raise RuntimeError("xfer is not installed, so vLLM does not find it: pip install --no-deps .")
    from vllm import LLM

    options = dict(
        model=model, load_format=load_format, skip_tokenizer_init=True, tensor_parallel_size=tp, enable_expert_parallel=ep,
        enforce_eager=eager, dtype="bfloat16", max_model_len=256, max_num_seqs=8, seed=0, disable_log_stats=True,
        # So many bytes for the cache, whatever else is on the device: several engines and trainers share these GPUs.
        enable_prefix_caching=True, gpu_memory_utilization=0.1, kv_cache_memory_bytes=1 << 30,
        weight_transfer_config={"backend": "xfer"},
        worker_extension_cls="tests.support.gpu_probe.Probe",
    )  # fmt: skip
    if not eager:
        options["compilation_config"] = {
            "cudagraph_capture_sizes": [1, 2, 4, 8],
            **({} if compiled else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}),
        }
    if dp > 1 or asynchronous:
        return InLoop(**{**options, "data_parallel_size": dp, **more})
    return LLM(**{**options, **more})


def _stand_in() -> None:
    """Let this process and vLLM's own import tests/support/kernels/flashinfer."""
    folder = str(Path(__file__).parent / "kernels")
    sys.path.append(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH"), folder) if p)
    os.environ["VLLM_HAS_FLASHINFER_CUBIN"] = "1"  # without it vLLM wants a compiler, too


def greedy(tokens: int):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, logprobs=1, detokenize=False, ignore_eos=True)


def ask(llm, prompts=PROMPTS, tokens=8):
    """Asks one prompt after another, since other requests in a batch change how sums are rounded."""
    out = []
    for p in prompts:
        for o in llm.generate([{"prompt_token_ids": p}], greedy(tokens), use_tqdm=False):
            o = o.outputs[0]
            out.append([list(o.token_ids), [round(d[t].logprob, 5) for t, d in zip(o.token_ids, o.logprobs)]])
    return out


def deaf(llm) -> list[str]:
    """Names of live tensors that can be overwritten without a change of the answer: a captured graph reads these from other memory. One
    token is computed; those before it are in the prefix cache, with the keys and values of the true weights."""
    prompt = [list(range(100, 229))]  # blocks of 16, 32, 64 or 128 tokens, and one token
    ask(llm, prompt)
    truth, out = ask(llm, prompt), []
    for name in llm.collective_rpc("xfer_names")[0]:
        llm.collective_rpc("xfer_noise", args=(name, True))
        heard = ask(llm, prompt)
        llm.collective_rpc("xfer_noise", args=(name, False))
        out += [name] if heard == truth else []
    assert ask(llm, prompt) == truth, "put back as it was, it must answer as before"
    return out


class Loop:
    """Asks the same prompts repeatedly and logs the controller's version with each answer."""

    def __init__(self, controller):
        self.controller, self.log, self.ended = controller, [], threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while not self.ended.is_set():
            try:
                with self.controller.serving() as llm:
                    self.log.append([self.controller.version, [o[0] for o in ask(llm)]])
            except Exception as e:
                self.log.append(["error", str(e)])
            time.sleep(0.001)  # so that the controller gets the gate

    def stop(self):
        self.ended.set()
        self.thread.join(60)
        return self.log


class Engine(vllm_main.Engine):
    _loop = _flight = None

    def made(self, **how):
        return start(**how)

    def observed(self, llm) -> dict:
        return dict(outputs=ask(llm))

    def start(self, **how) -> None:
        began = time.monotonic()
        self.llm = self.made(**how)
        emit("started", seconds=time.monotonic() - began)

    def serve(self, **how) -> None:
        super().serve(**{"deadline_s": 120.0, **how})

    def _serving(self) -> contextlib.AbstractContextManager:
        return self.controller.serving() if self.controller is not None else contextlib.nullcontext()

    def answer(self, prompt: list[int], tokens: int) -> None:
        with self._serving():
            emit("answered", tokens=ask(self.llm, [prompt], tokens)[0][0])

    def see(self, token: int) -> None:
        with self._serving():
            emit("seen", outputs=vllm_main.answers(self.llm, vllm_main.pictures(token)))

    def fly(self, prompt: list[int], tokens: int) -> None:
        self._flight = self.llm.flight(prompt, greedy(tokens))
        emit("flying")

    def flown(self) -> None:
        emit("flown", now=self._flight.now, ended=len(self._flight.log))

    def land(self) -> None:
        emit("landed", log=self._flight.land())

    def deaf(self) -> None:
        with self._serving():
            emit("heard", deaf=deaf(self.llm))

    def force(self) -> None:
        """Asks without xfer's gate."""
        emit("forced", outputs=ask(self.llm))

    def sleep(self, level: int) -> None:
        with self._serving():
            self.llm.sleep(level=level)
        emit("asleep")

    def wake(self, tags: list[str]) -> None:
        self.llm.wake_up(tags=tags)
        emit("awake")

    def _workers(self, method: str, *args, **kwargs) -> list:
        return self.llm.collective_rpc(f"xfer_{method}", args=args, kwargs=kwargs)

    def wrong(self, **what) -> None:
        began = time.monotonic()
        with self._serving():
            answers = self._workers("wrong", **what)
        wrong, nbytes = zip(*answers)
        emit("judged", wrong=wrong, bytes=nbytes, seconds=time.monotonic() - began)

    def digests(self) -> None:
        with self._serving():
            emit("digests", workers=self._workers("digests"))

    def layerwise(self) -> None:
        emit("layerwise", workers=self._workers("layerwise"))

    def generate(self) -> None:
        self._loop = Loop(self.controller)
        emit("generating")

    def generated(self) -> None:
        emit("generated", log=self._loop.stop())

    def noop(self, **how) -> None:
        emit("did nothing", rows=noop(self.llm, self.controller.handle, **how))

    def memory(self) -> None:
        emit("memory", workers=self._workers("memory"))

    def watch(self) -> None:
        self._workers("watch")
        emit("watching")

    def unwatch(self) -> None:
        emit("watched", workers=self._workers("unwatch"))

    def profile(self) -> None:
        self._workers("profile")
        emit("profiling")

    def unprofile(self, path: str) -> None:
        emit("profiled", workers=self._workers("unprofile", path))


if __name__ == "__main__":
    obey(*methods(Engine()))
