"""vLLM's own server, with the arguments of its command line; its engine's processes are forked (small_vllm.fork_workers)."""

import os
import runpy

from tests.support.small_vllm import fork_workers

if __name__ == "__main__":
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # the routes by which a trainer controls it
    fork_workers()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
