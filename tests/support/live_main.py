"""Real vLLM engines of unusual set-ups for functional tests. They take vllm_main.py's commands. Some need an AsyncLLM (data
parallel), some have a drafter, which vLLM's own checksums leave out.
"""

import asyncio
import gc
import hashlib
import os
import threading

import torch

from tests.support import cpu_data_parallel, small_vllm, vllm_main, worker_probe
from tests.support.proc import emit, methods, obey

if __name__ != "__main__":  # vLLM's workers import this module for the class below, before they make groups
    cpu_data_parallel.install()


class Probe(worker_probe.Probe):
    """Mixed into vLLM's worker."""

    def xfer_drafter(self) -> dict[str, str]:
        """sha256 of every parameter of the drafter, as vLLM has them for the model."""
        draft = self.get_draft_model()
        return {
            n: hashlib.sha256(p.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
            for n, p in (draft.named_parameters(remove_duplicate=False) if draft is not None else ())
        }


def options(**how) -> dict:
    return small_vllm.arguments(
        **{"worker_extension_cls": "tests.support.live_main.Probe", "num_gpu_blocks_override": None, **how}
    )


class InLoop:
    """An AsyncLLM with an LLM's methods: each call is awaited on a loop in a thread of its own."""

    def __init__(self, **how):
        self.loop, self.ranks = asyncio.new_event_loop(), how["data_parallel_size"]
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.engine = self.run(self._make(options(**how)))

    async def _make(self, how: dict):
        return small_vllm.asynchronous(**how)

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def answers(self) -> list:
        """Return the answers of each data-parallel rank to vllm_main's prompts."""
        asked = [(p, r) for p in vllm_main.PROMPTS for r in range(self.ranks)]
        return [self.run(small_vllm.answer(self.engine, p, rank=r)) for p, r in asked]

    def checksums(self) -> list[dict[str, str]]:
        return self.run(self.engine.compute_weight_checksums())

    def collective_rpc(self, method: str, args: tuple = ()) -> list:
        """Of the workers of all data-parallel ranks; AsyncLLM's own answers with those of the first only."""
        core = self.engine.engine_core
        return sum(self.run(core.call_utility_all_async("collective_rpc", method, None, args, None)), [])

    def shutdown(self) -> None:
        self.engine.shutdown()
        self.loop.call_soon_threadsafe(self.loop.stop)


class Synchronous:
    """An LLM with the methods of InLoop. `adapter`: folder of a LoRA, with which each prompt is asked too. `picture`: the token in
    a prompt that stands for a picture; prompts with two pictures are asked too."""

    def __init__(self, adapter: str = "", picture: int | None = None, **how):
        from vllm import LLM

        self.adapter, self.picture = adapter, picture
        self.engine = LLM(**options(**how))
        if how.get("pipeline_parallel_size", 1) > 1:
            # vLLM's CPU worker does not warm up when it is eager, and without any dummy batch a later stage has no
            # buffers for what the stage before sends: its first forward fails.
            self.engine.collective_rpc("execute_dummy_batch")

    def answers(self) -> list:
        plain = vllm_main.answers(self.engine)
        if self.picture is not None:
            from PIL import Image

            seen = [
                {"image": Image.linear_gradient("L").resize((32, 32)).rotate(turn).convert("RGB")} for turn in (0, 180)
            ]
            asked = [{"prompt_token_ids": [20, self.picture, 30], "multi_modal_data": s} for s in seen]
            pictured = vllm_main.answers(self.engine, asked)
            assert pictured[0] != pictured[1], "the model does not see its pictures"
            plain += pictured
        if not self.adapter:
            return plain
        from vllm.lora.request import LoRARequest

        adapted = vllm_main.answers(self.engine, lora_request=LoRARequest("toy", 1, self.adapter))
        assert adapted != plain
        return [plain, adapted]

    def checksums(self) -> list[dict[str, str]]:
        return self.engine.collective_rpc("compute_weight_checksums")

    def collective_rpc(self, method: str, args: tuple = ()) -> list:
        return self.engine.collective_rpc(method, args=args)

    def shutdown(self) -> None:
        self.engine.llm_engine.engine_core.shutdown()


class Engine(vllm_main.Engine):
    def made(self, **how):
        return (InLoop if how.get("data_parallel_size", 1) > 1 else Synchronous)(**how)

    def observed(self, llm) -> dict:
        sums = llm.checksums()
        found = {f"{i}: {k}": v for i, part in enumerate(sums) for k, v in part.items()}
        for i, part in enumerate(llm.collective_rpc("xfer_drafter")):
            found |= {f"{i}: draft.{k}": v for k, v in part.items()}
        return dict(outputs=llm.answers(), checksums=found)

    def serve(self, **how) -> None:
        import xfer

        loop = {"loop": self.llm.loop} if isinstance(self.llm, InLoop) else {}
        self.controller = xfer.serve(self.llm.engine, token=os.environ["XFER_TOKEN"], **loop, **how)
        emit("serving")

    def stop(self) -> None:
        self.controller.close()
        self.llm.shutdown()
        self.llm = self.controller = None
        gc.collect()
        emit("stopped")

    def truth(self, folder: str, layout: dict) -> None:
        """What a fresh engine is that loads this checkpoint."""
        fresh = self.made(model=folder, load_format="auto", **layout)
        emit("observed", version="", **self.observed(fresh))
        fresh.shutdown()
        del fresh
        gc.collect()


if __name__ == "__main__":
    obey(*methods(Engine()))
