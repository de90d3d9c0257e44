"""The trainer process of tests of families: real Megatron models of every kind of rank, and what xfer reads of them (proc.obey). It
asserts what must be true.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support import architectures
from tests.support.families import FAMILIES, register
from tests.support.layouts import TIED, left_out, region
from tests.support.one_process import random_weights
from tests.support.one_process_megatron import Build, Checkpoint, Whole, bridge_of, chunks_of, import_bridge, trainers
from tests.support.proc import PYTHON, ROOT, emit, environment, obey
from xfer.mesh.parallel import TrainerParallel
from xfer.trace.fragment import TensorSpec
from xfer.trainers.bridge_export import hf_config, model_bridge_of

BY_NAME = {f.name: f for f in FAMILIES}


@dataclass(frozen=True)
class Made:
    """A checkpoint on disk, the Megatron model it becomes on one rank, and what Bridge exports from that."""

    folder: str
    tensors: dict[str, torch.Tensor]
    whole: Whole
    exported: dict[str, torch.Tensor]
    bridge: str


@cache
def specs() -> dict[str, list[TensorSpec]]:
    told = subprocess.run(
        [PYTHON["engine"], "-m", "tests.support.specs_main"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip
    return {f: [TensorSpec(n, tuple(s), d) for n, s, d in rows] for f, rows in json.loads(told.stdout).items()}


WORK = tempfile.TemporaryDirectory()


@cache
def made(name: str) -> Made:
    folder, family = Path(tempfile.mkdtemp(dir=WORK.name)), BY_NAME[name]
    (folder / "config.json").write_text(json.dumps(family.config))
    tensors = random_weights(specs()[name], 0)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    whole = Whole.imported(folder, tensors, family.provider)
    build = Build(TrainerParallel(world=1), distopt=False, provider=family.provider)
    with build.playing(0), torch.no_grad():
        bridge = bridge_of(folder)
        chunks = chunks_of(bridge, build)
        whole.into(chunks)
        given = Checkpoint(tensors, hf_config(bridge))
        # On one rank the collectives of Bridge's export have no peers.
        stream = model_bridge_of(bridge).stream_weights_megatron_to_hf(chunks, given, cpu=True, show_progress=False)
        exported = {name: t.detach().clone().contiguous() for name, t in stream}
    return Made(str(folder), tensors, whole, exported, type(bridge._model_bridge).__name__)


def layout(name: str, number: int) -> None:
    """The world's fragments are what Bridge exports from one rank. Answers the layout's row for the docs."""
    family, m = BY_NAME[name], made(name)
    seen: list[tuple[list[str], object]] = []
    build = Build(family.trainer[number], provider=family.provider)
    world = trainers(
        m.folder, build, [m.whole], look=lambda rank, chunks, layout: seen.append((left_out(chunks, layout), layout))
    )
    assert sorted(s.name for s in world.catalog.specs) == sorted(m.exported) == sorted(m.tensors)
    truth = grouped(world.catalog, m.exported)
    held = {n: torch.zeros(t.shape, dtype=torch.bool) for n, t in truth.items()}
    for inventory, storages in zip(world.classes, world.weights[0]):
        roots = {r.name: s for r, s in zip(inventory.roots, storages)}
        for f in inventory.table.fragments(world.catalog, inventory.roots):
            held[f.tensor][f.index] = True
            assert same(truth[f.tensor][f.index], region(roots[f.root], f)), f
    assert all(bool(h.all()) for h in held.values()), [n for n, h in held.items() if not bool(h.all())]
    computed = {r.target for _, layout in seen for r in layout.traced.recipes}
    changed = {n for n, t in m.tensors.items() if not same(t, m.exported[n])}
    assert changed <= computed, "the checkpoint comes back, but for what the export computes"
    left = sorted({name for names, _ in seen for name in names})
    assert all(name.endswith(TIED) for name in left), left
    emit("layout", row=architectures.trainer_row(family, m.bridge, world, [x for _, x in seen], left))


def grouped(catalog, tensors) -> dict[str, torch.Tensor]:
    out = {}
    for spec in catalog.tensors:
        members = catalog.members(spec.name)
        whole = tensors[spec.name] if members == (spec.name,) else torch.stack([tensors[n] for n in members])
        out[spec.name] = whole.reshape(spec.shape)  # plans may see it in finer dims
    return out


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, after the cast to the wider dtype where a trainer holds a float32 tensor in bfloat16."""
    b = b.to(a.dtype)
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


if __name__ == "__main__":
    import_bridge()  # patches this process
    register()
    obey(layout)
