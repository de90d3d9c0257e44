"""Builds SGLang's own model class on meta, in a process whose parallel groups are set: a worker's, or a test's."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any
from unittest import mock

import torch

from xfer.errors import Unsupported
from xfer.trace.loader import Step
from xfer.trace.watch import PythonData, Watch, framework_line


def make_model(
    model_config: Any, load_config: Any, device: str = "meta", watch: Watch | None = None
) -> torch.nn.Module:
    """Return the model that SGLang would serve on this rank, uninitialised. The live model is left untouched.

    Args:
        model_config: SGLang's ModelConfig.
        load_config: SGLang's LoadConfig.
        device: Where its parameters lie.
        watch: On meta, records the constants that the constructor computes; `trace_loader` takes it as `built`.

    Raises:
        Unsupported: The class cannot be built on meta. It names the line of SGLang.
    """
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    quant_config = _get_quantization_config(model_config, load_config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(set_default_torch_dtype(model_config.dtype))
        if device == "meta":
            stack.enter_context(PythonData())
            stack.enter_context(watch or Watch())
        stack.enter_context(torch.device(device))
        # This cache is global: the next real model of the process would get meta tensors from it.
        stack.enter_context(mock.patch.object(factory, "_ROPE_DICT", {}))
        try:
            return _initialize_model(model_config, load_config, quant_config)
        except Exception as e:
            if device != "meta":
                raise
            raise Unsupported(
                "SGLang's model class cannot be built on meta tensors, so its layout cannot be read",
                [f"{framework_line(e)}: {type(e).__name__}: {e}"],
            ) from e


def after_loading(model: torch.nn.Module) -> list[Step]:
    """Return SGLang's processing of each module after its weights are loaded, as steps of `trace_loader`."""
    from sglang.srt.model_loader.loader import _modules_with_quant_method

    return [
        (module, partial(method.process_weights_after_loading, module))
        for module, method in _modules_with_quant_method(model)
    ]


def finish_loading(model: torch.nn.Module) -> None:
    """Do the computations on loaded weights that SGLang does at the end of each of its update sessions."""
    from sglang.srt.model_loader.loader import post_load_weights

    post_load_weights(model)
