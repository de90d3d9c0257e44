"""The peer route by NIXL (transport/peer_rdma.py), for real: UCX over TCP, in this process; between emulated hosts: test_hosts.py.

Real RDMA is not here: over TCP a thread of UCX in the source's process sends what the destination asks for.
"""

from __future__ import annotations

import sys

import pytest

from tests.functional.test_session_routes import by_route
from tests.support.world import World
from xfer.routes import Direct
from xfer.transport import peer_rdma

NIXL = pytest.mark.skipif(bool(peer_rdma.missing()), reason=peer_rdma.missing())


def test_without_nixl_connect_refuses_and_a_rank_that_offers_nothing_is_sent_its_bytes(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "nixl", None)  # importing it then fails, as where it is not installed
    wrong = Direct(rdma=True, relay=True).wrong(None, 2)
    assert len(wrong) == 2 and "relay=True" in wrong[0] and "pip install" in wrong[1], wrong
    with World(2, 2, rdma=True) as w:
        report = w.commits(1)
        assert by_route(report) == {"gloo": report.bytes} and "offers nothing by NIXL" in caplog.text


@NIXL
def test_refits_changes_and_moved_storages(monkeypatch):
    monkeypatch.setattr(peer_rdma, "SHORTEST", 2)
    with World(2, 2, 2, rdma=True) as w:
        for version in (1, 2, 3):
            report = w.commits(version, delta="auto")
            assert set(by_route(report)) == {"rdma"} and report.verified
        epochs = w.epochs()  # routes were opened again once already, for marks
        w.sources[0].move()
        assert set(by_route(w.commits(4))) == {"rdma"} and w.epochs() == [n + 1 for n in epochs]
