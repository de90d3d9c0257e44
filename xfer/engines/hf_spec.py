"""Canonical tensors of a Hugging Face model: name, shape and dtype of every checkpoint tensor, nothing allocated or
read.

Two sources. `checkpoint_specs` reads the headers of the safetensors files in a folder: exact, dtypes included.
`canonical_specs` asks transformers (4 or 5) to build its own model of a config on meta and to name it as a
checkpoint would; dtypes are then the config's for every tensor, though some checkpoints keep a few in float32.
torch and transformers are imported when called.

Ask before the first vLLM model is built in a process: vLLM's Transformers backend patches transformers' classes for
good.
"""

from __future__ import annotations

import functools
import json
import os
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from xfer.errors import LayoutError
from xfer.trace.fragment import TensorSpec

if TYPE_CHECKING:
    import torch

MAX_HEADER = 100 << 20
"""The limit that safetensors itself sets."""
_SAFETENSORS = {
    "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "U8": "uint8", "I8": "int8",
    "I16": "int16", "I32": "int32", "I64": "int64", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "U16": "uint16", "U32": "uint32", "U64": "uint64", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip


def canonical_specs(config: str | os.PathLike | Mapping, dtype: str | None = None) -> tuple[TensorSpec, ...]:
    """Specs of the model that `config` (a folder with config.json, or its contents) describes, sorted by name.

    `dtype`: of every tensor; default the config's own, else bfloat16. Of tensors that the model ties, the first stands
    for all.
    """
    if not isinstance(config, Mapping):
        return _of_json(json.dumps(json.loads((Path(config) / "config.json").read_text()), sort_keys=True), dtype)
    return _of_json(json.dumps(dict(config), sort_keys=True), dtype)


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
        if named is not None:  # also what is no plain language model: a tower beside one
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
    """Without the names of tensors that came before under another one: ties, which a checkpoint holds once."""
    first: dict[tuple, str] = {}
    for name, t in state.items():
        first.setdefault((t.untyped_storage()._cdata, t.storage_offset(), t.shape), name)
    return {name: state[name] for name in first.values()}


def checkpoint_specs(folder: str | os.PathLike) -> tuple[TensorSpec, ...]:
    """Specs of every tensor in the folder's *.safetensors files, from their headers alone, sorted by name.

    LayoutError for a folder without such files, a dtype that xfer does not know, or a tensor in two files.
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
