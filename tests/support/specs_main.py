"""Prints the checkpoint tensors of every family as JSON, by the engine environment's transformers: {family: [[name,
shape, dtype], …]}. The trainers' transformers does not know all of them."""

import json
import sys
from dataclasses import replace
from fnmatch import fnmatchcase

from tests.support.families import FAMILIES, Family
from xfer.engines.hf_spec import canonical_specs
from xfer.trace.fragment import TensorSpec


def specs_of(family: Family) -> tuple[TensorSpec, ...]:
    def wide(name: str) -> bool:
        return any(fnmatchcase(name, p) for p in family.fp32)

    known = () if family.names else canonical_specs(family.config)
    named = (TensorSpec(name, shape, "bfloat16") for name, shape in {**family.names, **family.drafter}.items())
    return tuple(replace(s, dtype="float32") if wide(s.name) else s for s in sorted((*known, *named)))


if __name__ == "__main__":
    json.dump({f.name: [(s.name, s.shape, s.dtype) for s in specs_of(f)] for f in FAMILIES}, sys.stdout)
