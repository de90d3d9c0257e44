"""The model of one vLLM worker on the packed route: its own `load_weights` loads it, bucket by bucket.

If the live weights have the layout in which they were loaded, the loader writes them in place. If vLLM processed them after
loading (quantized, experts laid out anew, packed for the CPU), vLLM's own layer-wise reload loads and processes each layer
again and copies it to its old place.

An engine that takes block FP8 from a checkpoint gets values and scales as such a checkpoint has them: they are made of each whole
tensor here. A trace of its loader says which tensors these are; nothing else is traced.

Both routes share the `LiveWeights` of the engine (weights.py), so either route repairs a model that the other left torn.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from xfer.engines.checks import matches, refuse_other_family
from xfer.engines.hf_spec import specs_of_config
from xfer.engines.live import LiveSlot, LiveStorages
from xfer.engines.lock import alone
from xfer.engines.processed import read_processed, without_scales
from xfer.engines.settings import PLAIN_CACHES, has_drafter, refuse_settings
from xfer.errors import LayoutError, Unsupported, out_of_memory
from xfer.kernels.block_fp8 import WEIGHT_DTYPES
from xfer.kernels.quantize import ScaleRule, WeightBox, grid, quantizer
from xfer.trace.fragment import TensorSpec

if TYPE_CHECKING:
    from xfer.engines.vllm_layout import EngineModel
    from xfer.trace.catalog import Catalog

logger = logging.getLogger("xfer")


class PackedModel:
    """Implements `Loader` (packed/worker.py)."""

    def __init__(self, engine: EngineModel):
        self.engine, self.weights = engine, engine.weights
        self._layerwise = False
        self._scales: dict[str, str] = {}  # tensor that is quantized here -> name of its scales
        self._rule = ScaleRule.IEEE
        self._open = False  # a layer-wise reload has begun
        self._loaded: set[str] | None = set()  # parameters that the engine's loader has loaded; None: it does not say
        self._as_loaded: frozenset[str] | None = None  # parameters that a layer-wise reload loads; None: the live ones
        self._plain_scales: frozenset[str] | None = None  # of attention; found at the first layer-wise reload

    # ---- joining

    def accept(self, catalog: Catalog) -> None:
        """Check that this engine can take what the trainers export.

        Args:
            catalog: The trainers' checkpoint tensors.

        Raises:
            LayoutError: The names of both sides differ. This is checked if transformers knows the engine's config.
            Unsupported: The packed route cannot refit this engine.
        """
        engine = self.engine
        refuse_settings(engine.vllm_config, engine.workers)
        bad = []
        if engine.keep:
            bad.append(f"keep={list(engine.keep)}: loaders write what they are given; use the direct route, or drop=")
        if engine.vllm_config.parallel_config.enable_eplb:
            bad.append("this engine moves experts between workers while it serves; start vLLM without EPLB")
        if getattr(engine.vllm_config, "lora_config", None) is not None:
            bad.append("enable_lora wraps layers under other names than the loader's; start vLLM without it")
        if engine.draft is not None or has_drafter(engine.vllm_config):
            bad.append("a drafter is a second model that the loader does not reach")
        if hasattr(engine.model, "process_weights_after_loading"):
            bad.append(
                f"{type(engine.model).__name__} makes tensors of its weights once all are loaded, and vLLM's reload does not make them "
                "again; use the direct route"
            )
        specs = self._wanted(catalog.specs)
        bad += self._find_scales(specs)
        if bad:
            raise Unsupported("the packed route cannot refit this engine", bad)
        live, self._plain_scales = LiveStorages(engine.model), None
        engine.refuse_asleep(live)
        # Every small vector may be the lock, since a refit that leaves one out does not commit.
        self.weights.watch(live, [s for s in alone(live) if s.is_parameter])
        expected = specs_of_config(engine.vllm_config.model_config.hf_config)
        if expected is not None:
            head = engine._untied_head(engine.model, specs, expected)
            ours = [s for s in expected if head is None or s != head.spec]
            refuse_other_family(specs, ours, engine.vllm_config.model_config.model)
            if head is not None and not head.tied():
                raise LayoutError(
                    "this engine's checkpoint has a head of its own, which loaders fill from no other tensor",
                    [
                        f"{head.spec.name}: the trainers tie it and do not send it; use the direct route, or start vLLM from "
                        "a checkpoint without it"
                    ],
                )
        emptied = any(slot.is_parameter and not slot.root for slot in live.slots.values())
        try:
            processed = read_processed(engine.model)
        except Unsupported:
            self._layerwise, self._rule = True, ScaleRule.IEEE  # as a checkpoint has it
        else:  # vLLM may quantize FP8 weights again
            self._layerwise = emptied or bool(processed.relaid) or processed.rule is not None
            self._rule = processed.rule or ScaleRule.IEEE
        kinds = {(s.dtype, s.shape[1]) for s in specs if s.name in self._scales}
        # Kernels are loaded now: loading one beside NCCL's can hang the host.
        rows = [torch.empty(1, n, dtype=getattr(torch, dtype), device=engine.device) for dtype, n in kinds]
        quantizer([WeightBox(row, *_room(row)) for row in rows], self._rule)

    def _find_scales(self, specs: Sequence[TensorSpec]) -> list[str]:
        """Find the tensors that are quantized here. Return a line for each weight in FP8 that would get no scale."""
        model, names, made, why = self.engine.model, {s.name for s in specs}, frozenset[str](), ""
        self._scales = {}
        if without_scales(model, ()):
            try:
                scales, made = self.engine.scale_names(specs)
            except (LayoutError, Unsupported) as e:
                why = f"; xfer cannot make them: {e.line()}"
            else:
                self._scales = {n: scale for n, scale in scales.items() if scale not in names}
        bad = [line + why for line in without_scales(model, names, made)]
        return bad + [
            f"{s.name}: is {s.dtype} and comes without {self._scales[s.name]}; send that too, or the weight in bf16 or fp32"
            for s in specs
            if s.name in self._scales and getattr(torch, s.dtype) not in WEIGHT_DTYPES
        ]

    def check(self) -> None:
        """Refuse an engine that sleeps."""
        self.engine.refuse_asleep(self.weights.live)

    def _wanted(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        return [s for s in specs if not matches(s.name, self.engine.drop)]

    # ---- loading

    def begin(self, specs: Sequence[TensorSpec]) -> None:
        self._loaded = set()
        self._dropped = {s.name for s in specs} - {s.name for s in self._wanted(specs)}
        if self._open:  # an earlier refit failed inside a reload; layers are opened again only when they were closed
            self._close_layers()
        if self._layerwise:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            if self._plain_scales is None:
                self._plain_scales = _plain_scales(self.engine.model)
            live, unread = self._parameters(), _plain_caches(self.engine.model)
            with self._inside():
                self._open = True
                initialize_layerwise_reload(self.engine.model)
            # Processing may add parameters (scales) that no loader knows.
            opened = self._parameters() - self._plain_scales
            self._as_loaded = opened - {n for n in opened - live if n.rpartition(".")[0] in unread}

    def _parameters(self) -> frozenset[str]:
        return frozenset(n for n, _ in self.engine.model.named_parameters(remove_duplicate=False))

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Load one bucket of tensors.

        Raises:
            LayoutError: The engine's loader refuses a tensor. It names the tensors of the bucket. An error for lack of memory
                passes unchanged.
        """
        given = [(n, t) for n, t in tensors if n not in self._dropped]
        if not given:
            return
        try:
            with self._inside(), torch.no_grad():
                loaded = self.engine.model.load_weights(self._offered(given))
        except Exception as e:
            if out_of_memory(e):
                raise
            what = f"{type(e).__name__}: {e}"
            names = [f"{n}: {str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for n, t in given]
            raise LayoutError(f"the engine's loader refused one of {len(given)} tensors: {what}"[:2000], names) from e
        if loaded is None or self._loaded is None:
            self._loaded = None
        else:
            self._loaded |= set(loaded)

    def _offered(self, given: Sequence[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors as the engine's loader takes them. A layer-wise reload keeps them longer than the buffer does: it gets copies."""
        made = {n: _room(t) for n, t in given if n in self._scales}
        quantizer([WeightBox(t, *made[n]) for n, t in given if n in made], self._rule).run()
        for name, t in given:
            if name in made:
                yield from zip((name, self._scales[name]), made.pop(name))
            else:
                yield name, t.clone() if self._layerwise else t

    def finish(self) -> None:
        """Finish loading, before the commit.

        Raises:
            LayoutError: The trainers' tensors did not reach all parameters. It names them.
        """
        if self._open:
            self._close_layers()
        self._refuse_left_out()
        self.weights.capture_lock()

    def abandon(self) -> None:
        """Restore incomplete layers after a failed refit and engage the lock, whose NaN the loader may have overwritten."""
        try:
            if self._open:
                self._close_layers()
        finally:
            self.weights.engage_lock()

    def _close_layers(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self._inside():
            finalize_layerwise_reload(self.engine.model, self.engine.vllm_config.model_config)
        self._open = False

    def _refuse_left_out(self) -> None:
        if self._loaded is None:
            logger.warning("xfer: this engine's loader does not say what it loaded; only names that came were checked")
            return
        slots = dict(LiveStorages(self.engine.model).slots)
        if self._as_loaded is not None:
            slots = {n: s for n, s in slots.items() if not s.is_parameter or n in self._as_loaded}
            for name in self._as_loaded - slots.keys():  # processing has replaced it
                slots[name] = LiveSlot(name, True, f"{name}, as it was loaded", 0, (), (), torch.uint8)
        reached = reached_by(self._loaded, slots)
        left = [
            f"{slot.name}: {slot.described()}"
            for slot in slots.values()
            if slot.is_parameter and slot.root and slot.root not in reached
        ]
        if left:
            raise LayoutError("parameters that no tensor of the trainers reached; they hold old weights", left)

    @contextlib.contextmanager
    def _inside(self):
        """Set vLLM's configuration, as its own calls do, and disable its check that one call loads everything."""
        from vllm.config import set_current_vllm_config

        with contextlib.ExitStack() as inside:
            inside.enter_context(set_current_vllm_config(self.engine.vllm_config))
            try:
                from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
            except ImportError:  # an older vLLM without that check
                pass
            else:
                inside.enter_context(disable_mtp_completeness_check())
            yield


def _room(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """New memory for the values and scales of a matrix."""
    scales = weight.new_empty(grid(weight.shape), dtype=torch.float32)
    return torch.empty_like(weight, dtype=torch.float8_e4m3fn), scales


def _plain_caches(model: torch.nn.Module) -> frozenset[str]:
    """Paths of the attention layers whose KV cache is not quantized. Nothing reads the scales and zero points that they have while a
    checkpoint is loaded; load_format="dummy" leaves random ones."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = ((n, m) for n, m in model.named_modules() if isinstance(m, AttentionLayerBase))
    return frozenset(n for n, m in layers if getattr(m, "kv_cache_dtype", "") in PLAIN_CACHES)


def _plain_scales(model: torch.nn.Module) -> frozenset[str]:
    """Names of the attention scales that a checkpoint may leave out.

    While a checkpoint is loaded, attention layers have parameters for scales. vLLM keeps each scale in a buffer of the same name
    with an underscore, and leaves the buffer alone if the checkpoint has no such scale. A buffer that is 1, as in a fresh
    engine, may stay; a scale from an earlier checkpoint would be stale.
    """
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = ((n, m) for n, m in model.named_modules() if isinstance(m, AttentionLayerBase))
    buffers = ((f"{n}.{key[1:]}", t) for n, m in layers for key, t in m._buffers.items() if key.startswith("_"))
    return frozenset(name for name, t in buffers if t is not None and t.numel() == 1 and float(t) == 1.0)


def reached_by(loaded: Iterable[str], slots: Mapping[str, LiveSlot]) -> set[str]:
    """Return the storages of the parameters that a loader reports as loaded.

    A module may report a parameter of a child without the child's name, as vLLM 0.25's runner of experts does
    ("experts.w13_weight" for "experts.routed_experts.w13_weight"). Such a name counts if it can mean one parameter only.

    Args:
        loaded: Names that the loader reports.
        slots: Live tensors by name.
    """
    parts: dict[tuple[str, str], list[str]] = {}  # (a module, the last part of a name anywhere below it) -> storages
    for name, slot in slots.items():
        above, _, last = name.rpartition(".")
        while above:
            parts.setdefault((above, last), []).append(slot.root)
            above = above.rpartition(".")[0]
    out = set()
    for name in loaded:
        if name in slots:
            out.add(slots[name].root)
        else:
            above, _, last = name.rpartition(".")
            meant = parts.get((above, last), ())
            out.update(meant if len(meant) == 1 else ())
    return out
