"""Layouts of Megatron-Core that test_trainer_families.py tries on a family or two: stages, cuts of experts, attention. As a program it
prints the checkpoint tensors of every family, theirs included, as JSON: {family: [[name, shape, dtype], …]}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tests.support.families import BY_NAME, FAMILIES, Config, Family, register_configs, specs_of
from xfer.mesh.parallel import TrainerParallel as T


@dataclass(frozen=True)
class Layout:
    """A family with more layers or other settings, cut in one way. `split`: fields of Bridge's provider that only ranks of this layout
    have; `refused`: a part of the error, where xfer refuses it."""

    name: str
    family: Family
    parallel: T
    split: Config = field(default_factory=dict)
    refused: str = ""


def _of(name: str, provider: Mapping[str, object] = {}, **config: object) -> Family:
    found = BY_NAME[name]
    more = dict(config={**found.config, **config}, provider={**found.provider, **provider})
    return replace(found, name=f"{name} {config} {provider}", **more)


def _stages(*names: str) -> Config:
    """One word per stage: E embedding, d decoder layer, m MTP layer, L loss."""
    kinds = {"E": "embedding", "d": "decoder", "m": "mtp", "L": "loss"}
    return dict(pipeline_model_parallel_layout=[[kinds[c] for c in stage] for stage in names])


_QWEN = _of("Qwen3", num_hidden_layers=4)
_TIED = _of("Qwen3, tied", num_hidden_layers=4)
_MTP = BY_NAME["GLM-4.5 with its MTP layer"]
_LITE = replace(_of("DeepSeek-V2", q_lora_rank=None), since="0.6")
_FUSED = replace(_of("DeepSeek-V3", dict(mla_down_proj_fusion=True)), since="0.6")

LAYOUTS = (
    Layout("uneven stages", _QWEN, T(world=4, tp=2, pp=2), _stages("Ed", "dddL")),
    Layout("a stage for the loss alone", _QWEN, T(world=4, pp=4), _stages("Edd", "d", "d", "L")),
    Layout("a stage for the loss alone, tied", _TIED, T(world=4, pp=4), _stages("E", "ddd", "d", "L")),
    Layout("uneven virtual stages", _QWEN, T(world=2, pp=2, vpp=2), _stages("E", "ddd", "d", "L")),
    Layout("first and last stage by number", _QWEN, T(world=3, pp=3), dict(
        num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=1)),
    Layout("embedding and loss count as layers", _of("Qwen3"), T(world=2, pp=2), dict(
        account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)),
    Layout("MTP beside the loss", _MTP, T(world=4, tp=2, pp=2, ep=2, etp=1), _stages("Eddd", "dmL")),
    Layout("MTP on a virtual stage", _MTP, T(world=2, pp=2, vpp=2), _stages("Ed", "dd", "d", "mL")),
    Layout("tied over virtual stages", _TIED, T(world=2, pp=2, vpp=2), _stages("Ed", "d", "d", "dL"),
           refused="use one stage per rank"),
    Layout("experts cut, the rest whole", BY_NAME["Qwen3-MoE"], T(world=4, ep=2, etp=2)),
    Layout("experts cut less than the rest", BY_NAME["Qwen3-MoE"], T(world=8, tp=4, ep=4, etp=2)),
    Layout("experts cut more than the rest", BY_NAME["GLM-4.5"], T(world=8, tp=2, ep=2, etp=4)),
    Layout("experts over all stages' ranks", BY_NAME["DeepSeek-V3"], T(world=8, tp=2, pp=2, ep=4, etp=1)),
    Layout("MLA without low-rank queries", _LITE, T(world=4, tp=2, pp=2, ep=2, etp=1), refused="no conversion for it"),
    Layout("MLA with fused down-projections", _FUSED, T(world=4, tp=2, ep=2, etp=1), refused="no conversion for it"),
    Layout("sparse MLA", BY_NAME["GLM-5"], T(world=4, tp=4, ep=2, etp=2)),
    Layout("gated delta net", BY_NAME["Qwen3-Next"], T(world=4, tp=4, ep=2, etp=2)),
    Layout("gated delta net on a stage of its own", BY_NAME["Qwen3.5, text"], T(world=4, tp=2, pp=2)),
)  # fmt: skip

if __name__ == "__main__":
    register_configs()
    every = [*FAMILIES, *(layout.family for layout in LAYOUTS)]
    json.dump({f.name: [(s.name, s.shape, s.dtype) for s in specs_of(f)] for f in every}, sys.stdout)
