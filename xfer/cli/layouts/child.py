"""Reads layouts of some ranks of one side, in a process of that side's framework; processes.py starts it.

    python -m xfer.cli.layouts.child TASK        # TASK: a file that holds a `TraceTask`

The framework first checks the description, which takes a second after its import. Then the process waits until it is
told to go on, and plays one rank after the other: Megatron-Core's ranks on memory that is never written, vLLM's on meta
tensors. It writes one inventory per rank beside TASK and reports each step as a line of JSON on standard output; what
the framework prints goes to standard error.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import msgspec

from xfer.errors import LayoutError, XferError
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import TensorSpec

FRAMEWORKS = {"trainer": "Megatron-Core and Bridge", "engine": "vLLM"}
NAMES = "names"
"""Side of a task that reads no layout: this Python's transformers names the checkpoint's tensors."""


class TraceTask(msgspec.Struct, forbid_unknown_fields=True):
    """What one process does.

    Attributes:
        side: "trainer", "engine" or NAMES.
        number: of this process among those of its side.
        config: contents of a Hugging Face config.json.
        parallel: fields of TrainerParallel or EngineParallel.
        ranks: whose layouts this process reads.
        options: fields of Bridge's model provider, or EngineArgs.
        keep, drop: as EngineModel takes them.
        names: of the checkpoint's tensors; None: ask transformers.
    """

    side: str
    number: int
    config: dict[str, Any]
    parallel: dict[str, Any]
    ranks: list[int]
    options: dict[str, Any]
    keep: list[str] = []
    drop: list[str] = []
    names: list[str] | None = None


class TracedRank(msgspec.Struct, array_like=True):
    """The checkpoint tensors that one trainer rank exports, or those that an engine's rank needs derived, as an encoded catalog."""

    rank: int
    specs: bytes


def main(argv: Sequence[str]) -> int:
    path = Path(argv[0])
    told: Queue[dict[str, Any]] = Queue()
    say = _take_stdout()
    Thread(target=_listen, args=(told,), daemon=True).start()
    task = msgspec.msgpack.decode(path.read_bytes(), type=TraceTask)
    try:
        {"trainer": read_trainer, "engine": read_engine, NAMES: name_tensors}[task.side](task, path.parent, say, told)
    except Exception as e:
        traceback.print_exc()
        if not isinstance(e, XferError):
            first = str(e).strip().splitlines()[:6] or ["no message"]
            e = XferError(f"{FRAMEWORKS.get(task.side, 'transformers')}: {type(e).__name__}: " + "\n    ".join(first))
        say(error=e.to_wire())
        return 1
    say(done=True)
    return 0


def _take_stdout() -> Callable[..., None]:
    """Returns a function that writes JSON lines to standard output; all other output goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**fields: Any) -> None:
        out.write(json.dumps(fields) + "\n")
        out.flush()

    return say


def _listen(told: Queue) -> None:
    """Queues the parent's lines; ends this process when the parent is gone."""
    lines = open(
        0, "rb", buffering=0, closefd=False
    )  # a thread that holds sys.stdin's lock blocks the interpreter's exit
    for line in iter(lines.readline, b""):
        told.put(json.loads(line))
    os._exit(3)


def _folder(task: TraceTask, work: Path) -> str:
    """A folder that holds the config and nothing that could be taken for weights."""
    folder = work / f"{task.side}{task.number}.config"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(task.config))
    return str(folder)


def _each(task: TraceTask, say: Callable[..., None]) -> Iterator[int]:
    for rank in task.ranks:
        began = time.monotonic()
        yield rank
        say(rank=rank, seconds=round(time.monotonic() - began, 3))
        gc.collect()


# ---- trainers


def read_trainer(task: TraceTask, work: Path, say: Callable[..., None], told: Queue) -> None:
    from xfer.cli.layouts import megatron
    from xfer.mesh.parallel import TrainerParallel
    from xfer.plan.inventory import trainer_inventory
    from xfer.trainers.megatron import MegatronTrainer

    bridge_class = megatron.import_bridge()
    from transformers import AutoConfig

    folder, parallel = _folder(task, work), TrainerParallel(**task.parallel)
    megatron.make_known(task.config)

    def new_bridge():
        return bridge_class.from_hf_config(AutoConfig.from_pretrained(folder))

    megatron.check(new_bridge(), parallel, task.options)
    say(checked=True)
    told.get()
    names = _names(task, say, told)
    megatron.write_no_parameter()
    found = []
    for rank in _each(task, say):
        with megatron.rank_of(parallel, rank):
            bridge = new_bridge()
            chunks = megatron.chunks_of(bridge, parallel, task.options)
            try:
                layout = MegatronTrainer(chunks, bridge, hf_names=names).read()
            except LayoutError:
                # Releases of transformers name a family differently: 5.12 has nemotron_h's embedding as no checkpoint has it.
                before, names = names, _named_by_parent(say, told) if task.names is None else names
                if names == before:
                    raise
                layout = MegatronTrainer(chunks, bridge, hf_names=names).read()
            found.append((rank, layout.roots, layout.traced))
        del bridge, chunks, layout
    catalog = _agreed(task, [(rank, traced.specs) for rank, _, traced in found], work, say, told)
    for rank, roots, traced in found:
        made = trainer_inventory(
            catalog,
            rank=rank,
            host="",
            roots=roots,
            fragments=traced.fragments,
            recipes=(r.digest() for r in traced.recipes),
        )
        (work / f"trainer.{rank}").write_bytes(made.to_bytes())


def _agreed(
    task: TraceTask,
    found: Sequence[tuple[int, Sequence[TensorSpec]]],
    work: Path,
    say: Callable[..., None],
    told: Queue,
) -> Catalog:
    """Tells the parent which tensors these ranks name, and returns its catalog of those that all ranks of this side name."""
    specs = [TracedRank(rank, Catalog(tuple(sorted(some))).to_bytes()) for rank, some in found]
    (work / f"{task.side}{task.number}.specs").write_bytes(msgspec.msgpack.encode(specs))
    say(specs=True)
    return Catalog.from_bytes(Path(told.get()["catalog"]).read_bytes())


def _names(task: TraceTask, say: Callable[..., None], told: Queue) -> list[str]:
    """Names of the checkpoint's tensors; the parent is asked for those of a family that this transformers lacks."""
    from xfer.cli.layouts.megatron import is_known

    if task.names is not None:
        return task.names
    if is_known(task.config):
        return _named_by_transformers(task)
    return _named_by_parent(say, told)


def _named_by_parent(say: Callable[..., None], told: Queue) -> list[str]:
    say(unnamed=True)
    return told.get()["names"]


def _named_by_transformers(task: TraceTask) -> list[str]:
    from xfer.engines.hf_spec import canonical_specs

    return [s.name for s in canonical_specs(task.config)]


def name_tensors(task: TraceTask, work: Path, say: Callable[..., None], told: Queue) -> None:
    say(names=_named_by_transformers(task))


# ---- engines


def read_engine(task: TraceTask, work: Path, say: Callable[..., None], told: Queue) -> None:
    import torch

    from xfer.cli.layouts.vllm import rank_of
    from xfer.engines.meta_model import make_meta_model
    from xfer.engines.vllm_layout import EngineModel
    from xfer.mesh.parallel import EngineParallel

    folder, parallel = _folder(task, work), EngineParallel(**task.parallel)
    with rank_of(folder, parallel, 0, **task.options):
        say(checked=True)
    catalog = Catalog.from_bytes(Path(told.get()["catalog"]).read_bytes())
    found = []
    for rank in _each(task, say):
        with rank_of(folder, parallel, rank, **task.options) as config, torch.no_grad():
            live = make_meta_model(config)
            model = EngineModel(config, live, torch.device("meta"), keep=task.keep, drop=task.drop)
            found.append((rank, model.read(catalog)))
        del live, model
    catalog = _agreed(task, [(rank, layout.derived) for rank, layout in found], work, say, told)
    for rank, layout in found:
        (work / f"engine.{rank}").write_bytes(layout.inventory(catalog, rank).to_bytes())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
