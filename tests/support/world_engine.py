"""The engine process of world tests (proc.obey): writes checkpoints, and refits replicas of real vLLM models from a world file."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support import torchvision

torchvision.install()

from tests.support.block_fp8 import serialized  # noqa: E402
from tests.support.families import BY_NAME, Family, register_configs, specs_of  # noqa: E402
from tests.support.one_process import Job, Trainers, random_weights  # noqa: E402
from tests.support.one_process_vllm import Worker, workers  # noqa: E402
from tests.support.proc import obey  # noqa: E402
from xfer.engines.hf_spec import checkpoint_specs  # noqa: E402
from xfer.engines.meta_model import make_model  # noqa: E402
from xfer.engines.vllm_layout import EngineModel  # noqa: E402
from xfer.engines.vllm_ranks import rank_of  # noqa: E402
from xfer.mesh.parallel import EngineParallel  # noqa: E402
from xfer.plan.options import PlanOptions  # noqa: E402
from xfer.plan.planner import plan_replica  # noqa: E402
from xfer.trace.catalog import Catalog  # noqa: E402

register_configs()
GPUS = 8
"""Of a host."""


def checkpoint(folder: str, config: dict | None = None, fp32: Sequence[str] = (), family: str = "") -> dict:
    """config: HF's. fp32: globs of tensors that the checkpoint keeps in float32. family: in place of both, its name in families.py."""
    model = BY_NAME[family] if family else Family("", config, engine=(), fp32=tuple(fp32))
    specs = specs_of(model)
    Path(folder).mkdir(parents=True)
    (Path(folder) / "config.json").write_text(json.dumps(model.config))
    save_file(random_weights(specs, 0), f"{folder}/model.safetensors", metadata={"format": "pt"})
    return dict(tensors=len(specs))


def forms(folder: str, parallel: dict, options: dict) -> dict:
    """The matrices that engines of this layout ask trainers to quantize, and the rule. Tensor-parallel ranks ask for the same."""
    with rank_of(folder, EngineParallel(**parallel), 0, **options) as config:
        model = EngineModel(config, make_model(config, "cpu"), torch.device("cpu"))
        layout = model.read(Catalog(checkpoint_specs(folder)))
    return dict(forms=sorted({(s.of, s.rule) for s in layout.derived}))


def row(folder: str, world: str, parallel: dict, replicas: int, options: dict, native: str) -> dict:
    """Refits replicas from the file `world`, which family_trainer.py has left. `parallel`: EngineParallel; `options`: EngineArgs;
    `native`: see family_trainer.row."""
    trainers = Trainers.load(world)
    specs = checkpoint_specs(folder)
    versions = [random_weights(specs, v) for v in range(len(trainers.weights))]
    wanted = sorted({(s.of, s.rule) for s in trainers.catalog.specs if s.of})
    loaded = [serialized(v, wanted, native) for v in versions]
    team = workers(folder, EngineParallel(**parallel), trainers.catalog, loaded, **options)
    sources = trainers.inventories()
    hosts = [f"t{r // GPUS}" for r in range(len(sources))] + [f"e{w // GPUS}" for w in range(len(team))]
    wrong, moved = [], []
    for replica in range(replicas):
        # Small buckets, so that even a toy takes several waves.
        how = PlanOptions(bucket_bytes=1 << 16, hosts=tuple(hosts), rotation=replica)
        job = Job(plan_replica(trainers.catalog, sources, [w.inventory for w in team], how))
        for version in range(len(versions)):
            for number, w in enumerate(team):
                w.scramble(1000 * replica + 10 * number + version + 1)
            moved.append(job.run(trainers.storages(version), [w.storages for w in team]))
            for w in team:
                w.finish()
                wrong += [f"replica {replica}, version {version}: {line}" for line in w.wrong(version)]
    alike = [n for w in team for n in _alike(w)][:5]
    return dict(ranks=len(sources), workers=len(team), wrong=wrong[:5], moved=moved, alike=alike)


def _alike(w: Worker) -> list[str]:
    """Roots that the wire writes and whose two versions do not differ: a comparison there could not fail."""
    judged, written = w.judged, {w.inventory.roots[i].name for i in w.inventory.table.root.tolist()}
    return [
        r.name
        for r, a, b in zip(w.inventory.roots, *w.truth[:2])
        if r.name in written and bool(judged[r.name].any()) and not bool(((a != b) & judged[r.name]).any())
    ]


if __name__ == "__main__":
    obey(checkpoint, forms, row)
