"""Every family that docs/architectures.md lists for engines: what xfer writes by a worker's layout is what vLLM's own
`load_weights` leaves, byte for byte, on every kind of rank of every layout in the table.

Both models begin with the same noise in every storage, so a byte that only one of them writes shows; kept bytes must be
those that the loader leaves alone. `XFER_WRITE_DOCS=1` with `--slow` writes the table anew (scripts/architectures.sh).
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from tests.support import architectures
from tests.support.families import FAMILIES, text
from tests.support.specs_main import specs_of
from xfer.mesh.parallel import EngineParallel

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

FIRST = [pytest.param(f, f.engine[0], id=f"{f.name} {text(f.engine[0])}") for f in FAMILIES if f.engine]
OTHERS = [pytest.param(f, p, id=f"{f.name} {text(p)}", marks=pytest.mark.slow) for f in FAMILIES for p in f.engine[1:]]


@pytest.fixture(scope="module", autouse=True)
def names():
    """transformers is asked first: vLLM's Transformers backend patches its classes for good."""
    return {f.name: specs_of(f) for f in FAMILIES}


@pytest.mark.parametrize("family, parallel", [*FIRST, *OTHERS])
def test_a_layout_writes_what_vllm_loads(family, parallel, names):
    from xfer.engines.live import Storages
    from xfer.engines.meta_model import make_model
    from xfer.engines.vllm_layout import EngineModel
    from xfer.testing.world import random_weights
    from xfer.testing.world_vllm import CPU, inventory_of, rank_of
    from xfer.trace.catalog import Catalog
    from xfer.trace.replay import load

    catalog, tensors = Catalog(names[family.name]), random_weights(names[family.name], 3)
    for rank in ranks(parallel):
        with rank_of(family.config, parallel, rank) as config:
            live, reference = make_model(config, "cpu"), make_model(config, "cpu")
            model = EngineModel(config, live, CPU)
            layout = model.read(catalog)
            inventory_of(catalog, layout, rank)  # what a session publishes: every byte has a class, or this raises
            model.scramble(5)
            got, want = Storages(live).tensors, Storages(reference).tensors
            assert got.keys() == want.keys()
            for name, noise in got.items():
                want[name].copy_(noise)
            load(replace(layout.traced, recipes=()), tensors, model.tensors)
            model.run_recipes()  # from what came to scratch
            reference.load_weights((n, t.clone()) for n, t in tensors.items())
            assert [n for n in want if not torch.equal(got[n], want[n])] == []
    if parallel is family.engine[0]:
        architectures.check("engines", architectures.engine_row(family, type(reference).__name__, layout, tensors))


def ranks(p: EngineParallel) -> list[int]:
    """First and last: they differ in every coordinate."""
    return sorted({0, p.world - 1})
