"""Reads how vLLM lays out experts anew after loading, from its own code: that runs on the twin, within the trace.

FlashInfer's kernels want the halves of w13 swapped, others want transposed or shuffled experts, with padding. vLLM does this
to a module's weights after it has loaded them (`process_weights_after_loading`). Tensors on meta have no bytes, so the trace
only notes which element goes where. A backend that computes new bytes is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from xfer.engines.processed import ELSE, ELSE_FP8, PROCESSED, Relaid, backend_of, quant_method
from xfer.errors import Unsupported
from xfer.trace.loader import Step
from xfer.trace.watch import PythonData, Watch, framework_line

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class AfterLoading:
    """vLLM's processing of some modules of one twin. Each module is processed once.

    Args:
        vllm_config: The configuration that the twin was built with.
        twin: A new twin.
        relaid: Modules of the live model.
        prefix: Of module names in errors.
    """

    def __init__(self, vllm_config: VllmConfig, twin: torch.nn.Module, relaid: Sequence[Relaid], prefix: str = ""):
        self._config, self._twin, self._relaid, self._prefix = vllm_config, twin, relaid, prefix
        self._done: set[str] = set()

    def steps(self, *, fp8: bool) -> list[Step]:
        """`after` of `trace_loader`: the modules in block FP8, or the others."""
        some = [r for r in self._relaid if r.fp8 is fp8]
        return [(self._twin.get_submodule(r.name), partial(self._process, r)) for r in some]

    def finish(self) -> None:
        """Process the modules that no trace did, so that the twin's tensors have the shapes of the live ones."""
        with PythonData(), Watch():
            for r in self._relaid:
                if r.name not in self._done:
                    self._process(r)

    def _process(self, r: Relaid) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.utils.torch_utils import set_default_torch_dtype

        module = self._twin.get_submodule(r.name)
        method = quant_method(module)
        if (backend := backend_of(method)) != r.backend:
            why = f"and vLLM takes {backend} when it builds this model again"
            raise Unsupported(PROCESSED, [_line(r, self._prefix, why)])
        self._done.add(r.name)
        try:
            with (
                set_current_vllm_config(self._config, check_compile=False),
                set_default_torch_dtype(self._config.model_config.dtype),
            ):
                method.process_weights_after_loading(module)
        except Exception as e:
            why = f"and how cannot be read: {framework_line(e)}: {type(e).__name__}: {e}"
            raise Unsupported(PROCESSED, [_line(r, self._prefix, why)]) from e


def refuse_computed(results: Sequence[str], relaid: Sequence[Relaid], prefix: str = "") -> None:
    """Refuse backends that compute bytes instead of moving them.

    Args:
        results: Names of tensors that a trace has no places for, each with ": " and a reason, or without.
        relaid: The modules that were processed in the trace.
        prefix: Of module names in errors.

    Raises:
        Unsupported: It names every module that has such tensors.
    """
    bad = []
    for r in relaid:
        mine = [x.removeprefix(f"{r.name}.").partition(": ") for x in results if x.startswith(f"{r.name}.")]
        if mine:
            names, why = ", ".join(sorted({name for name, _, _ in mine})), mine[0][2]
            bad.append(_line(r, prefix, f"and computes {names} there instead of moving bytes" + (why and f" ({why})")))
    if bad:
        raise Unsupported(PROCESSED, bad)


def _line(r: Relaid, prefix: str, why: str) -> str:
    what, otherwise = ("FP8 ", ELSE_FP8) if r.fp8 else ("", ELSE)
    where = f"{prefix}{r.name}: MoE backend {r.backend}"
    return f"{where} lays {what}experts out anew, {why}; start vLLM with moe_backend='triton', {otherwise}"
