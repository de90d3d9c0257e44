"""Names, shapes and dtypes of a Hugging Face checkpoint on disk, from the headers of its safetensors files. Reads no
weight."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from xfer.errors import LayoutError
from xfer.trace.fragment import TensorSpec

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_MAX_HEADER = 100 << 20


def read_headers(folder: Path, files: Mapping[str, str]) -> dict[str, TensorSpec]:
    """Specs of the tensors in `files` (tensor name -> file name in `folder`), as far as the files are there.

    A tensor whose dtype is none that trainers hold (a quantized checkpoint) is left out: what the trainer exports then
    says what it is. LayoutError for a file that is no safetensors file.
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
