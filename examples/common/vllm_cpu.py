"""vLLM on CPUs, as demos and tests start it."""

import os
from functools import cache


@cache
def fork_workers() -> None:
    """Lets vLLM fork its engine core and workers from this process, which must have no threads yet.

    Otherwise each of them imports vLLM anew, which takes longer than all that a demo asks of them. On GPUs vLLM forks by
    default; its CPU platform overwrites the setting whenever an engine is configured.
    """
    from vllm.platforms.cpu import CpuPlatform

    checked = CpuPlatform.check_and_update_config.__func__

    def check(cls, config) -> None:
        checked(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check)
