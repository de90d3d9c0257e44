"""The oracle itself, judged by tensors that are known in full: it rebuilds what was cut, and sees what nobody holds."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.golden import golden
from tests.support.row_worlds import Heap
from tests.support.threads import MemoryStore, all_good, run_ranks
from xfer.errors import CoverageError, LayoutError
from xfer.trace.fragment import Fill, Fragment, TensorSpec
from xfer.transport.links import open_group

EXAMPLES = int(os.environ.get("XFER_EXAMPLES", "200"))
RANKS = 3


@pytest.fixture(scope="module")
def links():
    store = MemoryStore()
    return all_good(run_ranks(RANKS, lambda r: open_group(store, r, RANKS, 20.0)))


def cut(rng, shape, parts):
    boxes = [((0,) * len(shape), shape)]
    for _ in range(parts if shape else 0):
        origin, extent = boxes.pop(int(rng.integers(len(boxes))))
        d = int(rng.integers(len(shape)))
        at = int(rng.integers(0, extent[d] + 1))
        for o, e in ((origin[d], at), (origin[d] + at, extent[d] - at)):
            if e:
                boxes.append(((*origin[:d], o, *origin[d + 1 :]), (*extent[:d], e, *extent[d + 1 :])))
    return boxes


def place(rng, heap, name, boxes, dtype):
    item = getattr(torch, dtype).itemsize
    out = []
    for origin, extent in boxes:
        root, offset, strides = heap.place(extent, item, bool(rng.random() < 0.5))
        out.append(Fragment(name, origin, extent, str(root), offset, strides, dtype))
    return out


def elements(f):
    """(storage byte, canonical index) of each element, by a loop."""
    for i in np.ndindex(*f.extent):
        yield f.offset + sum(a * b for a, b in zip(i, f.strides)), tuple(o + k for o, k in zip(f.origin, i))


@settings(max_examples=EXAMPLES // 4, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_takers_get_their_share_of_tensors_that_are_known_in_full(links, seed):
    rng = np.random.default_rng(seed)
    sources, takers = [Heap(rng, 2) for _ in range(RANKS)], [Heap(rng, 2) for _ in range(RANKS)]
    specs, full, holders, wanted = [], {}, [[] for _ in range(RANKS)], [[] for _ in range(RANKS)]
    for t in range(int(rng.integers(1, 4))):
        name, shape = f"t{t}", tuple(int(n) for n in rng.integers(1, 7, int(rng.integers(0, 4))))
        src, dst = (("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"))[rng.integers(3)]
        specs.append(TensorSpec(name, shape, src))
        full[name] = torch.from_numpy(np.asarray(rng.standard_normal(shape))).to(getattr(torch, src))
        for box in cut(rng, shape, 4):
            for r in rng.choice(RANKS, int(rng.integers(1, RANKS + 1)), replace=False):
                holders[r] += place(rng, sources[r], name, [box], src)
        for r in range(RANKS):
            wanted[r] += place(rng, takers[r], name, cut(rng, shape, 2), dst)
    held = [{str(i): torch.from_numpy(s) for i, s in enumerate(h.storages())} for h in sources]
    for r in range(RANKS):
        for f in holders[r]:
            for at, i in elements(f):
                held[r][f.root][at : at + full[f.tensor].element_size()] = (
                    full[f.tensor][i].reshape(1).view(torch.uint8)
                )
    into = [{str(i): torch.from_numpy(s) for i, s in enumerate(h.storages())} for h in takers]
    until = time.monotonic() + 20
    all_good(run_ranks(RANKS, lambda r: golden(links[r], specs, holders, held[r], wanted[r], [], into[r], until)))
    for r in range(RANKS):
        for f in wanted[r]:
            want = full[f.tensor].to(getattr(torch, f.dtype))
            for at, i in elements(f):
                assert torch.equal(into[r][f.root][at : at + want.element_size()], want[i].reshape(1).view(torch.uint8))


def one(links, holders, held, wanted, fills=(), into=None):
    spec = [TensorSpec("t", (8,), "float32")]
    return run_ranks(
        RANKS,
        lambda r: golden(
            links[r],
            spec,
            holders,
            held,
            wanted if r == 2 else (),
            fills if r == 2 else (),
            into,
            time.monotonic() + 20,
        ),
    )


def part(origin, extent, dtype="float32", offset=0):
    return Fragment("t", (origin,), (extent,), "w", offset, (getattr(torch, dtype).itemsize,), dtype)


def test_fills_are_written_and_neighbours_kept(links):
    into = {"w": torch.full((32,), 9, dtype=torch.uint8)}
    held = {"w": torch.zeros(32, dtype=torch.uint8)}
    all_good(one(links, [[], [], []], held, (), (Fill("w", 6, (2, 2), (8, 2), "bfloat16", b"\x01\x02"),), into))
    assert into["w"].tolist() == [9] * 6 + [1, 2, 1, 2] + [9] * 4 + [1, 2, 1, 2] + [9] * 14


def test_an_element_that_nobody_holds_is_an_error_and_not_a_zero(links):
    held, into = {"w": torch.zeros(32, dtype=torch.uint8)}, {"w": torch.full((32,), 9, dtype=torch.uint8)}
    got = one(links, [[part(0, 4)], [part(5, 3)], []], held, (part(0, 8),), (), into)
    assert got[:2] == [None, None] and isinstance(got[2], CoverageError) and len(got[2].violations) == 1
    assert bool((into["w"] == 9).all())


def test_holders_that_disagree_in_dtype_are_refused(links):
    held = {"w": torch.zeros(32, dtype=torch.uint8)}
    got = one(links, [[part(0, 4)], [part(4, 4, "bfloat16")], []], held, (), (), held)
    assert all(isinstance(e, LayoutError) for e in got)


def test_the_oracle_imports_nothing_that_it_judges():
    import ast

    import tests.support.golden as module

    tree = ast.parse(open(module.__file__).read())
    names = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)} | {
        a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names
    }
    assert {n for n in names if n.startswith("xfer")} == {"xfer.errors", "xfer.trace.fragment", "xfer.transport.group"}
