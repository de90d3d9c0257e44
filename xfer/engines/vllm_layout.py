"""The engine-side reader for vLLM: one worker's live model as a layout, without patching vLLM and without real weights.

The model class's own `load_weights` is traced on a twin of the model on the meta device, built inside the worker, so
that vLLM's own groups say which shard is whose (meta_model.py, trace/loader.py). layout.py carries the trace over to
the live storages; lock.py chooses the tensor that holds NaN while a refit is open. Here is what those need of vLLM: the
twin, what names the checkpoint should have, and how to run a forward. What is refused: settings.py, processed.py, copies.py.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch.overrides import TorchFunctionMode

from xfer.engines.asleep import LeftAlone, refuse_asleep
from xfer.engines.copies import Copies, attributes, tensors_in
from xfer.engines.layout import (
    EngineLayout,
    joined,
    read_layout,
    refuse_kept_in_vain,
    renamed,
    run_recipes,
    some,
    without_roots,
)
from xfer.engines.live import DRAFT, LiveStorages
from xfer.engines.lock import Lock, candidates, choose
from xfer.engines.one_line import one_line_per_kind
from xfer.engines.processed import refuse_processed
from xfer.engines.settings import refuse_settings
from xfer.engines.vllm_checks import all_agree, matches, refuse_other_family
from xfer.errors import LayoutError, Unsupported, XferError
from xfer.trace.fragment import TensorSpec
from xfer.trace.loader import trace_loader
from xfer.trace.traced import Traced
from xfer.trace.watch import Watch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from xfer.trace.catalog import Catalog

logger = logging.getLogger("xfer")

DUMMY_TOKENS = 16
"""Tokens of the forward that tests a lock; more than any tensor-parallel group divides them into in practice."""


class EngineModel:
    """One worker's model, seen by a session.

    `keep`: globs over the engine's tensor names that refits leave alone (a frozen tower). `drop`: globs over checkpoint
    names that this engine ignores. All workers of a replica call `read` and `choose_lock` in step: the latter runs the
    model's own collectives. Not thread-safe; errors are XferErrors that name tensors, and leave the live model as it was.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: torch.nn.Module,
        device: torch.device,
        *,
        keep: Sequence[str] = (),
        drop: Sequence[str] = (),
    ):
        self.vllm_config, self.model, self.device = vllm_config, model, device
        self.keep, self.drop, self.version = tuple(keep), tuple(drop), None
        self.workers = 0  # of the replica, as its controller counts them
        self.draft: torch.nn.Module | None = None  # the second model of speculative decoding, if it was handed over
        self._live: LiveStorages | None = None
        self._copies: Copies | None = None
        self._layout: EngineLayout | None = None
        self._tensors: Mapping[str, torch.Tensor] = {}
        self._lock: Lock | None = None
        self._kept: LeftAlone | None = None  # of an engine that may sleep
        dummy = getattr(vllm_config.load_config, "load_format", "auto") == "dummy"
        self._holds: Literal["whole", "mix", "nothing"] = "nothing" if dummy else "whole"

    # ---- reading

    @one_line_per_kind("vllm")
    def read(self, catalog: Catalog) -> EngineLayout:
        """Trace the loader over the catalog's tensors and carry the result over to the live storages.

        LayoutError: the trainers' tensors are not those of this model, the live model is not laid out as its class
        builds it, or bytes would stay as they are; Unsupported: a quantized model, settings with which old weights would
        live on (settings.py), or post-load processing that moves bytes.
        """
        if self.vllm_config.parallel_config.enable_eplb:
            raise Unsupported("this engine moves experts between workers while it serves", ["start vLLM without EPLB"])
        refuse_settings(self.vllm_config, self.workers)
        self._refuse_unseen_drafter()
        live = LiveStorages(self.model, draft=self.draft, wraps=self._wraps())
        self._refuse_asleep(live)
        refuse_processed(self.model)
        if self.draft is not None:
            refuse_processed(self.draft, DRAFT)
        expected = self._expected()
        built = Watch()
        twin, drafter = self._twin(built), self._twin_drafter(built)
        copies = self._made_since(twin, drafter)
        copies.look()
        specs = tuple(s for s in catalog.specs if not matches(s.name, self.drop))
        drafted = self._drafted(drafter, specs, live, built)
        drafters = set(drafted.reads) - {s.name for s in expected or ()}  # both models may read the embedding
        mine = tuple(s for s in specs if s.name not in drafters)
        head = self._untied_head(twin, mine, expected or ())
        absent: list[str] = []
        if expected is not None:
            ours = [s for s in expected if head is None or s != head.spec]
            absent = refuse_other_family(mine, ours, self.vllm_config.model_config.model, may_lack=bool(self.keep))
        try:
            traced = (
                trace_loader(twin, specs, built=built) if head is None else _trace_with_head(twin, specs, head, built)
            )
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
        self._live, self._layout, self._copies = live, layout, copies
        self._kept = LeftAlone(live, layout.kept, self._constants(copies)) if self._may_sleep() else None
        if self._lock is not None and any(s == self._lock.slot for s in candidates(layout, live)):
            # Read again: the tensor that was found by test before is still what it was, engaged or not.
            self._lock.moved_to(live.tensors[self._lock.root])
            self._layout = layout = replace(layout, tensors=self._lock.bound(layout.tensors))
        else:
            self._lock = None
        self._tensors = layout.tensors
        return layout

    @property
    def layout(self) -> EngineLayout:
        if self._layout is None:
            raise XferError("the engine's layout has not been read yet")
        return self._layout

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The binding table: root name -> flat uint8 tensor, scratch in place of the locked storage."""
        return self._tensors

    def check(self) -> Literal["same", "moved", "changed"]:
        """Whether the bindings still hold. "moved": call `rebind`; "changed": read and plan again. Costs microseconds.
        Unsupported while the engine sleeps, when that cost it parameters that it was to keep, and when a forward has made
        tensors where no refit reaches them.
        """
        state = self._live.check() if self._live is not None else "changed"
        if self._live is not None:
            self._refuse_asleep(self._live)
            if self._kept is not None:
                self._kept.check(self._live)
        if state != "changed":
            self._copies.check()
        return state

    def rebind(self) -> Mapping[str, torch.Tensor]:
        """The binding table at the present addresses. RebindError, naming each difference, if the layout is another
        one."""
        layout = self.layout
        self._live = self._live.rebound()
        self._copies.look()  # again, since it holds what lies in those storages
        tensors = {r.name: self._live.tensors.get(r.name, layout.tensors[r.name]) for r in layout.roots}
        if self._lock is not None:
            self._lock.moved_to(tensors[self._lock.root])
            tensors = self._lock.bound(tensors)
        self._tensors = tensors
        return tensors

    def _twin(self, watch: Watch) -> torch.nn.Module:
        from xfer.engines.meta_model import make_meta_model

        return make_meta_model(self.vllm_config, watch)

    def _twin_drafter(self, watch: Watch) -> torch.nn.Module | None:
        if self.draft is None:
            return None
        from xfer.engines.meta_model import make_meta_drafter

        return make_meta_drafter(self.vllm_config, watch)

    def _made_since(self, twin: torch.nn.Module, drafter: torch.nn.Module | None) -> Copies:
        """`twin`, `drafter`: as they were built; what their loaders compute they may keep as well."""
        layers = getattr(getattr(self.vllm_config, "compilation_config", None), "static_forward_context", {})

        def kv_caches() -> list[int]:  # vLLM binds them to the layers that it knows by name
            bound = (getattr(layer, "kv_cache", None) for layer in layers.values())
            return [t.untyped_storage()._cdata for cache in bound for _, t in tensors_in("", cache)]

        live, built = [("", self.model)], [("", twin)]
        if drafter is not None:
            live, built = [*live, (DRAFT, self.draft)], [*built, (DRAFT, drafter)]
        return Copies(live, attributes(built), wraps=self._wraps(), keep=self.keep, exempt=kv_caches)

    def _wraps(self) -> Callable[[torch.nn.Module], str]:
        """With `enable_lora`, vLLM puts a layer of its own around most linear ones after it has loaded them."""
        if getattr(self.vllm_config, "lora_config", None) is None:
            return lambda module: ""
        from vllm.lora.layers import BaseLayerWithLoRA

        return lambda module: "base_layer" if isinstance(module, BaseLayerWithLoRA) else ""

    def _constants(self, copies: Copies) -> dict[str, torch.Tensor]:
        """Those that a sleep can take: it leaves the host's memory alone."""
        return {name: t for name, t in copies.constants().items() if t.device.type == self.device.type}

    def _may_sleep(self) -> bool:
        return self.device.type == "cuda" and self.vllm_config.model_config.enable_sleep_mode

    def _refuse_asleep(self, live: LiveStorages) -> None:
        if self._may_sleep():
            refuse_asleep(live)

    def _refuse_unseen_drafter(self) -> None:
        config = getattr(self.vllm_config, "speculative_config", None)
        if config is None or config.draft_model_config is None or self.draft is not None or matches(DRAFT, self.keep):
            return
        raise Unsupported(
            f"this engine has a drafter ({config.method}), a second model that nobody handed over to xfer",
            [
                "it would go on drafting with old weights; hand it over (LLM, AsyncLLM and a vLLM 0.32 server do), "
                f"or name {DRAFT}* in keep= if no refit is to change it"
            ],
        )

    def _drafted(
        self, twin: torch.nn.Module | None, specs: Sequence[TensorSpec], live: LiveStorages, built: Watch
    ) -> Traced:
        """Where the drafter's own loader puts the checkpoint's tensors.

        A drafter loads tensors of its own and then shares the served model's embedding or head, whatever it had
        loaded there: what lies in a storage of the served model is written by that model's loader alone.
        """
        if twin is None:
            return Traced((), ())
        try:
            traced = renamed(trace_loader(twin, specs, built=built), DRAFT)
        except (LayoutError, Unsupported) as e:
            if matches(DRAFT, self.keep):  # it has a checkpoint of its own, of which nothing is to be written
                return Traced((), ())
            raise LayoutError(
                f"the loader of this engine's drafter does not take what the trainers export: {e.message}",
                [*e.violations, f"name {DRAFT}* in keep= if the drafter came from a checkpoint of its own"],
            ) from e
        shared = {name for name, slot in live.slots.items() if name.startswith(DRAFT) and slot.root not in ("", name)}
        shared = {name for name in shared if not live.slots[name].root.startswith(DRAFT)}
        return without_roots(traced, shared)

    def _expected(self) -> tuple[TensorSpec, ...] | None:
        """Canonical tensors by the engine's own HF config, which the trainer had no part in; None where unknown."""
        from xfer.engines.hf_spec import canonical_specs

        config = self.vllm_config.model_config.hf_config
        try:
            return canonical_specs(json.loads(config.to_json_string(use_diff=False)))
        except Exception as e:
            why = f"{type(config).__name__}: {type(e).__name__}: {str(e).partition(chr(10))[0]}"
            logger.warning(
                "xfer: transformers cannot name this engine's tensors, so only its loader checks them: %s", why
            )
            return None

    def _untied_head(
        self, twin: torch.nn.Module, specs: Sequence[TensorSpec], expected: Sequence[TensorSpec]
    ) -> _Head | None:
        """vLLM unties a head whose checkpoint on disk has a tensor for it; a trainer that ties them sends only the
        embedding."""
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
        """The same model for the packed route, which loads whole tensors and reads no layout."""
        from xfer.engines.vllm_loader import PackedModel

        return PackedModel(self)

    # ---- the lock

    def choose_lock(self) -> str:
        """Name of the storage that will hold NaN while a refit is open, found by test; "" on pipeline stages before the
        last, which every token leaves for the one that has the lock. XferError when no tensor qualifies."""
        if self._lock is not None:
            return self._lock.root
        from vllm.distributed.parallel_state import get_pp_group

        if not get_pp_group().is_last_rank:
            return ""
        with torch.no_grad():  # not inference_mode: what it makes could not be written outside
            lock = choose(self.layout, self._live, self.forward, all_agree)
        if lock is None:
            raise XferError(
                "no small tensor of this model turns every output NaN, so a torn engine could not be told from another",
                ["candidates: vectors that fill a storage of their own and that every refit writes"],
            )
        self._lock = lock
        if self._holds != "whole":
            lock.engage()
        return lock.root

    @property
    def holds(self) -> Literal["whole", "mix", "nothing"]:
        """Weights of one version (a checkpoint's, or a committed refit's); of two, when a refit has begun to write and
        none has committed since; or only the random ones of `load_format="dummy"`, which are not worth serving."""
        return self._holds

    def engage_lock(self) -> None:
        """Before the first byte is written: whoever resumes the engine now gets NaN."""
        self._holds = "mix"
        if self._lock is not None:
            self._lock.engage()

    def release_lock(self) -> None:
        """At the commit: install the tensor's new bytes."""
        if self._lock is not None:
            self._lock.release()
        self._holds = "whole"

    @torch.no_grad()
    def forward(self) -> list[torch.Tensor]:
        """A dummy forward on a few tokens without attention metadata, as vLLM profiles memory: no KV cache is touched.

        All ranks that share layers call it together. Returns the hidden states [tokens, width], or those of a pipeline
        stage before the last.
        """
        from vllm.config import set_current_vllm_config
        from vllm.distributed.parallel_state import get_pp_group
        from vllm.forward_context import set_forward_context

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
        if isinstance(out, tuple):  # models that also give hidden states to a drafter
            out = out[0]
        return [out] if isinstance(out, torch.Tensor) else list(out.tensors.values())

    def _no_adapter(self, tokens: int) -> None:
        """Tell vLLM's wrappers that no token of the next forward has an adapter; until the first batch of an engine they
        hold uninitialised indices. The next real batch says anew what it wants, since its mapping is another one."""
        manager = getattr(self.model, "lora_manager", None)
        if manager is None:
            return
        from vllm.lora.layers import LoRAMapping

        manager.set_adapter_mapping(LoRAMapping((0,) * tokens, (0,), is_prefill=True))

    # ---- around the wire

    def run_recipes(self) -> None:
        """What the loader computes, from what the wire brought to scratch."""
        run_recipes(self.layout, self._tensors)

    def synchronize(self) -> None:
        """Nothing that was queued on the device is still to come."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class EmptyIsZero(TorchFunctionMode):
    """Inside, memory that torch hands out uninitialised is zero.

    Without attention metadata vLLM's CPU attention returns its output as it was allocated. Old bytes there may be NaN,
    and a forward that is NaN by chance chooses the wrong lock or none.
    """

    _MAKERS = (torch.empty, torch.empty_like, torch.Tensor.new_empty)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in self._MAKERS else out


# ---- names


@dataclass(frozen=True)
class _Head:
    """An output head that takes the embedding: the checkpoint tensor that its loader wants, its parameter and the other's."""

    spec: TensorSpec
    weight: torch.nn.Parameter
    embedding: torch.nn.Parameter


def _trace_with_head(twin: torch.nn.Module, specs: Sequence[TensorSpec], head: _Head, built: Watch) -> Traced:
    """As if the checkpoint had the head's tensor, and then with the embedding's name in its place."""
    traced = trace_loader(twin, tuple(sorted((*specs, head.spec))), built=built)
    places = {name for name, p in twin.named_parameters(remove_duplicate=False) if p is head.embedding}
    sources = sorted({f.tensor for f in traced.fragments if f.root in places and f.tensor != head.spec.name})
    if len(sources) != 1:
        raise LayoutError(
            f"vLLM built {head.spec.name} apart from the embedding, and what the embedding takes cannot be told",
            [f"tensors that reach the embedding: {sources}"],
        )
    return replace(
        traced,
        specs=tuple(s for s in traced.specs if s.name != head.spec.name),
        fragments=tuple(replace(f, tensor=sources[0]) if f.tensor == head.spec.name else f for f in traced.fragments),
        casts=tuple(replace(c, tensor=sources[0]) if c.tensor == head.spec.name else c for c in traced.casts),
        reads=tuple(n for n in traced.reads if n != head.spec.name),
    )
