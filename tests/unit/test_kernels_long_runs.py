"""Which bytes of a pull go by a copy engine: every byte goes one way, and no short one by the engine."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from xfer.kernels.long_runs import divided
from xfer.kernels.strided import Move
from xfer.kernels.tiles import Turns

LONG = 4 << 20
MIB = 1 << 20


@st.composite
def moves(draw) -> list[Move]:
    """Boxes of up to three dims in units of a MiB, side by side on both ends, from storages of up to three senders."""
    out, left, right = [], [0] * 4, 0
    for _ in range(draw(st.integers(1, 6))):
        root, rows, outer = draw(st.integers(0, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
        width = draw(st.integers(1, 20))
        gap = draw(st.integers(0, 2))
        dims = (
            (outer, rows * (width + gap) * MIB, rows * width * MIB),
            (rows, (width + gap) * MIB, width * MIB),
            (width * MIB, 1, 1),
        )
        out.append(
            Move(root, left[root], "bfloat16", 0, right, "bfloat16", tuple(d for d in dims if d[0] > 1 or d[1] == 1))
        )
        left[root] += outer * rows * (width + gap) * MIB
        right += outer * rows * width * MIB
    return out


def moved(found: list[Move]) -> dict[int, tuple[int, int]]:
    """MiB of the destination -> (storage, MiB of it)."""
    out = {}
    for m in found:
        *outer, (n, _, _) = m.dims
        assert n % MIB == 0
        for at in np.ndindex(*(d[0] for d in outer)):
            a, b = (sum(i * d[k] for i, d in zip(at, outer)) for k in (1, 2))
            for k in range(n // MIB):
                place = (m.right + b) // MIB + k
                assert place not in out, "a byte goes twice"
                out[place] = m.left_root, (m.left + a) // MIB + k
    return out


@given(moves(), st.sampled_from([0.3, 0.65, 1.0]), st.sampled_from([(0, 0, 1, 2), (0, 1, 2, 3)]), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_both_ways_together_move_every_byte_once(found, share, groups, rotation):
    turns = Turns(groups, rotation, beside=frozenset({2}))
    kernel, engine = divided(found, share, LONG, turns)
    assert moved(kernel + engine) == moved(found)
    away = sum(1 for root, _ in moved(found).values() if groups[root] != 2)
    assert sum(m.dims[0][0] for m in engine) <= share * away * MIB
    assert all(len(m.dims) == 1 and m.dims[0][0] >= LONG and groups[m.left_root] != 2 for m in engine)
    if share == 1.0:
        assert not [m for m in kernel if groups[m.left_root] != 2 and m.dims[-1][0] >= LONG]


def test_senders_take_turns_beginning_with_the_takers_own_number():
    found = [
        Move(r, k * 8 * MIB, "uint8", 0, (r * 4 + k) * 8 * MIB, "uint8", ((8 * MIB, 1, 1),))
        for r in range(3)
        for k in range(4)
    ]
    _, engine = divided(found, 1.0, LONG, Turns((0, 1, 2), rotation=1))
    assert [m.left_root for m in engine] == [1, 2, 0] * 4


def test_conversions_and_mirrored_runs_are_the_kernels():
    cast = Move(0, 0, "float32", 0, 0, "bfloat16", ((LONG, 1, 1),))
    mirrored = Move(0, 0, "uint8", 0, LONG, "uint8", ((4, LONG, LONG), (LONG, 1, 1)), (0,))
    assert divided([cast, mirrored], 1.0, LONG, Turns()) == ([cast, mirrored], [])
