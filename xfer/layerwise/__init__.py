"""Layer-wise optimizers: each parameter is stepped by one data-parallel rank, and gathered while the next forward runs."""

from xfer.layerwise.gather import GatherStats, ParamGather
from xfer.layerwise.groups import ParamGroup
from xfer.layerwise.muon import Muon, newton_schulz
from xfer.layerwise.optimizer import LayerWise, LayerWiseOptimizer
from xfer.layerwise.ownership import Ownership, assign

__all__ = [
    "GatherStats",
    "LayerWise",
    "LayerWiseOptimizer",
    "Muon",
    "Ownership",
    "ParamGather",
    "ParamGroup",
    "assign",
    "newton_schulz",
]
