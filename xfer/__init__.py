"""xfer: a model's weights from the GPUs that train it to the GPUs that serve it, in one call.

    connect             every trainer rank, once; gives a Session
    nccl_xfer_refit     every trainer rank, after each optimizer step, as `session.refit`; gives a RefitReport
    serve               where the engine is, once per replica; gives its Controller
    Direct, Packed      routes for `connect`, with their options
    MegatronTrainer, TensorTrainer (with Declared), LayerWiseTrainer    what a trainer's weights are, for `connect`
    LayerWiseOptimizer, ParamGroup, Muon                                optimizers whose parameters have one owner each
    xferdtensor, MeshInfo                                               single tensors, on meshes of your own
    errors, XferError                                                   all that is raised on purpose

docs/guide.md goes from a training loop to these calls in ten lines.

Importing this package is cheap: no torch.distributed, no Megatron, no vLLM, no CUDA. Names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.3.0"

_HOME = {
    "connect": "xfer.api", "serve": "xfer.api", "nccl_xfer_refit": "xfer.api", "Session": "xfer.api",
    "Controller": "xfer.participants.controller", "Direct": "xfer.routes", "Packed": "xfer.routes",
    "MegatronTrainer": "xfer.trainers.megatron", "TensorTrainer": "xfer.trainers.dtensor",
    "Declared": "xfer.trainers.dtensor", "xferdtensor": "xfer.dtensor", "RefitReport": "xfer.report",
    "MeshInfo": "xfer.mesh.mesh_info", "errors": "xfer", "XferError": "xfer.errors",
    "LayerWiseOptimizer": "xfer.layerwise", "ParamGroup": "xfer.layerwise", "Muon": "xfer.layerwise",
    "LayerWiseTrainer": "xfer.trainers.layerwise",
}  # fmt: skip

# In full, for type checkers, which take from here what is public: all of _HOME but the module `errors`.
__all__ = [
    "connect", "serve", "nccl_xfer_refit", "Session", "Controller", "Direct", "Packed", "MegatronTrainer", "TensorTrainer",
    "Declared", "xferdtensor", "RefitReport", "MeshInfo", "XferError", "LayerWiseOptimizer", "ParamGroup", "Muon", "LayerWiseTrainer",
]  # fmt: skip

if TYPE_CHECKING:
    from xfer import errors as errors
    from xfer.api import Session, connect, nccl_xfer_refit, serve
    from xfer.dtensor import xferdtensor
    from xfer.errors import XferError
    from xfer.layerwise import LayerWiseOptimizer, Muon, ParamGroup
    from xfer.mesh.mesh_info import MeshInfo
    from xfer.participants.controller import Controller
    from xfer.report import RefitReport
    from xfer.routes import Direct, Packed
    from xfer.trainers.dtensor import Declared, TensorTrainer
    from xfer.trainers.layerwise import LayerWiseTrainer
    from xfer.trainers.megatron import MegatronTrainer
else:  # a checker that saw this would take any name for one that is there

    def __getattr__(name: str):
        import importlib

        if name == "errors":
            return importlib.import_module("xfer.errors")
        if name in _HOME:
            return getattr(importlib.import_module(_HOME[name]), name)
        raise AttributeError(f"module 'xfer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
