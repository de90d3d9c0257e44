"""Provenance by numbers: every dtype brings them back, and computed values do not pass for moved ones. That the probe and the trace of
an export agree is shown in test_trace_export.py."""

from __future__ import annotations

import pytest
import torch

from xfer.errors import LayoutError, Unsupported
from xfer.trace.fragment import TensorSpec
from xfer.trace.probe import NOT_MOVED, OFFSET_BITS, Digits, decode, export_fragments, numbers

DTYPES = ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32", "uint8", "int8", "int32", "int64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_digits_come_back_as_numbers(dtype):
    kind = getattr(torch, dtype)
    spec = TensorSpec("x", (7, 50), dtype)
    digits = Digits.fit([spec] * 5)
    for root in (0, 4):
        back = digits.recombine(digits.digits(root, spec.shape, kind))
        assert torch.equal(back, numbers(root, spec.shape))
    assert digits.passes == 2 * digits.count and digits.count * digits.bits >= (350 * 4).bit_length()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "compute",
    [torch.zeros_like, torch.neg, lambda x: x + 1, lambda x: x * 2, lambda x: x * 0.5, lambda x: x + x.flip(0)],
)
def test_what_was_computed_is_not_a_move(dtype, compute):
    spec = TensorSpec("x", (64,), dtype)
    digits = Digits.fit([spec, spec])
    out = digits.recombine([compute(x) for x in digits.digits(1, spec.shape, getattr(torch, dtype))])
    assert int((out == NOT_MOVED).sum()) == 64


def test_dtypes_without_integers_and_another_shape_are_refused():
    with pytest.raises(Unsupported) as e:
        Digits.fit([TensorSpec("x", (2,), "float8_e8m0fnu"), TensorSpec("y", (2,), "bool")])
    assert len(e.value.violations) == 2
    with pytest.raises(LayoutError, match="shape"):
        export_fragments(TensorSpec("x", (6, 4), "bfloat16"), numbers(0, (24,)), {})


def test_decoding_skips_what_was_not_moved():
    ids = numbers(3, (10,))
    ids[4:6] = NOT_MOVED
    assert [(at.size, root, at == of) for at, root, of in decode(ids)] == [(8, 3, True)]
    assert 3 << OFFSET_BITS == int(ids[0])
