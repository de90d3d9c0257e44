"""One process of torchrun that holds a whole vLLM engine (distributed_executor_backend="external_launcher"). RANK and the like are
in the environment. It takes vllm_main.py's commands.
"""

import os
from pathlib import Path

from tests.support.proc import emit, methods, obey
from tests.support.small_vllm import arguments
from tests.support.vllm_main import Engine


def name_shared_memory() -> str:
    """Make the names of shared memory begin with this launcher's port, since vLLM's CPU workers use the same names under each
    launcher of a host. Return that prefix."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as Shared

    begin, name = f"launcher-{os.environ['MASTER_PORT']}", Shared.make_group_name
    Shared.make_group_name = staticmethod(lambda communicator: begin + name(communicator).replace("/", ""))
    return begin


class Launched(Engine):
    def start(self, model: str) -> None:
        import torch.distributed as dist
        from vllm import LLM

        dist.init_process_group("gloo")  # as the trainer in such a process has; vLLM takes it over
        shared = name_shared_memory()
        how = dict(load_format="auto", distributed_executor_backend="external_launcher")
        self.llm = LLM(**arguments(model, **how))
        for path in Path("/dev/shm").glob(f"{shared}*"):  # all ranks have mapped it, and a killed one would leave it
            path.unlink(missing_ok=True)
        emit("started")


if __name__ == "__main__":
    obey(*methods(Launched()))
