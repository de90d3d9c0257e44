"""The packed route, live: real Megatron-Core + Bridge trainers gather buckets, a real vLLM loads them, bit for bit.

The truth is the same as in test_refit_e2e.py: a fresh vLLM that loads what Bridge exported at that step.
"""

from __future__ import annotations

import pytest

from tests.functional.test_refit_e2e import PLAIN, Case, run, stage  # noqa: F401
from tests.support.marks import BOTH

pytestmark = BOTH
HOW = dict(route="packed", bucket_bytes=96 << 10, deadline_s=120.0, scramble=False)
"""Small enough for many buckets."""
SHARED = dict(HOW, colocated=True)
CASES = [
    Case("qwen3", dict(tp=2, pp=2, **PLAIN), (dict(tp=2),), connect=HOW),
    Case("deepseek_v3", dict(tp=2, pp=2, ep=2, etp=1, distopt=True), (dict(tp=2),), connect=HOW),
    Case("qwen3_tied", dict(tp=2, pp=2, **PLAIN), (dict(tp=1),), connect=SHARED),
    Case("qwen3_moe", dict(tp=2, ep=2, etp=2, **PLAIN), (dict(tp=2), dict(tp=1)), connect=HOW),
    Case("qwen3_moe", dict(tp=2, pp=2, ep=2, etp=1, **PLAIN), (dict(tp=2, ep=True),), connect=SHARED),
]


@pytest.mark.parametrize(
    "case", [CASES[0], *(pytest.param(c, marks=pytest.mark.slow) for c in CASES[1:])], ids=lambda c: c.name
)
def test_packed_refit_equals_a_fresh_load_of_the_export(case, stage, tmp_path):  # noqa: F811
    run(case, stage, tmp_path)
