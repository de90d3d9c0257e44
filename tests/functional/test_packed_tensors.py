"""The packed route's gather from FSDP2 modules, DTensors and plain tensors, three gloo ranks: what torch's own full_tensor()
gives, bit for bit, in one message per rank and bucket. The ranks are tests/support/packed_tensors.py.
"""

from __future__ import annotations

import json

import pytest

from tests.functional.megatron_launch import launch

pytestmark = pytest.mark.trainer


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed-tensors")
    launch("../support/packed_tensors.py", str(folder), world=3, folder=folder)
    return json.loads((folder / "seen.json").read_text())


@pytest.mark.parametrize("kind", ["fsdp", "tensors"])
def test_buckets_hold_what_torch_gathers_and_only_on_rank_0(seen, kind):
    for rank, found in enumerate(seen):
        for step in ("first", "second"):
            x = found[kind][step]
            assert x["wrong"] == [], (rank, step)
            assert (x["tensors"] > 0) == (rank == 0), "nobody else has a whole tensor"
            assert x["groups"] > 1 and x["most"] <= (2 if rank == 0 else 0), "one message per rank and bucket"


def test_several_ranks_put_messages_together_in_their_buffers_also_in_many_rounds(seen):
    for rank, found in enumerate(seen):
        one, many = found["tensors"]["everywhere"], found["tensors"]["rounds"]
        assert one["wrong"] == many["wrong"] == [], rank
        assert (one["tensors"], many["tensors"]) == ((0, 0) if rank == 1 else (6, 6))
        assert many["built"] == one["built"] + 1 == 4
    assert seen[0]["tensors"]["rounds"]["most"] > 2 >= seen[0]["tensors"]["everywhere"]["most"] > 0


def test_a_tensor_that_one_rank_replaced_is_read_anew_on_all(seen):
    assert [found["tensors"]["second"]["built"] for found in seen] == [2, 2, 2]
    assert [found["fsdp"]["second"]["built"] for found in seen] == [1, 1, 1]
