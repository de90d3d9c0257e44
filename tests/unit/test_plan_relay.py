"""Relay chains move what the direct rows move: each byte leaves the trainers once, and none is read before it is there."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lib.relay import relay
from tests.support.row_worlds import apply_world, random_world, row
from xfer.plan.program import Op, Program, row_wire_bytes
from xfer.plan.relay import GRAIN, in_parts


def one_destination(seed: int, sources: int, rows: int):
    """Rows into rank `sources` from the ranks below it, and the storages of all."""
    rng = np.random.default_rng(seed)
    programs, storages = random_world(rng, sources + 1, 1, rows)
    table = programs[sources].rows
    return table[(table["dst"] == sources) & (table["src"] != sources)], storages


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32), sources=st.integers(1, 3), k=st.integers(1, 5), parts=st.integers(1, 6), data=st.data()
)
def test_every_destination_ends_with_what_it_would_have_pulled_alone(seed, sources, k, parts, data):
    """Each rank sends each byte once."""
    rows, storages = one_destination(seed, sources, 40)
    destinations = [sources + i for i in range(k)]
    programs = relay(rows, destinations, parts)
    moved = [p.rows[p.rows["op"] != Op.FILL] for p in programs]
    direct, *relayed = (row_wire_bytes(r).sum() for r in moved)
    assert direct == row_wire_bytes(rows).sum() and (moved[0]["src"] < sources).all()
    for j, r in enumerate(moved[1:], 1):
        assert (r["src"] == destinations[j - 1]).all() and (r["wave"] >= j).all() and (r["wave"] < j + parts).all()
    assert len(set(relayed)) <= 1  # in the destinations' dtypes
    alone = apply_world([Program(sources, 1, rows)], storages)
    world = [*storages[:sources], *([s.copy() for s in storages[sources]] for _ in destinations)]
    # As far ahead of each other as a relay lets them: a part needs the same part of the worker before.
    ended = [0] * k
    while ended[-1] < parts:
        j = data.draw(st.sampled_from([i for i in range(k) if ended[i] < (ended[i - 1] if i else parts)]))
        now = programs[j].rows
        fills = now["op"] == Op.FILL
        now = now[(now["wave"] == ended[j] + j) & ~fills | fills]
        world = apply_world([Program(destinations[j], 1, now)], world)
        ended[j] += 1
    for j, worker in enumerate(destinations):
        for got, want in zip(world[worker], alone[sources], strict=True):
            assert np.array_equal(got, want), f"worker {j}"


@settings(deadline=None)
@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=6), st.integers(1, 6))
def test_parts_are_even_up_to_the_grain(sizes, parts):
    cut = in_parts(
        np.concatenate([row((n,), src_dtype="float32", src=k % 2, dst=2) for k, n in enumerate(sizes)]), parts
    )
    each = [int(row_wire_bytes(cut[cut["wave"] == p]).sum()) for p in range(parts)]
    assert max(each) - min(each) <= 2 * GRAIN * 4 and sum(each) == 4 * sum(sizes)
