"""Engines that serve block FP8. Trainers in bf16 quantize what such engines ask for; trainers that keep matrices in FP8 themselves send
their bytes and scales as they are. The judges are oracles in numpy that quantize each whole matrix (tests/support/block_fp8.py)."""

import threading
import time

import pytest
import torch

from tests.support.block_fp8 import NATIVE, te_quantized
from tests.support.fp8_engine import MATRICES, SHAPES, Fp8Taker, fp8_engine
from tests.support.te_blocks import padded
from tests.support.world import ToyEngine, ToyLayout, ToySource, World, flat, good, raised, right, until_true
from xfer.coordinator import refit
from xfer.coordinator.blocks import SharedBlocks
from xfer.direct.plane import DirectPlane
from xfer.errors import CoverageError, Unsupported
from xfer.kernels.block_fp8 import ScaleRule
from xfer.trace.derived import SCALES, VALUES, block_grid
from xfer.trace.fragment import Fragment, Root
from xfer.trace.traced import Traced
from xfer.transport import peer_rdma


def fp8_world(engines: list[ToyEngine], **more) -> World:
    return World(replicas=len(engines), shapes=dict(SHAPES), engines=engines, **more)


@pytest.mark.parametrize("rule", ScaleRule)
def test_engines_hold_what_the_oracle_makes_of_each_version(monkeypatch, rule):
    """No block is shared here, so no rank measures one for others."""
    monkeypatch.setattr(SharedBlocks, "measured", lambda *_: pytest.fail("measured"))
    with fp8_world([fp8_engine(rule)]) as world:
        for version in (1, 2):
            report = world.commits(version)
            assert report.verified and report.rules == (rule.value,)
            halves = sum(a * b for a, b in (SHAPES[n] for n in MATRICES)) // 2
            assert report.extra_bytes >= halves
        said = world.sessions[0].explain()
        text = f"to FP8 before each refit (e4m3, a scale per 128x128 block, rule {rule.value})"
        assert f"quantizes 2 matrices {text}" in said
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
        side, halves = world.sessions[0].side, sum(world.sources[0].params[n].nbytes for n in MATRICES)
        assert side._last._copied_bytes <= sum(t.numel() for t in side.roots()[1]) - halves, "sent in FP8 only"


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


@pytest.mark.parametrize(
    "way",
    [
        dict(relay=True),
        dict(relay=True, host_pull=True),
        pytest.param(dict(rdma=True), marks=pytest.mark.skipif(bool(peer_rdma.missing()), reason=peer_rdma.missing())),
    ],
    ids=["a relay ring", "a relay chain", "NIXL"],
)
def test_replicas_by_both_rules_are_refitted_by_each_way_also_where_blocks_are_shared(monkeypatch, way):
    """Two of three replicas ask for the same form. Scratch is freed and made anew."""
    monkeypatch.setattr(peer_rdma, "SHORTEST", 2)
    engines = [fp8_engine(rule) for rule in (ScaleRule.IEEE, ScaleRule.POW2, ScaleRule.IEEE)]
    with fp8_world(engines, trainers=3, **way) as world:
        kinds = set()
        for version, how in enumerate((dict(verify=True), dict(stage=True), dict(delta="auto"), dict(verify=True)), 1):
            report = world.commits(version, **how)
            kinds |= {r.route for o in report.outcomes for r in o.routes}
            if version == 3:
                good(world.on_all(lambda i: world.sessions[i].release()))
        assert report.rules == ("ieee", "pow2") and ("relay" if "relay" in way else "rdma") in kinds


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


@pytest.mark.parametrize("role", ["trainer", "worker"])
@pytest.mark.parametrize("step, news", [("make_plan", "catalog"), ("open", "inventory")])
def test_a_plan_that_another_engine_made_old_by_asking_for_fp8_is_made_again(monkeypatch, step, news, role):
    """An engine in bf16 is planned by the first catalog. One rank begins with that when it has read the second one, another has not."""
    engines, late, over = [ToyEngine(2, dict(SHAPES)), fp8_engine()], threading.Event(), threading.Event()
    begin, read, last = getattr(DirectPlane, step), Fp8Taker.read, engines[0].takers[1]

    def begun_late(self, *args):
        if late.is_set() or (self.replica, self.side.role, self.side.index) != (0, role, 0):
            return begin(self, *args)
        first = getattr(self.side, news)
        late.set()
        try:
            until_true(lambda: getattr(self.side, news) != first)
            return begin(self, *args)
        finally:
            over.set()

    monkeypatch.setattr(DirectPlane, step, begun_late)
    monkeypatch.setattr(
        Fp8Taker, "read", lambda self, catalog: (late.wait(10), time.sleep(0.3), read(self, catalog))[2]
    )
    reads = last.read
    last.read = lambda catalog: (late.is_set() and over.wait(10) and time.sleep(0.3), reads(catalog))[1]
    with fp8_world(engines) as world:
        assert over.is_set()
        world.commits(1)


# ---- trainers that keep matrices in FP8


class NativeSource(ToySource):
    """Rows of `own` are in FP8: e4m3 bytes, and scales whose rows are padded to four, as TransformerEngine pads them."""

    def __init__(self, rank: int, world: int, native: str, own: tuple[str, ...] = MATRICES):
        self.native, self.own = native, own
        super().__init__(rank, world, dict(SHAPES))

    def set(self, version: int) -> None:
        codes_of = {name: self.params.pop(name) for name in self.own if name in self.params}
        super().set(version)
        for name in self.own:
            codes, scales = te_quantized(self.params.pop(name).float().numpy(), NATIVE[self.native])
            if name in codes_of:
                self.params[name] = codes_of[name]
            self._put(name, torch.from_numpy(codes))
            whole = torch.full(padded(block_grid(codes.shape)), torch.nan)
            whole[:, : scales.shape[1]] = torch.from_numpy(scales)
            self._put(f"{name}:scales", whole)

    def _put(self, key: str, new: torch.Tensor) -> None:
        """In place, as an optimizer does."""
        self.params.setdefault(key, new).copy_(new)

    def read(self) -> ToyLayout:
        plain = super().read()
        held, scales = [f for f in plain.traced.fragments if f.tensor not in self.own], []
        for name in self.own:
            codes, scale = self.params[name], self.params[f"{name}:scales"]
            row, column = self.rows(SHAPES[name][0])[0], SHAPES[name][1]
            held.append(Fragment(name, (row, 0), tuple(codes.shape), name, 0, (column, 1), VALUES))
            blocks = block_grid(tuple(codes.shape))
            strides = tuple(s * 4 if n > 1 else 0 for n, s in zip(blocks, scale.stride()))
            scales.append(Fragment(name, (row // 128, 0), blocks, f"{name}:scales", 0, strides, SCALES))
        tensors = {n: flat(t) for n, t in self.params.items()}
        roots = tuple(Root(n, t.numel()) for n, t in tensors.items())
        traced, pow2 = Traced(plain.traced.specs, tuple(held)), NATIVE[self.native]
        return ToyLayout(traced, roots, tensors, scales=tuple(scales), pow2=pow2)


def native_world(engines: list[ToyEngine], native: str, own: tuple[str, ...] = MATRICES) -> World:
    world = fp8_world(engines)
    world.sources = [NativeSource(i, 2, native, own) for i in range(2)]
    for engine in engines:
        for taker in engine.takers:
            taker.native = {name: native for name in own}
    return world


EXACT = "bit for bit, the bytes and scales that this trainer multiplies with"
POW2 = "native, powers of two"
HELD = [
    ("native", MATRICES, [ScaleRule.IEEE], EXACT),
    (POW2, MATRICES, [ScaleRule.IEEE], EXACT),
    (POW2, MATRICES, [ScaleRule.POW2, ScaleRule.IEEE], "powers of two"),
    ("native", MATRICES[:1], [ScaleRule.IEEE], EXACT),
]
"""What trainers keep, which matrices, what engines ask for, and what trainers say of it. Other matrices are quantized beside these."""


@pytest.mark.parametrize(("native", "own", "rules", "said"), HELD)
def test_engines_hold_the_trainers_own_bytes_of_each_version(native, own, rules, said):
    """Also of storages that have moved."""
    with native_world([fp8_engine(rule) for rule in rules], native, own) as world:
        for version in (1, 2, 3):
            for source in world.sources if version == 3 else ():
                for name, old in list(source.params.items()):
                    source.params[name] = old.clone()
                    old.view(torch.uint8).fill_(0x7F)
            report = world.commits(version)
            assert report.verified and report.rules == ("native", *(["ieee"] if own != MATRICES else ()))
            assert own != MATRICES or [s.side.scratch_bytes for s in world.sessions] == [0, 0], "nothing is copied"
        assert said in world.sessions[0].explain()


@pytest.mark.parametrize(
    ("engine", "kind", "texts"),
    [
        (lambda: fp8_engine(ScaleRule.POW2), Unsupported, ("layers.1.w and others", "VLLM_USE_DEEP_GEMM_E8M0=0")),
        (lambda: ToyEngine(2, dict(SHAPES)), CoverageError,
         ("layers.0.w: float8_e4m3fn in the trainer, bfloat16 in ", "serve it in block FP8 too")),
    ],
    ids=["it needs powers of two", "it is in bf16"],
)  # fmt: skip
def test_an_engine_that_cannot_use_the_trainers_own_bytes_is_refused(engine, kind, texts):
    with pytest.raises(kind) as error:
        native_world([engine()], "native").connect()
    raised([error.value], kind, *texts)
