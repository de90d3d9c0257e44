"""Real vLLM engines of unusual set-ups, which take vllm_main.py's commands. vLLM's own checksums leave out drafters."""

import gc
import hashlib

import torch

from tests.support import cpu_data_parallel, small_vllm, vllm_main, worker_probe
from tests.support.in_loop import InLoop
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


class Engine(vllm_main.Engine):
    adapter, picture = "", None

    def made(self, adapter: str = "", picture: int | None = None, **how):
        """adapter: folder of a LoRA, with which each prompt is asked too. picture: the token in a prompt that stands for a picture."""
        from vllm import LLM

        self.adapter, self.picture = adapter, picture
        options = {"worker_extension_cls": "tests.support.live_main.Probe", "num_gpu_blocks_override": None, **how}
        if how.get("data_parallel_size", 1) > 1:
            return InLoop(**small_vllm.arguments(**options))
        llm = LLM(**small_vllm.arguments(**options))
        if how.get("pipeline_parallel_size", 1) > 1:
            # vLLM's CPU worker does not warm up when it is eager, and without any dummy batch a later stage has no
            # buffers for what the stage before sends: its first forward fails.
            llm.collective_rpc("execute_dummy_batch")
        return llm

    def observed(self, llm) -> dict:
        found = vllm_main.observe(llm)
        for i, part in enumerate(llm.collective_rpc("xfer_drafter")):
            found["checksums"] |= {f"{i}: draft.{k}": v for k, v in part.items()}
        plain = found["outputs"]
        if self.picture is not None:
            pictured = vllm_main.answers(llm, vllm_main.pictures(self.picture))
            assert pictured[0] != pictured[1], "the model does not see its pictures"
            found["outputs"] = plain + pictured
        if self.adapter:
            from vllm.lora.request import LoRARequest

            adapted = vllm_main.answers(llm, lora_request=LoRARequest("toy", 1, self.adapter))
            assert adapted != plain
            found["outputs"] = [plain, adapted]
        return found

    def stop(self) -> None:
        self.controller.close()
        vllm_main.shut(self.llm)
        self.llm = self.controller = None
        gc.collect()
        emit("stopped")


if __name__ == "__main__":
    obey(*methods(Engine()))
