"""Provenance by numbers: every dtype brings them back, and computed values do not pass for moved ones. That the probe and the trace of
an export agree is shown in test_trace_export.py."""

import pytest
import torch

from tests.support.replay import load
from xfer.errors import LayoutError, Unsupported
from xfer.trace.fragment import TensorSpec
from xfer.trace.loader import trace_loader
from xfer.trace.probe import NOT_MOVED, OFFSET_BITS, Digits, decode, export_fragments, moves, numbers

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


FLOOR = 2.0**-22
A, B = TensorSpec("a", (3, 5), "float32"), TensorSpec("b", (2, 5), "float32")


class Scales(torch.nn.Module):
    """A matrix of both tensors in a wider storage, which is changed after loading."""

    def __init__(self, change) -> None:
        super().__init__()
        self.change = change
        self.p = torch.nn.Parameter(torch.empty(5, 8, device="meta"), requires_grad=False)

    def load_weights(self, weights) -> None:
        given = dict(weights)
        self.p.data[:3, :5].copy_(given["a"])
        self.p.data[3:, :5].copy_(given["b"])
        self.change(self.p.data[:, :5])


CHANGES = {  # and whether it changes a possible number
    "a limit below": (lambda x: x.clamp_(min=1e-10), False),
    "the limit itself": (lambda x: x.clamp_(min=FLOOR), False),
    "rows turned and a limit": (lambda x: x.copy_(x.roll(2, 0).clamp(min=1e-10)), False),
    "scaled and scaled back": (lambda x: x.mul_(0.5).mul_(2), False),
    "a limit above the least": (lambda x: x.clamp_(min=FLOOR * (1 + 2**-20)), True),
    "a limit below the largest": (lambda x: x.clamp_(max=3e38), True),
    "doubled": (lambda x: x.mul_(2), True),
    "one of two": (lambda x: x.copy_(torch.maximum(x, x.roll(1, 0))), True),
    "one number for all": (lambda x: x.copy_(x.amax().expand(5, 5)), True),
    "rounded": (lambda x: x.copy_(x.to(torch.bfloat16)), True),
}


@pytest.mark.parametrize("change, computes", CHANGES.values(), ids=CHANGES)
def test_arithmetic_that_changes_no_possible_number_is_a_move_and_other_stays_arithmetic(change, computes):
    traced = trace_loader(Scales(change), (A, B))
    assert traced.recipes and not any(f.root == "p" for f in traced.fragments)
    found = moves(traced, FLOOR)
    if computes:
        assert found == traced
        return
    assert not found.recipes and found.fragments
    given = {s.name: torch.rand(s.shape) + FLOOR for s in (A, B)}
    by_recipe, by_move = (torch.full((5, 8), 7.0) for _ in range(2))
    load(traced, given, {"p": by_recipe})
    load(found, given, {"p": by_move})
    assert torch.equal(by_recipe, by_move)
