"""Workers of pytest-xdist and the GPUs that they begin at (tests/conftest.py)."""

from __future__ import annotations

import pytest

from tests.conftest import beginning_at, visible


@pytest.mark.parametrize("count", range(1, 9))
def test_every_worker_sees_all_gpus_and_as_many_as_there_are_begin_apart(count):
    devices = [str(3 * d) for d in range(count)]
    seen = [beginning_at(f"gw{k}", devices).split(",") for k in range(count)]
    assert all(sorted(s) == sorted(devices) for s in seen)
    assert [s[0] for s in seen] == devices
    assert beginning_at(f"gw{count}", devices) == ",".join(seen[0])


@pytest.mark.parametrize("there, left", [("", []), ("2,0", ["2", "0"])])
def test_gpus_that_were_hidden_stay_hidden(monkeypatch, there, left):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", there)
    assert visible() == left
