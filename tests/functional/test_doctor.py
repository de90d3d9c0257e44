"""`xfer doctor` between real processes: on loopback, and on emulated hosts whose names, routes or rates are wrong."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples.common.ports import free_port
from tests.support import forge
from tests.support.hosts import Cluster, Host, missing
from tests.support.proc import PATIENCE, ROOT, environment
from tests.support.world import until_true
from xfer.cli.doctor import visits
from xfer.cli.doctor.facts import Checkup, HostFacts, NetworkPath
from xfer.cli.doctor.look import look
from xfer.cli.doctor.meeting import Begin, Join, Leader, Result, Terms, attend
from xfer.cli.doctor.visits import open_door, visit
from xfer.cli.line import Line
from xfer.coordinator.state import Options
from xfer.errors import HandshakeError, PeerLost
from xfer.rendezvous.channel import dial_socket, listen
from xfer.rendezvous.server import Server

TOKEN = "a token for tests"
LIMIT_S = 60 * PATIENCE


def doctored(at: str, *more: str, hosts=(None,), envs=({}, {}, {})) -> list[tuple[int, dict]]:
    """Run a process of `xfer doctor` on each host, this one if it is None, with the variables of `envs`. Return exit codes and JSON."""
    options = "--rendezvous", at, "--size", str(len(hosts)), "--timeout", str(LIMIT_S / 2), "--seconds", "0.1", *more
    started: list[forge.Forged | subprocess.Popen] = []
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, f"said {i}") for i in range(len(hosts))]
        data = [Path(folder, f"json {i}") for i in range(len(hosts))]
        try:
            for i, host in enumerate(hosts):
                with open(said[i], "w") as out:
                    run = ["-m", "xfer", "doctor", "--json", str(data[i]), *options]
                    own = environment(**{"XFER_TOKEN": TOKEN, **envs[i]})
                    started.append(forge.start(sys.executable, run, own, ROOT, out, out, host))
            codes = [p.wait(LIMIT_S) for p in started]
        finally:
            for p in started:
                p.kill()
        assert all(d.exists() for d in data), [s.read_text() for s in said]
        return [(code, json.loads(d.read_text())["doctor"]) for code, d in zip(codes, data)]


def problems(report: dict) -> list[tuple[str, str, str]]:
    return [(f["topic"], f["where"], f["said"]) for f in report["findings"] if f["level"] == "problem"]


def here() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def test_three_processes_measure_every_pair_and_all_print_what_differs():
    envs = [{}, {"NCCL_PROTO": "LL"}, {"NCCL_BUFFSIZE": "1"}]
    codes, reports = zip(*doctored(here(), hosts=[None] * 3, envs=envs))
    first = reports[0]
    assert codes == (1, 1, 1) and reports[1] == first == reports[2]
    labels = [h["label"] for h in first["hosts"]]
    (two, one) = problems(first)
    assert one[:2] == two[:2] == ("environment", ", ".join(labels))
    (with_proto,) = (h["label"] for h in first["hosts"] if h["settings"] == {"NCCL_PROTO": "LL"})
    assert f"LL on {with_proto}" in one[2] and f"not set on {', '.join(x for x in labels if x != with_proto)}" in one[2]
    pairs = {(p["source"], p["destination"]) for p in first["paths"]}
    assert pairs == {(a, b) for a in labels for b in labels if a != b}
    assert all(p["nbytes"] and 0 < p["round_trip_s"] < 1 and not p["error"] for p in first["paths"])
    assert {(m["source"], m["destination"]) for m in first["memory"]} == pairs


def test_a_service_that_says_nothing_ends_the_wait_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at, began = f"tcp://127.0.0.1:{silent.getsockname()[1]}", time.monotonic()
        ((code, report),) = doctored(at, "--timeout", "2")
    assert code == 1 and time.monotonic() - began < 2 + 20 * PATIENCE
    assert any("within 2 s" in said for _, _, said in problems(report))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_two_that_see_gpus_read_each_others_memory_and_agree_on_nccl():
    (code, report), other = doctored(here(), "--timeout", "60", hosts=[None] * 2)
    assert (code, report) == other and code == 0, problems(report)
    read = {(m["source"], m["memory"]): m["error"] for m in report["memory"]}
    labels = [h["label"] for h in report["hosts"]]
    assert read == {(label, memory): "" for label in labels for memory in ("host memory", "GPU memory")}
    for h in report["hosts"]:
        assert len(h["gpus"]) == torch.cuda.device_count() and {"NCCL", "CUDA", "NVIDIA driver"} <= h["versions"].keys()
    assert all("NCCL" in p["users"] for p in report["paths"] if p["address"] != "127.0.0.1")


# ---- in this process: members that break the rules


def start(terms: Terms) -> Future[Checkup]:
    return ThreadPoolExecutor(1).submit(attend, terms, look())


def both_agree(first: Future[Checkup], second: Future[Checkup]) -> Checkup:
    a, b = first.result(LIMIT_S), second.result(LIMIT_S)
    assert a == b
    return a


def join(terms: Terms, size: int = 0) -> Line:
    """A member, which says that it has come where `size` are expected."""
    line = Line(dial_socket(terms.rendezvous, TOKEN, 10 * PATIENCE), "the leader")
    if size:
        line.send(Join(look(), size, {}), soon())
    return line


def soon() -> float:
    return time.monotonic() + 20 * PATIENCE


@pytest.mark.parametrize("come", [1, 2])
def test_a_wrong_token_is_told_at_once_and_disturbs_nobody_and_who_waits_in_vain_hears_of_it(come):
    terms = Terms(here(), TOKEN, 2, LIMIT_S if come == 2 else 2 * PATIENCE, 0)
    leader = Leader(listen(terms.rendezvous, TOKEN), terms)
    with pytest.raises(HandshakeError, match="different tokens"):
        attend(replace(terms, token="another token"), look())
    checkup, *others = [f.result(LIMIT_S) for f in [start(terms) for _ in range(come)]]
    assert len(checkup.hosts) == come and others == [checkup] * (come - 1)
    if come == 2:
        assert checkup.failures == ()
    else:
        missing, rejected = (f.said for f in checkup.failures)
        assert not checkup.paths and "only 1 of 2 processes came" in missing
        assert "a caller holds another token, from 127.0.0.1" in rejected
    leader.close()


def test_a_member_that_leaves_is_named_and_the_others_measure():
    terms = Terms(here(), TOKEN, 3, 20 * PATIENCE, 0.05)
    two, leaver = [start(terms) for _ in range(2)], join(terms, 3)
    leaver.take(soon(), Begin)
    leaver.close()
    first = both_agree(*two)
    (lost,) = (f.where for f in first.failures if "left during the measurements" in f.said)
    stay = {f.label for f in first.hosts} - {lost}
    measured = {(p.source, p.destination) for p in first.paths if not p.error}
    assert len(stay) == 2 and measured == {(a, b) for a in stay for b in stay if a != b}


def test_one_that_comes_when_all_have_come_is_told_so():
    terms = Terms(here(), TOKEN, 2, 20 * PATIENCE, 0)
    leader = Leader(listen(terms.rendezvous, TOKEN), terms)
    late, first, second = join(terms), join(terms, 2), join(terms, 2)
    first.take(soon(), Begin)
    late.send(Join(look(), 2, {}), soon())
    until_true(lambda: not leader._callers._came.empty(), 20 * PATIENCE)
    first.close()
    second.close()
    checkup = late.take(soon(), Result).checkup
    assert [f.said for f in checkup.failures] == ["all 2 processes of --size had come before this one"]
    leader.close()


def visited(identity: str, meant: HostFacts, seconds: float, labels: dict[str, str] | None = None) -> list[NetworkPath]:
    """What a visit to `meant` finds where a process of this identity answers."""
    door, port = open_door(identity, TOKEN)
    with contextlib.closing(door):
        return list(visit(look(), replace(meant, port=port), "", TOKEN, seconds, labels or {}))


def test_a_visited_process_that_reads_and_never_answers_ends_a_visit_in_time(monkeypatch):
    def swallow(sock, stream_s, until):
        while sock.recv(1 << 20):
            pass

    monkeypatch.setattr(visits, "_count", swallow)
    monkeypatch.setattr(visits, "STREAM_S", 0.2)
    began = time.monotonic()
    found = visited("b", replace(look(), identity="b"), 0.1)
    why = f"a stream of bytes does not: nothing within {visits.WARM_S + 0.1 + 0.2:g} s"
    assert found and all(why in p.error for p in found)
    assert all(p.round_trip_s for p in found) and time.monotonic() - began < 20 * PATIENCE


@pytest.mark.parametrize(
    "sent", [b"\x00", b"\xff\xff\xff\xff", b"\x04\x00\x00\x00\x93\xa4None", b"\x05\x00\x00\x00cos\nx"]
)
def test_what_a_proven_caller_sends_is_decoded_or_refused(sent):
    """A frame that is cut, too long, of another type, or a pickle: the meeting goes on without its sender."""
    terms = Terms(here(), TOKEN, 2, 20 * PATIENCE, 0)
    first, odd = start(terms), join(terms)
    odd.sock.sendall(sent)
    odd.close()
    checkup = both_agree(first, start(terms))
    assert not checkup.failures and len(checkup.paths) == 2


def test_another_process_at_an_address_is_told_from_the_one_that_is_meant():
    """As where two machines have one address, or a name is that of this machine everywhere."""
    found = visited("c's identity", replace(look(), label="b", identity="b's identity"), 0, {"c's identity": "c"})
    assert found and all(p.error == "c answers there, not b" for p in found)


def test_a_session_at_that_address_is_told_from_a_doctor():
    at = here()
    options = Options(trainers=1, replicas=1, deadline_s=60.0, bucket_bytes=1 << 20)
    with contextlib.closing(Server(at, TOKEN, options)), pytest.raises(PeerLost, match="is a session running at this"):
        attend(Terms(at, TOKEN, 2, 10 * PATIENCE, 0), look())


# ---- on emulated hosts


MBIT = 400


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three hosts with two NICs each: nic0 in the network of their names, nic1 in another one."""
    if why := missing():
        pytest.skip(why)
    with Cluster(3, 2, mbit=MBIT, rails=True) as c:
        yield c


AT = "tcp://h0:29600"
"""Where the doctors of emulated hosts meet."""


@contextlib.contextmanager
def changed(host: Host, change: str, back: str) -> Iterator[None]:
    """A host of other tests, changed by a command."""
    subprocess.run(host.command("sh", "-c", change), check=True)
    try:
        yield
    finally:
        subprocess.run(host.command("sh", "-c", back), check=True)


def test_emulated_hosts_that_are_sound_have_no_problem_and_reach_their_rate(cluster):
    hosts = cluster.hosts
    (code, report), *others = doctored(AT, "--seconds", "0.5", hosts=hosts)
    assert others == [(code, report)] * 2 and code == 0, problems(report)
    at = {h.name: h.address for h in hosts}
    assert {(p["source"], p["destination"], p["address"]) for p in report["paths"]} == {
        (a, b, at[b]) for a in at for b in at if a != b
    }  # fmt: skip
    mbit = [p["nbytes"] * 8 / p["seconds"] / 1e6 for p in report["paths"]]
    assert all(p["path_mtu"] == 1500 for p in report["paths"]) and min(mbit) > MBIT / 2 and max(mbit) < MBIT * 1.1, mbit


def test_a_host_name_that_resolves_to_loopback_is_found_and_the_right_interface_advised(cluster, tmp_path):
    first, last = cluster.hosts[:2]
    known = "".join(f"{h.address} {h.name}\n" for h in cluster.hosts)
    (tmp_path / "right").write_text(f"127.0.0.1 localhost\n{known}")
    (tmp_path / "wrong").write_text(f"127.0.0.1 localhost\n127.0.1.1 h1\n{first.address} h0\n")
    mounts = [f"umount /etc/hosts && mount --bind {tmp_path}/{name} /etc/hosts" for name in ("wrong", "right")]
    with changed(last, *mounts):
        (code, report), _ = doctored(AT, hosts=[first, last])
    assert code == 1 and {topic for topic, *_ in problems(report)} == {"host name", "reachability"}, report["findings"]
    (name,) = (f for f in report["findings"] if f["topic"] == "host name" and f["level"] == "problem")
    assert name["where"] == "h1" and "127.0.1.1" in name["said"]
    (path,) = (f for f in report["findings"] if f["topic"] == "reachability")
    assert path["where"] == "h0 -> h1" and "GLOO_SOCKET_IFNAME=nic0 on h1" in path["advice"]


def test_a_path_that_goes_in_one_direction_only_is_found(cluster):
    """Host 0 listens on nic1, to whose network host 2 has no route."""
    first, last = cluster.hosts[0], cluster.hosts[2]
    with changed(last, "ip route del 10.2.0.0/16 dev nic1", "ip route add 10.2.0.0/16 dev nic1"):
        (code, report), _ = doctored(AT, hosts=[first, last], envs=[{"GLOO_SOCKET_IFNAME": f"nic{i}"} for i in (1, 0)])
    (path,) = problems(report)
    assert code == 1 and path[:2] == ("reachability", "h2 -> h0") and "the other direction works" in path[2], report
    (good,) = (p for p in report["paths"] if p["source"] == "h0")
    assert good["address"] == last.address and good["nbytes"] and not good["error"]


def test_a_slow_host_is_named_by_its_paths(cluster):
    cluster.slow(cluster.hosts[1], 0.1)
    try:
        (code, report), *_ = doctored(AT, hosts=cluster.hosts)
    finally:
        cluster.mend(cluster.hosts[1])
    slow = {f["where"] for f in report["findings"] if f["topic"] == "rate" and f["level"] == "warning"}
    assert code == 0 and {"h0 -> h1", "h1 -> h0", "h2 -> h1", "h1 -> h2"} <= slow and len(slow) < 6, report


def test_a_rendezvous_that_each_host_takes_for_itself_is_told_by_both(cluster):
    """Each listens, and none comes: the classical result of a name that is loopback everywhere."""
    for code, report in doctored("tcp://localhost:29600", "--timeout", "3", hosts=cluster.hosts[:2]):
        assert code == 1 and {"meeting", "rendezvous"} <= {topic for topic, _, _ in problems(report)}
