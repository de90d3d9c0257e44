"""Checksums of one set of rows, as a number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from xfer.kernels.checksum import Sums


def checksum_rows(rows: np.ndarray, roots: Sequence[torch.Tensor], side: str, shapes: Sequence[Sequence[int]]) -> int:
    """The checksum, 0 <= c < 2**64, of `rows` as they lie in these storages."""
    return Sums.of_one(rows, roots, side, shapes).values()[0]
