"""The half of tracing that knows a framework: layouts of some ranks of one side, in a process of the framework's Python.

    python -m xfer.cli.trace_child JOB        # started by tracing.py; JOB is the file that it wrote

First the framework itself checks the description, which takes a second after its import; then the process waits for the word to
go on. Each rank is played by this process, one after the other: Megatron-Core's ranks on memory that nobody touches, vLLM's on
meta tensors. Results are files beside JOB; what was done is said on standard output, a JSON object a line. Whatever the
framework prints goes to standard error.
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

from xfer.errors import XferError
from xfer.trace.catalog import Catalog

FRAMEWORKS = {"trainer": "Megatron-Core and Bridge", "engine": "vLLM"}
NAMES = "names"
"""As the side of a task: no rank is traced, the checkpoint's tensors are named by this Python's transformers."""


class Task(msgspec.Struct, forbid_unknown_fields=True):
    """`parallel`: fields of TrainerParallel or EngineParallel. `names`: of the checkpoint's tensors; None: transformers
    is asked. `options`: fields of Bridge's provider, or EngineArgs.
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


class Traced(msgspec.Struct, array_like=True):
    """A rank's specs, encoded as a catalog: what the side's catalog is the union of."""

    rank: int
    specs: bytes


def main(argv: Sequence[str]) -> int:
    path, told = Path(argv[0]), Queue()
    say = _voice()
    Thread(target=_listen, args=(told,), daemon=True).start()
    task = msgspec.msgpack.decode(path.read_bytes(), type=Task)
    try:
        {"trainer": trace_trainer, "engine": trace_engine, NAMES: name_tensors}[task.side](task, path.parent, say, told)
    except Exception as e:
        traceback.print_exc()
        if not isinstance(e, XferError):
            first = str(e).strip().splitlines()[:6] or ["no message"]
            e = XferError(f"{FRAMEWORKS.get(task.side, 'transformers')}: {type(e).__name__}: " + "\n    ".join(first))
        say(error=e.to_wire())
        return 1
    say(done=True)
    return 0


def _voice() -> Callable[..., None]:
    """Says JSON on what was standard output, which is standard error from now on for everybody else."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**fields: Any) -> None:
        out.write(json.dumps(fields) + "\n")
        out.flush()

    return say


def _listen(told: Queue) -> None:
    """What the parent says, line by line; when it is gone, nobody wants this process's work."""
    lines = open(0, "rb", buffering=0, closefd=False)  # sys.stdin's lock, held here, would spoil the end of the process
    for line in iter(lines.readline, b""):
        told.put(json.loads(line))
    os._exit(3)


def _folder(task: Task, work: Path) -> str:
    """A folder with the config and nothing else: nothing in it can be taken for weights."""
    folder = work / f"{task.side}{task.number}.config"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(task.config))
    return str(folder)


def _each(task: Task, say: Callable[..., None]) -> Iterator[int]:
    for rank in task.ranks:
        began = time.monotonic()
        yield rank
        say(rank=rank, seconds=round(time.monotonic() - began, 3))
        gc.collect()


# ---- trainers


def trace_trainer(task: Task, work: Path, say: Callable[..., None], told: Queue) -> None:
    from xfer.testing import megatron_cpu

    megatron_cpu.install()
    from xfer.mesh.parallel import TrainerParallel
    from xfer.plan.inventory import trainer_inventory
    from xfer.testing.te_everywhere import import_bridge
    from xfer.testing.world_megatron import Build, check, chunks_of, playing
    from xfer.trainers.megatron import MegatronTrainer

    bridge_class = import_bridge()
    from transformers import AutoConfig

    folder = _folder(task, work)
    _make_known(task.config)
    provider = {"perform_initialization": False, **task.options}
    build = Build(TrainerParallel(**task.parallel), distopt=False, provider=provider)
    check(bridge_class.from_hf_config(AutoConfig.from_pretrained(folder)), build)
    say(checked=True)
    told.get()
    names = _names(task, say, told)
    _touch_nothing()
    found = []
    for rank in _each(task, say):
        # Megatron leaves the attention backend of one model in the environment, and refuses another in the next.
        for name in [n for n in os.environ if n.startswith("NVTE_")]:
            del os.environ[name]
        with playing(build, rank):
            bridge = bridge_class.from_hf_config(AutoConfig.from_pretrained(folder))
            layout = MegatronTrainer(chunks_of(bridge, build), bridge, hf_names=names).read()
            found.append((rank, layout.roots, layout.traced))
        del bridge, layout
    specs = [Traced(rank, Catalog(tuple(sorted(traced.specs))).to_bytes()) for rank, _, traced in found]
    (work / f"trainer{task.number}.specs").write_bytes(msgspec.msgpack.encode(specs))
    say(specs=True)
    # The catalog is the union over all processes of this side.
    catalog = Catalog.from_bytes(Path(told.get()["catalog"]).read_bytes())
    for rank, roots, traced in found:
        recipes = (r.digest() for r in traced.recipes)
        made = trainer_inventory(
            catalog, rank=rank, host="", roots=roots, fragments=traced.fragments, recipes=recipes
        )  # fmt: skip
        (work / f"trainer.{rank}").write_bytes(made.to_bytes())


def _is_known(config: dict[str, Any]) -> bool:
    """Whether this transformers has the family."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return config.get("model_type", "") in CONFIG_MAPPING_NAMES


def _make_known(config: dict[str, Any]) -> None:
    """To AutoConfig, which has to read it."""
    from xfer.testing.te_everywhere import stand_in_config

    if not _is_known(config) and config.get("architectures"):
        stand_in_config(config["model_type"], config["architectures"][0])


def _names(task: Task, say: Callable[..., None], told: Queue) -> list[str]:
    """Of the checkpoint's tensors. Those of a family that this transformers does not know somebody else has to name."""
    if task.names is not None:
        return task.names
    if _is_known(task.config):
        from xfer.engines.hf_spec import canonical_specs

        return [s.name for s in canonical_specs(task.config)]
    say(unnamed=True)
    return told.get()["names"]


def name_tensors(task: Task, work: Path, say: Callable[..., None], told: Queue) -> None:
    from xfer.engines.hf_spec import canonical_specs

    say(names=[s.name for s in canonical_specs(task.config)])


def _touch_nothing() -> None:
    """A rank's parameters are address space until somebody writes to them: nobody may."""
    import torch

    for name, fill in list(vars(torch.nn.init).items()):
        if name.endswith("_") and not name.startswith("_") and callable(fill):
            setattr(torch.nn.init, name, lambda t, *args, **kwargs: t)


# ---- engines


def trace_engine(task: Task, work: Path, say: Callable[..., None], told: Queue) -> None:
    import torch

    from xfer.engines.meta_model import make_meta_model
    from xfer.engines.vllm_layout import EngineModel
    from xfer.mesh.parallel import EngineParallel
    from xfer.testing.world_vllm import inventory_of, rank_of

    folder, parallel = _folder(task, work), EngineParallel(**task.parallel)
    with rank_of(folder, parallel, 0, **task.options):
        say(checked=True)
    catalog = Catalog.from_bytes(Path(told.get()["catalog"]).read_bytes())
    for rank in _each(task, say):
        with rank_of(folder, parallel, rank, **task.options) as config, torch.no_grad():
            live = make_meta_model(config)
            model = EngineModel(config, live, torch.device("meta"), keep=task.keep, drop=task.drop)
            layout = model.read(catalog)
        (work / f"engine.{rank}").write_bytes(inventory_of(catalog, layout, rank).to_bytes())
        del live, model, layout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
