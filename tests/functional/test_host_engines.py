"""Real vLLMs on emulated hosts of their own, refitted by trainers on two others: every byte crosses a network of shaped interfaces, over
NCCL's sockets where there are GPUs, over gloo or by NIXL otherwise.

.venvs/trainer/bin/python -m pytest -q -m "slow and not gpu" tests/functional/test_host_engines.py     # on CPUs
python -m pytest -q -m gpu tests/functional/test_host_engines.py     # as root, with one to four GPUs
"""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.gpu_job import gpus
from tests.support.host_engines import FAR, GRACE_S, NOWHERE, SHORT, Bench, GlooBench, NcclBench, NixlBench
from tests.support.hosts import missing
from tests.support.proc import stopped
from tests.support.refit_job import until

LATE = ("DeadlineExceeded", "PeerLost")
GPU = [pytest.mark.gpu, pytest.mark.skipif(gpus() < 1, reason="needs a GPU")]
WAYS = {"gloo": (GlooBench, {}), "nccl": (NcclBench, {}), "gloo, IPv6": (GlooBench, dict(ipv6=True))}
WAYS |= {"nccl, IPv6": (NcclBench, dict(ipv6=True)), "nixl": (NixlBench, {})}
MARKS = {n: GPU if kind is NcclBench else pytest.mark.slow for n, (kind, _) in WAYS.items()}


@pytest.fixture(scope="module", params=[pytest.param(n, marks=m) for n, m in MARKS.items()])
def bench(request, tmp_path_factory):
    if why := missing():
        pytest.skip(why)
    kind, network = WAYS[request.param]
    made = kind(tmp_path_factory.mktemp("bench"), **network)
    yield made
    made.end()


@pytest.fixture
def b(bench) -> Bench:
    bench.ensure()
    return bench


def of_ipv4(b: Bench) -> None:
    if b.cluster.ipv6:
        pytest.skip("faults are tried with one kind of addresses")


def test_refits_between_hosts_are_bit_exact(b):
    for seed in (2, 1):
        report = b.right(seed)
        assert report["verified"], report
        assert max(report["came"]) < 1.1 * b.nbytes + (1 << 18), (report["came"], b.nbytes)


def test_what_changed_is_all_that_crosses_and_the_engines_are_as_after_a_whole_refit(b):
    b.right(1, delta="auto")
    before = [b.held(i) for i in range(2)]
    b.whole = False
    b.all("nudge", "nudged")
    came = [b.cluster.bytes_in(h) for h in b.cluster.hosts[2:]]
    b.refit(delta="auto")
    came = [b.cluster.bytes_in(h) - n for h, n in zip(b.cluster.hosts[2:], came)]
    after = [b.held(i) for i in range(2)]
    assert max(came) < b.nbytes / 5, (came, b.nbytes)
    b.refit()
    assert [b.held(i) for i in range(2)] == after and all(x != y for x, y in zip(before, after))
    b.right(1)


def test_a_link_that_is_cut_in_mid_transfer_fails_its_replica_in_time_and_the_other_goes_on(b):
    of_ipv4(b)
    seed, wait = b.other(), b.moving(2, 3)
    b.begin(seed, deadline_s=SHORT, min_replicas=1)
    wait()
    b.cluster.cut(b.cluster.hosts[3])
    for said in b.answers(within=SHORT + GRACE_S):
        assert said["kind"] == "refitted" and said["committed"] == [True, False], said
        assert said["errors"][1].startswith((*LATE, "EngineLost")) and "replica 1" in said["errors"][1], said
    assert b.holds(0, seed)
    b.cluster.mend(b.cluster.hosts[3])
    b.refit()
    b.right(b.seed)


def test_a_trainer_that_is_stopped_in_mid_transfer_is_named_in_time_and_goes_on(b):
    of_ipv4(b)
    b.fault("trainer:1:moving:stop@1")
    b.begin(b.other(), deadline_s=SHORT)
    pid = b.trainers[1].proc.pid
    until(lambda: stopped(pid), 30, "trainer 1 is stopped")
    try:
        (said,) = b.answers((0,), SHORT + GRACE_S)
        assert said["kind"] == "raised" and said["type"] in LATE and "trainer 1" in said["text"], said
    finally:
        os.kill(pid, signal.SIGCONT)
    (said,) = b.answers((1,), FAR)
    assert said["kind"] == "raised" and said["type"] in LATE, said
    b.right(b.seed)


def test_an_engine_that_listens_where_nobody_reaches_it_fails_alone_in_time(b):
    """Over gloo it is right all the same if it is the one that dials. Trainers do not wait for it when they connect."""
    of_ipv4(b)
    b.whole = False
    b.replace_engine(1, **NOWHERE)
    said = b.meet(wait=False)
    assert [s["kind"] for s in said] == ["connected"] * 2, said
    b.engines[0].ask("ready", "ready")  # else the other one alone may be enough for this refit
    seed = b.other()
    b.begin(seed, deadline_s=SHORT, min_replicas=1)
    for said in b.answers(within=SHORT + GRACE_S):
        assert said["kind"] == "refitted" and said["committed"][0], said
        if said["committed"][1]:
            assert "gloo" in b.transports and b.holds(1, seed), said
        else:
            assert said["errors"][1].startswith(LATE) and "replica 1" in said["errors"][1], said
    assert b.holds(0, seed)
    b.replace_engine(1)
    b.connected(b.meet())
    b.right(b.seed)
