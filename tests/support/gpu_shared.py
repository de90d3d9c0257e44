"""vLLM workers that share a GPU, where there are fewer GPUs than workers (gpu_job.SHARED). Nothing of xfer. Model, layout, CUDA graphs and
requests are those of as many GPUs. To NCCL each worker is a host of its own, since it refuses two ranks of one host on one GPU; vLLM's own
all-reduce kernels, which map other GPUs' memory, are off.
"""

from __future__ import annotations

import os

GPUS = "XFER_TEST_WORKER_GPUS"
OPTIONS = dict(
    worker_cls="tests.support.gpu_shared.SharedGpuWorker",
    distributed_executor_backend="mp",
    disable_custom_all_reduce=True,
)
"""Of `LLM`. The executor is named since vLLM would otherwise count GPUs before it chooses."""


def environment(devices: list[int]) -> dict[str, str]:
    """Of the engine's process. devices: for each worker of the replica, which of the visible GPUs it lies on."""
    return {GPUS: ",".join(map(str, devices)), "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "NCCL_MNNVL_ENABLE": "0"}


def __getattr__(name: str):
    """The worker class is made where vLLM asks for it: tests import this module without vLLM."""
    if name != "SharedGpuWorker":
        raise AttributeError(name)
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_worker import Worker

    class SharedGpuWorker(Worker):
        def init_device(self):
            p = self.parallel_config
            os.environ["NCCL_HOSTID"] = f"{os.environ.get('NCCL_HOSTID', 'worker')}-{p.data_parallel_index}-{self.rank}"
            # vLLM's own table of which local rank lies on which GPU; its option for it refuses to name one twice.
            p.assigned_physical_gpu_ids = [
                current_platform.visible_device_id_to_physical_device_id(int(g)) for g in os.environ[GPUS].split(",")
            ]
            super().init_device()

    globals()[name] = SharedGpuWorker
    return SharedGpuWorker
