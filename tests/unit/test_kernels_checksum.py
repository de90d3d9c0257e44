"""Checksums depend on values and their places in the checkpoint tensor only, and on every one of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import EXAMPLES
from tests.support.memory import allocations
from tests.support.row_worlds import Heap, cut, row, write_box
from xfer.errors import LayoutError
from xfer.kernels import checksum
from xfer.kernels.checksum import Sums
from xfer.plan.checksum import added
from xfer.plan.program import DTYPE_CODE, MAX_DIMS, ROW, Op

MASK, HALF, G = (1 << 64) - 1, (1 << 32) - 1, 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def half_mix(x: int, k: int) -> int:
    b, m, n = ((13, 0x85EBCA6B, 0xC2B2AE35), (15, 0x7FEB352D, 0x846CA68B))[k]
    x = (x ^ (x >> 16)) * m & HALF
    x = (x ^ (x >> b)) * n & HALF
    return x ^ (x >> 16)


def checksum_rows(rows: np.ndarray, roots: Sequence[torch.Tensor], side: str, shapes: Sequence[Sequence[int]]) -> int:
    """The checksum, 0 <= c < 2**64, of `rows` as they lie in these storages."""
    return Sums.of_one(rows, roots, side, shapes).values()[0]


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    return torch.empty(value.numel(), dtype=value.dtype).copy_(value.reshape(-1)).view(torch.uint8)


def whole(value: torch.Tensor, tensor: int = 0, **columns) -> np.ndarray:
    """One row over a dense tensor, both ends alike."""
    return row(tuple(value.shape), src_dtype=str(value.dtype).removeprefix("torch."), tensor=tensor, **columns)


def fragments(rng, value: torch.Tensor, parts: int) -> tuple[np.ndarray, list[torch.Tensor]]:
    """The tensor cut into boxes, which lie in storages in any way."""
    name, heap, rows = str(value.dtype).removeprefix("torch."), Heap(rng, 3), []
    boxes = cut(rng, tuple(value.shape), parts)
    for origin, extent, _ in boxes:
        place = heap.place("src", extent, value.element_size(), rng.random() < 0.7)
        place |= {k.replace("src", "dst"): v for k, v in place.items()}
        rows.append(row(extent, src_dtype=name, origin=(0,) * (MAX_DIMS - len(extent)) + origin, **place))
    roots = heap.storages()
    for r, (origin, extent, _) in zip(rows, boxes):
        write_box(
            roots[r["dst_root"][0]], r[0], value[tuple(slice(o, o + e) for o, e in zip(origin, extent))].reshape(-1)
        )
    return np.concatenate(rows), [torch.from_numpy(r) for r in roots]


def random_tensor(rng: np.random.Generator, longest: int = 8, shape: tuple[int, ...] = ()) -> torch.Tensor:
    shape = shape or tuple(int(n) for n in rng.integers(1, longest + 1, int(rng.integers(1, 5))))
    dtype = (torch.bfloat16, torch.float32, torch.uint8, torch.int64)[rng.integers(4)]
    data = rng.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).reshape(shape)


def columns(rng: np.random.Generator, value: torch.Tensor) -> tuple[np.ndarray, list[torch.Tensor]]:
    """A matrix of 48 columns in two rows, cut between groups of elements or anywhere."""
    rows, item = whole(value).repeat(2), value.element_size()
    at, spare = int(rng.choice([8, 16, 17])), int(rng.choice([0, 2, 16, 64]))
    rows["extent"][:, -1], rows["origin"][:, -1] = (at, 48 - at), (0, at)
    for end in ("src", "dst"):
        rows[f"{end}_offset"] = np.array([spare, spare + at]) * item
    return rows, [torch.cat([torch.zeros(spare * item, dtype=torch.uint8), as_bytes(value)])]


def cut_tensor(seed: int, parts: int, narrow: bool, matrix: bool, longest: int = 8):
    """(the tensor that a destination holds, rows of a source that may be wider, storages)."""
    rng = np.random.default_rng(seed)
    value = random_tensor(rng, longest, (int(rng.integers(1, 5)), 48) if matrix else ())
    value = torch.from_numpy(rng.standard_normal(value.shape).astype(np.float32)) if narrow else value
    rows, roots = columns(rng, value) if matrix else fragments(rng, value, parts)
    if narrow:
        rows["dst_dtype"], rows["op"] = DTYPE_CODE["bfloat16"], Op.CAST
    return value.bfloat16() if narrow else value, rows, roots


CUTS = dict(seed=st.integers(0, 2**32 - 1), parts=st.integers(0, 8), narrow=st.booleans(), matrix=st.booleans())


@settings(max_examples=EXAMPLES, deadline=None)
@given(chunk=st.sampled_from([1, 7, 1 << 18]), **CUTS)
def test_any_cut_in_any_order_and_any_layout_gives_the_same_number(chunk, seed, **how):
    """Whoever holds the bytes, and whatever a source's dtype is. Sums of sources add up."""
    value, rows, roots = cut_tensor(seed, longest=8 if chunk > 7 else 4, **how)
    shapes = [tuple(value.shape)]
    want = checksum_rows(whole(value), [as_bytes(value)], "dst", shapes)
    with patch.object(checksum, "CHUNK", chunk):
        if not how["narrow"]:
            assert checksum_rows(rows, roots, "dst", shapes) == want
        assert checksum_rows(rows, roots, "src", np.array([(1,) * (MAX_DIMS - value.dim()) + shapes[0]])) == want
    some = np.random.default_rng(seed).random(len(rows)) < 0.5
    assert added(*(checksum_rows(rows[m], roots, "src", shapes) for m in (some, ~some))) == want


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_one_flipped_bit_or_two_swapped_elements_or_a_shift_change_it(seed):
    rng = np.random.default_rng(seed)
    value = random_tensor(rng)
    shapes = [tuple(value.shape)]

    def of(t):
        return checksum_rows(whole(t), [as_bytes(t)], "dst", shapes)

    broken, swapped, (i, j) = value.clone(), value.reshape(-1).clone(), rng.integers(value.numel(), size=2)
    broken.view(-1).view(torch.uint8)[int(rng.integers(broken.nbytes))] ^= 1 << int(rng.integers(8))
    swapped[[i, j]] = swapped[[j, i]]
    for other in (broken, swapped.reshape(value.shape), value.reshape(-1).roll(1).reshape(value.shape)):
        assert (of(other) == of(value)) == torch.equal(as_bytes(other), as_bytes(value))


@pytest.mark.parametrize("shape", [(3, 3, 3), (2, 3, 4), (2, 3, 16)], ids=["odd", "any", "whole groups"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_the_number_itself(dtype, shape):
    """The definition as a loop over Python integers; a tensor's number and each element's place are part of it."""
    value = (torch.arange(torch.Size(shape).numel()) * 0x9E3779B97F4A7).to(dtype).reshape(shape)
    want, elements = [0, 0], value.reshape(-1)
    if dtype == torch.uint8:  # pairs, with a zero where the second one is missing
        elements = torch.cat([elements, elements.new_zeros(elements.numel() % 2)]).view(torch.int16)
    for i, v in enumerate(elements.tolist()):
        m = mix(v & MASK)
        bits = {8: (m & HALF, m >> 32), 4: ((v ^ (v & HALF) >> 16),) * 2}.get(elements.element_size(), (v, v))
        for k in range(2):
            f, s = (mix(G * x & MASK) >> 32 * k & HALF for x in (0x1000 + i % 8, 6))
            want[k] += (half_mix(i // 8 + s & HALF, k) | 1) * (f | 1) * (bits[k] + (0x3C6EF372, 0xA54FF53A)[k])
    got = checksum_rows(whole(value, tensor=5), [as_bytes(value)], "dst", [()] * 5 + [shape])
    assert got == want[0] & HALF | (want[1] & HALF) << 32


def test_empty_and_fill_rows_count_nothing_and_outside_is_refused():
    t = torch.randn(8)
    fill = whole(t)
    fill["op"], fill["tensor"] = Op.FILL, -1
    assert checksum_rows(fill, [as_bytes(t)], "dst", []) == checksum_rows(np.zeros(0, ROW), [], "dst", []) == 0
    assert checksum_rows(row((0, 3)), [as_bytes(t)], "dst", [(0, 3)]) == 0
    with pytest.raises(LayoutError, match="outside"):
        checksum_rows(whole(t, dst_offset=4), [as_bytes(t)], "dst", [(8,)])


def test_memory_is_bounded():
    """A row of 64 chunks takes no more scratch than one of two."""

    def peak(n):
        t = torch.zeros(n, dtype=torch.uint8)
        return max(accumulate(allocations(lambda: checksum_rows(whole(t), [t], "dst", [(n,)]))))

    with patch.object(checksum, "CHUNK", 1 << 12):
        assert 0 < peak(64 << 12) <= 2 * peak(2 << 12)
