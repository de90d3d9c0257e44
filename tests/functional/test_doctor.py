"""`xfer doctor` between real processes: on loopback, and on two emulated hosts whose names or routes are wrong."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from examples.common.ports import free_port
from tests.support.proc import PATIENCE, environment
from xfer.cli.doctor.facts import Checkup
from xfer.cli.doctor.line import Line
from xfer.cli.doctor.look import look
from xfer.cli.doctor.meeting import Begin, Join, Terms, attend
from xfer.cli.doctor.visits import Offers, open_door, visit
from xfer.coordinator.state import Options
from xfer.errors import PeerLost
from xfer.rendezvous.channel import dial_socket
from xfer.rendezvous.server import Server

TOKEN = "a token for tests"
LIMIT_S = 60 * PATIENCE


class Doctor:
    """A process of `xfer doctor`. `end` gives its exit code and its JSON."""

    def __init__(self, *options: str, prefix: tuple[str, ...] = (), **env: str):
        command = [*prefix, sys.executable, "-m", "xfer", "doctor", "--json", "-", "--seconds", "0.1", *options]
        self.process = subprocess.Popen(
            command, env=environment(**{"XFER_TOKEN": TOKEN, **env}), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )  # fmt: skip

    def end(self) -> tuple[int, dict]:
        try:
            out, err = self.process.communicate(timeout=LIMIT_S)
        finally:
            self.process.kill()
        assert out, err
        return self.process.returncode, json.loads(out)["doctor"]


def problems(report: dict) -> list[tuple[str, str, str]]:
    return [(f["topic"], f["where"], f["said"]) for f in report["findings"] if f["level"] == "problem"]


def here() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def test_three_processes_measure_every_pair_and_all_print_what_differs():
    at = here()
    three = [Doctor("--rendezvous", at, "--size", "3", **e) for e in ({}, {"NCCL_PROTO": "LL"}, {"NCCL_BUFFSIZE": "1"})]
    codes, reports = zip(*(d.end() for d in three))
    first = reports[0]
    assert codes == (1, 1, 1) and reports[1] == first == reports[2]
    (two, one), labels = problems(first), [h["label"] for h in first["hosts"]]
    assert (one[0], two[0]) == ("environment", "environment") and one[1] == two[1] == ", ".join(labels)
    held = {h["label"]: h["settings"] for h in first["hosts"]}
    (with_proto,) = (label for label, s in held.items() if s == {"NCCL_PROTO": "LL"})
    assert f"LL on {with_proto}" in one[2] and f"not set on {', '.join(x for x in labels if x != with_proto)}" in one[2]
    pairs = {(p["source"], p["destination"]): p for p in first["paths"]}
    assert pairs.keys() == {(a, b) for a in labels for b in labels if a != b}
    assert all(p["nbytes"] and 0 < p["round_trip_s"] < 1 and not p["error"] for p in pairs.values())
    assert {(m["source"], m["destination"]) for m in first["memory"]} == pairs.keys()


def test_two_that_agree_have_no_problem():
    at = here()
    two = [Doctor("--rendezvous", at, "--size", "2") for _ in range(2)]
    codes, reports = zip(*(d.end() for d in two))
    assert codes == (0, 0), problems(reports[0])


def test_a_wrong_token_is_told_on_both_sides_and_nobody_waits_for_long():
    at, began = here(), time.monotonic()
    waits = Doctor("--rendezvous", at, "--size", "2", "--timeout", str(5 * PATIENCE))
    while not listens(at):
        assert time.monotonic() < began + LIMIT_S
        time.sleep(0.05)
    code, report = Doctor("--rendezvous", at, "--size", "2", XFER_TOKEN="another token").end()
    assert code == 1 and any("different tokens" in said for _, _, said in problems(report))
    code, report = waits.end()
    said = [said for topic, _, said in problems(report) if topic == "meeting"]
    assert code == 1 and "only 1 of 2 processes came" in said[0] and "a caller holds another token" in said[1]


def listens(at: str) -> bool:
    """Whether the port is in use: a connection would count as a caller without the token."""
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", int(at.rpartition(":")[2])))
        except OSError:
            return True
    return False


def test_a_service_that_says_nothing_ends_the_wait_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at, began = f"tcp://127.0.0.1:{silent.getsockname()[1]}", time.monotonic()
        code, report = Doctor("--rendezvous", at, "--timeout", "2").end()
    assert code == 1 and time.monotonic() - began < 2 + 20 * PATIENCE
    assert any("within 2 s" in said for _, _, said in problems(report))


# ---- in this process: members that break the rules


def start(terms: Terms) -> tuple[threading.Thread, list[Checkup]]:
    kept: list[Checkup] = []
    thread = threading.Thread(target=lambda: kept.append(attend(terms, look())), daemon=True)
    thread.start()
    return thread, kept


def join(terms: Terms) -> Line:
    return Line(dial_socket(terms.rendezvous, TOKEN, 10 * PATIENCE), "the leader")


def soon() -> float:
    return time.monotonic() + 20 * PATIENCE


def test_a_member_that_leaves_is_named_and_the_others_measure():
    terms = Terms(here(), TOKEN, 3, 20 * PATIENCE, 0.05)
    two, leaver = [start(terms) for _ in range(2)], join(terms)
    leaver.send(Join(look(), 3, Offers()), soon())
    leaver.take(soon(), Begin)
    leaver.close()
    for thread, _ in two:
        thread.join(LIMIT_S)
    (first,), (second,) = (kept for _, kept in two)
    assert first == second and len(first.hosts) == 3
    (lost,) = (f.where for f in first.failures if "left during the measurements" in f.said)
    stay = {f.label for f in first.hosts} - {lost}
    assert {(p.source, p.destination) for p in first.paths if not p.error} == {
        (a, b) for a in stay for b in stay if a != b
    }


@pytest.mark.parametrize(
    "sent", [b"\x00", b"\xff\xff\xff\xff", b"\x04\x00\x00\x00\x93\xa4None", b"\x05\x00\x00\x00cos\nx"]
)
def test_what_a_proven_caller_sends_is_decoded_or_refused(sent):
    """A frame that is cut, too long, of another type, or a pickle: the meeting goes on without its sender."""
    terms = Terms(here(), TOKEN, 2, 20 * PATIENCE, 0)
    first, odd = start(terms), join(terms)
    odd.sock.sendall(sent)
    odd.close()
    second = start(terms)
    for thread, _ in (first, second):
        thread.join(LIMIT_S)
    assert first[1] == second[1] and not first[1][0].failures and len(first[1][0].paths) == 2


def test_another_process_at_an_address_is_told_from_the_one_that_is_meant():
    """As where two machines have one address, or a name is that of this machine everywhere."""
    door, port = open_door("c's identity", TOKEN)
    try:
        meant = replace(look(), label="b", identity="b's identity", port=port)
        found = list(visit(look(), meant, "", TOKEN, 0, {"c's identity": "c"}))
    finally:
        door.close()
    assert found and all(p.error == "c answers there, not b" for p in found)


def test_a_session_at_that_address_is_told_from_a_doctor():
    at = here()
    server = Server(at, TOKEN, Options(trainers=1, replicas=1, deadline_s=60.0, bucket_bytes=1 << 20))
    try:
        with pytest.raises(PeerLost) as e:
            attend(Terms(at, TOKEN, 2, 10 * PATIENCE, 0), look())
        assert "is a session running at this address?" in str(e.value)
    finally:
        server.close()


# ---- on two emulated hosts


NAMESPACES = next(
    (why for why, bad in (("needs root", os.geteuid() != 0), ("needs iproute2", shutil.which("ip") is None)) if bad), ""
)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[list[tuple[str, ...]]]:
    """Two hosts, ways to run a command on each. Both have 10.77.0.x on nic0 and 10.78.0.x on nic1; only host 0 knows a way from nic1."""
    if NAMESPACES:
        pytest.skip(NAMESPACES)
    names = [f"xd{os.getpid()}-{i}" for i in range(2)]
    folder = tmp_path_factory.mktemp("hosts")

    def ip(*words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"ip {' '.join(words)}: {done.stderr.strip()}")

    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        for nic in ("nic0", "nic1"):
            ip("-n", names[0], "link", "add", nic, "type", "veth", "peer", "name", nic, "netns", names[1])
        for i, name in enumerate(names):
            for nic in (0, 1):
                ip("-n", name, "addr", "add", f"10.7{7 + nic}.{i * nic}.{i + 1}/24", "dev", f"nic{nic}")
                ip("-n", name, "link", "set", f"nic{nic}", "up")
            (folder / f"hosts{i}").write_text(
                f"127.0.0.1 localhost\n10.77.0.1 xh0\n10.77.0.2 xh1\n127.0.1.1 wrong{i}\n"
            )
        # Host 0 reaches nic1 of host 1, which has no way back to nic1 of host 0.
        ip("-n", names[0], "route", "add", "10.78.1.0/24", "via", "10.77.0.2")
        yield [
            ("ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-c",
             f'mount --bind {folder}/hosts{i} /etc/hosts; hostname "$0"; exec "$@"')
            for i, name in enumerate(names)
        ]  # fmt: skip
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def on_hosts(hosts, names=("xh0", "xh1"), envs=({}, {}), at="10.77.0.1") -> list[tuple[int, dict]]:
    options = "--rendezvous", f"tcp://{at}:29600", "--size", "2", "--timeout", str(10 * PATIENCE)
    two = [Doctor(*options, prefix=(*h, n), **e) for h, n, e in zip(hosts, names, envs)]
    return [d.end() for d in two]


def test_emulated_hosts_that_are_sound_have_no_problem(hosts):
    (code, report), other = on_hosts(hosts)
    assert (code, report) == other and code == 0, problems(report)
    assert {(p["source"], p["destination"], p["address"]) for p in report["paths"]} == {
        ("xh0", "xh1", "10.77.0.2"), ("xh1", "xh0", "10.77.0.1")
    }  # fmt: skip
    assert all(p["path_mtu"] == 1500 and p["nbytes"] for p in report["paths"])


def test_a_host_name_that_resolves_to_loopback_is_found_and_the_right_interface_advised(hosts):
    (code, report), _ = on_hosts(hosts, ("xh0", "wrong1"))
    assert code == 1 and {topic for topic, _, _ in problems(report)} == {"host name", "reachability"}
    (name,) = (f for f in report["findings"] if f["topic"] == "host name" and f["level"] == "problem")
    assert name["where"] == "wrong1" and "127.0.1.1" in name["said"]
    (way,) = (f for f in report["findings"] if f["topic"] == "reachability")
    assert way["where"] == "xh0 -> wrong1" and "GLOO_SOCKET_IFNAME=nic0 on wrong1" in way["advice"]


def test_a_way_that_goes_in_one_direction_only_is_found(hosts):
    """Both listen on nic1. Host 1 has no route to that of host 0."""
    (code, report), _ = on_hosts(hosts, envs=({"GLOO_SOCKET_IFNAME": "nic1"},) * 2)
    (way,) = problems(report)
    assert code == 1 and way[:2] == ("reachability", "xh1 -> xh0") and "the other direction works" in way[2], report
    (good,) = (p for p in report["paths"] if p["address"] == "10.78.1.2")
    assert good["source"] == "xh0" and good["nbytes"] and not good["error"]


def test_a_rendezvous_that_each_host_takes_for_itself_is_told_by_both(hosts):
    """Each listens, and none comes: the classical result of a name that is loopback everywhere."""
    options = "--rendezvous", "tcp://localhost:29600", "--size", "2", "--timeout", "3"
    for code, report in [d.end() for d in [Doctor(*options, prefix=(*h, n)) for h, n in zip(hosts, ("xh0", "xh1"))]]:
        assert code == 1 and {"meeting", "rendezvous"} <= {topic for topic, _, _ in problems(report)}
