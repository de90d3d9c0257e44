"""Numbers sent through Bridge's real collectives say the same as the symbolic trace, and stand in where it cannot
follow."""

from __future__ import annotations

import pytest

from tests.functional.megatron_launch import seen_in_launches

pytestmark = pytest.mark.trainer

CASES = ["qwen3-tp2-pp2", "qwen3_moe-tp2-pp2-ep2-etp1", "deepseek_v3-tp2-ep2"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return seen_in_launches("probes", tmp_path_factory.mktemp("megatron-probe"))


@pytest.mark.parametrize("case", CASES)
def test_probe_and_trace_agree_on_every_element(seen, case):
    x = seen(case)
    assert "error" not in x, x["text"]
    assert x["same"] == [True] * 4


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_traced_is_refused_or_probed(seen, case):
    x = seen(case)
    assert "linear_proj.weight" in x["refused"] and "numpy" in x["refused"]
    assert x["fallback"] == [True] * 4


@pytest.mark.parametrize("case", CASES)
def test_a_probe_is_not_fooled_by_arithmetic(seen, case):
    assert "o_proj.weight" in seen(case)["computed"]
