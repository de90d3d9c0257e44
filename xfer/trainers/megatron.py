"""The Megatron-Core side of a refit: the place of each part of a checkpoint tensor in this rank's live storages.

`xfer.connect` takes a `MegatronTrainer` on each trainer rank. It reads the layout by running Megatron-Bridge's own export
on meta twins (bridge_export.py, xfer.trace), checks cheaply whether storages have moved (slots.py), and finishes parameter
gathers in flight before a refit reads. It moves no bytes and copies no parameter. Tensors that Bridge computes while it
exports (adapters merged into weights) are computed again in scratch before each refit (computed.py).
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from math import prod
from operator import is_
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from xfer.errors import LayoutError, RebindError, Unsupported
from xfer.kernels.cuda_driver import unmapped
from xfer.pending import drain_over, known
from xfer.tested import TRAINERS, named, untested_trainer
from xfer.trace.boxes import relocate
from xfer.trace.collectives import objects_stay_home
from xfer.trace.export import ExportWatch
from xfer.trace.fragment import Fragment, TensorSpec
from xfer.trace.slots import Binding, Slot, Slots, bare, device_of, refuse_elsewhere, walk
from xfer.trace.traced import Traced, TrainerLayout
from xfer.trainers import block_scaled, marked_writes
from xfer.trainers.bridge_export import (
    AdapterTasks,
    BridgeExport,
    CheckpointNames,
    Scales,
    factor_tasks,
    hf_config,
    model_bridge_of,
    owned_adapters,
    owned_tasks,
    process_groups,
    read_headers,
    with_factors,
)
from xfer.trainers.bridge_probe import Probed, probe_export
from xfer.trainers.computed import Computed
from xfer.trainers.mbridge_export import checkpoint_specs, follow, is_mbridge

if TYPE_CHECKING:
    from xfer.trainers.traced_stream import TracedStream

logger = logging.getLogger("xfer")
Meet = Callable[[tuple[int, ...], str], None]


class MegatronTrainer:
    """Source adapter for `xfer.connect`: one Megatron-Core trainer rank.

    Checkpoint tensors have the shapes and dtypes of the checkpoint's safetensors headers. Without headers they have those of
    the exported tensors, cut to the config's vocab_size if the vocabulary is padded. A fragment has the live parameter's own
    dtype: for a trainer in fp32 and a bf16 checkpoint the plan contains a cast, and an fp32 router bias stays fp32.

    Args:
        model_chunks: One module per virtual pipeline stage, wrapped or not.
        bridge: The AutoBridge of the model, or mbridge's bridge of it (ISEEKYAN/mbridge). With mbridge, `hf_names`, `probe` and
            `scratch_bytes` do nothing, and the packed route is refused.
        hf_names: Names of the checkpoint's tensors. Needed only if the bridge was made from a config without a checkpoint.
        probe: Probe parameters with the real conversion if their export cannot be followed symbolically. Probing is
            collective: pass it on all ranks or on none. "all" probes every parameter, as a cross-check at toy sizes.
        scratch_bytes: Most bytes of this rank for computed tensors; None: no limit. A merged LoRA needs this rank's share of
            every weight with an adapter, and the adapters' factors of its tensor-parallel group.

    Raises:
        Unsupported: The arguments are no chunks or no AutoBridge, the process groups do not exist yet, or Megatron-Core or
            Megatron-Bridge is not installed. It lists everything that is wrong.
    """

    _fence: Callable[[], object] | None = None

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module] | torch.nn.Module,
        bridge,
        *,
        hf_names: Iterable[str] | None = None,
        probe: bool | Literal["all"] = False,
        scratch_bytes: int | None = None,
    ):
        if isinstance(model_chunks, torch.nn.Module) and not isinstance(model_chunks, torch.nn.ModuleList):
            model_chunks = [model_chunks]
        bad = [*_wrong_installation(bridge), *_wrong_chunks(model_chunks), *_wrong_bridge(bridge)]
        if bad := bad or _wrong_groups(list(model_chunks), bridge):
            raise Unsupported("MegatronTrainer(model_chunks, bridge) cannot work as it was called", bad)
        self.chunks, self.bridge = list(model_chunks), bridge
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        if self.rank == 0:
            _warn_of_versions()
        self._device: torch.device | None = None  # set when the layout is first read
        self._hf_names = None if hf_names is None else tuple(hf_names)
        self._probe, self.reads_together = probe, bool(probe)
        self._scratch_bytes = scratch_bytes
        self._slots: Slots | None = None
        self._seats = block_scaled.Seats()
        self.computed: Computed | None = None
        """The tensors that this rank computes before each refit; None if there are none."""
        self._scales = Scales()
        self._groups: list[object] = []  # Megatron's groups, if computed tensors gather over them

    @property
    def device(self) -> torch.device:
        """The device of this rank's parameters when their layout was first read; before that, their present one."""
        return self._device or device_of(p for chunk in self.chunks for p in chunk.parameters())

    # ---- before bytes move

    def stream(self) -> TracedStream:
        """Return the source of the packed route, which assembles whole checkpoint tensors."""
        from xfer.trainers.traced_stream import TracedStream

        if is_mbridge(self.bridge):
            raise Unsupported(
                "mbridge on the packed route",
                ["use xfer.Direct(), or give MegatronTrainer a megatron.bridge.AutoBridge"],
            )
        return TracedStream(self)

    def drain(self) -> None:
        """`finish_gathers`, then wait for the device."""
        self.finish_gathers()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def finish_gathers(self) -> None:
        """Finish every parameter gather of this rank before further work on its current stream.

        Call it after `optimizer.step()`, on all ranks: it is collective over data-parallel groups if Megatron's distributed or
        layer-wise optimizer overlaps its gathers.

        With `overlap_param_gather`, `step()` updates only what this rank owns; pre-hooks of the next forward gather the rest.
        This brings each bucket group to the state that those hooks leave: it dispatches gathers that have not started and
        waits for all of them. A group that is done needs nothing, so a second refit is free. All gathers are dispatched before
        the first wait, so that they overlap. Gathers of a layer-wise optimizer over these chunks (xfer.layerwise) are finished
        too.

        Do not call it between backward and `step()`: as a forward would, it gathers the old values there, and Megatron then
        skips the gather of the new ones.
        """
        if self._fence is not None:
            self._fence_biases()
        groups = [g for chunk in self.chunks for g in _bucket_groups(chunk)]
        self._refuse_paused([b for g in groups if not g.param_gather_dispatched for b in g.buckets])
        for group in groups:
            if not group.param_gather_dispatched:
                group.start_param_sync()
        for group in groups:
            group.finish_param_sync(skip_next_bucket_dispatch=True)
        drain_over(p for chunk in self.chunks for p in chunk.parameters())

    def finishes_alone(self) -> bool:
        """Whether `finish_gathers` waits for no other rank: no optimizer overlaps its gathers."""
        return not known() and not any(map(_bucket_groups, self.chunks))

    def _refuse_paused(self, buckets: Sequence) -> None:
        """Raise RebindError if a gather would write to paused memory."""
        written = [(b, t) for b in buckets for t in (b.params_list if b.param_data is None else [b.param_data])]
        if gone := unmapped([t for _, t in written])():
            names = {id(slot.get()): slot.name for slot in walk(self.chunks)}
            some = ", ".join(names[id(p)] for p in written[gone[0]][0].params_list[:3])
            paused = len({id(written[i][0]) for i in gone})
            raise RebindError(
                f"trainer {self.rank}: parameters have to be gathered, and there is no memory behind them",
                [
                    f"{paused} buckets, with {some}: paused (torch_memory_saver)? Resume the weights before xfer reads them"
                ],
            )

    # ---- layout

    def fence_before(self, fence: Callable[[], object]) -> None:
        """Also call `fence` before Megatron finishes gradients, since it then updates the biases of routers, which are exported.

        Raises:
            Unsupported: There are such biases, and `finalize_model_grads_func`, which updates them, is not set yet.
        """
        self._fence = fence
        self._fence_biases()

    def _fence_biases(self) -> None:
        """Fence the function that updates the biases. Done in every refit, since Megatron-LM's `train()` sets it anew."""
        from megatron.core.utils import get_model_config

        configs = {id(c): c for c in map(get_model_config, self.chunks)}
        for config in configs.values():
            outer = finish = config.finalize_model_grads_func
            while isinstance(finish, partial) and finish.func != self._fenced:
                finish = finish.args[0] if finish.args else None  # of another session
            if isinstance(finish, partial):
                continue
            if outer is not None:
                config.finalize_model_grads_func = partial(self._fenced, outer)
            elif getattr(config, "moe_router_enable_expert_bias", False):
                raise Unsupported(
                    f"trainer {self.rank}: the biases of routers will be updated without the fence",
                    [
                        "set config.finalize_model_grads_func before fence_before, or call session.fence() before gradients are finished"
                    ],
                )

    def _fenced(self, finish: Callable[..., object], *args: object, **keywords: object) -> object:
        if self._fence is not None:
            self._fence()
        return finish(*args, **keywords)

    def mark_writes(self, optimizer: object) -> None:
        """Let Megatron's distributed optimizer mark its changes; see marked_writes.py."""
        marked_writes.mark_writes(optimizer)

    def read(self) -> TrainerLayout:
        """Trace the export of this rank. Without `probe` it uses no collective and reads no byte of a parameter.

        Raises:
            Unsupported: A setting of the model or the kind of a tensor is not supported.
            LayoutError: Bridge's export of some tensors cannot be followed, or they do not match the checkpoint.
            RebindError: Parameters have no bytes, or are on another device.
        """
        self._refuse_unsupported()
        if is_mbridge(self.bridge):
            return self._read_mbridge()
        device, model_bridge = self.device, model_bridge_of(self.bridge)
        names, index = self._checkpoint()
        slot_of = {id(slot.get()): slot for slot in walk(self.chunks)}
        with torch.no_grad():
            with objects_stay_home():
                tasks = owned_tasks(model_bridge, self.chunks, names)
                adapters = owned_adapters(model_bridge, self.chunks)
                self._refuse_unmapped([*tasks, *factor_tasks(adapters)], slot_of)
                seen = self._follow(model_bridge, names, tasks, adapters, slot_of)
            if self._probe:
                failing = None if self._probe == "all" else set(seen.failed)
                seen.replace(probe_export(model_bridge, self.chunks, names, slot_of, failing, device))
        exported = seen.result(self.rank)
        self._say_what_is_left(exported, slot_of.values())
        traced = _canonical(exported, index, self._rows(seen.vocab), self.rank)
        computed = Computed(traced, device, self._scratch_bytes) if traced.recipes or traced.gathers else None
        found = [slot_of[id(t.param_weight)] for t in (*tasks, *factor_tasks(adapters))]
        slots = Slots(self.chunks, [part for slot in found for part in block_scaled.slots_of(slot)], unmapped=unmapped)
        bound = slots.bind()
        scaled = {slot.name: slot.tensor() for slot in found if block_scaled.is_scaled(slot.get())}
        traced, scales = block_scaled.in_fp8(traced, scaled, bound.places, f"trainer {self.rank}")
        pow2 = all(map(block_scaled.has_pow2_scales, scaled.values()))
        refuse_elsewhere(slots.slots, device, f"trainer {self.rank}")
        self._slots, self._device, self._seats = slots, device, block_scaled.Seats(found)
        self.computed, self._scales = computed, Scales(self.chunks, adapters)
        self._groups = process_groups(self.chunks) if computed is not None and computed.exchanges else []
        trained = _trained(traced, found)
        traced = _relocate(traced, bound)
        if computed is None:
            return TrainerLayout(traced, bound.roots, bound.tensors, trained, scales, pow2)
        traced = replace(traced, fragments=traced.fragments + computed.fragments)
        roots, tensors = (*bound.roots, computed.root), self._with_scratch(bound.tensors)
        return TrainerLayout(traced, roots, tensors, trained, scales, pow2)

    def _read_mbridge(self) -> TrainerLayout:
        device, found = self.device, list(walk(self.chunks))
        with torch.no_grad():
            exported = follow(self.bridge, self.chunks, found, self.rank)
        if self.bridge.make_vocab_size_divisible_by is None:  # else mbridge drops the rows that it padded
            self._say_what_is_left(exported, found)
        traced = _canonical(exported, checkpoint_specs(self.bridge), {}, self.rank)
        slots = Slots(self.chunks, [slot for slot in found if slot.name in traced.reads], unmapped=unmapped)
        bound = slots.bind()
        refuse_elsewhere(slots.slots, device, f"trainer {self.rank}")
        self._slots, self._device = slots, device
        return TrainerLayout(_relocate(traced, bound), bound.roots, bound.tensors, _trained(traced, slots.slots))

    def check(self) -> str:
        """Compare storages, scales of adapters and the groups of `compute` with the last `read` or `rebind`.

        It is cheap enough to run while bytes move.

        Returns:
            "same", "moved" (call `rebind`) or "changed" (call `read`).

        Raises:
            RebindError: Parameters have no bytes, lie in paused memory, or are on another device. It lists them.
        """
        if not self._seats.hold():
            return "changed"
        state = self._slots.check() if self._slots else "changed"
        return state if self._others_hold() else "changed"

    def begin_check(self) -> Callable[[], bool] | None:
        """See participants.trainer.Source."""
        rest = self._slots.begin_check() if self._slots and self._seats.hold() else None
        return rest if rest is not None and self._others_hold() else None

    def _others_hold(self) -> bool:
        groups = self._groups
        return (not groups or all(map(is_, groups, process_groups(self.chunks)))) and self._scales.hold()

    def rebind(self) -> Mapping[str, torch.Tensor]:
        """Return root name -> flat uint8 view of the storage at its present address, after `check` returned "same" or "moved".

        The views keep the storages alive: drop them before a trainer frees or offloads its weights.
        """
        if self._slots is None:
            raise RebindError("rebind() before read()")
        return self._with_scratch(self._slots.bind().tensors)

    def _with_scratch(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        c = self.computed
        return tensors if c is None else {**tensors, c.root.name: c.storage}

    # ---- computed tensors

    def parameter(self, name: str) -> torch.Tensor:
        """Return the live tensor of a slot, for recipes: `recipe.evaluate(trainer.parameter)`.

        Raises:
            KeyError: The name is unknown.
        """
        if self._slots is None:
            raise KeyError(name)
        return self._slots.by_name[name].tensor().detach()

    def compute(self, meet: Meet = lambda ranks, digest: None) -> None:
        """Compute the scratch from the present parameters, bit for bit as Bridge would export them.

        It gathers the same tensors over Megatron's own groups as Bridge does, mainly the factors of adapters.

        Args:
            meet: `meet(ranks, digest)` is called before the first gather of a group. It returns when all its ranks are about
                to gather with equal digests, since a gather that one rank does not join would block the others.
        """
        if self.computed is None:
            return
        for x in self.computed.exchanges:
            meet(tuple(dist.get_process_group_ranks(x.group)), x.digest())
        self.computed.run(self.parameter, _all_gather)

    # ---- details

    def _checkpoint(self) -> tuple[CheckpointNames, dict[str, TensorSpec]]:
        """The names of the checkpoint's tensors, and the specs of those whose headers are on disk."""
        source = getattr(getattr(self.bridge.hf_pretrained, "state", None), "source", None)
        if self._hf_names is not None:
            return CheckpointNames(self._hf_names, hf_config(self.bridge)), {}
        if source is None:
            raise LayoutError(
                f"trainer {self.rank}: the bridge was made from a config alone; give MegatronTrainer(hf_names=...), "
                "the names of the tensors of the checkpoint that the engines serve"
            )
        files = getattr(source, "key_to_filename_map", None)
        index = read_headers(source.path, files) if files else {}
        return CheckpointNames(source.get_all_keys(), hf_config(self.bridge)), index

    def _follow(
        self, model_bridge, names: CheckpointNames, tasks, adapters: AdapterTasks, slot_of: Mapping[int, Slot]
    ) -> _Followed:
        """Export this rank's tasks on twins, symbolically."""
        factors = factor_tasks(adapters)
        slots = [slot_of[id(t.param_weight)] for t in (*tasks, *factors)]
        twins = [block_scaled.twin(t.param_weight) for t in (*tasks, *factors)]
        theirs = with_factors(adapters, twins[len(tasks) :])
        export = BridgeExport(model_bridge, self.chunks, names, tasks, twins[: len(tasks)], theirs)
        watch = ExportWatch({slot.name: t for slot, t in zip(slots, twins, strict=True)})
        seen = _Followed(self.chunks)
        with watch:
            for task, name, tensor in export:
                if not seen.admits(task, name):
                    continue
                known = len(watch.errors)
                watch.note_export(name, tensor)
                if len(watch.errors) > known:
                    seen.failed[task.global_param_name] = "; ".join(watch.errors[known:])
        seen.failed |= export.failed
        seen.traced = watch.result(strict=False)
        slot_name = {t.global_param_name: slot.name for t, slot in zip((*tasks, *factors), slots, strict=True)}
        for recipe in seen.traced.recipes:
            if recipe.foreign:
                why = f"{recipe.target}: computed ({', '.join(recipe.ops)}) from data of other ranks that came by no gather"
                seen.failed |= {g: why for g, slot in slot_name.items() if slot in recipe.sources}
        return seen

    def _rows(self, vocab: Iterable[str]) -> dict[str, int]:
        return dict.fromkeys(vocab, hf_config(self.bridge).get_text_config().vocab_size)

    def _refuse_unsupported(self) -> None:
        from megatron.core.transformer.moe.experts import SequentialMLP
        from megatron.core.utils import get_model_config

        bad = []
        for i, chunk in enumerate(self.chunks):
            wrappers = {name for m in chunk.modules() for name in type(m).__module__.split(".")}
            if "megatron_fsdp" in wrappers or getattr(getattr(chunk, "ddp_config", None), "use_megatron_fsdp", False):
                bad.append(f"chunk {i}: Megatron-FSDP keeps no whole parameter; use DDP with the distributed optimizer")
            config = get_model_config(chunk)
            bad += [
                f"chunk {i}: {setting}={getattr(config, setting)}: {why}"
                for setting, (harmless, why) in _CHANGES_WEIGHTS.items()
                if getattr(config, setting, None) not in (None, harmless)
            ]
            for path, module in chunk.named_modules():
                if isinstance(module, SequentialMLP):
                    bad.append(
                        f"{i}:{bare(path)}: SequentialMLP experts: Bridge loads the wrong ones under EP and cannot "
                        "export them; build with moe_grouped_gemm=True"
                    )
        for slot in walk(self.chunks):
            p = slot.tensor()
            if type(p) not in (torch.Tensor, torch.nn.Parameter) and (why := block_scaled.refused(p)):
                bad.append(f"{slot.name}: {why}")
            elif self._probe and block_scaled.is_scaled(p):
                bad.append(f"{slot.name}: is in FP8, and probe= needs weights that are plain tensors; leave it out")
        if _tied(self.chunks) and len(self.chunks) > 1:
            bad.append(
                "tied embeddings with virtual pipeline stages: Bridge cannot load them, so nothing says that they are "
                "right; untie them or use one stage per rank"
            )
        if bad:
            raise Unsupported(f"trainer {self.rank}: not supported", bad)

    def _refuse_unmapped(self, tasks, slot_of: Mapping[int, Slot]) -> None:
        """Refuse parameters that Bridge does not export. Bridge only logs them, and drops both gate and up if one is missing."""
        from megatron.core import parallel_state

        mapped = {id(t.param_weight) for t in tasks}
        why = "no mapping, or the checkpoint lacks one of its tensors"
        if not parallel_state.is_initialized():
            why += "; if it is an adapter's: Bridge merges adapters only after initialize_model_parallel()"
        bad = [
            f"{slot.name}: Bridge has no conversion for it: {why}"
            for key, slot in slot_of.items()
            # Megatron-Core marks the last stage's copy of an embedding, which the first stage exports.
            if key not in mapped and not getattr(slot.get(), "shared", False)
        ]
        if bad:
            raise LayoutError(f"trainer {self.rank}: trained tensors that would never reach an engine", bad)

    def _say_what_is_left(self, traced: Traced, slots: Iterable[Slot]) -> None:
        """Log trained parameters that are exported in part. Bridge drops rows for which a checkpoint has no place."""
        held = Counter[str]()
        for f in traced.fragments:
            held[f.root] += prod(f.extent)
        held -= Counter({source: held[source] for r in traced.recipes for source in r.sources})
        trained = {slot.name: slot.tensor().numel() for slot in slots if slot.tensor().requires_grad}
        left = [f"{n} ({trained[n] - of} of {trained[n]} elements)" for n, of in held.items() if of < trained.get(n, 0)]
        if left:
            logger.warning(
                f"xfer: trainer {self.rank}: Bridge exports only a part of {len(left)} trained parameters, and no engine "
                f"gets the rest: {', '.join(left[:3])}{', ...' * (len(left) > 3)}"
            )


_INTERLEAVED = "gate and up rows alternate in the live weights, and Bridge's export does not undo it; leave it unset"
_GROUPED = "one parameter holds all experts of a rank, for which Bridge has no conversion; leave it False"
_CUT_AGAIN = "weights are cut over one more group, of which Bridge knows nothing; leave it at 1"
_CHANGES_WEIGHTS: dict[str, tuple[int | None, str]] = {
    "moe_mlp_glu_interleave_size": (None, _INTERLEAVED),
    "moe_shared_expert_glu_interleave_size": (None, _INTERLEAVED),
    "moe_single_grouped_weight": (False, _GROUPED),
    "moe_single_grouped_bias": (False, _GROUPED),
    "gtp_weight_remat_size": (1, _CUT_AGAIN),
    "expert_gtp_weight_remat_size": (1, _CUT_AGAIN),
}
"""Settings of Megatron-Core 0.19 under which live weights are not those that Bridge exports: setting -> (harmless value, reason)."""


def _wrong_installation(bridge: object) -> list[str]:
    """A line for missing packages, and one if there is no process group at all."""
    needed = ("megatron.core",) if is_mbridge(bridge) else ("megatron.core", "megatron.bridge")
    missing = [name for name in needed if not _installed(name)]
    bad = []
    if missing:
        bad.append(
            f"{' and '.join(missing)}: not installed for {sys.executable}, and MegatronTrainer reads layouts by their code; install "
            f"them (tested: {named(TRAINERS)}), or for FSDP2 and plain torch modules write xfer.TensorTrainer(module)"
        )
    if not dist.is_initialized():
        bad.append(
            "no process group: call torch.distributed.init_process_group() and megatron.core.parallel_state."
            "initialize_model_parallel() and build the model, all before MegatronTrainer(...)"
        )
    return bad


def _wrong_groups(chunks: Sequence[torch.nn.Module], bridge: object) -> list[str]:
    """A line if neither Megatron-Core nor the model has process groups. mbridge asks Megatron-Core alone."""
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        return []
    if not is_mbridge(bridge):
        with suppress(RebindError):
            process_groups(chunks)
            return []
    return [
        "no process groups of Megatron: call megatron.core.parallel_state.initialize_model_parallel() and build the model, "
        "both before MegatronTrainer(...), or build it with a pg_collection of its own (Megatron-Bridge 0.6)"
    ]


def _warn_of_versions() -> None:
    """Log a line if these releases of the frameworks were not tested together. A checkout may have no version."""
    core, bridge = (getattr(sys.modules.get(f"megatron.{name}"), "__version__", None) for name in ("core", "bridge"))
    if core and bridge and (line := untested_trainer(core, bridge)):
        logger.warning("xfer: %s", line)


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def _wrong_chunks(given: object) -> list[str]:
    expected = "give Megatron's model: the list of modules that its get_model() returns, or one module"
    if not isinstance(given, list | tuple | torch.nn.ModuleList):
        return [f"model_chunks is {_described(given)}; {expected}"]
    if not given:
        return [f"model_chunks is empty; {expected}"]
    return [
        f"model_chunks[{i}]: is {_described(chunk)}; {expected}"
        for i, chunk in enumerate(given)
        if not isinstance(chunk, torch.nn.Module)
    ]


def _wrong_bridge(given: object) -> list[str]:
    """Check the attributes that are used. An import of Bridge, to compare classes, would take seconds."""
    if hasattr(type(given), "_model_bridge") and hasattr(given, "hf_pretrained"):
        return []
    if is_mbridge(given):
        return []
    write = (
        "give a megatron.bridge.AutoBridge: bridge = megatron.bridge.AutoBridge.from_hf_pretrained(folder of the checkpoint); or "
        "mbridge's bridge that built the model"
    )
    return [f"bridge is {_described(given)}; {write}"]


def _described(x: object) -> str:
    if x is None:
        return "None"
    kind = x if isinstance(x, type) else type(x)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"the class {name} itself" if isinstance(x, type) else f"of type {name}"


class _Followed:
    """The result of following an export.

    Attributes:
        traced: Fragments, recipes and specs.
        failed: Global parameter name -> reason.
        vocab: Names of tensors whose first dim is the vocabulary, the only dim that Megatron pads.
    """

    traced: Traced

    def __init__(self, chunks: Sequence[torch.nn.Module]):
        from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
        from megatron.core.utils import unwrap_model

        self.failed: dict[str, str] = {}
        self.vocab: set[str] = set()
        self._refused: list[str] = []
        self._tied = _tied(chunks)
        self._first: dict[str, str] = {}  # tied parameter -> the one name that is kept for it
        self._embedding = VocabParallelEmbedding
        self._heads = {id(getattr(unwrap_model(chunk), "output_layer", None)) for chunk in chunks} - {id(None)}

    def admits(self, task, name: str) -> bool:
        """Whether an exported name is a checkpoint tensor of its own.

        Bridge yields a tied embedding a second time as the output layer if the checkpoint lists it. One tensor is enough: an
        engine that unties them loads the embedding into both.
        """
        if isinstance(task.megatron_module, self._embedding) or id(task.megatron_module) in self._heads:
            self.vocab.add(name)
            return not self._tied or self._first.setdefault(task.param_name, name) == name
        return True

    def replace(self, probed: Probed) -> None:
        """Replace the fragments of the probed tasks, also of those that were probed because another rank failed."""
        admitted = {name for name, task in probed.tasks.items() if self.admits(task, name)}
        mine = {slot.name for slot in probed.slots}
        self.failed, self._refused = {}, probed.errors  # every failing task was probed
        fragments = [f for f in self.traced.fragments if f.root not in mine]
        fragments += [f for f in probed.fragments if f.tensor in admitted]
        specs = {s.name: s for s in (*self.traced.specs, *(s for s in probed.specs if s.name in admitted))}
        self.traced = replace(
            self.traced,
            specs=tuple(sorted(specs.values())),
            fragments=tuple(sorted(fragments, key=lambda f: (f.tensor, f.origin, f.root, f.offset))),
            recipes=tuple(r for r in self.traced.recipes if not mine.issuperset(r.sources)),
            reads=tuple(sorted({*self.traced.reads, *(f.root for f in fragments)})),
            unread=tuple(sorted(set(self.traced.unread) - {f.root for f in fragments})),
        )

    def result(self, rank: int) -> Traced:
        bad = [f"{name}: {why}" for name, why in sorted(self.failed.items())] + self._refused
        if not bad:
            bad = [f"{slot}: no exported tensor holds it" for slot in self.traced.unread]
        if bad:
            raise LayoutError(f"trainer {rank}: Bridge's export of these cannot be followed", bad)
        return self.traced


def _all_gather(group: dist.ProcessGroup, mine: torch.Tensor) -> list[torch.Tensor]:
    """Gather `mine` of each rank of Megatron's `group`. It has the same size on all of them."""
    slots = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather([slots], [mine]).wait()
    return slots


def _bucket_groups(chunk: Any) -> list:
    """Megatron's bucket groups with gathers that may be pending: none unless an optimizer overlaps them.

    That is the distributed optimizer or, from Megatron-Core 0.19 on, its layer-wise one, whose buckets list their parameters
    by owner.
    """
    while chunk is not None and not hasattr(chunk, "bucket_groups"):
        chunk = getattr(chunk, "module", None)
    config = getattr(chunk, "ddp_config", None)
    if config is None or not config.overlap_param_gather:
        return []
    groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
    if config.use_distributed_optimizer:
        return groups
    return [g for g in groups if any(getattr(b, "layerwise_params_list", None) for b in g.buckets)]


def _tied(chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether embeddings are tied: the config's flag, as Bridge reads it. An output layer may be there in both cases."""
    from megatron.core.utils import get_model_config, unwrap_model

    fallback = getattr(unwrap_model(chunks[0]), "share_embeddings_and_output_weights", False)
    return bool(getattr(get_model_config(chunks[0]), "share_embeddings_and_output_weights", fallback))


def _canonical(traced: Traced, index: Mapping[str, TensorSpec], rows: Mapping[str, int], rank: int) -> Traced:
    """Return the trace with the checkpoint's specs, and with fragments cut to them if the vocabulary is padded.

    `index`: specs from the checkpoint's headers. `rows`: vocab_size, for the tensors whose first dim is the vocabulary.
    """
    specs, bad = {}, []
    for spec in traced.specs:
        want = index.get(spec.name)
        if want is None:
            n = rows.get(spec.name, None)
            want = spec if n is None else replace(spec, shape=(min(n, spec.shape[0]), *spec.shape[1:]))
        split = spec.split if want.shape == spec.shape else ()
        if want.split != split:
            want = replace(want, split=split)
        padded = spec.name in rows and spec.shape[0] >= want.shape[0] and spec.shape[1:] == want.shape[1:]
        if spec.shape != want.shape and not padded:
            bad.append(f"{spec.name}: exported as {spec.shape}, the checkpoint has {want.shape}")
        specs[spec.name] = want
    bad += [
        f"{r.target}: is computed ({', '.join(r.ops)}) and has a padded vocabulary"
        for r in traced.recipes
        if specs[r.target].shape != next(s.shape for s in traced.specs if s.name == r.target)
    ]
    if bad:
        raise LayoutError(f"trainer {rank}: tensors whose shape disagrees with the checkpoint's", bad)
    fragments = (_cut(f, specs[f.tensor].shape) for f in traced.fragments)
    return replace(traced, specs=tuple(sorted(specs.values())), fragments=tuple(f for f in fragments if f is not None))


def _cut(f: Fragment, shape: tuple[int, ...]) -> Fragment | None:
    """The part of `f` inside a checkpoint tensor of `shape`; None if all of it is padding."""
    if not shape or f.index[0].stop <= shape[0]:
        return f
    n = len(range(f.origin[0], shape[0], f.index[0].step))
    if n <= 0:
        return None
    return replace(f, extent=(n, *f.extent[1:]), strides=(f.strides[0] if n > 1 else 0, *f.strides[1:]))


def _trained(traced: Traced, slots: Iterable[Slot]) -> frozenset[str]:
    """Names of exported tensors that lie in, or are computed from, a parameter that requires grad."""
    grad = {slot.name for slot in slots if slot.tensor().requires_grad}
    held = {f.tensor for f in traced.fragments if f.root in grad}
    return frozenset(held | {r.target for r in traced.recipes if not grad.isdisjoint(r.sources)})


def _relocate(traced: Traced, bound: Binding) -> Traced:
    """Return the trace with fragments by storage instead of by parameter.

    A twin begins at byte 0 of its own storage; its parameter may lie anywhere in a shared one.
    """
    places = {name: (place.root, place.offset) for name, place in bound.places.items()}
    return replace(traced, fragments=tuple(relocate(traced.fragments, places)))
