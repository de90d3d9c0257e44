"""Rows that describe what a rank *holds*, rather than what moves: the footprint of an inventory in the program's columns.

Checksums on the taker's side enumerate these and not the program, so that bytes which nobody planned are seen too.
"""

from __future__ import annotations

import numpy as np

from xfer.plan.inventory import Inventory
from xfer.plan.program import ROW, Op


def footprint_rows(inventory: Inventory) -> np.ndarray:
    """One row of dtype ROW per fragment: canonical box and place on the destination side, source side empty."""
    t = inventory.table
    rows = np.zeros(len(t), ROW)
    rows["op"] = Op.COPY
    rows["tensor"], rows["dst_root"], rows["dst_offset"] = t.tensor, t.root, t.offset
    rows["src_dtype"] = rows["dst_dtype"] = t.dtype
    rows["origin"], rows["extent"], rows["dst_strides"] = t.origin, t.extent, t.strides
    rows["src"], rows["dst"] = -1, inventory.rank
    return rows
