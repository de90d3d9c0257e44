"""Scales of FP8 parameters as scales of checkpoint tensors, against a brute-force map of elements, with blocks of 4 x 4."""

from __future__ import annotations

import numpy as np
import pytest

from xfer.errors import Unsupported
from xfer.trace import derived
from xfer.trace.fragment import Fragment

SIDE = 4
"""Of a block here."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(derived, "BLOCK", SIDE)


def boxes(rng: np.random.Generator):
    """(a box of a matrix in a parameter, shape of the matrix, rows and columns of the parameter), often aligned."""
    step = rng.choice([1, SIDE], size=6)
    shape = tuple(int(rng.integers(1, 5) * SIDE - rng.integers(0, SIDE) * (rng.random() < 0.5)) for _ in range(2))
    turned = rng.random() < 0.3
    origin, extent = [], []
    for n, s in zip(shape, step[:2]):
        o = int(rng.integers(0, -(-n // s)) * s)
        e = n - o if rng.random() < 0.5 else int(min(n - o, max(1, rng.integers(1, 4)) * s))
        origin.append(o)
        extent.append(e)
    place = [int(rng.integers(0, 3) * s) for s in step[2:4]]
    inside = extent[::-1] if turned else extent
    rows, width = (p + e + int(rng.integers(0, 3)) for p, e in zip(place, inside))
    strides = (1, width) if turned else (width, 1)
    strides = tuple(s if n > 1 else 0 for s, n in zip(strides, extent))
    f = Fragment("x", tuple(origin), tuple(extent), "p", place[0] * width + place[1], strides, derived.VALUES)
    return f, shape, rows, width


def block_of(f: Fragment, width: int, i: int, j: int) -> tuple[int, int]:
    """The parameter's block in which element (i, j) of the box lies."""
    row, column = divmod(f.offset + i * f.strides[0] + j * f.strides[1], width)
    return row // SIDE, column // SIDE


def truth(f: Fragment, shape: tuple[int, int], width: int) -> dict[tuple[int, int], tuple[int, int]] | None:
    """The parameter's block of each block of the matrix; None if some has several, or only a part of its elements."""
    found: dict[tuple[int, int], set] = {}
    held: dict[tuple[int, int], int] = {}
    for i in range(f.extent[0]):
        for j in range(f.extent[1]):
            block = (f.origin[0] + i) // SIDE, (f.origin[1] + j) // SIDE
            found.setdefault(block, set()).add(block_of(f, width, i, j))
            held[block] = held.get(block, 0) + 1
    for (a, b), n in held.items():
        size = min(SIDE, shape[0] - a * SIDE) * min(SIDE, shape[1] - b * SIDE)
        if n < size or len(found[a, b]) > 1:
            return None
    return {block: there.pop() for block, there in found.items()}


@pytest.mark.parametrize("seed", range(8))
def test_scales_are_those_of_the_parameters_blocks_or_the_box_is_refused(seed):
    rng, given, refused = np.random.default_rng(seed), 0, 0
    for _ in range(250):
        f, shape, rows, width = boxes(rng)
        strides = (4 * derived.block_grid((rows, width))[1] + 16, 4)  # rows of scales are padded
        want = truth(f, shape, width)
        try:
            got = derived.scales_of(f, shape, width, "s", 1 << 10, strides)
        except Unsupported as e:
            assert want is None, (f, shape, rows, width, e)
            refused += 1
            continue
        given += 1
        assert want is not None, (f, shape, rows, width)
        assert (got.tensor, got.root, got.dtype) == ("x", "s", derived.SCALES)
        places = {
            (got.origin[0] + i, got.origin[1] + j): got.offset + i * got.strides[0] + j * got.strides[1]
            for i in range(got.extent[0])
            for j in range(got.extent[1])
        }
        assert places == {
            block: (1 << 10) + row * strides[0] + column * strides[1] for block, (row, column) in want.items()
        }
    assert given > 20 and refused > 20, (given, refused)


def test_a_stack_or_interleaved_rows_are_refused():
    stack = Fragment("x", (0, 0, 0), (2, 4, 4), "p", 0, (16, 4, 1), derived.VALUES)
    other = Fragment("x", (0, 0), (4, 4), "p", 0, (4, 1), derived.VALUES, (2, 1))
    for f, shape in ((stack, (2, 4, 4)), (other, (8, 4))):
        with pytest.raises(Unsupported, match="otherwise than in plain boxes of a matrix"):
            derived.scales_of(f, shape, 4, "s", 0, (16, 4))
