"""One SGLang worker's live model as a layout: SGLang's own `load_weights` is traced on a twin of the model on meta.

Bytes are written between SGLang's begin_weight_update and end_weight_update, in the form in which its loader leaves them.
So processing after loading must move nothing (`_refuse_moved`). SGLang itself does its computations on weights at the end
of its session (`finish_loading`). The general parts are in engines/: layout.py, live.py, weights.py, copies.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from xfer.engines.checks import agreed, matches, refuse_other_family
from xfer.engines.copies import Copies, attributes
from xfer.engines.hf_spec import specs_of_config
from xfer.engines.layout import EngineLayout, read_layout, refuse_kept_in_vain
from xfer.engines.live import LiveStorages
from xfer.engines.lock import Forward
from xfer.engines.weights import LiveWeights
from xfer.errors import LayoutError, Unsupported
from xfer.sglang.meta import after_loading, finish_loading, make_model
from xfer.trace.loader import trace_loader
from xfer.trace.watch import Watch

if TYPE_CHECKING:
    from xfer.trace.catalog import Catalog
    from xfer.trace.fragment import TensorSpec
    from xfer.trace.traced import Traced


class SGLangModel:
    """One worker's model: implements `LayoutReader` (direct/worker.py).

    Args:
        model_config: SGLang's ModelConfig.
        load_config: SGLang's LoadConfig.
        model: The live model.
        device: Its device.
        forward: Its dummy forward, which returns one tensor of logits [tokens, vocabulary]. Needed for the lock only.
        groups: The process groups on the CPU whose ranks take part in a forward. Needed for the lock only.
        refuse: Raises if a setting of the engine stands in the way of refits (settings.py).

    Attributes:
        keep: Globs over the engine's tensor names. Refits leave these tensors alone.
        drop: Globs over the names of checkpoint tensors that this engine ignores.
        weights: Its live weights, with their lock.
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
        self._refuse = refuse
        dummy = str(getattr(load_config.load_format, "value", load_config.load_format)) == "dummy"
        agree = partial(agreed, groups=groups)
        self.weights = LiveWeights(device, forward, agree, "nothing" if dummy else "whole")

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
        expected = specs_of_config(self.model_config.hf_config)
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
        return self.weights.bind(layout, live, copies)

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
                "SGLang's processing of this model's weights after loading cannot be read", [e.message, *e.violations]
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

    def loader(self) -> Any:
        """Refuse the packed route."""
        raise Unsupported("SGLang engines take no packed weights from xfer", ["connect(route=xfer.Direct())"])
