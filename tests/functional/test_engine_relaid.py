"""Experts that vLLM lays out anew after loading: what xfer writes is what vLLM's own loader and then its own processing leave, byte for
byte, or the backend is refused by name. Backends run on GPUs only, so these tests choose one for vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from examples.common import toy  # noqa: E402
from tests.support import block_fp8  # noqa: E402
from tests.support.engine_bytes import differ, written  # noqa: E402
from tests.support.one_process import random_weights  # noqa: E402
from xfer.engines.live import LiveStorages  # noqa: E402
from xfer.engines.meta_model import make_model  # noqa: E402
from xfer.engines.processed import quant_method, read_processed  # noqa: E402
from xfer.engines.vllm_layout import EngineModel  # noqa: E402
from xfer.engines.vllm_ranks import rank_of  # noqa: E402
from xfer.errors import Unsupported  # noqa: E402
from xfer.mesh.parallel import EngineParallel  # noqa: E402
from xfer.trace.catalog import Catalog  # noqa: E402
from xfer.trace.derived import quantized  # noqa: E402
from xfer.trace.fragment import TensorSpec  # noqa: E402

SIZES = dict(num_hidden_layers=2, hidden_size=256, head_dim=128, moe_intermediate_size=128, num_experts=16)
CONFIG = toy.config("qwen3_moe", **SIZES)
SPECS = tuple(sorted(TensorSpec(n, tuple(s), str(d).removeprefix("torch.")) for n, s, d in toy.specs(CONFIG)))
MATRICES = [s for s in SPECS if s.name.endswith(("_proj.weight", "mlp.gate.weight"))]
"""Those that an engine of this family serves in block FP8."""
EXPERTS = EngineParallel(tp=2, ep=True)
CUT = EngineParallel(tp=2)
BF16 = {
    "TRITON": "as loaded", "BATCHED_TRITON": "as loaded", "FLASHINFER_CUTLASS": "moved",
    # Their code needs packages or kernels that are not here.
    "FLASHINFER_TRTLLM": "refused", "AITER": "refused", "XPU": "refused", "MOONEP": "refused",
}  # fmt: skip
FP8 = {
    "TRITON": "as loaded", "BATCHED_TRITON": "as loaded", "VLLM_CUTLASS": "as loaded", "BATCHED_VLLM_CUTLASS": "as loaded",
    "FLASHINFER_CUTLASS": "moved", "HPC": "moved",
    "FLASHINFER_TRTLLM": "refused", "AITER": "refused", "XPU": "refused", "MARLIN": "refused", "HUMMING": "refused",
}  # fmt: skip
"""By backend: what it does to weights after loading."""
CASES = [
    *((p, "", n, said) for n, said in BF16.items() for p in (EXPERTS, CUT)),
    *((EXPERTS, "fp8", n, said) for n, said in FP8.items()),  # half an expert would be smaller than a block
    (EXPERTS, "compressed-tensors", "FLASHINFER_CUTLASS", "moved"),
]


@contextmanager
def rank(monkeypatch, parallel: EngineParallel, fp8: str, backend: str) -> Iterator[object]:
    """The configuration of the last worker, whose experts are served by this backend. `fp8`: a quant_method, or "" for bf16."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as fp8_oracle
    from vllm.model_executor.layers.fused_moe.oracle import unquantized as oracle
    from vllm.model_executor.layers.quantization import fp8 as fp8_method
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_fp8 as compressed_method,
    )

    def choice(found, kernels):
        return found, kernels(found)[0]

    with rank_of(CONFIG, parallel, 1, **(block_fp8.ENGINES[fp8] if fp8 else {})) as config:
        if fp8:
            chosen = choice(fp8_oracle.Fp8MoeBackend[backend], fp8_oracle.backend_to_kernel_cls)
            for owner in (fp8_method, compressed_method):
                monkeypatch.setattr(owner, "select_fp8_moe_backend", lambda *args, **more: chosen)
        else:
            chosen = choice(oracle.UnquantizedMoeBackend[backend], oracle.backend_to_kernel_cls)
            unquantized = unquantized_fused_moe_method
            monkeypatch.setattr(unquantized, "select_unquantized_moe_backend", lambda moe_config: chosen)
        if "BATCHED" in backend:  # its kernel needs the communication of data-parallel ranks
            monkeypatch.setattr(fp8_method, "make_fp8_moe_kernel", mock.MagicMock())
            monkeypatch.setattr(unquantized_fused_moe_method, "make_unquantized_moe_kernel", mock.MagicMock())
        yield config


def process(config, model: torch.nn.Module) -> None:
    """Do to experts, and to scales of the KV cache, what vLLM does after loading."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    for module in model.modules():
        if isinstance(method := quant_method(module), FusedMoEMethodBase | BaseKVCacheMethod):
            with set_current_vllm_config(config):
                method.process_weights_after_loading(module)


def checkpoint(fp8: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What trainers send, and what vLLM loads. Some experts are zero: in FP8, their scales are the smallest that there are."""
    tensors = random_weights(SPECS, 3)
    for name in tensors:
        if ".experts.9." in name:
            tensors[name] = torch.zeros_like(tensors[name])
    if not fp8:
        return tensors, tensors
    loaded = block_fp8.serialized(tensors, ((s.name, "ieee") for s in MATRICES), suffix=block_fp8.SCALES[fp8])
    sent = dict(tensors)
    for s in MATRICES:
        values, scales = quantized(s, "ieee")
        sent[values.name], sent[scales.name] = loaded[s.name], loaded[s.name + block_fp8.SCALES[fp8]]
    return sent, loaded


@pytest.mark.parametrize(
    "parallel, fp8, backend, said", CASES, ids=[f"{n} {fp8 or 'bf16'} ep={p.ep}" for p, fp8, n, _ in CASES]
)
def test_a_backend_gets_what_vllm_leaves_or_is_refused_by_name(monkeypatch, parallel, fp8, backend, said):
    with rank(monkeypatch, parallel, fp8, backend) as config:
        live = make_model(config, "cpu")
        names = {r.name for r in read_processed(live).relaid}
        experts = {n for n, m in live.named_modules() if hasattr(m, "w13_weight")}
        assert experts and names == (set() if said == "as loaded" else experts)
        if said == "refused":
            with pytest.raises(Unsupported, match="processed its weights") as error:
                EngineModel(config, live, torch.device("cpu")).read(Catalog(SPECS))
            what = "FP8 experts" if fp8 else "experts"
            (line,) = {v.split(": ", 1)[1] for v in error.value.violations}
            assert line.startswith(f"MoE backend {backend} lays {what} out anew, and how cannot be read: ")
            assert "start vLLM with moe_backend='triton'" in line and "connect(route=xfer.Packed())" in line
            return
        process(config, live)
        reference = make_model(config, "cpu")
        sent, loaded = checkpoint(fp8)
        layout = written(EngineModel(config, live, torch.device("cpu")), Catalog(SPECS), sent, twin=reference)
        assert not layout.traced.recipes
        reference.load_weights((n, t.clone()) for n, t in loaded.items())
        as_loaded = {n: t.clone() for n, t in LiveStorages(reference).tensors.items()}
        process(config, reference)
        assert differ(live, reference) == []
        moved = {n for n, t in LiveStorages(reference).tensors.items() if not torch.equal(as_loaded[n], t)}
        assert {n.rpartition(".")[0] for n in moved} == (experts if backend == "FLASHINFER_CUTLASS" else set())


def test_each_backend_that_vllm_knows_is_in_the_table():
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    # Those of other platforms choose no kernels by the oracle. Those of other forms serve no block FP8. DeepGEMM is a rule of scales.
    elsewhere = {"CPU", "TPU", "OOT", "NONE"}
    other = {"CPU_W8A8", "AITER_MXFP8", "TRITON_MXFP8", "EMULATION", "DEEPGEMM", "BATCHED_DEEPGEMM"}
    assert {b.name for b in UnquantizedMoeBackend} == BF16.keys() | elsewhere - {"NONE"}
    assert {b.name for b in Fp8MoeBackend} == FP8.keys() | elsewhere - {"TPU", "OOT"} | other


@pytest.mark.parametrize("fp8", ["", "fp8"], ids=["bf16", "FP8"])
def test_experts_that_trainers_do_not_send_are_kept_where_they_lie(monkeypatch, fp8):
    with rank(monkeypatch, EXPERTS, fp8, "FLASHINFER_CUTLASS") as config:
        live = make_model(config, "cpu")
        process(config, live)
        catalog = Catalog(tuple(s for s in SPECS if ".experts." not in s.name))
        layout = EngineModel(config, live, torch.device("cpu"), keep=["*.experts.*"]).read(catalog)
        kept = {k.root for k in layout.kept}
        assert kept >= {n for n, p in live.named_parameters() if ".experts." in n}


def test_a_backend_that_computes_weights_is_refused_by_what_it_computes(monkeypatch):
    """FlashInfer's, with a conversion that doubles instead of swapping."""
    from vllm.model_executor.layers.fused_moe.oracle import unquantized
    from vllm.model_executor.layers.quantization.utils import flashinfer_utils

    for owner, fp8 in ((unquantized, ""), (flashinfer_utils, "fp8")):
        monkeypatch.setattr(owner, "swap_w13_to_w31", lambda x: (x.float() * 2).to(x.dtype))
        with rank(monkeypatch, EXPERTS, fp8, "FLASHINFER_CUTLASS") as config:
            live = make_model(config, "cpu")
            with pytest.raises(Unsupported) as error:
                EngineModel(config, live, torch.device("cpu")).read(Catalog(SPECS))
            assert len(error.value.violations) == len(read_processed(live).relaid)
            computed = "w13_weight, w13_weight_scale_inv" if fp8 else "w13_weight"
            assert all(f"and computes {computed} there instead" in v for v in error.value.violations)
