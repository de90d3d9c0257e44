"""Checkpoint tensors of a Hugging Face model: names, shapes and dtypes. No tensor is allocated or read.

There are two sources. `checkpoint_specs` reads the headers of the safetensors files in a folder, which is exact.
`canonical_specs` lets transformers (4 or 5) build its own model of a config on meta, with the names of a checkpoint. All
tensors then have the config's dtype, although some checkpoints keep a few in float32. torch and transformers are
imported when a function is called.

Call `canonical_specs` before the first vLLM model is built in a process: vLLM's Transformers backend patches
transformers' classes for good.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xfer.errors import LayoutError
from xfer.trace.fragment import TensorSpec

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("xfer")
MAX_HEADER = 100 << 20
"""The limit that safetensors itself sets."""
_SAFETENSORS = {
    "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "U8": "uint8", "I8": "int8",
    "I16": "int16", "I32": "int32", "I64": "int64", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "U16": "uint16", "U32": "uint32", "U64": "uint64", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip


def canonical_specs(config: str | os.PathLike | Mapping, dtype: str | None = None) -> tuple[TensorSpec, ...]:
    """Return the checkpoint tensors of a config's model, sorted by name. Tied tensors appear once, under the first name.

    Args:
        config: A folder with config.json, or its contents.
        dtype: Dtype of every tensor. Default: the config's, else bfloat16.
    """
    if not isinstance(config, Mapping):
        return _of_json(json.dumps(json.loads((Path(config) / "config.json").read_text()), sort_keys=True), dtype)
    return _of_json(json.dumps(dict(config), sort_keys=True), dtype)


def specs_of_config(config: Any) -> tuple[TensorSpec, ...] | None:
    """Return the checkpoint tensors of an engine by its own Hugging Face config, independent of the trainer.

    Args:
        config: A PretrainedConfig.

    Returns:
        The tensors; None if transformers does not know the model, which is logged.
    """
    try:
        return canonical_specs(json.loads(config.to_json_string(use_diff=False)))
    except Exception as e:
        why = f"{type(config).__name__}: {type(e).__name__}: {str(e).partition(chr(10))[0]}"
        logger.warning("xfer: transformers cannot name this engine's tensors, so only its loader checks them: %s", why)
        return None


@functools.cache
def _of_json(config: str, dtype: str | None) -> tuple[TensorSpec, ...]:
    import torch
    import transformers

    given = json.loads(config)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config)
        hf = transformers.AutoConfig.from_pretrained(folder)
    kind = str(dtype or given.get("dtype") or given.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    keyword = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    named = getattr(transformers, str((given.get("architectures") or [""])[0]), None)
    with torch.device("meta"):
        if named is not None:  # this includes models that are not plain language models
            model = named._from_config(hf, **{keyword: getattr(torch, kind)})
        else:
            model = transformers.AutoModelForCausalLM.from_config(hf, **{keyword: getattr(torch, kind)})
    state = _once_each(model.state_dict())
    try:  # transformers 5 fuses experts in memory; a checkpoint has them apart
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        pass
    else:
        state = revert_weight_conversion(model, state)
    specs = (TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in state.items())
    return tuple(sorted(specs))


def _once_each(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Drop further names of tied tensors, which a checkpoint holds once."""
    first: dict[tuple, str] = {}
    for name, t in state.items():
        first.setdefault((t.untyped_storage()._cdata, t.storage_offset(), t.shape), name)
    return {name: state[name] for name in first.values()}


def checkpoint_specs(folder: str | os.PathLike) -> tuple[TensorSpec, ...]:
    """Return the tensors in a folder's *.safetensors files, read from their headers and sorted by name.

    Raises:
        LayoutError: The folder has no such files, a dtype is unknown, or two files have the same tensor.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise LayoutError(f"no safetensors files in {folder}")
    found: dict[str, TensorSpec] = {}
    bad: list[str] = []
    for path in files:
        for name, entry in _header(path).items():
            if name == "__metadata__":
                continue
            kind = _SAFETENSORS.get(entry["dtype"])
            if kind is None:
                bad.append(f"{name}: dtype {entry['dtype']} in {path.name} is not one that xfer moves")
            elif name in found:
                bad.append(f"{name}: in {path.name} and in another file")
            else:
                found[name] = TensorSpec(name, tuple(entry["shape"]), kind)
    if bad:
        raise LayoutError(f"the checkpoint in {folder} cannot be described", bad)
    return tuple(sorted(found.values()))


def _header(path: Path) -> dict:
    with path.open("rb") as f:
        raw = f.read(8)
        size = struct.unpack("<Q", raw)[0] if len(raw) == 8 else 0
        if not 0 < size <= MAX_HEADER:
            raise LayoutError(f"{path.name} is not a safetensors file: a header of {size} bytes")
        return json.loads(f.read(size))
