"""Writes that mark: exactly the granules that they change, by the torch twin and by the kernel, and every other write is found.

TRITON_INTERPRET=1 python -m pytest tests/unit/test_kernels_written.py
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from tests.support.examples import EXAMPLES
from tests.unit.test_kernels_marks import granules
from tests.unit.test_kernels_triton import DEVICE, KINDS
from xfer.kernels import written
from xfer.kernels.marks import ByteRange, places
from xfer.kernels.written import Written, spans_of, write
from xfer.trainers.marked_writes import mark_writes


class Params:
    """Storages with 16-bit tensors inside, and an optimizer's fp32 masters of these."""

    def __init__(self, seed: int, device: str = "cpu"):
        self.rng = rng = np.random.default_rng(seed)
        dtype = [torch.bfloat16, torch.float16][seed % 2]
        self.roots, self.params = [], []
        for _ in range(rng.integers(1, 3)):
            counts, at, places = rng.choice([1, 7, 8, 40, 513, 1000, 2050], rng.integers(1, 4)), 0, []
            for n in counts.tolist():
                at = -(-at // 16) * 16 + 16 * int(rng.integers(0, 5))
                places.append((at, n))
                at += 2 * n
            values = torch.from_numpy(rng.standard_normal(at // 2 + 8).astype(np.float32)).to(dtype)
            self.roots.append(values.view(torch.uint8).to(device))
            self.params += [self.roots[-1][a : a + 2 * n].view(dtype) for a, n in places]
        self.masters = [p.float() for p in self.params]
        written.announce(self)

    def writes(self):
        return self.params

    def held(self) -> list[np.ndarray]:
        return [r.cpu().numpy().copy() for r in self.roots]

    def step(self, share: float) -> None:
        """Change this share of the masters, and write all of them. Some changes are lost in rounding; some values are special."""
        for m in self.masters:
            some = torch.from_numpy(self.rng.random(len(m)) < share).to(m.device)
            m[some] *= 1 + self.rng.choice([1e-4, 0.5])
            if self.rng.random() < 0.1:
                m[0] = self.rng.choice([0.0, -0.0, np.inf, 1e30, 1e-40])
        write(zip(self.params, self.masters))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0]), min_size=1, max_size=4))
def test_writes_do_what_a_copy_does_and_mark_what_they_change_and_any_other_write_is_found(kind, seed, shares):
    params = Params(seed, DEVICE)
    spans = spans_of(params.roots)
    assert len(spans) == len(params.params) and list(spans) == sorted(spans)
    taken, want = Written(params.roots, spans), 0
    taken._by_kernel = kind == "triton"
    for share in shares:
        before = params.held()
        with patch("xfer.kernels.written_triton.TILE_WORDS", 2) if taken._by_kernel else nullcontext():
            params.step(share)
        assert all(torch.equal(p, m.to(p.dtype)) for p, m in zip(params.params, params.masters))
        want = want | granules(params.held(), before)
        taken.settle()
        assert np.array_equal(taken.bits.cpu().numpy(), want)
    taken.clear()
    k = int(params.rng.integers(len(spans)))
    s, at = spans[k], places([len(r) for r in params.roots])
    if params.rng.random() < 0.5:
        params.step(0.3)  # after another write, and before one
        want = taken.bits.cpu().numpy().copy()
    else:
        want = taken.bits.cpu().numpy() * 0
    one = params.rng.integers(s.start, s.stop)
    params.roots[s.root][one] ^= 1 << params.rng.integers(8)
    if params.rng.random() < 0.5:
        before = params.held()
        params.step(0.1)
        want |= granules(params.held(), before)
    want[at[s.root] + s.start // 256 : at[s.root] + -(-s.stop // 256)] = 255
    for _ in range(2):
        taken.settle()
        assert np.array_equal(taken.bits.cpu().numpy(), want)


def test_of_what_a_writer_names_only_tensors_that_can_be_marked_are_spans():
    params = Params(0)
    root = params.roots[0] = torch.zeros(4096, dtype=torch.uint8)
    half = root.view(torch.bfloat16)
    params.params = [
        half[8:40],
        half[16:24],  # inside the one before
        half[32:36],  # and this one
        half[43:47],  # no multiple of 16 bytes
        half[64:96].view(4, 8).t(),
        half[96:112].view(torch.int16),
        root[256:320].view(torch.float32),
        half[:0],
        torch.zeros(16, dtype=torch.bfloat16),  # elsewhere
        half[512:544],
    ]
    assert spans_of(params.roots[:1]) == (ByteRange(0, 16, 80), ByteRange(0, 1024, 1088))
    assert spans_of([root[2:]]) == (), "a storage that begins at an odd place"
    written.forget(params)
    assert spans_of(params.roots[:1]) == ()


def test_a_write_that_no_kernel_can_do_is_a_plain_copy_and_found_as_any_other_write():
    params = Params(4)
    taken = Written(params.roots, spans_of(params.roots))
    p = max(params.params, key=len)
    for into, value in ((p, p.double() + 1), (p[:4], p[:4].float() + 2), (p, torch.zeros(1))):
        write([(into, value)])
        assert torch.equal(into, value.to(p.dtype).expand(into.shape)) and not taken.bits.any()
        taken.settle()
        assert int((taken.bits == 255).sum()) >= p.nbytes // 256
        taken.clear()


class Interrupt(TorchFunctionMode):
    """KeyboardInterrupt in place of one call of torch, by its number."""

    def __init__(self, at: int):
        super().__init__()
        self.left = at

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == -1:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def test_what_a_write_that_is_interrupted_has_changed_is_marked():
    at, over = 0, False
    while not over:
        params = Params(3)
        taken, before = Written(params.roots, spans_of(params.roots)), params.held()
        for m in params.masters:
            m += 1
        try:
            with Interrupt(at):
                write(zip(params.params, params.masters))
            over = True
        except KeyboardInterrupt:
            at += 1
        taken.settle()
        changed = granules(params.held(), before)
        assert not (changed & ~taken.bits.numpy()).any(), at
    assert at > 20 * len(params.params) and changed.any()


def test_storages_that_move_go_on_and_nobody_who_is_gone_takes_writes():
    params = Params(3)
    taken = Written(params.roots, spans_of(params.roots))
    moved = [r.clone() for r in params.roots]
    at = [(s.root, s.start, s.stop) for s in taken.spans]
    dtype = params.params[0].dtype
    params.roots, params.params = moved, [moved[i][a:b].view(dtype) for i, a, b in at]
    params.masters = [p.float() for p in params.params]
    assert spans_of(moved) == taken.spans
    taken.bind(moved)
    taken.settle()
    assert not taken.bits.any(), "they hold the same"
    params.step(1.0)
    assert taken.bits.any()
    bits, version = taken.bits, params.params[0]._version
    del taken
    gc.collect()
    bits.zero_()
    params.step(1.0)
    assert not bits.any() and params.params[0]._version > version


def test_megatrons_copies_wait_for_no_operator_that_reads_them():
    root = torch.zeros(128, dtype=torch.uint8, device=DEVICE)
    a, b = (root[i : i + 32].view(torch.bfloat16) for i in (0, 64))
    master = torch.arange(16, dtype=torch.float32, device=DEVICE)

    class Optimizer:
        """With the names that Megatron's has."""

        shard_float16_groups, shard_fp32_from_float16_groups = [[a, b]], [[master, master]]

        def _copy_main_params_to_model_params(self) -> None:
            a.view(-1)[:].copy_(master)
            self.read = a + 0
            a.copy_(master + 1)
            b.copy_(a)

    optimizer = Optimizer()
    mark_writes(optimizer)
    taken = Written([root], spans_of([root]))
    assert len(taken.spans) == 2
    optimizer._copy_main_params_to_model_params()
    assert torch.equal(optimizer.read, master.bfloat16())
    assert torch.equal(a, (master + 1).bfloat16()) and torch.equal(b, a)
    marks = taken.bits.clone()
    assert int(marks[int(places([128])[0])]) == 0b101
    taken.settle()
    assert torch.equal(taken.bits, marks), "nothing else has written"
