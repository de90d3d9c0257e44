"""One SGLang worker's live model as a layout: SGLang's own `load_weights` is traced on a twin of the model on meta.

Bytes are written between SGLang's begin_weight_update and end_weight_update, in the form in which its loader leaves them.
So processing after loading must move nothing (`_refuse_moved`), and what SGLang computes from weights at the end of a
session (`finish_loading`) is left to it. The general parts are in engines/: layout.py, live.py, lock.py, copies.py.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from xfer.coordinator.messages import Label
from xfer.engines.checks import agreed, matches, refuse_other_family
from xfer.engines.copies import Copies, attributes
from xfer.engines.layout import EngineLayout, read_layout, refuse_kept_in_vain, run_recipes
from xfer.engines.live import LiveStorages
from xfer.engines.lock import Lock, choose, kept, rebound
from xfer.errors import LayoutError, Unsupported, XferError
from xfer.sglang.meta import after_loading, finish_loading, make_model
from xfer.trace.loader import trace_loader
from xfer.trace.watch import Watch

if TYPE_CHECKING:
    from xfer.trace.catalog import Catalog
    from xfer.trace.fragment import TensorSpec
    from xfer.trace.traced import Traced

logger = logging.getLogger("xfer")

Forward = Callable[[], list[torch.Tensor]]
"""A dummy forward of the live model: one tensor of logits [tokens, vocabulary]."""


class SGLangModel:
    """One worker's model, as a session uses it: `Adapter` and `Model` in participants/worker.py, `LiveModel` in direct/worker.py.

    Args:
        model_config: SGLang's ModelConfig.
        load_config: SGLang's LoadConfig.
        model: The live model.
        device: Its device.
        forward: Its dummy forward. Needed for the lock only.
        groups: The process groups on the CPU whose ranks take part in a forward. Needed for the lock only.
        refuse: Raises if a setting of the engine stands in the way of refits (settings.py).

    Attributes:
        keep: Globs over the engine's tensor names. Refits leave these tensors alone.
        drop: Globs over the names of checkpoint tensors that this engine ignores.
        version: Label of the last refit that was installed.
    """

    def __init__(
        self,
        model_config: Any,
        load_config: Any,
        model: torch.nn.Module,
        device: torch.device,
        forward: Forward = list,
        groups: Sequence[torch.distributed.ProcessGroup] = (),
        refuse: Callable[[], None] = lambda: None,
    ):
        self.model_config, self.load_config, self.model, self.device = model_config, load_config, model, device
        self.keep: tuple[str, ...] = ()
        self.drop: tuple[str, ...] = ()
        self.version: Label = None
        self._forward, self._groups, self._refuse = forward, groups, refuse
        self._live: LiveStorages | None = None
        self._copies: Copies | None = None
        self._layout: EngineLayout | None = None
        self._tensors: Mapping[str, torch.Tensor] = {}
        self._lock: Lock | None = None
        dummy = str(getattr(load_config.load_format, "value", load_config.load_format)) == "dummy"
        self._holds: Literal["whole", "mix", "nothing"] = "nothing" if dummy else "whole"

    @property
    def holds(self) -> Literal["whole", "mix", "nothing"]:
        return self._holds

    # ---- reading

    def read(self, catalog: Catalog) -> EngineLayout:
        """Trace the loader over the catalog's tensors and map the result to the live storages.

        Raises:
            LayoutError: The trainers' tensors are not those of this model, the live model is not laid out as its class
                builds it, or a refit would leave bytes as they are.
            Unsupported: The model is quantized, processing after loading moves bytes, or the model keeps tensors that no
                refit reaches.
        """
        self._refuse()
        specs = tuple(s for s in catalog.specs if not matches(s.name, self.drop) and not s.of)
        live = LiveStorages(self.model)
        expected = self._expected()
        if expected is not None:
            refuse_other_family(specs, expected, self.model_config.model_path, may_lack=bool(self.keep))
        copies = Copies([("", self.model)], self._computed(), keep=self.keep)
        copies.look()
        twin, traced = self._trace(specs)
        self._refuse_moved(specs, traced)
        storages = LiveStorages(twin)
        if self.keep:
            refuse_kept_in_vain(self.keep, live.slots, storages, traced, whole=True)
        layout = read_layout(live, storages, traced, keep=self.keep, device=self.device)
        self._lock, layout = kept(self._lock, layout, live)
        self._live, self._layout, self._copies, self._tensors = live, layout, copies, layout.tensors
        return layout

    def _trace(self, specs: Sequence[TensorSpec], *, processed: bool = False) -> tuple[torch.nn.Module, Traced]:
        built = Watch()
        twin = make_model(self.model_config, self.load_config, watch=built)
        return twin, trace_loader(twin, specs, built=built, after=after_loading(twin) if processed else ())

    def _refuse_moved(self, specs: Sequence[TensorSpec], loaded: Traced) -> None:
        """Refuse weights that do not lie where the loader left them."""
        try:
            _, processed = self._trace(specs, processed=True)
        except LayoutError as e:
            raise Unsupported(
                "what SGLang does to this model's weights after loading cannot be read", [e.message, *e.violations]
            ) from e
        if processed != loaded:
            moved = sorted({f.root for f in {*loaded.fragments} ^ {*processed.fragments}})
            raise Unsupported(
                "SGLang lays weights out anew after loading, and xfer writes them as they are loaded",
                [*moved, "start SGLang with --moe-runner-backend triton and without quantization"],
            )

    def _computed(self) -> dict[str, int | None]:
        """The tensors outside parameters and buffers that a new model has, or that SGLang computes again after every update."""
        twin = make_model(self.model_config, self.load_config)
        known = attributes([("", twin)])
        finish_loading(twin)
        return {**attributes([("", twin)]), **known}

    def _expected(self) -> tuple[TensorSpec, ...] | None:
        """The checkpoint tensors according to the engine's own HF config; None if transformers does not know it."""
        from xfer.engines.hf_spec import canonical_specs

        config = self.model_config.hf_config
        try:
            return canonical_specs(json.loads(config.to_json_string(use_diff=False)))
        except Exception as e:
            why = f"{type(config).__name__}: {type(e).__name__}: {str(e).partition(chr(10))[0]}"
            logger.warning(
                "xfer: transformers cannot name this engine's tensors, so only its loader checks them: %s", why
            )
            return None

    def loader(self) -> Any:
        """Refuse the packed route."""
        raise Unsupported("SGLang engines take no packed weights from xfer", ["connect(route=xfer.Direct())"])

    @property
    def layout(self) -> EngineLayout:
        if self._layout is None:
            raise _not_read()
        return self._layout

    @property
    def live(self) -> LiveStorages:
        if self._live is None:
            raise _not_read()
        return self._live

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Root name -> flat uint8 tensor, with scratch in place of the locked storage."""
        return self._tensors

    def check(self, quick: bool = False) -> Literal["same", "moved", "changed"]:
        if self._live is None or self._copies is None:
            return "changed"
        state = self._live.check(quick)
        if state != "changed":
            self._copies.check()
        return state

    def rebind(self) -> Mapping[str, torch.Tensor]:
        layout = self.layout
        self._live = live = self.live.rebound()
        if self._copies is not None:
            self._copies.look()  # it compares with the storages, which are new
        self._tensors = rebound(self._lock, layout, live)
        return self._tensors

    # ---- the lock

    def choose_lock(self) -> str:
        """Find the storage that holds NaN while a refit is open. Collective over the workers of a replica.

        Returns:
            Its name.

        Raises:
            XferError: No tensor qualifies.
        """
        if self._lock is not None:
            return self._lock.root
        with torch.inference_mode():  # as SGLang's own forwards
            lock = choose(
                self.layout, self.live, self._forward, lambda verdict, about: agreed(verdict, about, self._groups)
            )
            self._forward()  # the KV slot of padded tokens holds what the last forward wrote: no NaN
        if lock is None:
            raise XferError(
                "no small tensor of this model turns every output NaN, so a torn engine could not be told from another",
                ["candidates: vectors that fill a storage of their own and that every refit writes"],
            )
        self._lock = lock
        if self._holds != "whole":
            lock.engage()
        return lock.root

    def engage_lock(self) -> None:
        """Fill the lock with NaN, before the first byte is written."""
        self._holds = "mix"
        if self._lock is not None:
            self._lock.engage()

    def release_lock(self) -> None:
        """Install the new bytes of the lock, at the commit."""
        if self._lock is not None:
            self._lock.release()
        self._holds = "whole"

    # ---- around the wire

    def run_recipes(self) -> None:
        """Compute what the loader computes, from the checkpoint tensors that arrived in scratch."""
        run_recipes(self.layout, self._tensors)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _not_read() -> XferError:
    return XferError("the engine's layout has not been read yet")
