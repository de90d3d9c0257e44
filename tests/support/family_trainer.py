"""The trainer process of tests of families and of whole worlds: real Megatron models of every kind of rank, and what xfer reads of them
(proc.obey). It asserts what must be true.
"""

from __future__ import annotations

import json
import logging
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from safetensors.torch import save_file

from tests.support import architectures
from tests.support.families import BY_NAME, Family, register
from tests.support.layouts import TIED, by_parameter, left_out, region
from tests.support.one_process import Trainers, random_weights
from tests.support.one_process_megatron import Build, Checkpoint, Chunks, Whole, alone, import_bridge, trainers
from tests.support.proc import PYTHON, ROOT, emit, environment, obey
from tests.support.trainer_layouts import LAYOUTS
from xfer.engines.hf_spec import checkpoint_specs
from xfer.errors import LayoutError, XferError
from xfer.mesh.parallel import TrainerParallel
from xfer.trace.collectives import objects_stay_home
from xfer.trace.fragment import TensorSpec
from xfer.trace.traced import TrainerLayout
from xfer.trainers.bridge_export import hf_config, model_bridge_of
from xfer.trainers.megatron import MegatronTrainer

TRIED = {layout.name: layout for layout in LAYOUTS}
FOUND = {layout.family.name: layout.family for layout in LAYOUTS} | BY_NAME
WORK = tempfile.TemporaryDirectory()


# ---- layouts of families


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
        [PYTHON["engine"], "-m", "tests.support.trainer_layouts"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip
    return {f: [TensorSpec(n, tuple(s), d) for n, s, d in rows] for f, rows in json.loads(told.stdout).items()}


@cache
def written(name: str) -> tuple[str, dict[str, torch.Tensor]]:
    """A checkpoint on disk, and its tensors."""
    folder, tensors = Path(tempfile.mkdtemp(dir=WORK.name)), random_weights(specs()[name], 0)
    (folder / "config.json").write_text(json.dumps(FOUND[name].config))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return str(folder), tensors


@cache
def made(name: str) -> Made:
    (folder, tensors), family = written(name), FOUND[name]
    whole = Whole(folder, tensors, family.provider)
    with alone(family.provider).playing(0, folder) as (bridge, chunks), torch.no_grad():
        whole.into(chunks)
        given = Checkpoint(tensors, hf_config(bridge))
        stream = model_bridge_of(bridge).stream_weights_megatron_to_hf(chunks, given, cpu=True, show_progress=False)
        exported = {name: t.detach().clone().contiguous() for name, t in stream}
    return Made(folder, tensors, whole, exported, type(bridge._model_bridge).__name__)


def layout(name: str, number: int) -> None:
    """The world's fragments are what Bridge exports from one rank. Answers the layout's row for the docs."""
    family = BY_NAME[name]
    parts: list[dict[str, list]] = []
    world, layouts, left = traced(family, family.trainer[number], {}, parts)
    emit("layout", parts=parts, row=architectures.trainer_row(family, made(name).bridge, world, layouts, left))


def tried(name: str) -> dict:
    """The same of a layout of trainer_layouts.py. Answers the error by which xfer refuses it, or nothing."""
    one = TRIED[name]
    if not one.refused:
        traced(one.family, one.parallel, one.split)
        return dict(error="")
    build = Build(one.parallel, provider={**one.family.provider, **one.split})
    with build.playing(0, written(one.family.name)[0]) as (bridge, chunks):
        try:
            MegatronTrainer(chunks, bridge).read()
        except XferError as e:
            return dict(error=str(e))
    raise AssertionError(f"{name}: was read")


def mbridge(name: str, number: int) -> dict:
    """The world's fragments by mbridge's export are what Bridge and mbridge export from one rank. Answers the error by which xfer
    refuses the layout, or nothing."""
    family, m = BY_NAME[name], made(name)
    with alone(family.provider).playing(0, m.folder) as (bridge, chunks), torch.no_grad(), objects_stay_home():
        m.whole.into(chunks)
        exported = {n: t.detach().clone() for n, t in of_mbridge(m, bridge, chunks).export_weights(chunks)}
        assert exported.keys() == m.exported.keys()
        assert [n for n, t in exported.items() if not same(t, m.exported[n])] == []
    # Megatron-Core marks vocabulary-parallel weights, as mbridge needs it, when it initialises them.
    try:
        traced(family, family.trainer[number], {"perform_initialization": True}, exporter=partial(of_mbridge, m))
    except LayoutError as e:
        return dict(error=str(e))
    return dict(error="")


def of_mbridge(made: Made, bridge, chunks: Chunks):
    """mbridge's bridge of the same model, on the rank that this process plays, as if it had loaded the checkpoint."""
    from mbridge import AutoBridge
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge
    from megatron.core import parallel_state
    from megatron.core.transformer import MLATransformerConfig

    # The field has this name in Megatron-Core 0.12, and mbridge 0.15.1 passes it.
    def config(*, max_position_embeddings, **given):
        return MLATransformerConfig(original_max_position_embeddings=max_position_embeddings, **given)

    DeepseekV3Bridge.TransformerConfigClass = staticmethod(config)
    theirs = hf_config(bridge)
    if not hasattr(theirs, "rope_theta"):  # where transformers 4 had it
        theirs.rope_theta = theirs.rope_parameters["rope_theta"]
    found = AutoBridge.from_config(theirs)
    found.safetensor_io = SimpleNamespace(hf_dir=made.folder, index=dict.fromkeys(made.tensors, "model.safetensors"))
    tp, named = parallel_state.get_tensor_model_parallel_world_size(), [x for c in chunks for x in c.named_parameters()]
    rows = {p.shape[0] * tp for n, p in named if "word_embeddings" in n or "output_layer" in n}
    if rows:
        found.make_vocab_size_divisible_by, found.vocab_size = 1, theirs.vocab_size
        (found.padded_vocab_size,) = rows
    return found


def traced(
    family: Family, parallel: TrainerParallel, split: Mapping, parts: list[dict[str, list]] | None = None, **more
) -> tuple[Trainers, list[TrainerLayout], list[str]]:
    """The world, the layout of each class of its ranks, and what no fragment holds. `split`: further provider fields.
    `parts`: takes `by_parameter` of each class. `more`: of `trainers`."""
    m = made(family.name)
    seen: list[tuple[list[str], TrainerLayout]] = []
    build = Build(parallel, provider={**family.provider, **split})
    parts, said = [] if parts is None else parts, []

    def look(chunks: Chunks, layout: TrainerLayout) -> None:
        seen.append((left_out(chunks, layout), layout))
        parts.append(by_parameter(chunks, layout))

    with mock.patch.object(logging.Logger, "callHandlers", lambda _, record: said.append(record.getMessage())):
        world = trainers(m.folder, build, [m.whole], look=look, **more)
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
    assert all(name.endswith(TIED) or any(fnmatchcase(name, p) for p in family.partly) for name in left), left
    dropped = [name for name in left if not name.endswith(TIED)]
    assert bool(dropped) == any("no engine gets the rest" in line for line in said), (dropped, said)
    return world, [x for _, x in seen], left


def grouped(catalog, tensors) -> dict[str, torch.Tensor]:
    out = {}
    for spec in catalog.tensors:
        members = catalog.members(spec.name)
        whole = tensors[spec.name] if members == (spec.name,) else torch.stack([tensors[n] for n in members])
        out[spec.name] = whole.reshape(spec.shape)  # plans may see it in finer dims
    return out


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, after the cast to the wider dtype where a trainer holds a float32 tensor in bfloat16."""
    a, b = (t.to(a.dtype).clone(memory_format=torch.contiguous_format) for t in (a, b))
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# ---- worlds


def row(
    folder: str, world: str, parallel: dict, provider: dict, versions: int, every=False, deriving=(), native=""
) -> dict:
    """Traces every class of ranks of a job and leaves the world in the file `world`, for world_engine.py. `parallel`: TrainerParallel;
    `provider`: fields of Bridge's provider; `every`: trace each rank of a class, too; `deriving`: (matrix, rule) of those that an engine
    wants in FP8; `native`: in block_fp8.NATIVE, for trainers that keep weights in FP8 themselves."""
    began, specs = time.perf_counter(), checkpoint_specs(folder)
    weights = [Whole(folder, random_weights(specs, v)) for v in range(versions)]
    imported = time.perf_counter()
    build = Build(TrainerParallel(**parallel), provider=provider)
    made = trainers(folder, build, weights, deriving=[tuple(pair) for pair in deriving], native=native)
    made.save(world)
    traced = time.perf_counter()
    return dict(
        ranks=len(made.class_of), classes=len(made.classes), import_s=imported - began, trace_s=traced - imported,
        fragments=sum(len(made.classes[c].table) for c in made.class_of),
        unlike=unlike(made, trainers(folder, build, weights, every=True)) if every else [],
    )  # fmt: skip


def unlike(by_class: Trainers, by_rank: Trainers) -> list[int]:
    """Ranks that are not what the first rank of their class is."""

    def same(rank: int, c: int) -> bool:
        pairs = ((a, b) for v, w in zip(by_class.weights, by_rank.weights) for a, b in zip(v[c], w[rank]))
        alike = by_class.classes[c].digest() == by_rank.classes[rank].digest()
        return alike and all(torch.equal(a, b) for a, b in pairs)

    return [rank for rank, c in enumerate(by_class.class_of) if not same(rank, c)]


if __name__ == "__main__":
    import_bridge()  # patches this process
    register()
    obey(layout, tried, mbridge, row)
