"""Which bytes of a pull a copy engine moves, and which the kernel."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xfer.kernels import cuda_driver
from xfer.kernels.long_runs import NOTHING, READ_TOO, PitchedRuns, Rule, divided
from xfer.kernels.strided import StridedCopy
from xfer.kernels.tiles import Turns

MIB = 1 << 20
LONG, BOX = 4 * MIB, 12 * MIB


def rule(share: float, most: int = NOTHING.most) -> Rule:
    return Rule(share, least=LONG, box_bytes=BOX, row_bytes=2 * MIB, most=most)


def run(root: int, left: int, right: int, nbytes: int) -> StridedCopy:
    return StridedCopy(root, left, "uint8", 0, right, "uint8", ((nbytes, 1, 1),))


@st.composite
def moves(draw) -> list[StridedCopy]:
    """Boxes of up to three dims in units of a MiB, side by side on both ends, from storages of up to three sources."""
    out, left, right = [], [0] * 4, 0
    for _ in range(draw(st.integers(1, 6))):
        root, rows, outer = draw(st.integers(0, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 2))
        width, pitch = (n := draw(st.integers(1, 20)) * MIB), n + draw(st.integers(0, 2)) * MIB
        dims = ((outer, rows * pitch, rows * width), (rows, pitch, width), (width, 1, 1))
        dims = tuple(d for d in dims if d[0] > 1 or d[1] == 1)
        out.append(StridedCopy(root, left[root], "bfloat16", 0, right, "bfloat16", dims))
        left[root] += outer * rows * pitch
        right += outer * rows * width
    return out


def as_move(b: PitchedRuns) -> StridedCopy:
    dims = ((b.rows, b.left_pitch, b.right_pitch), (b.width, 1, 1))
    return StridedCopy(b.left_root, b.left, "uint8", b.right_root, b.right, "uint8", dims)


def moved(found: list[StridedCopy]) -> dict[int, tuple[int, int]]:
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


@given(
    moves(),
    st.sampled_from([0.3, 0.65, 1.0]),
    st.sampled_from([(0, 0, 1, 2), (0, 1, 2, 3), (3, 1, 2, 0)]),
    st.sampled_from([2, NOTHING.most]),
)
@settings(max_examples=300, deadline=None)
def test_kernel_and_engine_move_every_byte_once_and_a_source_has_one_turn_of_the_engine(found, share, groups, most):
    kernel, engine = divided(found, rule(share, most), Turns(groups, beside=frozenset({2})))
    boxes = [b for some in engine for b in some]
    whole = moved(found)
    assert moved(kernel + [as_move(b) for b in boxes]) == whole
    order = [{groups[b.left_root] for b in some} for some in engine]
    assert all(len(some) == 1 for some in order)
    numbers = [min(some) for some in order]
    assert numbers == sorted(set(numbers)) and 2 not in numbers
    for some, group in zip(engine, numbers):
        of_group = MIB * sum(groups[root] == group for root, _ in whole.values())
        assert sum(b.nbytes for b in some) <= share * of_group
    assert all(b.width >= LONG or (b.nbytes >= BOX and b.width >= 2 * MIB) for b in boxes)
    assert len(boxes) <= most
    if share == 1.0 and most == NOTHING.most:
        runs = [(m.dims[-1][0], np.prod(m.extent[-2:])) for m in kernel if groups[m.left_root] != 2]
        assert not [1 for width, nbytes in runs if width >= LONG or (width >= 2 * MIB and nbytes >= BOX)]


EXPERTS = [
    StridedCopy(0, -e * 2048 * 1536, "bfloat16", 0, e * 2048 * 768, "bfloat16", ((2048, 1536, 768), (768, 1, 1)))
    for e in range(64)
]
CAST = StridedCopy(0, 0, "float32", 0, 0, "bfloat16", ((LONG, 1, 1),))
MIRRORED = StridedCopy(0, 0, "uint8", 0, LONG, "uint8", ((4, LONG, LONG), (LONG, 1, 1)), (0,))


@pytest.mark.parametrize(
    "found, rule",
    [(EXPERTS, READ_TOO), ([run(0, 0, 0, 64 * MIB)], NOTHING), ([CAST, MIRRORED], rule(1.0))],
    ids=["experts apart", "a rule of nothing", "conversions and mirrored runs"],
)
def test_what_the_kernel_moves_alone(found, rule):
    assert divided(found, rule, Turns()) == (found, [])


def test_what_an_engine_is_given():
    """Rows at one pitch are one copy; of each source an engine gets its share, in the order of turns."""
    rows = StridedCopy(0, 0, "bfloat16", 0, 0, "bfloat16", ((1 << 17, 1536, 768), (768, 1, 1)))
    assert divided([rows], READ_TOO, Turns()) == ([], [[PitchedRuns(0, 0, 1536, 0, 0, 768, 768, 1 << 17)]])
    found = [run(r, k * 8 * MIB, (r * 4 + k) * 8 * MIB, 8 * MIB) for k in range(4) for r in range(3)]
    _, engine = divided(found, rule(0.5), Turns((2, 0, 1)))
    assert [[b.left_root for b in some] for some in engine] == [[1, 1], [2, 2], [0, 0]]


def test_structures_are_as_long_as_the_drivers():
    """CUDA_MEMCPY2D and CUmemcpyAttributes of cuda.h."""
    assert ctypes.sizeof(cuda_driver._Memcpy2D) == 128 and ctypes.sizeof(cuda_driver._Attributes) == 24
    assert (cuda_driver._Memcpy2D.dstX.offset, cuda_driver._Memcpy2D.width.offset) == (56, 112)


def test_batches_are_short_and_each_run_is_in_one(monkeypatch):
    """The driver looks at all of a batch before the engine begins."""
    called, runs = [], [(1000 + i, 5000 + i, i + 1) for i in range(3000)]
    monkeypatch.setattr(cuda_driver, "_batch_call", lambda: "cuMemcpyBatchAsync_v2")
    monkeypatch.setattr(cuda_driver, "_call", lambda name, *args: called.append(args))
    copies = cuda_driver.CopyBatch(runs)
    copies.launch(type("Stream", (), {"cuda_stream": 0}))
    seen = []
    assert max(args[3].value for args in called) <= 256
    for to, source, nbytes, count, *_ in called:
        columns = [ctypes.cast(p, ctypes.POINTER(ctypes.c_uint64)) for p in (to, source, nbytes)]
        seen += [tuple(c[i] for c in columns) for i in range(count.value)]
    assert seen == runs
