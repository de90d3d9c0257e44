"""Whether an engine holds a checkpoint bit for bit: its checksums beside those of a new vLLM that loads the checkpoint from disk.

python -m examples.integrations.exact FOLDER [DTYPE]    # prints the new engine's checksums as a line
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
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
START_S = 300.0
"""Longest wait for a server."""


def checksums(folder: str | Path, dtype: str = "bfloat16", python: str = sys.executable) -> dict[str, str]:
    """Start a vLLM with the checkpoint in `folder`, end it, and return name -> SHA-256 of each parameter's bytes."""
    done = subprocess.run(
        [python, "-m", "examples.integrations.exact", str(folder), dtype], env={**os.environ, **ON_CPU}, text=True,
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


@contextmanager
def start_server(folder: Path, port: int, *flags: str) -> Iterator[str]:
    """Run `vllm serve` with the backend xfer and yield its URL when it answers; it ends with the block."""
    words = f"--model {folder} --host 127.0.0.1 --port {port} --dtype bfloat16 --enforce-eager --max-model-len 128"
    words += " --block-size 32 --num-gpu-blocks-override 64"
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    given = [*words.split(), *flags, "--weight-transfer-config", '{"backend": "xfer"}']
    server = subprocess.Popen([*module, *given], env={**os.environ, **ON_CPU, "VLLM_SERVER_DEV_MODE": "1"})
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while not _answers(f"{url}/health"):
            if server.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the server of {folder} did not start: exit code {server.poll()}")
            time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def _answers(url: str) -> bool:
    try:
        with DIRECT.open(url, timeout=5):
            return True
    except OSError:
        return False


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
