"""Prints the checkpoint tensors of every family as JSON, by the engine environment's transformers: {family: [[name,
shape, dtype], …]}. The trainers' transformers does not know all of them."""

import json
import sys
from fnmatch import fnmatchcase

from tests.support.families import FAMILIES, Family, register_configs
from tests.support.trainer_layouts import LAYOUTS
from xfer.engines.hf_spec import canonical_specs
from xfer.trace.fragment import TensorSpec


def specs_of(family: Family) -> tuple[TensorSpec, ...]:
    def kept(name: str) -> str | None:
        kinds = {"float32": family.fp32, "int32": family.int32}
        return next((kind for kind, globs in kinds.items() if any(fnmatchcase(name, p) for p in globs)), None)

    specs = () if family.names else canonical_specs(family.config)
    shapes, dtypes = family.names or {s.name: s.shape for s in specs}, {s.name: s.dtype for s in specs}
    named = sorted(family.published(shapes).items())
    return tuple(TensorSpec(n, s, kept(n) or dtypes.get(n, "bfloat16")) for n, s in named)


if __name__ == "__main__":
    register_configs()
    every = [*FAMILIES, *(layout.family for layout in LAYOUTS)]
    json.dump({f.name: [(s.name, s.shape, s.dtype) for s in specs_of(f)] for f in every}, sys.stdout)
