"""Whether an engine holds a checkpoint bit for bit: its checksums beside those of a new vLLM that loads the checkpoint from disk.

python -m examples.integrations.exact FOLDER [DTYPE]    # prints the new engine's checksums as a line
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

from examples.grpo.client import DIRECT

ENGINE = dict(
    skip_tokenizer_init=True, enforce_eager=True, max_model_len=128, max_num_seqs=8, block_size=32, num_gpu_blocks_override=64
)  # fmt: skip
"""Arguments of the toy engines of these examples."""
ON_CPU = {
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "XFER_CPU_RESIDENT": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
"""Environment of engines on CPUs, and of what starts them."""


def checksums(folder: str | Path, dtype: str = "bfloat16", python: str = sys.executable) -> dict[str, str]:
    """Start a vLLM with the checkpoint in `folder`, end it, and return name -> SHA-256 of each parameter's bytes."""
    done = subprocess.run(
        [python, "-m", "examples.integrations.exact", str(folder), dtype], env={**os.environ, **ON_CPU}, text=True,
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def held(url: str) -> dict[str, str]:
    """The same of what a server's worker holds. It was started with VLLM_SERVER_DEV_MODE=1."""
    data = json.dumps({"method": "compute_weight_checksums"}).encode()
    request = urllib.request.Request(f"{url}/collective_rpc", data, {"Content-Type": "application/json"})
    with DIRECT.open(request, timeout=60) as reply:
        found = json.loads(reply.read())["results"][0]
    return found if isinstance(found, dict) else json.loads(found.replace("'", '"'))


def require_equal(held: dict[str, str], wanted: dict[str, str], label: str) -> None:
    """Raise unless the two are equal, and print a line if they are."""
    wrong = sorted(n for n in held.keys() | wanted.keys() if held.get(n) != wanted.get(n))
    if wrong or not held:
        raise RuntimeError(f"{label}: {len(wrong)} of {len(wanted)} parameters differ: {', '.join(wrong[:5])}")
    print(f"{label}: {len(held)} parameters of the engine are bit-exact", flush=True)


if __name__ == "__main__":
    from examples.common.vllm_cpu import fork_workers

    fork_workers()
    from vllm import LLM

    llm = LLM(model=sys.argv[1], dtype=sys.argv[2], **ENGINE)
    print("\n" + json.dumps(llm.collective_rpc("compute_weight_checksums")[0]), flush=True)
