"""Sessions between emulated hosts (tests/support/hosts.py): every byte crosses a shaped network interface, by gloo.

.venvs/trainer/bin/python -m pytest -q tests/functional/test_hosts.py                # a few seconds
.venvs/trainer/bin/python -m pytest -q -m slow tests/functional/test_hosts.py        # all faults of links and hosts
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.host_world import BYTES, HostWorld
from tests.support.hosts import Cluster, missing
from tests.support.proc import PATIENCE, ROOT

NEEDED = sum(2 * a * b for a, b in (s for s in BYTES.values() if len(s) == 2)) + 2 * 12
"""Bytes that each replica of one worker needs."""


@pytest.fixture(scope="module", autouse=True)
def needs_hosts():
    if why := missing():
        pytest.skip(why)


def good(results):
    assert all(r["kind"] == "done" for r in results), results
    return results[0]["value"]


def right(w, version, replicas=None):
    """All workers hold exactly these weights, and the controllers serve them."""
    for r in w.replicas:
        if replicas is None or r.index in replicas:
            assert r.controller.value("state")["serves"], f"replica {r.index}"
            held = [x.value("holds", versions=list(range(8)))["whole"] for x in r.workers]
            assert held == [[version]] * w.workers, f"replica {r.index}"


@pytest.mark.parametrize(("ranks", "rails"), [(1, False), (2, True)])
def test_a_session_between_hosts_brings_every_byte_in_once(tmp_path, ranks, rails):
    with Cluster(4 // ranks, ranks, mbit=200, rails=rails) as c, HostWorld(c, tmp_path, trainers=2, workers=1) as w:
        good(w.meet())
        takers = c.hosts[2 // ranks :]
        for version in (1, 2):
            before = [c.bytes_in(h) for h in c.hosts]
            assert good(w.refit(version))["committed"] == [True, True]
            right(w, version)
            for h, b in zip(c.hosts, before):
                needed, came = ranks * NEEDED * (h in takers), c.bytes_in(h) - b
                assert needed <= came <= needed * 1.02 + 0.05 * NEEDED * (h not in takers), (h.name, came)


def test_a_host_has_a_name_addresses_and_processes_of_its_own():
    with Cluster(2, 2, mbit=200, rails=True) as c:
        a, b = c.hosts
        said = subprocess.run(
            b.command("sh", "-c", "hostname; getent hosts h0; ls -d /proc/[0-9]*; pwd"), capture_output=True, text=True
        )
        name, known, *processes, folder = said.stdout.splitlines()
        assert (name, known.split(), folder) == ("h1", [a.address, "h0"], os.getcwd()) and len(processes) <= 4, said
    assert not os.path.exists(f"/proc/{a.keeper}")


def test_hosts_end_with_the_process_that_made_them():
    script = (
        "import subprocess, sys, time; from tests.support.hosts import Cluster\n"
        "c = Cluster(2, mbit=100).__enter__(); subprocess.Popen(c.hosts[0].command('sleep', '1000'))\n"
        "print(*(h.keeper for h in c.hosts), flush=True); time.sleep(1000)"
    )
    p = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    keepers = p.stdout.readline().split()
    assert len(keepers) == 2 and all(os.path.exists(f"/proc/{k}") for k in keepers)
    p.send_signal(signal.SIGKILL)
    p.wait(10)
    until = time.monotonic() + 10 * PATIENCE
    while any(os.path.exists(f"/proc/{k}") for k in keepers):
        assert time.monotonic() < until, keepers
        time.sleep(0.02)
