"""Every family that docs/architectures.md lists for engines: what xfer writes by a worker's layout is what vLLM's own
`load_weights` leaves, byte for byte, on every kind of rank of every layout in the table.

Both models begin with the same noise in every storage, so a byte that only one of them writes shows; kept bytes must be
those that the loader leaves alone. `XFER_WRITE_DOCS=1` with `--slow` writes the table anew (scripts/architectures.sh).
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import pytest
import torch

from tests.support import architectures, torchvision

torchvision.install()

from tests.support.families import FAMILIES, register_configs, text  # noqa: E402
from tests.support.specs_main import specs_of  # noqa: E402
from xfer.errors import Unsupported  # noqa: E402
from xfer.mesh.parallel import EngineParallel  # noqa: E402

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

LAYOUTS = [
    pytest.param(f, p, id=f"{f.name} {text(p)}", marks=[pytest.mark.slow] if number or f.slow else [])
    for f in FAMILIES
    for number, p in enumerate(f.engine)
]


@pytest.fixture(scope="module", autouse=True)
def names():
    """transformers is asked first: vLLM's Transformers backend patches its classes for good."""
    register_configs()
    return {f.name: specs_of(f) for f in FAMILIES}


@pytest.mark.parametrize("family, parallel", LAYOUTS)
def test_a_layout_writes_what_vllm_loads(family, parallel, names):
    from tests.support.engine_bytes import scramble
    from tests.support.one_process import random_weights
    from tests.support.one_process_vllm import CPU
    from tests.support.replay import load
    from xfer.cli.layouts.vllm import rank_of
    from xfer.engines.live import LiveStorages
    from xfer.engines.meta_model import make_model
    from xfer.engines.vllm_layout import EngineModel
    from xfer.trace.catalog import Catalog

    catalog, tensors = Catalog(names[family.name]), random_weights(names[family.name], 3)
    for rank in ranks(parallel):
        with rank_of(family.config, parallel, rank) as config:
            live, reference = make_model(config, "cpu"), make_model(config, "cpu")
            model = EngineModel(config, live, CPU)
            layout = model.read(catalog)
            layout.inventory(catalog, rank)  # what a session publishes: every byte has a class, or this raises
            scramble(model, 5)
            got, want = LiveStorages(live).tensors, LiveStorages(reference).tensors
            assert got.keys() == want.keys()
            for name, noise in got.items():
                want[name].copy_(noise)
            load(replace(layout.traced, recipes=()), tensors, model.tensors)
            model.run_recipes()  # from what came to scratch
            reference.load_weights((n, t.clone()) for n, t in tensors.items())
            assert [n for n in want if not torch.equal(got[n], want[n])] == []
    if parallel is family.engine[0]:
        architectures.check("engines", architectures.engine_row(family, type(reference).__name__, layout, tensors))


def test_a_class_that_cannot_be_built_on_meta_is_refused_with_its_line(names, monkeypatch):
    """Its constructor needs a value of a weight."""
    from vllm.model_executor.models.llama import LlamaMLP

    from tests.support.one_process_vllm import CPU
    from xfer.cli.layouts.vllm import rank_of
    from xfer.engines.meta_model import make_model
    from xfer.engines.vllm_layout import EngineModel
    from xfer.trace.catalog import Catalog

    build = LlamaMLP.__init__

    def reads(self, *args, **kwargs):
        build(self, *args, **kwargs)
        self.largest = self.down_proj.weight.max().item()

    llama = next(f for f in FAMILIES if f.name == "Llama")
    with rank_of(llama.config, EngineParallel(), 0) as config:
        model = EngineModel(config, make_model(config, "cpu"), CPU)
        monkeypatch.setattr(LlamaMLP, "__init__", reads)
        with pytest.raises(Unsupported, match="cannot be built on meta") as error:
            model.read(Catalog(names["Llama"]))
    line = reads.__code__.co_firstlineno + 2
    assert error.value.violations[0].startswith(f"LlamaMLP.reads ({__name__}, line {line}): RuntimeError: ")


def test_a_kind_of_warning_is_one_line(names, monkeypatch):
    """vLLM's loader warns of every tensor that has another dtype than its parameter."""
    from tests.support.one_process_vllm import CPU
    from xfer.cli.layouts.vllm import rank_of
    from xfer.engines.meta_model import make_model
    from xfer.engines.vllm_layout import EngineModel
    from xfer.trace.catalog import Catalog

    olmo = next(f for f in FAMILIES if f.name == "OLMo2")
    wide = [replace(s, dtype="float32") for s in names["OLMo2"]]
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    vllm = logging.getLogger("vllm")
    with rank_of(olmo.config, EngineParallel(), 0) as config:
        model = EngineModel(config, make_model(config, "cpu"), CPU)
        monkeypatch.setattr(vllm, "handlers", [handler])
        monkeypatch.setattr(vllm, "level", logging.WARNING)
        vllm.manager._clear_cache()
        model.read(Catalog(tuple(wide)))
        model.read(Catalog(names["OLMo2"]))
    (line,) = [x for x in said if "dtype" in x]
    count, _, quoted = line.partition(" times while xfer read the layout: ")
    assert int(count) > 10 and quoted.count("Attempted to load weight") == 3


def ranks(p: EngineParallel) -> list[int]:
    """First and last: they differ in every coordinate."""
    return sorted({0, p.world - 1})
