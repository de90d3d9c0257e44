"""Every family that docs/architectures.md lists for engines: what xfer writes by a worker's layout is what vLLM's own `load_weights`
leaves, byte for byte, on every kind of rank. `XFER_WRITE_DOCS=1` with `--slow` writes the table anew (scripts/architectures.sh)."""

from __future__ import annotations

import os

import pytest
import torch

from tests.support import architectures, torchvision

torchvision.install()

from tests.support.families import FAMILIES, register_configs, specs_of, text  # noqa: E402

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

LIVE = ("Qwen3", "Qwen3, tied", "Qwen3-MoE", "DeepSeek-V3")
"""Families whose layouts are all tested in every run; of the others, the first one."""
LAYOUTS = [
    pytest.param(
        f, p, id=f"{f.name} {text(p)}", marks=[pytest.mark.slow] if number and f.name not in LIVE or f.slow else []
    )
    for f in FAMILIES
    for number, p in enumerate(f.engine)
]


@pytest.fixture(scope="module", autouse=True)
def names():
    """transformers is asked first: vLLM's Transformers backend patches its classes for good."""
    register_configs()
    return {f.name: specs_of(f) for f in FAMILIES}


def test_sparse_attention_is_read_on_a_processor_with_amx(monkeypatch):
    """vLLM chooses another backend there, which knows nothing of sparse attention."""
    from xfer.engines.meta_model import make_model
    from xfer.engines.vllm_ranks import rank_of

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    (family,) = (f for f in FAMILIES if f.name == "DeepSeek-V3.2")
    with rank_of(family.config, family.engine[0], 0) as config:
        make_model(config, "cpu")


@pytest.mark.parametrize("family, parallel", LAYOUTS)
def test_a_layout_writes_what_vllm_loads(family, parallel, names):
    from tests.support.engine_bytes import differ, written
    from tests.support.one_process import random_weights
    from xfer.engines.meta_model import make_model
    from xfer.engines.vllm_layout import EngineModel
    from xfer.engines.vllm_ranks import rank_of
    from xfer.trace.catalog import Catalog

    catalog, tensors = Catalog(names[family.name]), random_weights(names[family.name], 3)
    for rank in sorted({0, parallel.world - 1}):  # first and last differ in every coordinate
        with rank_of(family.config, parallel, rank) as config:
            live, reference = make_model(config, "cpu"), make_model(config, "cpu")
            layout = written(EngineModel(config, live, torch.device("cpu")), catalog, tensors, rank, reference)
            reference.load_weights((n, t.clone()) for n, t in tensors.items())
            assert differ(live, reference) == []
    if parallel is family.engine[0]:
        architectures.check("engines", architectures.engine_row(family, type(reference).__name__, layout, tensors))
