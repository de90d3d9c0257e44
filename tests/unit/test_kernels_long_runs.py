"""Which bytes of a pull go by a copy engine: every byte goes one way, and no short run by the engine unless it lies in a large box."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from xfer.kernels import cuda_driver
from xfer.kernels.long_runs import NOTHING, READ_TOO, PitchedRuns, Rule, divided
from xfer.kernels.strided import StridedCopy
from xfer.kernels.tiles import Turns

MIB = 1 << 20
LONG, BOX = 4 * MIB, 12 * MIB


def rule(share: float) -> Rule:
    return Rule(share, least=LONG, box_bytes=BOX, row_bytes=2 * MIB)


@st.composite
def moves(draw) -> list[StridedCopy]:
    """Boxes of up to three dims in units of a MiB, side by side on both ends, from storages of up to three senders."""
    out, left, right = [], [0] * 4, 0
    for _ in range(draw(st.integers(1, 6))):
        root, rows, outer = draw(st.integers(0, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 2))
        width = draw(st.integers(1, 20))
        gap = draw(st.integers(0, 2))
        dims = (
            (outer, rows * (width + gap) * MIB, rows * width * MIB),
            (rows, (width + gap) * MIB, width * MIB),
            (width * MIB, 1, 1),
        )
        out.append(
            StridedCopy(
                root, left[root], "bfloat16", 0, right, "bfloat16", tuple(d for d in dims if d[0] > 1 or d[1] == 1)
            )
        )
        left[root] += outer * rows * (width + gap) * MIB
        right += outer * rows * width * MIB
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


def bytes_of(found: list[StridedCopy], groups, group: int) -> int:
    return MIB * sum(1 for root, _ in moved(found).values() if groups[root] == group)


@given(moves(), st.sampled_from([0.3, 0.65, 1.0]), st.sampled_from([(0, 0, 1, 2), (0, 1, 2, 3), (3, 1, 2, 0)]))
@settings(max_examples=300, deadline=None)
def test_both_ways_together_move_every_byte_once_and_a_sender_has_one_turn_of_the_engine(found, share, groups):
    turns = Turns(groups, beside=frozenset({2}))
    kernel, engine = divided(found, rule(share), turns)
    boxes = [b for some in engine for b in some]
    assert moved(kernel + [as_move(b) for b in boxes]) == moved(found)
    order = [{groups[b.left_root] for b in some} for some in engine]
    assert all(len(some) == 1 for some in order)
    numbers = [min(some) for some in order]
    assert numbers == sorted(set(numbers)) and 2 not in numbers
    for some, group in zip(engine, numbers):
        assert sum(b.nbytes for b in some) <= share * bytes_of(found, groups, group)
    assert all(b.width >= LONG or (b.nbytes >= BOX and b.width >= 2 * MIB) for b in boxes)
    if share == 1.0:
        left = [m for m in kernel if groups[m.left_root] != 2]
        assert not [
            m for m in left if m.dims[-1][0] >= LONG or (m.dims[-1][0] >= 2 * MIB and np.prod(m.extent[-2:]) >= BOX)
        ]


def test_rows_at_one_pitch_are_one_copy_and_those_of_many_experts_apart_are_the_kernels():
    rows = StridedCopy(0, 0, "bfloat16", 0, 0, "bfloat16", ((1 << 17, 1536, 768), (768, 1, 1)))
    kernel, engine = divided([rows], READ_TOO, Turns())
    assert kernel == [] and engine == [[PitchedRuns(0, 0, 1536, 0, 0, 768, 768, 1 << 17)]]
    apart = [
        StridedCopy(0, -e * 2048 * 1536, "bfloat16", 0, e * 2048 * 768, "bfloat16", ((2048, 1536, 768), (768, 1, 1)))
        for e in range(64)
    ]
    assert divided(apart, READ_TOO, Turns()) == (apart, [])


def test_no_more_copies_than_a_stream_holds():
    apart = [StridedCopy(0, -k * LONG, "uint8", 0, k * LONG, "uint8", ((LONG, 1, 1),)) for k in range(20)]
    kernel, [engine] = divided(apart, replace(rule(1.0), most=6), Turns())
    assert len(engine) == 6 and moved(kernel + [as_move(b) for b in engine]) == moved(apart)


def test_a_rule_of_nothing_leaves_all_to_the_kernel():
    box = ((4, 40 * MIB, 20 * MIB), (1 << 14, 2048, 1024), (1024, 1, 1))
    found = [
        StridedCopy(0, 0, "uint8", 0, at, "uint8", dims) for at, dims in ((0, ((64 * MIB, 1, 1),)), (64 * MIB, box))
    ]
    assert divided(found, NOTHING, Turns()) == (found, [])
    assert [len(some) for some in divided(found, READ_TOO, Turns())[1]] == [5]


def test_structures_are_as_long_as_the_drivers():
    """CUDA_MEMCPY2D and CUmemcpyAttributes of cuda.h."""
    assert ctypes.sizeof(cuda_driver._Memcpy2D) == 128 and ctypes.sizeof(cuda_driver._Attributes) == 24
    assert (cuda_driver._Memcpy2D.dstX.offset, cuda_driver._Memcpy2D.width.offset) == (56, 112)


def test_an_engine_has_its_share_of_each_sender_and_brings_one_after_the_other():
    found = [
        StridedCopy(r, k * 8 * MIB, "uint8", 0, (r * 4 + k) * 8 * MIB, "uint8", ((8 * MIB, 1, 1),))
        for k in range(4)
        for r in range(3)
    ]
    _, engine = divided(found, rule(0.5), Turns((2, 0, 1)))
    assert [[b.left_root for b in some] for some in engine] == [[1, 1], [2, 2], [0, 0]]


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


def test_conversions_and_mirrored_runs_are_the_kernels():
    cast = StridedCopy(0, 0, "float32", 0, 0, "bfloat16", ((LONG, 1, 1),))
    mirrored = StridedCopy(0, 0, "uint8", 0, LONG, "uint8", ((4, LONG, LONG), (LONG, 1, 1)), (0,))
    assert divided([cast, mirrored], rule(1.0), Turns()) == ([cast, mirrored], [])
