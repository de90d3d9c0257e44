"""A real vLLM engine on GPUs, CUDA graphs and torch.compile as vLLM chooses; does what the test says on standard input.

{"do": "start", "model", "tp", …}  {"do": "serve", "rendezvous", "replica"}  {"do": "ready"}  {"do": "observe"}
{"do": "wrong", "config", "seed" | "folder"}  {"do": "scramble", "seed"}  {"do": "generate"}  {"do": "stop generating"}
{"do": "digests"}  {"do": "layerwise"}  {"do": "noop", "times", "took_ms", "pause_ms"}  {"do": "memory"}  {"do": "state"}  {"do": "stop"}
{"do": "force"}  {"do": "sleep", "level"}  {"do": "wake", "tags"}  {"do": "watch"}  {"do": "unwatch"}  {"do": "deaf"}
{"do": "profile"}  {"do": "unprofile", "path"}
{"do": "answer", "prompt", "tokens"}  {"do": "fly", "prompt", "tokens"}  {"do": "flown"}  {"do": "land"}
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from importlib.metadata import entry_points

from tests.support.gpu_async import Ranks
from tests.support.proc import commands, emit

PROMPTS = [[5, 6, 7, 8], list(range(10, 60)), [100, 3, 90, 17] * 12]


def start(
    model: str,
    tp: int = 1,
    dp: int = 1,
    ep: bool = False,
    load_format: str = "dummy",
    eager: bool = False,
    asynchronous: bool = False,
    **more,
):
    if not entry_points(group="vllm.general_plugins", name="xfer"):  # vLLM says so after it has loaded its model
        raise RuntimeError("xfer is in the path here, not installed, so vLLM does not find it: pip install --no-deps .")
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
        options["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8]}
    if dp > 1 or asynchronous:
        return Ranks(**{**options, "data_parallel_size": dp, **more})
    return LLM(**{**options, **more})


def greedy(tokens: int):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, logprobs=1, detokenize=False, ignore_eos=True)


def ask(llm, prompts=PROMPTS, tokens=8):
    """One after another: which of them an engine takes into one batch is a matter of time, and what else is in a batch changes how
    sums are rounded."""
    out = []
    for p in prompts:
        for o in llm.generate([{"prompt_token_ids": p}], greedy(tokens), use_tqdm=False):
            o = o.outputs[0]
            out.append([list(o.token_ids), [round(d[t].logprob, 5) for t, d in zip(o.token_ids, o.logprobs)]])
    return out


def deaf(llm) -> list[str]:
    """Names of live tensors whose values, changed where they lie, change nothing in how one token is answered: those that a captured
    graph reads from elsewhere. All tokens before it are in the prefix cache and keep the keys and values of the true weights."""
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
    """Asks the same prompts again and again and notes which version the controller named."""

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
            time.sleep(0.001)  # the gate prefers the controller, and needs to be seen open once

    def stop(self):
        self.ended.set()
        self.thread.join(60)
        return self.log


def noop(llm, handle, times: int, took_ms: float = 0.0, pause_ms: float = 0.0) -> list[dict]:
    """vLLM's own round trips of a refit, in the controller's order, with a call that does nothing in place of update.
    Milliseconds. took_ms: for so long it does nothing, which is not counted. pause_ms: between two."""
    calls = [
        ("pause", lambda: handle.pause(30)),
        ("label", lambda: handle.set_version("noop", 30)),
        ("start", lambda: handle.start_update(30)),
        ("update", lambda: llm.collective_rpc("xfer_nothing", args=(took_ms / 1e3,))),
        ("finish", lambda: handle.finish(None, 30)),
        ("reset caches", lambda: handle.reset_caches(30)),
        ("label again", lambda: handle.set_version("noop", 30)),
        ("resume", lambda: handle.resume(30)),
    ]
    out = []
    for _ in range(times):
        time.sleep(pause_ms / 1e3)
        at, asleep = [time.perf_counter()], 0.0
        for name, call in calls:
            call()
            asleep += took_ms / 1e3 if name == "update" else 0.0
            at.append(time.perf_counter() - asleep)
        row = {name: (b - a) * 1e3 for (name, _), a, b in zip(calls, at, at[1:])}
        out.append({**row, "all": (at[-1] - at[0]) * 1e3})
    return out


def main() -> None:
    llm = controller = loop = flight = None
    emit("up")
    for c in commands():
        do = c.pop("do")
        began = time.monotonic()
        try:
            if do == "start":
                llm = start(**c)
                emit("started", seconds=time.monotonic() - began)
            elif do == "serve":
                import xfer

                if controller is not None:
                    controller.close()
                engine, loop_of = (llm.engine, {"loop": llm.loop}) if isinstance(llm, Ranks) else (llm, {})
                controller = xfer.serve(engine, token=os.environ["XFER_TOKEN"], deadline_s=120.0, **loop_of, **c)
                emit("serving")
            elif do == "ready":
                controller.wait_ready()
                emit("is ready")
            elif do == "observe" and controller is None:
                emit("observed", version="", outputs=ask(llm))
            elif do == "observe":
                with controller.serving():
                    emit("observed", version=controller.version, outputs=ask(llm))
            elif do == "answer":
                with controller.serving():
                    emit("answered", tokens=ask(llm, [c["prompt"]], c["tokens"])[0][0])
            elif do == "fly":
                flight = llm.flight(c["prompt"], greedy(c["tokens"]))
                emit("flying")
            elif do == "flown":
                emit("flown", now=flight.now, ended=len(flight.log))
            elif do == "land":
                emit("landed", log=flight.land())
            elif do == "deaf":
                with controller.serving():
                    emit("heard", deaf=deaf(llm))
            elif do == "force":
                emit("forced", outputs=ask(llm))  # behind xfer's back
            elif do == "sleep":
                with controller.serving():
                    llm.sleep(level=c["level"])
                emit("asleep")
            elif do == "wake":
                llm.wake_up(tags=c["tags"])
                emit("awake")
            elif do == "wrong":
                with controller.serving():
                    answers = llm.collective_rpc("xfer_wrong", kwargs=c)
                emit(
                    "judged",
                    wrong=[a[0] for a in answers],
                    bytes=[a[1] for a in answers],
                    seconds=time.monotonic() - began,
                )
            elif do == "scramble":
                with controller.serving():
                    emit("scrambled", kept=llm.collective_rpc("xfer_scramble", args=(c["seed"],)))
            elif do == "kept":
                with controller.serving():
                    emit("kept", kept=llm.collective_rpc("xfer_kept"))
            elif do == "digests":
                with controller.serving() if controller is not None else contextlib.nullcontext():
                    emit("digests", workers=llm.collective_rpc("xfer_digests"))
            elif do == "layerwise":
                emit("layerwise", workers=llm.collective_rpc("xfer_layerwise"))
            elif do == "generate":
                loop = Loop(controller)
                emit("generating")
            elif do == "stop generating":
                emit("generated", log=loop.stop())
            elif do == "noop":
                emit("did nothing", rows=noop(llm, controller.handle, **c))
            elif do == "memory":
                emit("memory", workers=llm.collective_rpc("xfer_memory"))
            elif do == "watch":
                llm.collective_rpc("xfer_watch")
                emit("watching")
            elif do == "unwatch":
                emit("watched", workers=llm.collective_rpc("xfer_unwatch"))
            elif do == "profile":
                llm.collective_rpc("xfer_profile")
                emit("profiling")
            elif do == "unprofile":
                emit("profiled", workers=llm.collective_rpc("xfer_unprofile", args=(c["path"],)))
            elif do == "state":
                error, lost = str(controller.error or ""), str(controller.lost or "")
                emit("state", version=controller.version, error=error, lost=lost)
            elif do == "stop":
                if controller is not None:
                    controller.close()
                emit("stopped")
        except Exception as e:
            traceback.print_exc()
            emit("raised", type=type(e).__name__, text=str(e), seconds=time.monotonic() - began)


if __name__ == "__main__":
    main()
