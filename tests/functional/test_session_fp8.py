"""Trainers in bf16 refit engines that serve block FP8: the trainers quantize what such engines ask for. The judge is an oracle in
numpy that quantizes each whole matrix (tests/support/block_fp8.py)."""

from __future__ import annotations

import threading
import time

import pytest

from tests.support.fp8_engine import MATRICES, SHAPES, Fp8Taker, fp8_engine
from tests.support.world import ToyEngine, World, good, right, until_true
from xfer.coordinator import refit
from xfer.coordinator.blocks import SharedBlocks
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


@pytest.mark.parametrize("pulled", [False, True], ids=["sent", "pulled"])
def test_a_refit_by_changes_compares_quantized_bytes(pulled):
    with fp8_world([fp8_engine()], host_pull=pulled) as world:
        whole = world.commits(1, delta="auto").outcomes[0].bytes_moved
        some = []
        for tiny in (1e-30, 2e-30):  # both are 0 in FP8
            world.sources[0].params["layers.0.w"][0, 0] = tiny
            some.append(good(world.refit(delta="auto")).outcomes[0].bytes_moved)
        assert 0 < some[0] < whole / 100 and some[1] == 0


def three(**more) -> World:
    """Three trainers cut 256 rows at 85 and 170, so that each shares blocks with another one."""
    return fp8_world([fp8_engine()], trainers=3, **more)


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


def test_an_engine_that_wants_another_form_once_exports_change_gets_it_in_that_refit():
    engines = [ToyEngine(2, dict(SHAPES)), fp8_engine()]
    with fp8_world(engines, drop=("extra",)) as world:
        assert world.commits(1).rules == ("ieee",)
        for taker in engines[1].takers:
            taker.rule = ScaleRule.POW2
            taker.read = lambda catalog, taker=taker: (time.sleep(0.5), Fp8Taker.read(taker, catalog))[1]
        for source in world.sources:
            source.export()
        assert "pow2" in world.commits(2).rules


def test_an_engine_that_hangs_while_it_reads_new_exports_holds_up_no_other(monkeypatch):
    monkeypatch.setattr(refit, "TOGETHER_S", 0.3)
    engines, end = [ToyEngine(2, dict(SHAPES)), fp8_engine()], threading.Event()
    with fp8_world(engines, drop=("extra",)) as world:
        world.commits(1)
        taker = engines[1].takers[0]
        taker.read = lambda catalog: (end.wait(20), Fp8Taker.read(taker, catalog))[1]
        for source in world.sources:
            source.export()
        results = world.start(2, min_replicas=1)
        until_true(lambda: not any(t.wrong(2) for t in engines[0].takers))
        end.set()
        good(results())
        right(world, 2, {0})
        del taker.read
        world.commits(3)
