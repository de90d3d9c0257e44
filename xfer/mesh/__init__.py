"""Meshes of ranks, and the part of a tensor that each rank holds under a declared layout.

Importing this touches neither CUDA nor torch.distributed; torch is imported only by the calls that translate its types.
"""

from xfer.mesh.box import Box, row_major, whole
from xfer.mesh.mesh_info import MeshInfo, MeshRecord
from xfer.mesh.parallel import EngineParallel, TrainerParallel
from xfer.mesh.placement import Interleaved, Placement, Replicate, Segmented, Shard, StridedShard, from_torch
from xfer.mesh.slices import LocalBox, LocalLayout, local_layout, local_shape

__all__ = [
    "Box",
    "EngineParallel",
    "Interleaved",
    "LocalBox",
    "LocalLayout",
    "MeshInfo",
    "MeshRecord",
    "Placement",
    "Replicate",
    "Segmented",
    "Shard",
    "StridedShard",
    "TrainerParallel",
    "from_torch",
    "local_layout",
    "local_shape",
    "row_major",
    "whole",
]
