"""`xfer doctor` without a network: which addresses gloo and NCCL choose, how a rate is counted, what is found in given facts, and what is
printed."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from itertools import combinations

import msgspec
import pytest

from xfer.cli import line
from xfer.cli.doctor import visits
from xfer.cli.doctor.addresses import chosen, gloo_addresses, nccl_interfaces
from xfer.cli.doctor.checks import examine
from xfer.cli.doctor.facts import (
    Checkup,
    Gpu,
    HostFacts,
    Interface,
    Level,
    MemoryRead,
    NetworkPath,
    RdmaPort,
    Resolved,
    problem,
)  # fmt: skip
from xfer.cli.doctor.look import look, settings_of
from xfer.cli.doctor.meeting import labelled, rounds
from xfer.cli.doctor.page import SCHEMA, show, to_data

LO = Interface("lo", ("127.0.0.1", "::1"), loopback=True, mtu=65536)
ETH = Interface("eth0", ("10.0.0.1", "fd00::1"), mbit_per_s=10_000)
IB = Interface("ib0", ("10.1.0.1",), mtu=4092, mbit_per_s=400_000)
DOCKER = Interface("docker0", ("172.17.0.1",), bridge=True)
DOWN = Interface("eth1", ("10.2.0.1",), running=False)
V6 = Interface("eth2", ("fd00::2",))
GPU = (Gpu(0, "H200", "u0", (1,)), Gpu(1, "H200", "u1", (0,)))
SOUND = HostFacts(
    label="a", identity="a", host="a", machine="m-a", pid=1, network="net", ipc="ipc", pids="pid", port=1,
    own_name=Resolved("a", ("10.0.0.1",)), rendezvous=Resolved("a", ("10.0.0.1",)), interfaces=(LO, ETH),
    versions={"xfer": "1", "torch": "2.11.0+cu130", "NCCL": "2.28.9"}, shm_bytes=16 << 30, shm_device=1,
)  # fmt: skip


def facts(label: str = "a", **changes) -> HostFacts:
    """A sound machine of that name, with changes."""
    return replace(SOUND, **{"label": label, "identity": label, "host": label, "machine": f"m-{label}", **changes})


# ---- a rate


def test_bytes_that_had_piled_up_when_a_stream_began_are_not_counted():
    (ours, theirs), until = socket.socketpair(), time.monotonic() + 20
    threading.Thread(target=visits._count, args=(theirs, 0.3, until), daemon=True).start()
    ours.sendall(bytes(8 << 20))
    ours.settimeout(0)
    later = counted = 0
    while not counted and time.monotonic() < until:
        with contextlib.suppress(BlockingIOError):  # the reader is behind
            later += ours.send(bytes(10_000))
        time.sleep(0.005)
        with contextlib.suppress(BlockingIOError):
            counted = int.from_bytes(ours.recv(8), "little")
    assert 0 < counted < later


def test_a_stream_goes_on_until_all_others_have_been_counted():
    (first, its_reader), (second, other_reader), until = socket.socketpair(), socket.socketpair(), time.monotonic() + 5
    its_reader.settimeout(1)
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(visits._send, [first, second], until)
        its_reader.sendall((5).to_bytes(8, "little"))
        went_on = time.monotonic() + 0.3
        while time.monotonic() < went_on:
            assert its_reader.recv(1 << 20)
        other_reader.sendall((7).to_bytes(8, "little"))
        assert sent.result(10) == 12


# ---- which interfaces gloo and NCCL choose

HERE = ("10.0.0.1",)


@pytest.mark.parametrize(
    "variable, name, there, gloo, nccl",
    [
        ("", HERE, (LO, ETH, IB, DOCKER), "10.0.0.1", "ib0"),
        ("", ("192.0.2.9", "10.1.0.1"), (LO, ETH, IB), "10.1.0.1", "ib0"),  # the first that can be bound here
        ("", ("127.0.1.1",), (LO, ETH, IB), "127.0.1.1", "ib0"),
        ("", ("192.0.2.9",), (LO, ETH, IB), "127.0.0.1", "ib0"),
        ("", (), (LO, DOCKER, ETH, DOWN), "127.0.0.1", "eth0"),
        ("", HERE, (LO, DOCKER), "127.0.0.1", "docker0"),
        ("", HERE, (LO,), "127.0.0.1", "lo"),
        ("", HERE, (DOWN,), "127.0.0.1", ""),
        ("GLOO_SOCKET_IFNAME=ib0", HERE, (LO, ETH, IB), "10.1.0.1", "ib0"),
        ("GLOO_SOCKET_IFNAME=ib0,eth0", (), (LO, ETH, IB), "10.1.0.1 10.0.0.1", "ib0"),
        ("GLOO_SOCKET_IFNAME=ib", HERE, (LO, ETH, IB), "", "ib0"),  # whole names only
        ("NCCL_SOCKET_IFNAME=eth", HERE, (LO, ETH, IB, V6), "10.0.0.1", "eth0 eth2"),
        ("NCCL_SOCKET_IFNAME==eth", HERE, (LO, ETH), "10.0.0.1", ""),
        ("NCCL_SOCKET_IFNAME==eth0,ib0", HERE, (LO, ETH, IB), "10.0.0.1", "eth0 ib0"),
        ("NCCL_SOCKET_IFNAME=^ib,lo", HERE, (LO, ETH, IB), "10.0.0.1", "eth0"),
        ("NCCL_SOCKET_IFNAME=^=ib", HERE, (ETH, IB), "10.0.0.1", "eth0 ib0"),
        ("NCCL_SOCKET_FAMILY=AF_INET6", HERE, (LO, ETH, IB), "10.0.0.1", "eth0"),
        ("NCCL_SOCKET_FAMILY=AF_INET", HERE, (V6, ETH), "10.0.0.1", "eth0"),
    ],
)
def test_gloo_and_nccl_listen_where_variables_the_hosts_name_and_its_interfaces_say(variable, name, there, gloo, nccl):
    """gloo: addresses. nccl: interfaces."""
    key, _, value = variable.partition("=")
    of = facts(settings={key: value} if variable else {}, own_name=Resolved("a", name), interfaces=there)
    assert gloo_addresses(of) == gloo.split() and [i.name for i in nccl_interfaces(of)] == nccl.split()


def test_one_address_is_listed_once_with_all_that_use_it():
    of = facts(gpus=GPU, interfaces=(LO, ETH, IB))
    assert chosen(of, "10.1.0.1") == {"10.0.0.1": ["gloo"], "10.1.0.1": ["NCCL", "rendezvous"]}
    assert chosen(facts()) == {"10.0.0.1": ["gloo"]}  # no GPU, no NCCL


# ---- findings


def path(source="a", destination="b", address="10.0.0.2", users=("gloo",), **rest) -> NetworkPath:
    measured = {"round_trip_s": 5e-5, "nbytes": 10**9, "seconds": 0.5, **rest}
    return NetworkPath(source, destination, address, users, **measured)


A = facts()
B = facts("b", own_name=Resolved("b", ("10.0.0.2",)), interfaces=(LO, replace(ETH, addresses=("10.0.0.2",))))
A2 = dict(machine="m-a", host="b")
"""Another process of a's machine, with a host name of its own."""
PORT = RdmaPort("mlx5_0", 1, "ACTIVE", "InfiniBand", "400 Gb/sec")
OWN_LOOPBACK = facts(own_name=Resolved("a", ("127.0.1.1",)))
MISSING = problem("meeting", "tcp://a:1", "only 1 of 2 processes came", "start it")


def one(**changes) -> Checkup:
    return Checkup((facts(**changes),))


def two(**second) -> Checkup:
    return Checkup((A, replace(B, **second)))


def between(*paths: NetworkPath) -> Checkup:
    return Checkup((A, B), paths)


@pytest.mark.parametrize(
    "checkup, topics, said",
    [
        # sound machines
        (Checkup((A,)), "", ""),
        (between(path(), path("b", "a", "10.0.0.1")), "", ""),
        (Checkup(tuple(replace(f, gpus=GPU, rdma=(PORT,), settings={"NCCL_PROTO": "Simple"}) for f in (A, B))), "", ""),
        (two(settings={"NCCL_HOSTID": "b", "NCCL_DEBUG": "INFO"}), "", ""),
        (two(versions={**SOUND.versions, "torch": "2.13.0"}), "", ""),  # over gloo it may differ
        (two(host="a", machine="m-a"), "", ""),
        (two(**A2, ipc="other"), "", ""),  # it keeps GPUs apart, and there is none
        (between(path(users=("rendezvous",), error="refused")), "", ""),  # no bytes of weights travel there
        (Checkup((A, B, replace(facts("c"), machine="m-a")),  # rates inside a machine are not compared with those of a network
                 (path("a", "c", nbytes=10**11), path("c", "a", nbytes=10**11), path(), path("b", "a"))), "", ""),
        # one machine
        (Checkup((OWN_LOOPBACK,)), "warning: host name", "127.0.1.1, which no other machine"),
        (one(own_name=Resolved("a", ("192.0.2.9",))), "warning: host name", "of no interface here"),
        (one(own_name=Resolved("a", (), "not known")), "warning: host name", "has no address: not known"),
        (one(rendezvous=Resolved("x", (), "not known")), "problem: rendezvous", "x has no address here"),
        (one(settings={"GLOO_SOCKET_IFNAME": "eth9"}), "problem: interfaces", "there are lo, eth0"),
        (one(settings={"NCCL_SOCKET_IFNAME": "eth9"}), "problem: interfaces", "no running interface"),
        (one(interfaces=(LO, replace(ETH, running=False))), "problem: interfaces", "eth0, which is down"),
        (one(interfaces=(LO, replace(ETH, bridge=True))), "warning: interfaces", "a bridge of this machine"),
        (one(interfaces=(LO, ETH, IB)), "warning: interfaces", "gloo uses eth0 (10 Gbit/s, MTU 1500), and ib0 (400"),
        (one(rdma=(replace(PORT, state="DOWN"),)), "warning: RDMA", "mlx5_0 port 1: DOWN"),
        (one(rdma=(PORT,), settings={"NCCL_IB_DISABLE": "1"}), "warning: RDMA", "1 RDMA ports are active"),
        (one(rdma=(PORT,), memlock=1 << 16), "warning: RDMA", "memory can be locked"),
        (one(open_files=1024), "warning: limits", "at most 1024 open files"),
        (one(shm_bytes=64 << 20), "warning: /dev/shm", "67.1 MB"),
        (one(shm_bytes=64 << 20, gpus=GPU), "problem: /dev/shm", "67.1 MB"),
        (one(device_files=8), "warning: GPUs", "torch sees no GPU, and the kernel shows 8"),
        (one(gpus=(GPU[0], replace(GPU[1], peers=()))), "warning: GPUs", "memory: 0 and 1"),
        (one(gpus=(replace(GPU[0], peers=()), GPU[1])), "warning: GPUs", "memory: 0 and 1"),
        (one(congestion="bbr"), "warning: TCP", "congestion control is bbr"),
        (one(ptrace_scope=2), "warning: host memory", "ptrace_scope is 2"),
        # what does not fit between two
        (two(settings={"NCCL_PROTO": "LL"}), "problem: environment", "NCCL_PROTO: not set on a; LL on b"),
        (two(settings={"NCCL_CUMEM_ENABLE": "0"}), "problem: environment", "NCCL_CUMEM_ENABLE: not set on a; 0 on b"),
        (two(settings={"NCCL_IB_HCA": "mlx5_0"}), "warning: environment", "NCCL_IB_HCA"),
        (two(settings={"UCX_TLS": "tcp"}), "warning: environment", "UCX_TLS"),
        (two(versions={**SOUND.versions, "xfer": "2"}), "problem: versions", "xfer: 1 on a; 2 on b"),
        (two(versions={**SOUND.versions, "NCCL": "2.27.3"}), "problem: versions", "NCCL: 2.28.9 on a; 2.27.3 on b"),
        (two(versions={**SOUND.versions, "libibverbs.so.1": "1.15.60.0"}), "warning: versions", "none on a"),
        (two(host="a"), "problem: host identity", "two machines are called a"),
        (two(host="a", machine="m-a", pids="other"), "problem: host identity", "do not share process ids"),
        (two(**A2, shm_device=2), "warning: /dev/shm", "a /dev/shm of its own"),
        (two(interfaces=(LO, replace(ETH, addresses=("10.0.0.2",), mtu=9000))), "warning: MTU", "1500 on a; 9000 on b"),
        (two(own_name=Resolved("b", ("127.0.1.1",))), "problem: host name", "127.0.1.1, which no other machine"),
        (two(rendezvous=Resolved("a", ("127.0.0.1",))), "problem: rendezvous", "127.0.0.1 here"),
        (Checkup((facts(gpus=GPU), replace(B, **A2, gpus=GPU[:1], ipc="other"))), "warning: namespaces, warning: GPUs",
         "a, b :: one machine, IPC namespaces of their own"),
        # what was measured
        (between(path(error="no answer within 5 s"), path("b", "a", "10.0.0.1")), "problem: reachability", "a -> b :: other direction"),
        (between(path(round_trip_s=0.03)), "warning: reachability", "a -> b :: 30.0 ms"),
        (between(path(clock_ahead_s=-7.0)), "warning: clock", "b :: 7.0 s behind that of a"),
        (between(path(), path("b", "a", nbytes=10**8)), "warning: rate", "b -> a :: 200 MB/s, and 2.00 GB/s on the fastest"),
        (between(path(address="127.0.1.1", users=("gloo", "NCCL"), error="refused"), path(users=("rendezvous",))), "problem: reachability",
         "a -> b :: 10.0.0.2 was reached: set GLOO_SOCKET_IFNAME=eth0 and NCCL_SOCKET_IFNAME=eth0 on b"),
        (Checkup((A,), memory=tuple(MemoryRead("a", "b", m, "refused") for m in ("host memory", "GPU memory"))),
         "warning: host memory, warning: GPU memory", ""),
        # who is missing: names are then judged as between machines
        (Checkup((OWN_LOOPBACK,), failures=(MISSING,)), "problem: meeting, problem: host name", ""),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_advice_and_nothing_else_is(checkup, topics, said):
    """said: words of the first finding, behind the place that it names."""
    some = [f for f in examine(checkup) if f.level is not Level.OK]
    assert [f"{f.level.value}: {f.topic}" for f in some] == topics.split(", ") * bool(topics), some
    assert all(f.advice for f in some)
    where, _, words = said.rpartition(" :: ")
    assert not some or words in f"{some[0].said}\n{some[0].advice}" and where in ("", some[0].where)


# ---- the rest


@pytest.mark.parametrize("n", range(1, 10))
def test_all_pairs_meet_once_and_nobody_twice_in_a_round_and_labels_are_unique(n):
    met = rounds(n)
    assert sorted(tuple(sorted(p)) for r in met for p in r) == list(combinations(range(n), 2))
    assert all(len({x for p in r for x in p}) == 2 * len(r) for r in met) and len(met) <= n
    assert [f.label for f in labelled([A, B, *[A] * (n - 1)])] == [
        "a" + " #1" * (n > 1),
        "b",
        *(f"a #{k}" for k in range(2, n + 1)),
    ]


def test_nccls_files_fill_in_what_the_environment_leaves_open(tmp_path):
    file = tmp_path / "nccl.conf"
    file.write_text("# NCCL_ALGO=Tree\nNCCL_PROTO=LL\nNCCL_BUFFSIZE = 4194304\n")
    environ = {"NCCL_CONF_FILE": str(file), "NCCL_PROTO": "Simple", "XFER_TOKEN": "secret", "HOME": "/"}
    got = settings_of(environ)
    assert got == {"NCCL_BUFFSIZE": "4194304", "NCCL_CONF_FILE": str(file), "NCCL_PROTO": "Simple"}


def test_this_machine_is_read_as_the_kernel_has_it():
    here = look("localhost")
    assert [i.name for i in here.interfaces] == [n for _, n in socket.if_nameindex()]
    (loopback,) = (i for i in here.interfaces if i.loopback)
    assert "127.0.0.1" in loopback.addresses and loopback.running and loopback.mtu > 1000
    assert here.rendezvous.addresses[0] in ("127.0.0.1", "::1") and here.machine and here.shm_bytes
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(here), type=HostFacts) == here


ODD = "[a] of [/b] [red]\x1b[31m"


def test_a_page_prints_what_others_say_to_the_letter_and_findings_of_many_machines_in_one_line(monkeypatch, capsys):
    """Without control characters."""
    monkeypatch.setenv("COLUMNS", "300")
    hosts = [facts(ODD, own_name=Resolved(ODD, ("10.0.0.1",))), *(facts(f"h{i}", open_files=1024) for i in range(30))]
    checkup = Checkup(tuple(hosts), (path(ODD, "h0", error=ODD),), failures=(problem(ODD, ODD, ODD, ODD),))
    show(checkup, examine(checkup))
    text = capsys.readouterr().out
    assert ODD.replace("\x1b", "?") in text and "\x1b" not in text
    (line,) = (x for x in text.splitlines() if "1024 open files" in x)
    assert line.startswith("warning  limits: h0, h1,") and "and 22 more" in line


JSON = {
    "doctor": "problems warnings findings hosts paths memory schema",
    "findings": "level topic where said advice",
    "hosts": "label identity host machine pid own_name rendezvous interfaces port network ipc pids settings versions gpus device_files "
    "rdma shm_bytes shm_device memlock open_files ptrace_scope congestion",
    "paths": "source destination address users error round_trip_s clock_ahead_s path_mtu nbytes seconds",
    "memory": "source destination memory error",
}


def test_the_json_keeps_its_fields():
    """A renamed or removed field is another schema: raise SCHEMA and say so in CHANGELOG.md."""
    checkup = Checkup((facts(), B), (path(error="refused"),), (MemoryRead("a", "b", "host memory"),))
    data = msgspec.json.decode(msgspec.json.encode(to_data(checkup, examine(checkup))))
    assert data["schema"] == SCHEMA == 1 and data["problems"] == 1 and data["findings"][0]["level"] == "problem"
    got = {k: list(data[k][0]) for k in JSON if k != "doctor"} | {"doctor": list(data)}
    assert got == {k: v.split() for k, v in JSON.items()}
    assert {f.name for f in fields(HostFacts)} == set(JSON["hosts"].split())


def test_callers_that_prove_nothing_take_a_bounded_number_of_threads(monkeypatch):
    monkeypatch.setattr(line, "GREETERS", 2)
    listener = socket.create_server(("127.0.0.1", 0))
    door = line.Door([listener], "a token that is long enough", lambda sock, address: None)
    callers = [socket.create_connection(listener.getsockname(), 5.0) for _ in range(3)]
    greeted = [caller.recv(1) for caller in callers]
    assert sorted(map(bool, greeted)) == [False, True, True]
    for caller in callers:
        caller.close()
    door.close()
