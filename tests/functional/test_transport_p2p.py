"""Programs run over gloo leave exactly the bytes that a plain loop over their rows leaves, however they are cut."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.functional.test_transport_group import links as opened
from tests.support import plan_worlds
from tests.support.examples import EXAMPLES
from tests.support.memory import allocations
from tests.support.plan_worlds import quick
from tests.support.proc import PATIENCE
from tests.support.row_worlds import apply_world, change, fresh_sources, random_world, read_box, row
from tests.support.threads import all_good, run_ranks, soon
from xfer.direct.remembered import read_parts
from xfer.errors import PlanMismatch
from xfer.kernels.changes import unit_of
from xfer.kernels.marks import rest_of
from xfer.plan.program import Op, Program, row_wire_bytes
from xfer.transport import peer
from xfer.transport.changes import HeldBytes
from xfer.transport.group import Aborted
from xfer.transport.p2p import P2P
from xfer.transport.scratch import Scratch
from xfer.transport.steps import arrivals, steps

RANKS = 4


@pytest.fixture(scope="module")
def links():
    yield (found := opened(9))
    for link in found:
        link.close()


SEEDS = st.integers(0, 2**32 - 1)
CUTS = st.fixed_dictionaries(
    dict(step_bytes=st.sampled_from([1, 64, 300, 1 << 20]), direct_bytes=st.sampled_from([1, 40, 1 << 20]))
)


def tensors(storages):
    return [[torch.from_numpy(r.copy()) for r in s] for s in storages]


def are(roots, want) -> bool:
    """Whether storages of ranks hold these bytes."""
    return all(np.array_equal(t.numpy(), w) for some, wanted in zip(roots, want) for t, w in zip(some, wanted))


def run_all(runs: list[P2P], **of_rank) -> list:
    """What all ranks' runs return. of_rank: arguments, by rank."""
    return all_good(run_ranks(len(runs), lambda r: runs[r].run(soon(), **{k: v[r] for k, v in of_rank.items()})))


def nbytes(p: Program, end: str) -> int:
    """Bytes that this rank has to send ("src") or to receive ("dst")."""
    moved = p.rows[(p.rows["src"] != p.rows["dst"]) & (p.rows["op"] != Op.FILL)]
    return row_wire_bytes(moved[moved[end] == p.rank]).sum()


class Watched:
    """When a step is said to have arrived, its boxes hold what the run leaves there: relays let others read it (relay_place.py)."""

    def __init__(self, rows: np.ndarray, roots: list[torch.Tensor], want: list[np.ndarray]):
        self.rows, self.roots, self.want, self.told = rows, [t.numpy() for t in roots], want, []

    def arrived(self, step: int, stream) -> None:
        self.told.append(step)
        for r in self.rows[self.rows["wave"] == step]:
            got, want = (read_box(some[r["dst_root"]], r, "dst") for some in (self.roots, self.want))
            assert got.view(torch.uint8).equal(want.view(torch.uint8))

    def poll(self) -> None:
        pass


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(SEEDS, st.integers(1, 4), st.integers(1, 40), CUTS)
def test_any_programs_finish_and_equal_the_element_loop(links, seed, waves, rows, cut):
    """Sends, receives, both ways at once, local rows, fills, casts; run twice with changed sources."""
    rng = np.random.default_rng(seed)
    programs, storages = random_world(rng, RANKS, waves, rows)
    roots = tensors(storages)
    runs = [P2P(links[r], p, roots[r], **cut) for r, p in enumerate(programs)]
    for again in range(2):
        for r, p in enumerate(programs if again else ()):
            fresh = fresh_sources(rng, p.rows[p.rows["src"] == r], [t.numpy() for t in roots[r]])
            for t, new in zip(roots[r], fresh):
                t.copy_(torch.from_numpy(new))
        want = apply_world(programs, [[r.numpy().copy() for r in s] for s in roots])
        watch = [Watched(arrivals(p, cut["step_bytes"]), roots[r], want[r]) for r, p in enumerate(programs)]
        stats = run_all(runs, watch=watch)
        assert are(roots, want)
    for r, p in enumerate(programs):
        bytes_in = sum(x.bytes_in for x in stats[r].peers)
        assert (stats[r].bytes_out, stats[r].bytes_in) == tuple(nbytes(p, end) for end in ("src", "dst"))
        assert stats[r].bytes_in == bytes_in == row_wire_bytes(watch[r].rows).sum()
        assert watch[r].told == list(range(len(steps(p, **cut)))) and set(watch[r].rows["wave"]) <= set(watch[r].told)


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(
    SEEDS, st.integers(1, 40), CUTS, st.sampled_from([0.0, 0.02, 0.3, 1.0]), st.sets(st.integers(0, RANKS - 1)), st.booleans()
)  # fmt: skip
def test_a_run_by_changes_leaves_what_a_whole_one_leaves(links, seed, rows, cut, share, forgot, staged):
    """Some sources have no copies of what they sent before, and send all bytes. Also by way of scratch."""
    rng = np.random.default_rng(seed)
    programs, storages = random_world(rng, RANKS, 3, rows)
    roots = tensors(storages)
    runs = [P2P(links[r], p, roots[r], **cut) for r, p in enumerate(programs)]
    whole = run_all(runs)
    mine = [p.rows[(p.rows["src"] == r) & (p.rows["op"] != Op.FILL)] for r, p in enumerate(programs)]
    parts = [read_parts(rows, [t.numel() for t in some]) for rows, some in zip(mine, roots)]
    before = [[p.of(some).clone() for p in here] for here, some in zip(parts, roots)]
    for r in range(RANKS):
        change(rng, mine[r], [t.numpy() for t in roots[r]], share)
    want = apply_world(programs, [[t.numpy().copy() for t in some] for some in roots])
    bases = [HeldBytes(5, 77, None if r in forgot else before[r], parts[r]) for r in range(RANKS)]
    if staged:
        scratch = [Scratch(programs[r], roots[r], 1 << 40, "", None) for r in range(RANKS)]
        runs = [P2P(links[r], programs[r], s.roots, src_roots=s.live, scratch=s, **cut) for r, s in enumerate(scratch)]
    stats = run_all(runs, base=bases)
    for r, p in enumerate(programs):
        if staged:
            held = runs[r].held(scratch[r], p.rows[:0], None)
            assert held.needs_base == (stats[r].bytes_in < whole[r].bytes_in)
            held.apply(soon(), "")
        assert stats[r].bytes_out <= whole[r].bytes_out
        if r in forgot:
            assert stats[r].bytes_out == whole[r].bytes_out
        elif not share:
            parts = [part for step in steps(p, cut["step_bytes"], 1 << 62) for part in step.sends]
            assert stats[r].bytes_out == sum(part.nbytes for part in parts if not unit_of(part.rows))
    assert are(roots, want)


@settings(quick)
@given(plan_worlds.worlds(relay=True), CUTS, st.sampled_from([0.02, 1.0]), SEEDS)
def test_workers_hand_on_what_they_have_received(links, world, cut, share, seed):
    """Also in a run by changes, in which a worker receives only these, and hands on all bytes."""
    sides, plan = [*world.trainers, *world.workers], world.plan()
    inventories = [*world.sources(), *world.destinations()]
    roots = [[torch.from_numpy(s.storage[r.name]) for r in i.roots] for s, i in zip(sides, inventories)]
    runs = [P2P(links[r], plan.program(r), some, **cut) for r, some in enumerate(roots)]
    rng = np.random.default_rng(seed)
    for base in (None, HeldBytes(5, 77)):
        parts = [rest_of((), [t.numel() for t in some]) for some in roots[: plan.trainers]]
        before = [[p.of(some).clone() for p in here] for here, some in zip(parts, roots)]
        bases = [base and replace(base, before=b, parts=p) for b, p in zip(before, parts)] + [base] * len(world.workers)
        for value in world.values.values() if base else ():
            new = np.roll(value, 1, axis=0)
            value[:] = np.where(rng.random((len(value), 1)) < share, new, value)
        world.load_trainers()
        want = [world.expected(w) for w in world.workers]
        run_all(runs, base=bases)
        for side, expected in zip(world.workers, want):
            assert all(np.array_equal(side.storage[root], expected[root]) for root in expected)


@pytest.mark.parametrize("source", [HeldBytes(6, 77, []), HeldBytes(5, 78, [])])
def test_changes_of_another_refit_or_plan_are_refused_before_a_byte_is_written(source):
    p, got = long_pair(opened(2))
    ends = run_ranks(2, lambda r: p[r].run(soon(), base=HeldBytes(5, 77) if r else replace(source, before=None)))
    assert isinstance(ends[1], PlanMismatch) and "trainer 0: changes since refit" in str(ends[1])
    assert not got.any() and [isinstance(e, Exception) for e in ends] == [True, True]


@settings(max_examples=EXAMPLES, deadline=None)
@given(SEEDS, st.integers(1, 400), st.integers(1, 200), st.booleans())
def test_both_ends_of_a_message_cut_it_alike_and_within_bounds(seed, step_bytes, direct_bytes, pulls):
    """Nothing but the bytes of its rows travels, also where destinations pull some rows themselves."""
    rng = np.random.default_rng(seed)
    programs, _ = random_world(rng, 3, 2, 30)
    if pulls:
        taken = {t: {s: frozenset(np.flatnonzero(rng.integers(0, 2, 8))) for s in range(3)} for t in range(3)}
        programs = [peer.split(p, taken)[1] for p in programs]
    plans = [steps(p, step_bytes, direct_bytes) for p in programs]

    def messages(side):
        out = {}
        for r, plan in enumerate(plans):
            for step in plan:
                for part in getattr(step, side):
                    pair = (r, part.peer) if side == "sends" else (part.peer, r)
                    out.setdefault(pair, []).extend((step.wave, p.tag, p.nbytes) for p in part.pieces)
        return out

    assert messages("sends") == messages("receives")
    for p, plan in zip(programs, plans):
        for side, end in (("sends", "src"), ("receives", "dst")):
            sizes = [part.nbytes for step in plan for part in getattr(step, side)]
            assert sum(sizes) == nbytes(p, end) and max(sizes, default=0) <= max(step_bytes, 8)
        assert [s.wave for s in plan] == sorted(s.wave for s in plan)


def long_pair(links, value: int = 7, **how) -> tuple[list[P2P], torch.Tensor]:
    """64 rows of 16 KiB from rank 0, full of `value`, to rank 1, whose storage comes back."""
    size = 1 << 14
    places = [dict(src_offset=i * size, dst_offset=i * size, wire=i * size) for i in range(64)]
    rows = np.concatenate([row((size // 2,), src=0, dst=1, **at) for at in places])
    roots = torch.full((64 * size,), value, dtype=torch.uint8), torch.zeros(64 * size, dtype=torch.uint8)
    return [P2P(links[r], Program(r, 1, rows), [roots[r]], step_bytes=size, **how) for r in range(2)], roots[1]


def test_long_dense_rows_touch_no_buffer_and_short_ones_a_bounded_one():
    links = opened(2)
    for direct, extra in ((1 << 10, 0), (1 << 20, 2 * (1 << 14))):
        p, got = long_pair(links, direct_bytes=direct)
        assert [x.extra_bytes for x in p] == [extra, extra]
        run_all(p)
        assert (got == 7).all()


def test_a_warm_run_allocates_nothing():
    programs, storages = random_world(np.random.default_rng(3), 2, 3, 60)
    p = [P2P(link, *of_rank, step_bytes=256) for link, *of_rank in zip(opened(2), programs, tensors(storages))]
    run_all(p)
    assert not [n for n in allocations(lambda: run_all(p)) if n > 0] and allocations(lambda: torch.empty(100))


@pytest.mark.parametrize("how", ["cancelled", "a hook that fails"])
def test_a_run_that_ends_early_frees_its_peer_and_writes_nothing_more(how):
    p, got = long_pair(opened(2))
    seen, fails = [], how != "cancelled"

    def hook(wave, nbytes):
        seen.append(nbytes)
        if fails and len(seen) == 3:
            raise KeyError("hook")

    def rank(r):
        return p[1].run(soon(), lambda: not fails and len(seen) >= 3, hook) if r else p[0].run(soon())

    t0 = time.monotonic()
    source, destination = run_ranks(2, rank)
    assert time.monotonic() - t0 < 2 * PATIENCE
    assert isinstance(destination, KeyError if fails else Aborted) and isinstance(source, Exception)
    written = int(got.count_nonzero())
    assert written == seen[-1] == 3 << 14
    time.sleep(0.1)
    assert int(got.count_nonzero()) == written


def test_another_ranks_program_is_refused():
    with pytest.raises(PlanMismatch, match="trainer 1"):
        P2P(opened(2)[1], Program(0, 1, row((8,), dst=1)), [torch.zeros(64, dtype=torch.uint8)])
