"""Vision-language engines on GPUs, live, with their towers, which are sent whole or kept as they are: every byte is compared with what
vLLM's own loader makes of the same weights, and the model is asked about pictures. Needs torchvision.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.support import checkpoints
from tests.support.families import BY_NAME
from tests.support.gpu_job import SHARED, TOY, Job, gpus

pytest.importorskip("vllm")
GPUS = gpus()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU")]
TRITON = {"gdn_prefill_backend": "triton"}
"""Of linear attention. vLLM takes FlashInfer on Hopper, which not every host has."""
WIDE = {k: v for k, v in TOY.items() if k != "vocab_size"}


def _qwen(name: str, **text) -> dict:
    family = BY_NAME[name].config
    tower = {**family["vision_config"], "out_hidden_size": TOY["hidden_size"]}
    return {**family, "vision_config": tower, "text_config": {**family["text_config"], **WIDE, **text}}


def _rope(at: str, name: str, sections: list[int]) -> dict:
    """Sections of the rotary embedding for heads of 64."""
    return {at: {**BY_NAME[name].config["text_config"][at], "mrope_section": sections}}


CASES = {
    "Qwen3-VL": _qwen("Qwen3-VL", **_rope("rope_scaling", "Qwen3-VL", [12, 10, 10])),
    "Qwen3.5": _qwen("Qwen3.5", **_rope("rope_parameters", "Qwen3.5", [4, 2, 2])),
    "Qwen3.5-MoE": _qwen("Qwen3.5-MoE", **_rope("rope_parameters", "Qwen3.5-MoE", [4, 2, 2])),
}


@pytest.mark.skipif(GPUS < 2 and not SHARED, reason="needs two GPUs, or XFER_SHARE_GPUS=1")
@pytest.mark.parametrize("kept", [False, True], ids=["sent", "kept"])
@pytest.mark.parametrize("name", CASES)
def test_a_vision_language_engine_holds_every_byte_and_sees(tmp_path, name, kept):
    pytest.importorskip("torchvision")
    config = CASES[name]
    with Job(tmp_path, config) as job:
        checkpoints.write_processor(job.folder, config)
        how = dict(limit_mm_per_prompt={"image": 1, "video": 0}, additional_config=TRITON, skip_tokenizer_init=False)
        build = partial(job.plain, leave="model.visual." if kept else "")
        engine = job.pair([1], dict(eager=True, **how), build=build, keep=("visual.*",) if kept else ())
        for seed in (1, 2):
            job.verified(seed)
            job.good("export", "exported", folder=str(tmp_path / "whole"))
            (wrong,) = engine.wrong(folder=str(tmp_path / "whole"))
            assert all(n.startswith("visual.") for n, *_ in wrong) if kept else not wrong, wrong
            assert bool(wrong) == kept
            first, second = engine.ask("see", "seen", token=config["image_token_id"])["outputs"]
            assert first != second, "the model does not see its pictures"
