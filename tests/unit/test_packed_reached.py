"""Which parameters a vLLM loader has reached, told by the names that it answers with."""

from __future__ import annotations

import torch

from xfer.engines.live import Slot
from xfer.packed.vllm_model import reached_by


def slots(*names: str) -> dict[str, Slot]:
    return {n: Slot(n, True, f"storage of {n}", 0, (2,), (2,), torch.bfloat16) for n in names}


def test_names_as_vllm_0_25_answers_them():
    """Its runner of experts leaves out the part that holds them; seen on GPUs, where the whole refit was refused."""
    held = slots("layers.0.mlp.experts.routed_experts.w13_weight", "layers.0.mlp.gate.weight", "norm.weight")
    said = {"layers.0.mlp.experts.w13_weight", "norm.weight"}
    assert reached_by(said, held) == {
        "storage of layers.0.mlp.experts.routed_experts.w13_weight",
        "storage of norm.weight",
    }


def test_an_answer_that_may_mean_two_parameters_counts_for_neither():
    held = slots("layers.0.q.weight", "layers.0.k.weight", "layers.1.q.weight")
    assert reached_by({"layers.0.weight", "weight", "other.weight"}, held) == set()
