"""Reads how vLLM processes modules after loading: vLLM's own code runs on the twin, within the trace.

FlashInfer's kernels want the halves of w13 swapped, others want transposed or shuffled experts, with padding. vLLM does this
to a module's weights after it has loaded them (`process_weights_after_loading`). Tensors on meta have no bytes, so the trace
only notes which element goes where. A backend that computes new bytes is refused.

Other modules make tensors of their own out of weights in FP8: latent attention decodes with tensors in bf16. The trace notes the
operators, and each refit runs them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from xfer.engines.live import LiveStorages
from xfer.engines.processed import ELSE, ELSE_FP8, PROCESSED, Relaid, backend_of, quant_method
from xfer.errors import Unsupported
from xfer.trace.loader import Step
from xfer.trace.traced import Recipe
from xfer.trace.watch import PythonData, Watch, framework_line

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class AfterLoading:
    """vLLM's processing of some modules of one twin. Each module is processed once. `makers`: paths of modules that make tensors.

    Args:
        vllm_config: The configuration that the twin was built with.
        twin: A new twin.
        relaid: Modules of the live model.
        prefix: Goes before module names in errors.
    """

    def __init__(self, vllm_config: VllmConfig, twin: torch.nn.Module, relaid: Sequence[Relaid], prefix: str = ""):
        self._config, self._twin, self._relaid, self._prefix = vllm_config, twin, relaid, prefix
        self._done: set[str] = set()

    def steps(self, *, fp8: bool, makers: Sequence[str] = ()) -> list[Step]:
        """Return the argument `after` of `trace_loader`: the modules in block FP8, or the others; then `makers`."""
        some = [r for r in self._relaid if r.fp8 is fp8]
        steps: list[Step] = [(self._twin.get_submodule(r.name), partial(self._process, r)) for r in some]
        made = [self._twin.get_submodule(name) for name in makers]
        return steps + [(module, partial(self._run, module, self._config.model_config.dtype)) for module in made]

    def finish(self, makers: Sequence[str] = ()) -> None:
        """Process `makers` and the modules that no trace has processed: the twin's tensors then have the shapes of the live ones."""
        with PythonData(), Watch():
            for r in self._relaid:
                if r.name not in self._done:
                    self._process(r)
            for name in makers:
                self._run(self._twin.get_submodule(name), self._config.model_config.dtype)

    def _run(self, owner: Any, argument: torch.nn.Module | torch.dtype) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.utils.torch_utils import set_default_torch_dtype

        with (
            set_current_vllm_config(self._config, check_compile=False),
            set_default_torch_dtype(self._config.model_config.dtype),
        ):
            owner.process_weights_after_loading(argument)

    def _process(self, r: Relaid) -> None:
        module = self._twin.get_submodule(r.name)
        method = quant_method(module)
        if (backend := backend_of(method)) != r.backend:
            why = f"and vLLM takes {backend} when it builds this model again"
            raise Unsupported(PROCESSED, [_line(r, self._prefix, why)])
        self._done.add(r.name)
        try:
            self._run(method, module)
        except Exception as e:
            why = f"and how cannot be read: {framework_line(e)}: {type(e).__name__}: {e}"
            raise Unsupported(PROCESSED, [_line(r, self._prefix, why)]) from e


def makers(live: LiveStorages, twin: torch.nn.Module, prefix: str = "") -> list[str]:
    """Return the modules with weights in FP8 that have made tensors after loading, in storages of their own, by path.

    Args:
        live: The live model.
        twin: A new twin.
        prefix: Of the live tensors' names.
    """
    built = {
        prefix + name
        for name, _ in (*twin.named_parameters(remove_duplicate=False), *twin.named_buffers(remove_duplicate=False))
    }
    made = [s.name for slots in live.by_root.values() if not any(s.name in built for s in slots) for s in slots]
    paths = {name.rpartition(".")[0] for name in made}
    return [
        path
        for path, module in twin.named_modules()
        if prefix + path in paths
        and hasattr(module, "process_weights_after_loading")
        and any(p.dtype is torch.float8_e4m3fn for p in module.parameters())
    ]


def refuse_other_operators(recipes: Iterable[Recipe], makers: Sequence[str], prefix: str = "") -> None:
    """Refuse tensors that modules make by operators other than torch's own: these may use other ranks, or write untraced memory.

    Args:
        recipes: The recipes of a trace in which the modules ran.
        makers: Paths of the modules.
        prefix: Goes before module names in errors.

    Raises:
        Unsupported: It names every such tensor.
    """
    theirs = [r for r in recipes if r.target.rpartition(".")[0] in makers]
    bad = {r.target: others for r in theirs if (others := [op for op in r.ops if not op.startswith("aten.")])}
    if bad:
        raise Unsupported(PROCESSED, [f"{prefix}{name}: computed by {', '.join(ops)}" for name, ops in bad.items()])


def refuse_computed(results: Sequence[str], relaid: Sequence[Relaid], prefix: str = "") -> None:
    """Refuse backends that compute bytes instead of moving them.

    Args:
        results: Names of tensors for which a trace has no places; ": " and a reason may follow a name.
        relaid: The modules that were processed in the trace.
        prefix: Goes before module names in errors.

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
