"""Compact messages: what changed comes back, and a message that is none about these rows is refused before it is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import EXAMPLES
from tests.support.row_worlds import row
from xfer.errors import ProtocolError
from xfer.kernels.changes import BLOCK, Patch, compact_bytes, encode, unit_of


def long_row(units: int, unit: int) -> np.ndarray:
    return row((units,), src_dtype="bfloat16" if unit == 2 else "float8_e4m3fn", dst_offset=64)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.integers(1, 3 * BLOCK), st.sampled_from([1, 2]), st.sampled_from([0.0, 1e-4, 0.01, 0.2]), st.integers(0, 1 << 30)
)
def test_what_changed_comes_back_in_as_many_bytes_as_the_format_says(units, unit, share, seed):
    g = torch.Generator().manual_seed(seed)
    old = torch.randint(0, 256, (units * unit,), dtype=torch.uint8, generator=g)
    chosen = torch.rand(units, generator=g) < share
    new = torch.where(chosen.repeat_interleave(unit), old + 1, old)
    message = encode(new, old, unit, 1 << 40)
    changed = int(chosen.sum())
    assert message.numel() == (compact_bytes(units, changed, unit) if changed else 0)
    if changed:
        assert encode(new, old, unit, message.numel() - 1) is None
        root = torch.cat([torch.zeros(64, dtype=torch.uint8), old])
        Patch(long_row(units, unit), [root], "trainer 0").apply(message)
        assert torch.equal(root[64:], new) and not root[:64].any()


WRONG = {
    "cut": lambda m: m[:-1],
    "too short": lambda m: m[:3],
    "counts that do not add up": lambda m: torch.cat([m[:1] + 1, m[1:]]),
    "a negative count": lambda m: torch.cat([m[:3], m[3:4] + 128, m[4:]]),
    "a place behind the end": lambda m: torch.cat([m[:8], m.new_full((2,), 255), m[10:]]),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_message_that_is_none_about_these_rows_is_refused_before_it_is_written(how):
    old = torch.zeros(2 * (BLOCK + 100), dtype=torch.uint8)
    new = old.clone()
    new[-200::50] = 1
    message = encode(new, old, 2, 1 << 20)
    root = torch.zeros(64 + len(old), dtype=torch.uint8)
    with pytest.raises(ProtocolError, match="trainer 0"):
        Patch(long_row(BLOCK + 100, 2), [root], "trainer 0").apply(WRONG[how](message))
    assert not root.any()


def test_elements_that_a_receiver_widens_have_no_units():
    assert unit_of(row((4,), src_dtype="bfloat16", dst_dtype="float32")) == 0
    assert unit_of(row((4,), src_dtype="float32", dst_dtype="bfloat16")) == 2
    assert unit_of(row((4,), src_dtype="bfloat16", dst_offset=1)) == 1
