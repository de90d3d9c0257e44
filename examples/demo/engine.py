"""The engine of the demo: a real vLLM on two worker processes, generating all the time except while a refit runs.

With --check MODEL it is instead a fresh engine that loads MODEL from disk and says what it computes: the ground truth.
"""

import argparse
import os
import sys
import threading

from examples.common import vllm_cpu
from examples.demo.events import emit

PROMPTS = [[5, 6, 7, 8], [100, 101, 102, 103], [40, 41, 42, 43, 44]]


def start(model: str, load_format: str):
    from vllm import LLM

    vllm_cpu.fork_workers()  # on GPUs this line does not exist
    return LLM(
        model=model, load_format=load_format, skip_tokenizer_init=True, tensor_parallel_size=2, enforce_eager=True, dtype="bfloat16",
        max_model_len=128, max_num_seqs=8, block_size=32, seed=0, disable_log_stats=True, weight_transfer_config={"backend": "xfer"},
    )  # fmt: skip


def observe(llm) -> list:
    """Greedy tokens and their logprobs, for each prompt."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=8, logprobs=1, detokenize=False, ignore_eos=True)
    out = []
    for r in llm.generate([{"prompt_token_ids": p} for p in PROMPTS], greedy, use_tqdm=False):
        o = r.outputs[0]
        out.append([list(o.token_ids), [round(d[t].logprob, 6) for t, d in zip(o.token_ids, o.logprobs)]])
    return out


def truth(llm) -> None:
    sums = llm.collective_rpc("compute_weight_checksums")
    emit("truth", checksums={k: v for part in sums for k, v in part.items()}, outputs=observe(llm))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--rendezvous")
    args = parser.parse_args()
    llm = start(args.model, "auto" if args.check else "dummy")
    if args.check:
        truth(llm)
        return
    import xfer

    controller = xfer.serve(llm, rendezvous=args.rendezvous, token=os.environ["XFER_TOKEN"])
    controller.wait_ready()
    emit("ready")
    controller.wait_version(timeout_s=600)  # it was started on random weights, which are not served
    finished = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), finished.set()), daemon=True).start()
    while not finished.is_set():
        with controller.serving() as engine:  # refits wait outside; nothing else does
            version = controller.version
            outputs = observe(engine)
        emit("tokens", version=version, outputs=outputs)
        finished.wait(0.2)
    with controller.serving() as engine:
        truth(engine)
    controller.close()


if __name__ == "__main__":
    main()
