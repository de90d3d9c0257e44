"""Balance, schedule and parts of relays: the work is even, nothing is lost, and no buffer overflows."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.lib.relay import relay
from tests.support.examples import EXAMPLES
from tests.support.links import divided
from tests.support.row_worlds import row
from xfer.plan.balance import Demand, balance
from xfer.plan.program import row_wire_bytes
from xfer.plan.relay import GRAIN, in_parts
from xfer.plan.schedule import schedule

some = settings(max_examples=EXAMPLES // 2 + 1, deadline=None)


@st.composite
def demands(draw, costs=(1,)):
    n, cost = draw(st.integers(1, 6)), st.sampled_from(costs)
    sets = st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True).map(lambda h: tuple(sorted(h)))
    units = st.one_of(st.integers(0, 20), st.integers(1000, 100_000))
    return n, draw(st.lists(st.builds(Demand, sets, st.integers(n, n + 4), units, cost), max_size=12))


@given(demands(costs=(1, 8)))
@example((8, [Demand((0,), 8, 8000, 1), *(Demand((i, i + 1), 8, 1000, 1) for i in range(7))]))  # a chain of sets
@some
def test_demands_are_divided_wholly_and_the_busiest_source_is_as_good_as_the_linear_programme(case):
    linprog = pytest.importorskip("scipy.optimize").linprog
    n, asked = case
    shares = balance(asked, n)
    assert shares == balance(asked, n) and divided(asked, shares)
    asked = [d for d in asked if d.units]
    if not asked:
        return
    columns = [(i, h) for i, d in enumerate(asked) for h in d.holders]
    equal = np.zeros((len(asked), len(columns) + 1))
    below = np.zeros((n, len(columns) + 1))
    for c, (i, h) in enumerate(columns):
        equal[i, c], below[h, c] = 1, asked[i].cost
    below[:, -1] = -1
    best = linprog([0] * len(columns) + [1], below, np.zeros(n), equal, [d.units for d in asked]).fun
    load, greedy = np.zeros((2, n), np.int64)
    for s in balance(asked, n):
        load[s.source] += (s.end - s.begin) * asked[s.demand].cost
    for d in asked:  # each demand from the least loaded holder is never better
        greedy[min(d.holders, key=lambda h: (greedy[h], h))] += d.units * d.cost
    # Whole units: rounding may cost each set one unit at a source.
    slack = sum({(d.holders, d.cost): d.cost for d in asked}.values())
    assert load.max() <= best * 1.01 + slack + 1
    assert load.max() <= greedy.max() + slack


SIZES = [(16, 4, 4), (16, 8, 2), (16, 2, 8), (16, 1, 8), (4, 8, 1), (1, 8, 1), (8, 1, 1), (16, 16, 1)]


@pytest.mark.parametrize("trainers, workers, replicas", SIZES)
def test_even_traffic_keeps_links_busy_and_sub_plans_that_run_at_once_use_different_sources(
    trainers, workers, replicas
):
    src, dst = np.divmod(np.arange(trainers * workers), workers)
    busy: dict[int, np.ndarray] = {}
    for r in range(replicas):
        rotated = dict(rotation=r, rotations=replicas)
        s = schedule(src, dst + trainers, np.full(len(src), 1000), message=100, per_rank=200, unit=10, **rotated)
        assert s.waves <= max(10, int(max(trainers, workers) * 1000 // 200 * 1.15) + 1)
        pair = np.repeat(np.arange(len(src)), np.diff(s.first))
        for wave in range(s.waves):
            busy.setdefault(wave, np.zeros(trainers, int))
            np.add.at(busy[wave], src[pair[s.wave == wave]], 100)
    most = sum(int(b.max()) for b in busy.values())
    # A source's own bytes, or a destination's: hardly any wave waits for a crowded one.
    assert most <= 1.1 * max(workers * replicas, trainers) * 1000
    first = [src[p] for p in range(len(src)) if (s.wave[s.first[p] : s.first[p + 1]] == 0).any()]
    assert max(map(first.count, first)) <= 2 and len({*first}) == min(trainers, 2 * workers)


@pytest.mark.parametrize("readers", [[(0, 2), (1, 3)], [(0, 1), (2, 3)], [(0, 1, 2, 3)] * 2])
@pytest.mark.parametrize("crumbs", [False, True])
def test_destinations_of_replicas_never_turn_to_one_source(readers, crumbs):
    """Readers: the sources of each worker. Two replicas, four sources. crumbs: the first worker also has a little of all others."""
    begin, turns = [], []
    for replica in range(2):
        nbytes = {(source, 4 + k): 1000 for k, some in enumerate(readers) for source in some}
        if crumbs:
            nbytes = {**{(source, 4): 5 for source in range(4)}, **nbytes}
        src, dst = np.array(sorted(nbytes)).T
        sizes = np.array([nbytes[p] for p in sorted(nbytes)])
        s = schedule(src, dst, sizes, message=100, per_rank=105, unit=5, rotation=replica, rotations=2)
        for worker, some in enumerate(readers):
            mine = dst == 4 + worker
            order = src[mine][np.argsort(s.turn[mine])].tolist()
            assert len(set(s.turn[mine].tolist())) == len(order) and set(order[: len(some)]) == set(some)
            turns.append(order[: len(some)])
            begin.append(s.turn[mine].min())
    assert all(len(set(at)) == len(at) for at in zip(*turns)) and begin == [0] * len(begin)


def test_a_pair_with_more_than_others_starts_at_once():
    sizes = np.array([200] * 9 + [1000])
    assert schedule(np.arange(10), np.full(10, 10), sizes, message=100, per_rank=200, unit=10).waves == 14


@pytest.mark.parametrize("replicas", [1, 4])
def test_between_hosts_every_wave_is_a_small_copy_of_the_whole(replicas):
    """Uneven pairs, of which none is short: no rank has more in a wave than its part of the bytes, and a slice."""
    dice = np.random.default_rng(replicas)
    src, dst = np.divmod(np.arange(64), 8)
    for replica in range(replicas):
        sizes = dice.integers(2_000, 40_000, 64)
        bounds = dict(message=4_000, per_rank=8_000, unit=10)
        s = schedule(src, dst + 8, sizes, **bounds, rotation=replica, rotations=replicas, far=np.ones(64, bool))
        pair = np.repeat(np.arange(64), np.diff(s.first))
        begin = s.begin.astype(np.int64)
        size = np.append(begin[1:], 0) - begin
        size[s.first[1:] - 1] = sizes - begin[s.first[1:] - 1]
        for end in (src, dst):
            all_of = np.bincount(end, sizes)
            waves = np.bincount(end[pair] * s.waves + s.wave, size, 8 * s.waves).reshape(8, -1)
            assert (waves <= (all_of / s.waves)[:, None] + 8 * 10 + sizes.max() / s.waves).all()
        assert s.waves <= 1.15 * max(np.bincount(e, sizes).max() for e in (src, dst)) / 8_000 + 1


@settings(deadline=None)
@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=6), st.integers(1, 6))
def test_parts_of_a_relay_are_even_up_to_the_grain(sizes, parts):
    """What parts leave in storages is judged in test_relay_place.py."""
    cut = in_parts(
        np.concatenate([row((n,), src_dtype="float32", src=k % 2, dst=2) for k, n in enumerate(sizes)]), parts
    )
    each = [int(row_wire_bytes(cut[cut["wave"] == p]).sum()) for p in range(parts)]
    assert max(each) - min(each) <= 2 * GRAIN * 4 and sum(each) == 4 * sum(sizes)


def test_in_the_chain_of_a_benchmark_each_part_goes_on_one_wave_later():
    rows = np.concatenate([row((64,), src=k, dst=2, dst_offset=128 * k) for k in range(2)])
    for j, p in enumerate(relay(rows, [2, 3, 4], 2)):
        assert (p.rank, p.waves, sorted(p.rows["wave"].tolist())) == (2 + j, 4, [j, j + 1])
        assert (p.rows["dst"] == 2 + j).all() and sorted(p.rows["src"].tolist()) == ([1 + j] * 2 if j else [0, 1])
        assert sorted(p.rows["dst_offset"].tolist()) == [0, 128]
