"""The engine-side reader for vLLM: one worker's live model as a layout, without patching vLLM and without real weights.

The model class's own `load_weights` is traced on a twin of the model on the meta device. The twin is built inside the
worker, so that vLLM's own groups determine the shards (meta_model.py, trace/loader.py). layout.py maps the trace to the
live storages; lock.py chooses the tensor that holds NaN while a refit is open. This module supplies what they need from
vLLM: the twin, the expected names of the checkpoint, and a forward. settings.py, processed.py and copies.py refuse
engines that cannot be refitted.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.overrides import TorchFunctionMode

from xfer.engines.asleep import LeftAlone, refuse_asleep
from xfer.engines.checks import matches, refuse_other_family
from xfer.engines.copies import Copies, Tree, attributes, tensors_in
from xfer.engines.hf_spec import specs_of_config
from xfer.engines.layout import (
    EngineLayout,
    joined,
    read_layout,
    refuse_kept_in_vain,
    renamed,
    some,
    without_roots,
)
from xfer.engines.live import DRAFT, LiveStorages
from xfer.engines.processed import Processed, read_processed
from xfer.engines.quantized import scale_names, with_quantized
from xfer.engines.relaid import AfterLoading, makers, refuse_computed, refuse_other_operators
from xfer.engines.settings import has_drafter, refuse_settings
from xfer.engines.vllm_checks import all_agree
from xfer.engines.weights import LiveWeights
from xfer.errors import LayoutError, Unsupported
from xfer.kernels.block_fp8 import ScaleRule
from xfer.trace.fragment import TensorSpec
from xfer.trace.loader import Step, trace_loader
from xfer.trace.traced import Traced
from xfer.trace.watch import Watch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from xfer.engines.meta_model import VllmModel
    from xfer.trace.catalog import Catalog

logger = logging.getLogger("xfer")

_SHOWN = 3
"""Messages of one kind of warning that are quoted."""
_Kind = tuple[str, int]
"""The line of code that warns."""
DUMMY_TOKENS = 16
"""Tokens of the forward that tests a lock. At least the size of any tensor-parallel group that is used in practice."""


class _HeldWarnings(logging.Filter):
    """Holds back the warnings of the thread that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[_Kind] = Counter()
        self.first: dict[_Kind, list[logging.LogRecord]] = {}
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread or record.levelno < logging.WARNING:
            return True
        kind = record.pathname, record.lineno
        self.count[kind] += 1
        first = self.first.setdefault(kind, [])
        if len(first) < _SHOWN:
            first.append(record)
        return False


@contextlib.contextmanager
def one_line_per_kind(package: str) -> Iterator[None]:
    """Hold back this thread's warnings from the loggers of `package`. At the end each kind is logged once, with its count and its
    first messages: vLLM's loaders warn once per tensor, and a trace runs a loader that has run before."""
    names = [n for n in logging.root.manager.loggerDict if n == package or n.startswith(f"{package}.")]
    loggers, held = [logging.getLogger(n) for n in names], _HeldWarnings()
    for logger in loggers:
        logger.addFilter(held)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(held)
        for kind, records in held.first.items():
            record = records[0]
            if held.count[kind] > 1:
                quoted = "; ".join(r.getMessage() for r in records)
                record.msg, record.args = "%d times while xfer read the layout: %s", (held.count[kind], quoted)
            logging.getLogger(record.name).handle(record)


class EngineModel:
    """One worker's model: implements `LayoutReader` (direct/worker.py) and `Loads` (packed/worker.py).

    All workers of a replica call `read` together, and `forward`, which runs the model's own collectives. Not thread-safe.
    Errors are XferErrors that name tensors; the live model is then unchanged.

    Args:
        vllm_config: The configuration of the engine.
        model: The live model.
        device: Its device.
        keep: Globs over the engine's tensor names. Refits leave these tensors alone (a frozen tower).
        drop: Globs over the names of checkpoint tensors that this engine ignores.

    Attributes:
        weights: Its live weights, with their lock.
        workers: Number of workers of the replica, as its controller counts them.
        draft: The drafter, the second model of speculative decoding, if it was handed over.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: VllmModel,
        device: torch.device,
        *,
        keep: Sequence[str] = (),
        drop: Sequence[str] = (),
    ):
        self.vllm_config, self.model, self.device = vllm_config, model, device
        self.keep, self.drop = tuple(keep), tuple(drop)
        self.workers = 0
        self.draft: torch.nn.Module | None = None
        dummy = getattr(vllm_config.load_config, "load_format", "auto") == "dummy"
        self.weights = LiveWeights(device, self.forward, all_agree, "nothing" if dummy else "whole")

    # ---- reading

    @one_line_per_kind("vllm")
    def read(self, catalog: Catalog) -> EngineLayout:
        """Trace the loader over the catalog's tensors and map the result to the live storages.

        Raises:
            LayoutError: The trainers' tensors are not those of this model, the live model is not laid out as its class
                builds it, or a refit would leave bytes as they are.
            Unsupported: xfer cannot write the form in which vLLM keeps the weights (processed.py, relaid.py), the model keeps
                tensors that no refit reaches, or a setting would keep results of old weights (settings.py).
        """
        if self.vllm_config.parallel_config.enable_eplb:
            raise Unsupported("this engine moves experts between workers while it serves", ["start vLLM without EPLB"])
        refuse_settings(self.vllm_config, self.workers)
        self._refuse_unseen_drafter()
        live = LiveStorages(self.model, draft=self.draft, wraps=self._wraps())
        self.refuse_asleep(live)
        processed = [read_processed(self.model)]
        processed += [] if self.draft is None else [read_processed(self.draft, DRAFT)]
        rule = ScaleRule.of_all(p.rule for p in processed)
        processed = [replace(p, rule=rule) for p in processed]
        expected = specs_of_config(self.vllm_config.model_config.hf_config)
        built = Watch()
        twin, drafter = self._twin(built), self._twin_drafter(built)
        copies = self._made_since(twin, drafter)
        copies.look()
        specs = tuple(s for s in catalog.exported if not matches(s.name, self.drop))
        drafted = self._drafted(drafter, specs, live, built, processed[-1])
        drafters = set(drafted.reads) - {s.name for s in expected or ()}  # without those that both models read
        mine = tuple(s for s in specs if s.name not in drafters)
        head = self._untied_head(twin, mine, expected or ())
        absent: list[str] = []
        if expected is not None:
            ours = [s for s in expected if head is None or s != head.spec]
            absent = refuse_other_family(mine, ours, self.vllm_config.model_config.model, may_lack=bool(self.keep))
        try:
            traced = self._traced(twin, specs, live, built, processed[0], self._twin, head=head)
            traced, both = joined(traced, drafted), LiveStorages(twin, draft=drafter)
            if self.keep:
                own = (*live.slots, *attributes([("", self.model)]))
                one_stage = self.vllm_config.parallel_config.pipeline_parallel_size == 1
                refuse_kept_in_vain(self.keep, own, both, traced, whole=one_stage)
            layout = read_layout(live, both, traced, keep=self.keep, device=self.device)
        except LayoutError as e:
            if absent := [n for n in absent if not matches(n, self.keep)]:
                e.violations = (*e.violations, f"not in the trainers' checkpoint, but in the engine's: {some(absent)}")
            raise
        left_alone = LeftAlone(live, layout.kept, self._constants(copies)) if self._may_sleep() else None
        return self.weights.bind(layout, live, copies, left_alone)

    @one_line_per_kind("vllm")
    def scale_names(self, specs: Sequence[TensorSpec]) -> tuple[dict[str, str], frozenset[str]]:
        """Trace the loader to say which tensors it takes in block FP8: see `scale_names` (quantized.py).

        Args:
            specs: The checkpoint's tensors.
        """

        def retraced(offered: Sequence[TensorSpec], names: Mapping[str, str]) -> Traced:
            built = Watch()
            return trace_loader(self._twin(built), offered, built=built, names=names)

        built = Watch()
        twin = self._twin(built)
        return scale_names(trace_loader(twin, specs, built=built), twin, retraced)

    def _twin(self, watch: Watch) -> torch.nn.Module:
        from xfer.engines.meta_model import make_meta_model

        return make_meta_model(self.vllm_config, watch)

    def _twin_drafter(self, watch: Watch) -> torch.nn.Module | None:
        if self.draft is None:
            return None
        from xfer.engines.meta_model import make_meta_drafter

        return make_meta_drafter(self.vllm_config, watch)

    def _made_since(self, twin: torch.nn.Module, drafter: torch.nn.Module | None) -> Copies:
        """The tensors that the live model keeps outside its storages and that the new twins do not have.

        `twin` and `drafter` must not have loaded yet, since a loader may keep tensors that it computes.
        """
        layers = getattr(getattr(self.vllm_config, "compilation_config", None), "static_forward_context", {})

        def kv_caches() -> list[int]:  # vLLM binds them to the layers of `static_forward_context`
            bound = (getattr(layer, "kv_cache", None) for layer in layers.values())
            return [t.untyped_storage()._cdata for cache in bound for _, t in tensors_in("", cache)]

        live: list[Tree] = [("", self.model)]
        built: list[Tree] = [("", twin)]
        if drafter is not None and self.draft is not None:
            live, built = [*live, (DRAFT, self.draft)], [*built, (DRAFT, drafter)]
        return Copies(live, attributes(built), wraps=self._wraps(), keep=self.keep, exempt=kv_caches)

    def _wraps(self) -> Callable[[torch.nn.Module], str]:
        """Name the child that a module wraps: with `enable_lora`, vLLM wraps most linear layers after it has loaded them."""
        if getattr(self.vllm_config, "lora_config", None) is None:
            return lambda module: ""
        from vllm.lora.layers import BaseLayerWithLoRA

        return lambda module: "base_layer" if isinstance(module, BaseLayerWithLoRA) else ""

    def _constants(self, copies: Copies) -> dict[str, torch.Tensor]:
        """The constants on this device. Sleep mode leaves the host's memory alone."""
        return {name: t for name, t in copies.constants().items() if t.device.type == self.device.type}

    def _may_sleep(self) -> bool:
        return self.device.type == "cuda" and self.vllm_config.model_config.enable_sleep_mode

    def refuse_asleep(self, live: LiveStorages) -> None:
        """Refuse storages without memory, if this engine may sleep."""
        if self._may_sleep():
            refuse_asleep(live)

    def _refuse_unseen_drafter(self) -> None:
        if self.draft is not None or not has_drafter(self.vllm_config) or matches(DRAFT, self.keep):
            return
        raise Unsupported(
            f"this engine has a drafter ({self.vllm_config.speculative_config.method}), a second model that nobody handed over to xfer",
            [
                "it would go on drafting with old weights; hand it over (LLM, AsyncLLM and a vLLM 0.32 server do), "
                f"or name {DRAFT}* in keep= if no refit is to change it"
            ],
        )

    def _drafted(
        self,
        twin: torch.nn.Module | None,
        specs: Sequence[TensorSpec],
        live: LiveStorages,
        built: Watch,
        processed: Processed,
    ) -> Traced:
        """Trace the drafter's own loader over the checkpoint's tensors.

        A drafter loads tensors of its own and afterwards shares the embedding or the head of the served model. Storages of
        the served model are therefore left out: only that model's loader writes them.
        """
        if twin is None:
            return Traced((), ())
        try:
            traced = self._traced(twin, specs, live, built, processed, self._twin_drafter, DRAFT)
            traced = renamed(traced, DRAFT)
        except (LayoutError, Unsupported) as e:
            if matches(DRAFT, self.keep):  # the drafter came from a checkpoint of its own and is kept
                return Traced((), ())
            raise LayoutError(
                f"the loader of this engine's drafter does not take what the trainers export: {e.message}",
                [*e.violations, f"name {DRAFT}* in keep= if the drafter came from a checkpoint of its own"],
            ) from e
        shared = {name for name, slot in live.slots.items() if name.startswith(DRAFT) and slot.root not in ("", name)}
        shared = {name for name in shared if not live.slots[name].root.startswith(DRAFT)}
        return without_roots(traced, shared)

    def _traced(
        self,
        twin: torch.nn.Module,
        specs: Sequence[TensorSpec],
        live: LiveStorages,
        built: Watch,
        processed: Processed,
        make: Callable[[Watch], torch.nn.Module | None],
        prefix: str = "",
        head: _Head | None = None,
    ) -> Traced:
        """Trace the loader of a new twin, and then what vLLM does to modules after loading. The twin's tensors are then laid out as
        the live ones are.

        Args:
            twin: The twin.
            specs: The checkpoint's tensors.
            live: The live models.
            built: The watch under which the twin was built.
            processed: What vLLM did to the live model. Its `rule` holds for all models of this engine.
            make: Makes another twin.
            prefix: Goes before module names in errors.
            head: An untied head that takes the embedding.
        """
        after = AfterLoading(self.vllm_config, twin, processed.relaid, prefix)
        made = makers(live, twin, prefix)

        def retraced(offered: Sequence[TensorSpec], names: Mapping[str, str]) -> Traced:
            nonlocal made
            built = Watch()
            again = make(built)
            if again is None:
                return Traced((), ())
            steps = AfterLoading(self.vllm_config, again, processed.relaid, prefix).steps(fp8=True, makers=made)
            try:
                traced = trace_loader(again, offered, built=built, after=steps, names=names)
                refuse_other_operators(traced.recipes, made, prefix)
                return traced
            except (LayoutError, Unsupported) as e:
                if not made:
                    raise
                why = "; ".join((e.message, *e.violations[:1]))
                logger.warning("xfer: tensors that %s made after loading cannot be remade: %s", prefix + made[0], why)
                made = []  # tensors that they made are refused by name
                return retraced(offered, names)

        steps = after.steps(fp8=False)
        try:
            if head is None:
                traced = trace_loader(twin, specs, built=built, after=steps)
            else:
                traced = _trace_with_head(twin, specs, head, built, steps)
            traced = with_quantized(traced, twin, retraced, processed.rule)
        except LayoutError as e:
            refuse_computed(e.violations, processed.relaid, prefix)
            raise
        refuse_computed([r.target for r in traced.recipes], processed.relaid, prefix)
        after.finish(made)
        return traced

    def _untied_head(
        self, twin: torch.nn.Module, specs: Sequence[TensorSpec], expected: Sequence[TensorSpec]
    ) -> _Head | None:
        """The head that takes the embedding, if there is one.

        vLLM unties a head if the checkpoint on disk has a tensor for it. A trainer that ties both sends only the embedding.
        """
        if not getattr(self.vllm_config.model_config, "word_embeddings_untied_by_checkpoint", False):
            return None
        from vllm.model_executor.model_loader.weight_tying import _get_untied_lm_head

        pair = _get_untied_lm_head(twin)
        if pair is None:
            return None
        sent, shape = {s.name for s in specs}, (pair.lm_head.org_vocab_size, pair.lm_head.embedding_dim)
        missing = [s for s in expected if s.name not in sent and s.shape == shape]
        return _Head(missing[0], pair.lm_head.weight, pair.embed_tokens.weight) if len(missing) == 1 else None

    def loader(self):
        """Return the same model for the packed route, which loads whole tensors and reads no layout."""
        from xfer.engines.vllm_loader import PackedModel

        return PackedModel(self)

    # ---- the lock

    @torch.no_grad()
    def forward(self) -> list[torch.Tensor] | None:
        """Run a dummy forward on a few tokens without attention metadata, as vLLM does to profile memory.

        It does not touch the KV cache. Collective over the ranks that share layers.

        Returns:
            The hidden states [tokens, width]; None on pipeline stages before the last, which run nothing.
        """
        from vllm.config import set_current_vllm_config
        from vllm.distributed.parallel_state import get_pp_group
        from vllm.forward_context import set_forward_context

        if not get_pp_group().is_last_rank:
            return None
        config, n = self.vllm_config, DUMMY_TOKENS
        self._no_adapter(n)
        tokens = torch.arange(n, device=self.device)
        positions = tokens.expand(3, n) if config.model_config.uses_mrope else tokens
        before = None
        if not get_pp_group().is_first_rank:
            before = self.model.make_empty_intermediate_tensors(
                batch_size=n, dtype=config.model_config.dtype, device=self.device
            )
            for t in before.tensors.values():
                t.fill_(1)
        context = set_forward_context(None, config, num_tokens=n, skip_compiled=True)
        with set_current_vllm_config(config), context, EmptyIsZero():
            out = self.model(input_ids=tokens, positions=positions, intermediate_tensors=before, inputs_embeds=None)
        return [out[0] if isinstance(out, tuple) else out]  # some models also return hidden states for a drafter

    def _no_adapter(self, tokens: int) -> None:
        """Tell vLLM's wrappers that no token of the next forward has an adapter.

        Before the first batch of an engine their indices are uninitialised. The next real batch has another mapping and
        therefore sets it anew.
        """
        manager = getattr(self.model, "lora_manager", None)
        if manager is None:
            return
        from vllm.lora.layers import LoRAMapping

        manager.set_adapter_mapping(LoRAMapping((0,) * tokens, (0,), is_prefill=True))


class EmptyIsZero(TorchFunctionMode):
    """Inside this mode, torch's uninitialised tensors are zero.

    Without attention metadata, vLLM's CPU attention returns its output uninitialised. Old bytes there may be NaN, and a
    forward that is NaN by chance would choose a wrong lock or none.
    """

    _MAKERS = (torch.empty, torch.empty_like, torch.Tensor.new_empty)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in self._MAKERS else out


# ---- names


@dataclass(frozen=True)
class _Head:
    """An untied output head that takes the embedding.

    Attributes:
        spec: The checkpoint tensor that the loader expects for it.
        weight: Its parameter.
        embedding: The parameter of the embedding.
    """

    spec: TensorSpec
    weight: torch.nn.Parameter
    embedding: torch.nn.Parameter

    def tied(self) -> bool:
        """Whether both parameters lie in one storage."""
        return self.weight.untyped_storage()._cdata == self.embedding.untyped_storage()._cdata


def _trace_with_head(
    twin: torch.nn.Module, specs: Sequence[TensorSpec], head: _Head, built: Watch, after: Iterable[Step]
) -> Traced:
    """Trace the loader as if the checkpoint had the head's tensor, then replace that tensor by the embedding's."""
    traced = trace_loader(twin, tuple(sorted((*specs, head.spec))), built=built, after=after)
    places = {name for name, p in twin.named_parameters(remove_duplicate=False) if p is head.embedding}
    sources = sorted({f.tensor for f in traced.fragments if f.root in places and f.tensor != head.spec.name})
    if len(sources) != 1:
        raise LayoutError(
            f"vLLM built {head.spec.name} apart from the embedding, and the embedding's own tensor cannot be determined",
            [f"tensors that reach the embedding: {sources}"],
        )
    return replace(
        traced,
        specs=tuple(s for s in traced.specs if s.name != head.spec.name),
        fragments=tuple(replace(f, tensor=sources[0]) if f.tensor == head.spec.name else f for f in traced.fragments),
        casts=tuple(replace(c, tensor=sources[0]) if c.tensor == head.spec.name else c for c in traced.casts),
        reads=tuple(n for n in traced.reads if n != head.spec.name),
    )
