"""Trainers that keep matrices in FP8 themselves refit engines in block FP8: bytes and scales go as they are. The judge quantizes each
whole matrix as TransformerEngine does, in numpy (tests/support/block_fp8.py)."""

from __future__ import annotations

import pytest
import torch

from tests.functional.test_session_fp8 import fp8_world
from tests.support.block_fp8 import NATIVE, te_quantized
from tests.support.fp8_engine import MATRICES, SHAPES, fp8_engine
from tests.support.te_blocks import padded
from tests.support.world import ToyEngine, ToyLayout, ToySource, World, flat, raised
from xfer.errors import CoverageError, Unsupported
from xfer.kernels.block_fp8 import ScaleRule
from xfer.trace.derived import SCALES, VALUES, block_grid
from xfer.trace.fragment import Fragment, Root
from xfer.trace.traced import Traced

EXACT = "bit for bit, the bytes and scales that this trainer multiplies with"


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
        return ToyLayout(
            Traced(plain.traced.specs, tuple(held)), roots, tensors, scales=tuple(scales), pow2=NATIVE[self.native]
        )


def native_world(engines: list[ToyEngine], native: str, own: tuple[str, ...] = MATRICES) -> World:
    world = fp8_world(engines)
    world.sources = [NativeSource(i, 2, native, own) for i in range(2)]
    for engine in engines:
        for taker in engine.takers:
            taker.native = {name: native for name in own}
    return world


@pytest.mark.parametrize("native", NATIVE)
def test_engines_hold_the_trainers_own_bytes_of_each_version(native):
    with native_world([fp8_engine()], native) as world:
        for version in (1, 2):
            report = world.commits(version)
            assert report.verified and report.rules == ("native",)
            assert [s.side.scratch_bytes for s in world.sessions] == [0, 0], "nothing is copied"
        assert EXACT in world.sessions[0].explain()


def test_an_engine_that_needs_powers_of_two_takes_those_of_the_trainer():
    with native_world([fp8_engine(ScaleRule.POW2), fp8_engine()], "native, powers of two") as world:
        for version in (1, 2):
            assert world.commits(version).rules == ("native",)
        assert "powers of two" in world.sessions[0].explain()


def test_an_engine_that_needs_powers_of_two_gets_no_others():
    with pytest.raises(Unsupported) as error:
        native_world([fp8_engine(ScaleRule.POW2)], "native").connect()
    raised([error.value], Unsupported, "layers.1.w and others", "VLLM_USE_DEEP_GEMM_E8M0=0")


def test_a_matrix_that_the_trainer_keeps_in_bf16_is_quantized_beside_the_others():
    with native_world([fp8_engine()], "native", own=MATRICES[:1]) as world:
        for version in (1, 2):
            assert world.commits(version).rules == ("native", "ieee")


def test_an_engine_in_bf16_is_told_that_nothing_is_dequantized():
    with pytest.raises(CoverageError) as error:
        native_world([ToyEngine(2, dict(SHAPES))], "native").connect()
    raised(
        [error.value],
        CoverageError,
        "layers.0.w: float8_e4m3fn in the trainer, bfloat16 in ",
        "serve it in block FP8 too",
    )


def test_storages_that_moved_are_read_where_they_are_now():
    with native_world([fp8_engine()], "native") as world:
        for version in (1, 2):
            for source in world.sources:
                for name, old in list(source.params.items()):
                    source.params[name] = old.clone()
                    old.view(torch.uint8).fill_(0x7F)
            world.commits(version)
