"""Reads names, shapes and dtypes of a Hugging Face checkpoint from the headers of its safetensors files. Reads no weight."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from xfer.errors import LayoutError
from xfer.trace.fragment import TensorSpec

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_MAX_HEADER = 100 << 20


def read_headers(folder: Path, files: Mapping[str, str]) -> dict[str, TensorSpec]:
    """Return the specs of a checkpoint's tensors, without those in missing files.

    Tensors in a dtype that trainers do not hold (a quantized checkpoint) are left out; the export then decides.

    Args:
        folder: The checkpoint.
        files: Tensor name -> file name.

    Raises:
        LayoutError: A file is no safetensors file.
    """
    specs: dict[str, TensorSpec] = {}
    for file in sorted(set(files.values())):
        path = folder / file
        if not path.is_file():
            continue
        for name, entry in _header(path).items():
            if name in files and entry.get("dtype") in _DTYPES:
                specs[name] = TensorSpec(name, tuple(entry["shape"]), _DTYPES[entry["dtype"]])
    return specs


def _header(path: Path) -> dict[str, dict]:
    try:
        with path.open("rb") as f:
            size = int.from_bytes(f.read(8), "little")
            if size > min(_MAX_HEADER, path.stat().st_size):
                raise ValueError(f"header of {size} bytes")
            header = json.loads(f.read(size))
        return {k: v for k, v in header.items() if k != "__metadata__"}
    except (ValueError, OSError) as e:
        raise LayoutError(f"cannot read the safetensors header of {path}: {e}") from e
