"""One process of vLLM engines that torchrun starts (distributed_executor_backend="external_launcher"): a process has one worker and
an `LLM`, which is a whole engine or, with the LLMs of other processes, a part of one. RANK and the like are in the environment.

    {"do": "start", "model", "tp"}   {"do": "serve", "rendezvous", …}   {"do": "ready"}   {"do": "observe"}
    {"do": "follow", "port"}   {"do": "lead", "port", "rendezvous", …}
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Listener
from pathlib import Path

from tests.support.proc import emit, obey
from tests.support.small_vllm import arguments
from tests.support.vllm_main import observe as observed

KEY = b"of this test"
FORWARDED = {
    "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update", "reset_prefix_cache"
}  # fmt: skip


class Everywhere:
    """Forwards the calls of a refit to this process's LLM and to that of another, which `follow` has there."""

    def __init__(self, llm, port: int):
        self._llm, self._other, self._calls = llm, Client(("127.0.0.1", port), authkey=KEY), ThreadPoolExecutor(2)

    def __getattr__(self, method: str):
        if method not in FORWARDED:
            raise AttributeError(method)
        return lambda *args: self._call(method, args)

    def _call(self, method: str, args):
        here, there = self._calls.submit(getattr(self._llm, method), *args), self._calls.submit(self._ask, method, args)
        return here.result(), there.result()

    def _ask(self, method: str, args):
        self._other.send((method, args))
        return self._other.recv()


def name_shared_memory() -> str:
    """Give it names of this launcher: vLLM's CPU workers name theirs alike under all launchers of a host. Returns how they begin."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as Shared

    begin, name = f"launcher-{os.environ['MASTER_PORT']}", Shared.make_group_name
    Shared.make_group_name = staticmethod(lambda communicator: begin + name(communicator).replace("/", ""))
    return begin


class Engine:
    llm = controller = None

    def start(self, model: str, tp: int) -> None:
        import torch.distributed as dist
        from vllm import LLM

        dist.init_process_group("gloo")  # as the trainer in such a process has; vLLM takes it over
        shared = name_shared_memory()
        how = dict(load_format="auto", tensor_parallel_size=tp, distributed_executor_backend="external_launcher")
        self.llm = LLM(**arguments(model, **how))
        for path in Path("/dev/shm").glob(f"{shared}*"):  # all ranks have mapped it, and a killed one would leave it
            path.unlink(missing_ok=True)
        emit("started")

    def serve(self, **how) -> None:
        import xfer

        self.controller = xfer.serve(self.llm, token=os.environ["XFER_TOKEN"], **how)
        emit("serving")

    def follow(self, port: int) -> None:
        listener = Listener(("127.0.0.1", port), authkey=KEY)

        def obey_the_other() -> None:
            with listener.accept() as other:
                while True:
                    method, args = other.recv()
                    other.send(getattr(self.llm, method)(*args))

        threading.Thread(target=obey_the_other, daemon=True).start()
        emit("following")

    def lead(self, port: int, **how) -> None:
        import xfer

        nothing = dict(pause=lambda: None, resume=lambda: None)  # nobody generates meanwhile
        self.controller = xfer.serve(
            Everywhere(self.llm, port), token=os.environ["XFER_TOKEN"], workers=2, **nothing, **how
        )
        emit("serving")

    def ready(self) -> None:
        self.controller.wait_ready()
        emit("ready")

    def observe(self) -> None:
        emit("observed", **observed(self.llm))


if __name__ == "__main__":
    e = Engine()
    obey(e.start, e.serve, e.follow, e.lead, e.ready, e.observe)
