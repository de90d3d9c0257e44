"""A real vLLM engine for functional tests; does what the test says on standard input.

{"do": "start", "model", "tp", "load_format", …}   {"do": "serve", "rendezvous", "replica"}   {"do": "observe"}
{"do": "scramble", "seed"}   {"do": "watch"}   {"do": "grown"}   {"do": "force"}   {"do": "stop"}
"""

import gc
import os
import traceback

from tests.support.proc import commands, emit

PROMPTS = [[5, 6, 7, 8], list(range(10, 60)), [100, 3, 90, 17] * 12]


def start(model: str, load_format: str = "dummy", tp: int = 1, ep: bool = False, **more):
    from vllm import LLM

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
        weight_transfer_config={"backend": "xfer"},
        worker_extension_cls="tests.support.worker_probe.Probe",
        **more,
    )


def observe(llm) -> dict:
    """Greedy tokens and logprobs of prompts that are asked again and again, and vLLM's sha256 of every parameter."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=6, logprobs=1, detokenize=False, ignore_eos=True)
    outputs = []
    for p in PROMPTS:
        o = llm.generate([{"prompt_token_ids": p}], greedy, use_tqdm=False)[0].outputs[0]
        outputs.append([list(o.token_ids), [round(d[t].logprob, 6) for t, d in zip(o.token_ids, o.logprobs)]])
    return dict(
        outputs=outputs,
        checksums={k: v for part in llm.collective_rpc("compute_weight_checksums") for k, v in part.items()},
    )


def main() -> None:
    llm = controller = None
    emit("up")
    for c in commands():
        do = c.pop("do")
        try:
            if do == "start":
                llm = start(**c)
                emit("started")
            elif do == "serve":
                import xfer

                controller = xfer.serve(llm, token=os.environ["XFER_TOKEN"], **c)
                emit("serving")
            elif do == "ready":
                controller.wait_ready()
                emit("is ready")
            elif do == "observe":
                if controller is None:
                    emit("observed", version="", **observe(llm))
                else:
                    with controller.serving() as engine:
                        emit("observed", version=controller.version, **observe(engine))
            elif do == "checksums":
                with controller.serving():
                    sums = llm.collective_rpc("compute_weight_checksums")
                emit("summed", checksums={k: v for part in sums for k, v in part.items()})
            elif do == "scramble":
                with controller.serving():
                    emit("scrambled", kept=llm.collective_rpc("xfer_scramble", args=(c["seed"],)))
            elif do == "kept":
                with controller.serving():
                    emit("kept", kept=llm.collective_rpc("xfer_kept"))
            elif do == "watch":
                llm.collective_rpc("xfer_forget_peak")
                emit("watching")
            elif do == "grown":
                emit("grown", bytes=llm.collective_rpc("xfer_grown"))
            elif do == "force":
                emit("forced", **observe(llm))  # behind xfer's back
            elif do == "state":
                emit("state", version=controller.version, error=str(controller.error or ""))
            elif do == "truth":
                for folder in c["folders"]:
                    fresh = start(folder, "auto", **c["layout"])
                    emit("observed", version="", **observe(fresh))
                    fresh.llm_engine.engine_core.shutdown()
                    del fresh
                    gc.collect()
            elif do == "stop":
                if controller is not None:
                    controller.close()
                emit("stopped")
        except Exception as e:
            traceback.print_exc()
            emit("raised", type=type(e).__name__, text=str(e))


if __name__ == "__main__":
    main()
