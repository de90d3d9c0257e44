"""Facts that one process sees of its machine, measurements between two, and findings: plain data for other processes and for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface.

    Attributes:
        addresses: In the kernel's order, IPv4 first; without link-local IPv6.
        running: It is up and has a carrier.
        mbit_per_s: The speed that its driver states; 0 if it states none, as virtual ones do.
    """

    name: str
    addresses: tuple[str, ...] = ()
    running: bool = True
    loopback: bool = False
    bridge: bool = False
    mtu: int = 1500
    mbit_per_s: int = 0


@dataclass(frozen=True, slots=True)
class Resolved:
    """A host name and the addresses that this machine's resolver gives for it, or why it gives none."""

    name: str
    addresses: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that this process sees. `peers`: numbers of the GPUs whose memory it can read."""

    number: int
    name: str
    uuid: str
    peers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A port of an RDMA device, as the kernel describes it, e.g. mlx5_0, 1, "ACTIVE", "InfiniBand", "400 Gb/sec (4X NDR)"."""

    device: str
    port: int
    state: str
    link: str
    rate: str


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What one process sees.

    Attributes:
        label: Its name in this report: `host`, with a number behind it where several processes have the same.
        identity: A random name of this process, by which others know that they reached it.
        host: The name by which sessions know this host (XFER_HOST, or the kernel's).
        machine: The kernel's number of this boot: the same in all containers of a machine.
        network, ipc, pids: Namespaces of this process.
        port: Where it listens for the measurements; 0 without any.
        own_name: The kernel's host name, resolved: gloo's default address.
        rendezvous: The host of the rendezvous, resolved; None without one.
        settings: Variables of NCCL, gloo and the libraries below them, from the environment and NCCL's files.
        versions: Packages, CUDA, the driver and libraries of the network, by name.
        device_files: Number of GPUs that the kernel shows, whether or not torch sees them.
        shm_bytes, shm_device: Size of /dev/shm, and the kernel's number of that file system.
        memlock, open_files: Limits of this process; -1: none.
        ptrace_scope: Yama's setting; -1: there is none.
        congestion: TCP's congestion control, e.g. "cubic".
    """

    label: str
    identity: str
    host: str
    machine: str
    pid: int
    own_name: Resolved
    rendezvous: Resolved | None = None
    interfaces: tuple[Interface, ...] = ()
    port: int = 0
    network: str = ""
    ipc: str = ""
    pids: str = ""
    settings: Mapping[str, str] = field(default_factory=dict, hash=False)
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)
    gpus: tuple[Gpu, ...] = ()
    device_files: int = 0
    rdma: tuple[RdmaPort, ...] = ()
    shm_bytes: int = 0
    shm_device: int = 0
    memlock: int = -1
    open_files: int = -1
    ptrace_scope: int = -1
    congestion: str = ""

    @property
    def gpu_kinds(self) -> str:
        """Such as "8 x H200"."""
        return ", ".join(f"{n} x {name}" for name, n in Counter(g.name for g in self.gpus).items())

    def shares_machine(self, other: HostFacts) -> bool:
        return self.machine == other.machine

    def shares_network(self, other: HostFacts) -> bool:
        """Whether a loopback address of one is also one of the other."""
        return (self.machine, self.network) == (other.machine, other.network)


@dataclass(frozen=True, slots=True)
class NetworkPath:
    """The path from one process to an address of another.

    Attributes:
        source, destination: Labels.
        users: What would use that address: "gloo", "NCCL", "rendezvous".
        error: Why the address cannot be used from there; "" if it can.
        round_trip_s: The shortest of some round trips.
        clock_ahead_s: Clock of the destination minus that of the source; wrong by half a round trip at most.
        path_mtu: Bytes, as the kernel of the source knows it; 0 if it does not.
        nbytes, seconds: What arrived over several TCP connections in that time, to measure the rate.
    """

    source: str
    destination: str
    address: str
    users: tuple[str, ...]
    error: str = ""
    round_trip_s: float = 0.0
    clock_ahead_s: float = 0.0
    path_mtu: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class MemoryRead:
    """Whether `destination` can read memory of `source`, on one machine. `error`: why not; "" if it can."""

    source: str
    destination: str
    memory: str
    error: str = ""


class Level(Enum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        topic: What was looked at, one word or two, e.g. "host name".
        where: Label of a process, "a -> b" for a path, or several labels with commas.
        said: What was found.
        advice: What to do; "" if nothing is to be done.
    """

    level: Level
    topic: str
    where: str
    said: str
    advice: str = ""


ok, warning, problem = (partial(Finding, level) for level in Level)


@dataclass(frozen=True, slots=True)
class Checkup:
    """All that is known. `failures`: what went wrong with the meeting itself."""

    hosts: tuple[HostFacts, ...]
    paths: tuple[NetworkPath, ...] = ()
    memory: tuple[MemoryRead, ...] = ()
    failures: tuple[Finding, ...] = ()
