"""Reads layouts of some ranks of one side, in a process of that side's framework; processes.py starts it and gives the orders.

The framework first checks the description, which takes a second after its import. Then the process plays the ranks that it is told:
Megatron-Core's on memory that is never written, vLLM's on meta tensors. Catalogs and inventories travel in wire form, as base64.
"""

from __future__ import annotations

import functools
import gc
import json
from base64 import b64decode, b64encode
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from xfer.cli.children import serve
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import TensorSpec

if TYPE_CHECKING:
    from xfer.engines.layout import EngineLayout

FRAMEWORKS = {"trainer": "Megatron-Core and Bridge", "engine": "vLLM"}
NAMES = "names"
"""Side of a task that reads no layout: this Python's transformers names the checkpoint's tensors."""


class TraceTask(msgspec.Struct, forbid_unknown_fields=True):
    """The task of the processes of one side.

    Attributes:
        side: "trainer", "engine" or NAMES.
        config: contents of a Hugging Face config.json.
        parallel: fields of TrainerParallel or EngineParallel.
        options: fields of Bridge's model provider, or EngineArgs.
        keep, drop: as EngineModel takes them.
        names: of the checkpoint's tensors; None: ask transformers.
    """

    side: str
    config: dict[str, Any]
    parallel: dict[str, Any]
    options: dict[str, Any]
    keep: list[str] = []
    drop: list[str] = []
    names: list[str] | None = None


def main(file: str) -> None:
    """Run the `TraceTask` in `file`. Makes a folder beside it, with the config and nothing that could be taken for weights."""
    task, folder = msgspec.msgpack.decode(Path(file).read_bytes(), type=TraceTask), Path(file).with_suffix(".config")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(task.config))
    kind = {"trainer": TrainerRanks, "engine": EngineRanks, NAMES: TensorNames}[task.side]
    serve(FRAMEWORKS.get(task.side, "transformers"), lambda: kind(task, str(folder)))


@functools.lru_cache(1)
def _catalog(text: str) -> Catalog:
    return Catalog.from_bytes(b64decode(text))


def _told(specs: Iterable[TensorSpec]) -> str:
    return b64encode(Catalog(tuple(sorted(specs))).to_bytes()).decode()


class TensorNames:
    def __init__(self, task: TraceTask, folder: str):
        self._task = task

    def names(self) -> list[str]:
        from xfer.engines.hf_spec import canonical_specs

        return [s.name for s in canonical_specs(self._task.config)]


class TrainerRanks(TensorNames):
    def __init__(self, task: TraceTask, folder: str):
        from xfer.mesh.parallel import TrainerParallel
        from xfer.trainers import megatron_ranks

        bridge_class: Any = megatron_ranks.import_bridge()
        from transformers import AutoConfig

        super().__init__(task, folder)
        megatron_ranks.make_known(task.config)
        self._parallel = TrainerParallel(**task.parallel)
        self._found: dict[int, tuple] = {}
        self._bridge = lambda: bridge_class.from_hf_config(AutoConfig.from_pretrained(folder))
        megatron_ranks.check(self._bridge(), self._parallel, task.options)
        self._known = megatron_ranks.is_known(task.config)
        megatron_ranks.write_no_parameter()

    def names(self) -> list[str]:
        """Return the checkpoint's tensor names; none for a family that this transformers lacks."""
        return super().names() if self._known else []

    def read(self, rank: int, names: list[str]) -> str:
        """Return the checkpoint tensors that the rank exports, as a catalog. `names`: all tensor names of the checkpoint."""
        from xfer.trainers import megatron_ranks
        from xfer.trainers.megatron import MegatronTrainer

        gc.collect()
        with megatron_ranks.rank_of(self._parallel, rank):
            bridge = self._bridge()
            chunks = megatron_ranks.chunks_of(bridge, self._parallel, self._task.options)
            layout = MegatronTrainer(chunks, bridge, hf_names=names).read()
        self._found[rank] = layout.roots, layout.traced
        return _told(layout.traced.specs)

    def inventory(self, rank: int, catalog: str) -> str:
        """Return the inventory of a rank that was read. `catalog`: the exports of all ranks of this side."""
        from xfer.plan.inventory import trainer_inventory

        roots, traced = self._found[rank]
        recipes = (r.digest() for r in traced.recipes)
        made = trainer_inventory(
            _catalog(catalog), rank=rank, host="", roots=roots, fragments=traced.fragments, recipes=recipes
        )
        return b64encode(made.to_bytes()).decode()


class EngineRanks:
    def __init__(self, task: TraceTask, folder: str):
        from xfer.engines.vllm_ranks import rank_of
        from xfer.mesh.parallel import EngineParallel

        parallel = EngineParallel(**task.parallel)
        self._task = task
        self._found: dict[int, EngineLayout] = {}
        self._rank = lambda rank: rank_of(folder, parallel, rank, **task.options)
        with self._rank(0):
            pass

    def read(self, rank: int, catalog: str) -> str:
        """Return the tensors that the rank needs derived, as a catalog. `catalog`: the trainers' exports."""
        import torch

        from xfer.engines.meta_model import make_meta_model
        from xfer.engines.vllm_layout import EngineModel

        gc.collect()
        with self._rank(rank) as config, torch.no_grad():
            live, keep, drop = make_meta_model(config), self._task.keep, self._task.drop
            layout = EngineModel(config, live, torch.device("meta"), keep=keep, drop=drop).read(_catalog(catalog))
        self._found[rank] = layout
        return _told(layout.derived)

    def inventory(self, rank: int, catalog: str) -> str:
        """Return the inventory of a rank that was read. `catalog`: the trainers' exports, with what any rank of this side needs derived."""
        return b64encode(self._found[rank].inventory(_catalog(catalog), rank).to_bytes()).decode()
