"""Trainers in bf16 refit engines that serve block FP8: the trainers quantize what such engines ask for. The judge is an oracle in
numpy that quantizes each whole matrix (tests/support/block_fp8.py)."""

from __future__ import annotations

import threading
import time

import pytest

from tests.functional.test_session_changes import export
from tests.support.fp8_engine import MATRICES, SHAPES, Fp8Taker, fp8_engine
from tests.support.world import ToyEngine, World, good, raised, right, until_true
from xfer.coordinator import refit
from xfer.coordinator.blocks import SharedBlocks
from xfer.errors import DeadlineExceeded, PeerLost, XferError
from xfer.kernels.block_fp8 import ScaleRule


def fp8_world(engines: list[ToyEngine], **more) -> World:
    return World(replicas=len(engines), shapes=dict(SHAPES), engines=engines, **more)


@pytest.mark.parametrize("rule", ScaleRule)
def test_engines_hold_what_the_oracle_makes_of_each_version(rule):
    with fp8_world([fp8_engine(rule)]) as world:
        for version in (1, 2):
            report = world.commits(version)
            assert report.verified and report.rules == (rule.value,)
            halves = sum(a * b for a, b in (SHAPES[n] for n in MATRICES)) // 2
            assert report.extra_bytes >= halves
        said = world.sessions[0].explain()
        assert (
            f"quantizes 2 matrices to FP8 before each refit (e4m3, a scale per 128x128 block, rule {rule.value})"
            in said
        )
        assert "bit for bit, what they would load from a checkpoint that this rule wrote" in said


def test_engines_in_bf16_and_in_fp8_by_both_rules_in_one_session():
    engines = [ToyEngine(2, dict(SHAPES)), fp8_engine(), fp8_engine(ScaleRule.POW2)]
    with fp8_world(engines) as world:
        for version in (1, 2):
            report = world.commits(version)
        assert report.rules == ("ieee", "pow2")


def test_an_engine_that_needs_fp8_joins_a_session_of_bf16_engines_later():
    """Between two refits: the catalog changes then, and all ranks read it in the next one."""
    with fp8_world([ToyEngine(2, dict(SHAPES)), ToyEngine(2, dict(SHAPES))]) as world:
        world.commits(1)
        world.leave(1)
        world.come(1, fp8_engine())
        until_true(lambda: world.coordinator.generation == 2)
        world.commits(2)
        world.commits(3)


def test_an_engine_that_needs_fp8_comes_while_bytes_move_by_the_old_catalog():
    with fp8_world([ToyEngine(2, dict(SHAPES)), ToyEngine(2, dict(SHAPES))]) as world:
        world.leave(1)
        installs = threading.Event()
        world.engines[0].takers[0].installs_after(installs)
        results = world.start(1, min_replicas=1)
        until_true(lambda: world.coordinator.refit and len(world.coordinator.refit.parts[0].armed) == 2)
        world.come(1, fp8_engine())
        until_true(lambda: world.coordinator.derived)
        assert world.coordinator.generation == 1
        installs.set()
        good(results())
        right(world, 1, {0})
        world.commits(2)


def test_trainers_that_moved_or_released_their_weights_quantize_what_they_have_now():
    with fp8_world([fp8_engine()]) as world:
        for version, change in ((1, lambda s: s.move()), (2, lambda s: None)):
            for source in world.sources:
                change(source)
            world.commits(version)
            good(world.on_all(lambda i: world.sessions[i].release()))


def three(**more) -> World:
    """Three trainers cut 256 rows at 85 and 170, so that each shares blocks with another one."""
    return fp8_world([fp8_engine()], trainers=3, **more)


def test_ranks_with_parts_of_one_block_agree_on_its_scale():
    with three() as world:
        for version in (1, 2):
            world.commits(version)
        world.leave(0)
        world.come(0, fp8_engine(ScaleRule.POW2))
        until_true(lambda: world.coordinator.generation == 3)
        assert world.commits(3).rules == ("ieee", "pow2")


def test_a_nan_in_one_part_of_a_block_shows_in_all_of_it():
    with three() as world:
        for source in world.sources:
            source.set(1)
        world.sources[2].params["layers.0.w"][-1, 0] = float("nan")  # row 255, in the second block
        good(world.refit())
        live = world.engines[0].takers[0].live
        assert (live["layers.0.w"][128:, :128] == 0x7F).all() and (live["layers.0.w"][:128] != 0x7F).all()
        assert live["layers.0.w_scale_inv"].isnan().tolist() == [[False, False], [True, False]]
        world.commits(2)


def test_no_rank_measures_where_no_block_is_shared(monkeypatch):
    seen = []
    monkeypatch.setattr(SharedBlocks, "measured", lambda self, client, msg: seen.append(client))
    with fp8_world([fp8_engine()]) as world:
        world.commits(1)
    assert not seen


@pytest.mark.parametrize("call", ["ready", "measured"])
def test_ranks_that_wait_for_a_part_of_a_block_hear_why_it_does_not_come(call):
    """A rank raises before it measures, or after: the others raise its error, and the next refit commits."""
    with three() as world:
        world.commits(1)
        side = world.sessions[1].side
        quantize = side.measure if call == "ready" else side.quantize

        def fails(*args):
            setattr(side, quantize.__name__, quantize)
            raise ValueError("no memory")

        setattr(side, quantize.__name__, fails)
        world.fails(2, XferError, "no memory")
        world.commits(3)


def test_ranks_that_wait_for_a_rank_that_is_gone_hear_so():
    with three() as world:
        world.commits(1)
        world.sessions[1].side.measure = lambda until: world.sessions[1]._party.channel.close()
        results = world.refit(2)
        raised(results[::2], PeerLost, "trainer 1 (host")
        raised(results[1:2], PeerLost, "lost the control connection")


def test_a_rank_that_does_not_come_is_named_at_the_deadline():
    with three() as world:
        world.commits(1)
        end = threading.Event()
        drain = world.sources[1].drain
        world.sources[1].drain = lambda: (end.wait(20), drain())
        results = world.start(2, deadline_s=1.5)
        until_true(lambda: not results.running())
        late = raised(results(), DeadlineExceeded, "trainer 1: it has called, and is not ready")
        assert not any("trainer 0:" in str(e) or "trainer 2:" in str(e) for e in late)
        end.set()
        world.sources[1].drain = drain
        world.commits(3)


def test_ranks_whose_exports_change_measure_again():
    """Of two ranks the exports change, one after the other: the union stays what it was, and all agree by a catalog made anew."""
    with three(drop=("extra",)) as world:
        world.commits(1)
        export(world.sources[0])
        generation = world.coordinator.generation
        world.commits(2)
        assert world.coordinator.generation == generation + 1
        for source in world.sources[1:]:
            export(source)
            generation = world.coordinator.generation
            world.commits(3 + source.rank)
            assert world.coordinator.generation == generation + 1
        world.commits(9)


def test_an_engine_that_wants_another_form_once_exports_change_gets_it_in_that_refit():
    engines = [ToyEngine(2, dict(SHAPES)), fp8_engine()]
    with fp8_world(engines, drop=("extra",)) as world:
        assert world.commits(1).rules == ("ieee",)
        for taker in engines[1].takers:
            taker.rule = ScaleRule.POW2
            taker.read = lambda catalog, taker=taker: (time.sleep(0.5), Fp8Taker.read(taker, catalog))[1]
        for source in world.sources:
            export(source)
        assert "pow2" in world.commits(2).rules


def test_an_engine_that_hangs_while_it_reads_new_exports_holds_up_no_other(monkeypatch):
    monkeypatch.setattr(refit, "TOGETHER_S", 0.3)
    engines, end = [ToyEngine(2, dict(SHAPES)), fp8_engine()], threading.Event()
    with fp8_world(engines, drop=("extra",)) as world:
        world.commits(1)
        taker = engines[1].takers[0]
        taker.read = lambda catalog: (end.wait(20), Fp8Taker.read(taker, catalog))[1]
        for source in world.sources:
            export(source)
        results = world.start(2, min_replicas=1)
        until_true(lambda: not any(t.wrong(2) for t in engines[0].takers))
        end.set()
        good(results())
        right(world, 2, {0})
        del taker.read
        world.commits(3)
