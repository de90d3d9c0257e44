"""The trainers of a one-process world: this process plays every class of ranks of a Megatron-Core job on torch's fake process group.
Weights come from the checkpoint on a road that xfer has no part in: Bridge imports it into a model of one rank, and Megatron-Core's own
`sharded_state_dict()` says which box of each tensor a rank holds. So if xfer read a layout wrongly, it would move wrong bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from unittest import mock

import torch

from examples.common import megatron_cpu
from tests.support.block_fp8 import NATIVE
from tests.support.one_process import Trainers
from tests.support.te_blocks import Fp8Weights
from xfer.direct.native import Native
from xfer.direct.quantized import ROOT, Quantized
from xfer.errors import LayoutError
from xfer.mesh.parallel import TrainerParallel, place_of
from xfer.plan.inventory import trainer_inventory
from xfer.trace.catalog import Catalog
from xfer.trainers import gpu_packages
from xfer.trainers import megatron_ranks as megatron
from xfer.trainers.bridge_export import CheckpointNames, hf_config, model_bridge_of

Chunks = Sequence[torch.nn.Module]
REAL_TE = os.environ.get("XFER_TEST_TE") == "real"
"""Build the layers of TransformerEngine itself instead of those that gpu_packages.py declares."""


# ---- a rank


@dataclass(frozen=True, slots=True)
class Build:
    """How trainer ranks are built. `distopt`: whether parameters lie in the buffers of Megatron's distributed optimizer; `provider`:
    fields of Bridge's model provider (uneven stages and the like)."""

    parallel: TrainerParallel
    distopt: bool = True
    provider: Mapping[str, object] = field(default_factory=dict)

    @contextmanager
    def playing(self, rank: int, folder: str) -> Iterator[tuple[object, Chunks]]:
        """Inside, this process is `rank` of the job. A new AutoBridge for the checkpoint in `folder`, and the rank's model chunks, whose
        memory is uninitialised."""
        with megatron.rank_of(self.parallel, rank):
            bridge = import_bridge().from_hf_pretrained(folder, trust_remote_code=False)
            yield bridge, self._chunks(bridge)

    def _chunks(self, bridge) -> Chunks:
        if not self.distopt:
            return megatron.chunks_of(bridge, self.parallel, self.provider)
        from megatron.core.distributed import DistributedDataParallelConfig

        provider = megatron.make_provider(bridge, self.parallel, self.provider)
        return provider.provide_distributed_model(
            ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=50_000),
            data_parallel_random_init=False,
            bf16=provider.params_dtype == torch.bfloat16,
        )


def alone(provider: Mapping) -> Build:
    """A job of one rank. There the collectives of an export have no peers."""
    return Build(TrainerParallel(world=1), distopt=False, provider=provider)


def import_bridge() -> type:
    """Returns AutoBridge, in a process in which optimizers, too, can be built without a GPU. Must come first."""
    if REAL_TE:
        build_without_gpu()
    gpu_packages.declare()
    # `sharded_state_dict` of grouped experts asks TransformerEngine for its state of fp8, of which there is none.
    grouped = gpu_packages.GroupedLinear
    grouped.get_extra_state = lambda layer: torch.empty(0, dtype=torch.uint8)
    grouped.fp8, grouped.fp8_calibration, grouped.fp8_meta = False, False, {"fp8_checkpoint": False}
    megatron_cpu.install()
    return megatron.import_bridge()


@cache
def build_without_gpu() -> None:
    """TransformerEngine's layers are its own. All that keeps them from being built here is one question in a constructor."""
    gpu_packages.PACKAGES.remove("transformer_engine")
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule as Base

    build = Base.__init__

    def built(self, *args, **kwargs):
        with mock.patch.object(torch.cuda, "is_available", lambda: True):
            build(self, *args, **kwargs)

    Base.__init__ = built


# ---- weights, without xfer


class Checkpoint(CheckpointNames):
    """A checkpoint in memory, as Bridge asks for one while importing."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], config: object):
        super().__init__(tensors, config)
        self.update(tensors)
        self.model_name_or_path = "a checkpoint in memory"


class Whole:
    """Every tensor of a Megatron model, whole, under its key in Megatron's distributed checkpoints, as Bridge imports `tensors` into a
    model of one rank."""

    def __init__(self, folder: str, tensors: Mapping[str, torch.Tensor], provider: Mapping = {}):
        self.tensors: dict[str, torch.Tensor] = {}
        with alone(provider).playing(0, folder) as (bridge, chunks):
            _nan(chunks)
            given = Checkpoint(tensors, hf_config(bridge))
            model_bridge_of(bridge).load_weights_hf_to_megatron(given, chunks)
            for key, shape, index, data in boxes(chunks):
                full = self.tensors.setdefault(key, torch.full(shape, float("nan"), dtype=data.dtype))
                full[index].copy_(data)
        _refuse_nan(self.tensors.items(), "the checkpoint does not fill these tensors of a one-rank model")

    def into(self, chunks: Chunks) -> None:
        """Write what these chunks hold of it. LayoutError names every parameter that Megatron's boxes leave out."""
        _nan(chunks)
        for key, _, index, data in boxes(chunks):
            data.copy_(self.tensors[key][index])
        _refuse_nan(_floats(chunks), "Megatron's sharded state dict does not fill these")


def boxes(chunks: Chunks) -> Iterator[tuple[str, tuple[int, ...], tuple[int | slice, ...], torch.Tensor]]:
    """(key, whole shape, index, data) of every entry of `sharded_state_dict()` with a tensor: the live tensor `data` is `index` of the
    whole tensor `key`. LayoutError for an entry that is no view of a live parameter or buffer."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factories
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
    from megatron.core.utils import unwrap_model

    # Megatron's DDP has something else of the name `buffers`.
    tensors = [t for c in chunks for t in (*c.parameters(), *torch.nn.Module.buffers(c))]
    live = {t.untyped_storage().data_ptr() for t in tensors}
    for chunk in map(unwrap_model, chunks):
        state = chunk.sharded_state_dict(metadata=ensure_metadata_has_dp_cp_group(None))
        entries = {k: v for k, v in state.items() if isinstance(v, ShardedTensor | ShardedTensorFactory)}
        apply_factories(entries)
        for t in nested_values(entries):
            if t.data.untyped_storage().data_ptr() not in live:
                raise LayoutError(f"{t.key}: Megatron's sharded state dict has a copy here, not the live tensor")
            n = t.prepend_axis_num
            index = (*t.global_offset[:n], *(slice(o, o + e) for o, e in zip(t.global_offset[n:], t.local_shape)))
            yield t.key, tuple(t.global_shape), index, t.data.detach()


def _floats(chunks: Chunks) -> Iterator[tuple[str, torch.Tensor]]:
    for chunk in chunks:
        state = chunk.state_dict(keep_vars=True)
        yield from ((n, t) for n, t in state.items() if isinstance(t, torch.Tensor) and t.is_floating_point())


def _nan(chunks: Chunks) -> None:
    for _, t in _floats(chunks):
        t.detach().fill_(float("nan"))


def _refuse_nan(tensors, why: str) -> None:
    bad = [name for name, t in tensors if bool(t.isnan().any())]
    if bad:
        raise LayoutError(why, bad)


# ---- the world


def trainers(
    folder: str, build: Build, weights, *, every=False, deriving=(), native="", look=None, exporter=None
) -> Trainers:
    """Every class of ranks of a job that trains the checkpoint in `folder`, with `weights`, the `Whole` of each version. What an export
    computes from data of other ranks cannot be computed here. `every`: each rank is a class of its own; `deriving`: matrices that are
    quantized, and the rule for each; `native`: in block_fp8.NATIVE, for trainers that keep the weights of TransformerEngine's layers in
    FP8; `look`: called with (chunks, layout) once per class, while this process plays its first rank; `exporter`: makes the bridge that
    MegatronTrainer gets of (AutoBridge, chunks). LayoutError when two versions do not have one layout, or Megatron places a rank otherwise
    than xfer's mesh says."""
    from xfer.trainers.megatron import MegatronTrainer

    number: dict[tuple[int, ...], int] = {}
    places = ((r,) if every else tuple(place_of(build.parallel, r).values()) for r in range(build.parallel.world))
    class_of = [number.setdefault(place, len(number)) for place in places]
    firsts = [class_of.index(c) for c in range(len(number))]
    found, storages, catalog = [], [[] for _ in weights], None
    if deriving:
        specs = []
        for rank in firsts:
            with build.playing(rank, folder) as (bridge, chunks):
                specs.append((f"trainer {rank}", MegatronTrainer(chunks, bridge).read().traced.specs))
        catalog = Catalog.union(specs).deriving(deriving)
    for rank in firsts:
        with build.playing(rank, folder) as (bridge, chunks):
            own = Fp8Weights(chunks, NATIVE[native]) if native else None
            if own is not None:
                own.put(True)
            trainer = MegatronTrainer(chunks, exporter(bridge, chunks) if exporter else bridge)
            layout = trainer.read()
            held = Native(catalog or Catalog(()), layout, f"trainer {rank}")
            tensors, quantized = dict(layout.tensors), None
            if catalog is not None:
                quantized = Quantized(catalog, held.rest, torch.device("cpu"), f"trainer {rank}")
                tensors = quantized.bind(layout.tensors)
            if look is not None:
                look(chunks, layout)
            for version, whole in zip(storages, weights):
                if own is not None:
                    own.put(False)
                whole.into(chunks)
                if own is not None:
                    own.quantize()
                    own.put(True)
                    assert trainer.check() == "same"
                trainer.compute()
                if quantized is not None and quantized.roots:
                    tensors[ROOT].fill_(0x7F)  # a NaN, wherever nothing is written
                    quantized.run()
                version.append(tuple(tensors[n].clone() for n in sorted(tensors)))
            more = ((), ()) if quantized is None else (quantized.roots, quantized.fragments)
            fragments = (*layout.traced.fragments, *held.fragments, *more[1])
            found.append((rank, (*layout.roots, *more[0]), layout.traced, fragments))
    if catalog is None:
        catalog = Catalog.union((f"trainer {rank}", traced.specs) for rank, _, traced, _ in found)
    inventories = tuple(
        trainer_inventory(catalog, rank=rank, host="", roots=roots, fragments=fragments)
        for rank, roots, _, fragments in found
    )
    return Trainers(catalog, inventories, tuple(class_of), tuple(tuple(v) for v in storages))
