"""One process is a rank of an SGLang engine without its scheduler: its own groups, over gloo, and its own model classes.

python -m tests.support.sglang_rank PORT TP EP RANK FAMILY...       # one process for each rank; one line of JSON for each family
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.engine_bytes import differ, written
from tests.support.families import FAMILIES, register_configs, specs_of
from tests.support.one_process import random_weights

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0}
"""The positions of the published DeepSeek-V3. SGLang's class has no other on a CPU."""


def rank_of(config: dict, port: int, tp: int, ep: int, rank: int):
    """Make this process `rank` of an engine of that model. Return SGLang's ModelConfig and LoadConfig."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    folder = tempfile.mkdtemp(prefix="xfer-sglang-")
    (Path(folder) / "config.json").write_text(json.dumps(config))
    args = ServerArgs(
        model_path=folder, device="cpu", dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True,
        attention_backend="torch_native", tp_size=tp, ep_size=ep, log_level="error",
    )  # fmt: skip
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    if not dist.is_initialized():
        bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=port)
    model_config = ModelConfig.from_server_args(args)
    bootstrap.init_layer_runtime(model_config=model_config)
    initialize_moe_config()
    return model_config, LoadConfig(load_format="dummy")


def compared(family, port: int, tp: int, ep: int, rank: int) -> dict:
    from xfer.sglang.layout import SGLangModel
    from xfer.sglang.meta import make_model
    from xfer.trace.catalog import Catalog

    config = family.config
    if config["model_type"] == "deepseek_v3":
        config = {**config, "rope_scaling": YARN}
    specs = specs_of(family)
    catalog, tensors = Catalog(specs), random_weights(specs, 3)
    configs = rank_of(config, port, tp, ep, rank)
    live, reference = make_model(*configs, "cpu"), make_model(*configs, "cpu")
    model = SGLangModel(*configs, live, torch.device("cpu"))
    layout = written(model, catalog, tensors, rank, reference)
    with torch.no_grad():
        reference.load_weights((n, t.clone()) for n, t in tensors.items())
    return {
        "family": family.name,
        "class": type(live).__name__,
        "differ": differ(live, reference),
        "bytes": layout.bytes_of(layout.footprint),
        "kept": layout.bytes_of(layout.kept),
    }


def main(port: int, tp: int, ep: int, rank: int, names: list[str]) -> None:
    register_configs()
    for family in FAMILIES:
        if family.name in names:
            print(json.dumps(compared(family, port, tp, ep, rank)), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]), sys.argv[5:])
