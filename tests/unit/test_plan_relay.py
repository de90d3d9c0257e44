"""Relays move what the direct rows move: every byte once out of the trainers, and none is read before it is there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.row_worlds import apply_world, random_world
from xfer.errors import PlanMismatch
from xfer.plan.program import Op, Program, row_wire_bytes
from xfer.plan.relay import GRAIN, relay


def one_taker(seed: int, senders: int, rows: int):
    """Rows into rank `senders` from the ranks below it, and everybody's storages."""
    rng = np.random.default_rng(seed)
    programs, storages = random_world(rng, senders + 1, 1, rows)
    table = programs[senders].rows
    return table[(table["dst"] == senders) & (table["src"] != senders)], storages


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32), senders=st.integers(1, 3), k=st.integers(1, 5), waves=st.integers(1, 6), data=st.data()
)
def test_every_taker_ends_with_what_it_would_have_pulled_alone(seed, senders, k, waves, data):
    rows, storages = one_taker(seed, senders, 40)
    takers = [senders + i for i in range(k)]
    programs = relay(rows, takers, waves)
    alone = apply_world([Program(senders, 1, rows)], storages)
    world = [*storages[:senders], *([s.copy() for s in storages[senders]] for _ in takers)]
    # Takers run ahead of each other as far as a relay lets them: wave w needs everybody's wave w - 1.
    ended = [0] * k
    while min(ended) <= waves:
        j = data.draw(st.sampled_from([i for i in range(k) if ended[i] <= waves and ended[i] <= min(ended)]))
        now = programs[j].rows[programs[j].rows["wave"] == ended[j]]
        world = apply_world([Program(takers[j], 1, now)], world)
        ended[j] += 1
    for j, taker in enumerate(takers):
        for got, want in zip(world[taker], alone[senders], strict=True):
            assert np.array_equal(got, want), f"taker {j}"


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), k=st.integers(1, 5), waves=st.integers(1, 4))
def test_trainers_give_each_byte_once_and_takers_carry_alike(seed, k, waves):
    rows, _ = one_taker(seed, 2, 40)
    programs = relay(rows, [2 + i for i in range(k)], waves)
    table = np.concatenate([p.rows[p.rows["op"] != Op.FILL] for p in programs])
    nbytes = row_wire_bytes(table)
    assert nbytes[table["src"] < 2].sum() == row_wire_bytes(rows).sum()
    assert (table["wave"][table["src"] < 2] < waves).all() and (table["wave"][table["src"] >= 2] > 0).all()
    # Each taker's own share is even, up to the grain and what is not cut inside of it.
    item = 8
    shares = [int(nbytes[(table["src"] < 2) & (table["dst"] == 2 + i)].sum()) for i in range(k)]
    assert max(shares) - min(shares) <= 2 * waves * GRAIN * item


def test_what_cannot_be_relayed_is_refused():
    rows, _ = one_taker(1, 2, 60)
    with pytest.raises(ValueError, match="at least one wave"):
        relay(rows, [2, 3], 0)
    with pytest.raises(PlanMismatch, match="both sender and taker"):
        relay(rows, [1, 3], 2)
    several = rows.copy()
    several["dst"][-1] = 7
    with pytest.raises(PlanMismatch, match="rank 7"):
        relay(several, [2, 3], 2)


def test_nothing_to_move():
    rows, _ = one_taker(1, 2, 60)
    assert [len(p.rows) for p in relay(rows[:0], [2, 3], 4)] == [0, 0]
