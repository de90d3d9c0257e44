"""The trainer process of tests of families: real Megatron models of every kind of rank, and what xfer reads of them (proc.obey). It
asserts what must be true.
"""

from __future__ import annotations

import json
import logging
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

from tests.support import architectures
from tests.support.families import BY_NAME, Family, register
from tests.support.layouts import TIED, by_parameter, left_out, region
from tests.support.one_process import Trainers, random_weights
from tests.support.one_process_megatron import Build, Checkpoint, Whole, bridge_of, chunks_of, import_bridge, trainers
from tests.support.proc import PYTHON, ROOT, emit, environment, obey
from tests.support.trainer_layouts import LAYOUTS
from xfer.errors import LayoutError, XferError
from xfer.mesh.parallel import TrainerParallel
from xfer.trace.collectives import objects_stay_home
from xfer.trace.fragment import TensorSpec
from xfer.trace.traced import TrainerLayout
from xfer.trainers.bridge_export import hf_config, model_bridge_of
from xfer.trainers.megatron import MegatronTrainer

TRIED = {layout.name: layout for layout in LAYOUTS}
FOUND = {layout.family.name: layout.family for layout in LAYOUTS} | BY_NAME


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
def written(name: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint on disk, and its tensors."""
    folder, tensors = Path(tempfile.mkdtemp(dir=WORK.name)), random_weights(specs()[name], 0)
    (folder / "config.json").write_text(json.dumps(FOUND[name].config))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder, tensors


@cache
def made(name: str) -> Made:
    (folder, tensors), family = written(name), FOUND[name]
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
    family = BY_NAME[name]
    parts: list[dict[str, list]] = []
    world, layouts, left = traced(family, family.trainer[number], {}, parts)
    emit("layout", parts=parts, row=architectures.trainer_row(family, made(name).bridge, world, layouts, left))


def tried(name: str) -> None:
    """The same of a layout of trainer_layouts.py. Answers the error by which xfer refuses it, or nothing."""
    one = TRIED[name]
    if not one.refused:
        traced(one.family, one.parallel, one.split)
        return emit("tried", error="")
    build = Build(one.parallel, provider={**one.family.provider, **one.split})
    with build.playing(0):
        bridge = bridge_of(written(one.family.name)[0])
        trainer = MegatronTrainer(chunks_of(bridge, build), bridge)
        try:
            trainer.read()
        except XferError as e:
            return emit("tried", error=str(e))
    raise AssertionError(f"{name}: was read")


def mbridge(name: str, number: int) -> None:
    """The world's fragments by mbridge's export are what Bridge and mbridge export from one rank. Answers the error by which xfer
    refuses the layout, or nothing."""
    family, m = BY_NAME[name], made(name)
    build = Build(TrainerParallel(world=1), distopt=False, provider=family.provider)
    with build.playing(0):
        bridge = bridge_of(m.folder)
        chunks = chunks_of(bridge, build)
        with torch.no_grad(), objects_stay_home():  # on one rank, tensor collectives have no peers
            m.whole.into(chunks)
            exported = {n: t.detach().clone() for n, t in of_mbridge(m, bridge, chunks).export_weights(chunks)}
        assert exported.keys() == m.exported.keys()
        assert [n for n, t in exported.items() if not same(t, m.exported[n])] == []
    # Megatron-Core marks vocabulary-parallel weights, as mbridge needs it, when it initialises them.
    try:
        traced(family, family.trainer[number], {"perform_initialization": True}, exporter=partial(of_mbridge, m))
    except LayoutError as e:
        return emit("mbridge", error=str(e))
    emit("mbridge", error="")


def of_mbridge(made: Made, bridge, chunks: Sequence[torch.nn.Module]):
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
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rows = {
        p.shape[0] * tp
        for c in chunks
        for n, p in c.named_parameters()
        if "word_embeddings" in n or "output_layer" in n
    }
    if rows:
        found.make_vocab_size_divisible_by, found.vocab_size = 1, theirs.vocab_size
        (found.padded_vocab_size,) = rows
    return found


def traced(
    family: Family,
    parallel: TrainerParallel,
    split: Mapping[str, object],
    parts: list[dict[str, list]] | None = None,
    **more,
) -> tuple[Trainers, list[TrainerLayout], list[str]]:
    """The world, the layout of each class of its ranks, and what no fragment holds. `split`: further provider fields.
    `parts`: takes `by_parameter` of each class. `more`: of `trainers`."""
    m = made(family.name)
    seen: list[tuple[list[str], TrainerLayout]] = []
    build = Build(parallel, provider={**family.provider, **split})
    parts = [] if parts is None else parts

    def look(rank: int, chunks: Sequence[torch.nn.Module], layout: TrainerLayout) -> None:
        seen.append((left_out(chunks, layout), layout))
        parts.append(by_parameter(chunks, layout))

    with warnings_of_xfer() as said:
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


@contextmanager
def warnings_of_xfer() -> Iterator[list[str]]:
    """The lines that xfer's logger gets inside."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("xfer").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("xfer").removeHandler(handler)


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


if __name__ == "__main__":
    import_bridge()  # patches this process
    register()
    obey(layout, tried, mbridge)
