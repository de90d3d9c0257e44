"""Hosts on one machine: namespaces with a name, processes and network interfaces of their own, on emulated switches (docs/hosts.md).

A host is a process that waits for this one's end of a pipe to close. It is process 1 of its host, so the kernel ends all processes of
the host with it, and the namespaces after them. Hosts share all files, those of /dev/shm too. Needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

NAMESPACES = {"net": "net", "uts": "uts", "mnt": "mount", "pid_for_children": "pid"}
"""Files in /proc/PID/ns, and what `nsenter` calls them."""
ENTERED = os.environ.get("XFER_TEST_HOST_NAMESPACES", ",".join(NAMESPACES)).split(",")
"""Those that commands enter: "net,uts" where a driver fails with other process ids. They then die with their parents, not with the host."""
SHARED = ("uts", "mnt", "pid_for_children")
"""Those that ranks of a host share."""
PR_SET_PDEATHSIG = 1
BUFFER_S, BURST = 0.004, 128 << 10
"""Seconds and bytes of a NIC's buffer, in each direction: short, as those of a NIC and a switch are. A burst holds two of the packets that
TCP hands to a NIC at once."""
LOCAL = 2 * 10**9
"""For fabric files: bytes/s between ranks of one host, over its loopback interface."""


def missing() -> str | None:
    """Why hosts cannot be emulated here, or None."""
    gone = [p for p in ("ip", "tc", "nsenter", "unshare") if shutil.which(p) is None]
    if gone:
        return f"{', '.join(gone)} not installed: apt-get install iproute2 util-linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Cluster(1, mbit=100) as c:
            c.lose(c.hosts[0], 1.0)
    except HostError as e:
        return f"no emulated host: {e}"
    return None


class HostError(RuntimeError):
    """A namespace, an interface or its shaping cannot be had."""


@dataclass(frozen=True)
class Host:
    """One emulated host. Picklable: any process of this machine (and root) may enter it.

    keeper: process id by whose /proc/PID/ns it is entered. addresses: one for each NIC, `nic0`, `nic1`, ... nets: process ids of the
    network namespaces, one for all ranks or one for each. net: the one that is entered, default: the first.
    """

    name: str
    keeper: int
    addresses: tuple[str, ...]
    nets: tuple[int, ...]
    net: int = 0

    def rank(self, rank: int) -> Host:
        """The host as its local rank `rank` sees it."""
        return replace(self, net=self.nets[rank % len(self.nets)])

    def _files(self) -> list[str]:
        """Of the namespaces, in the order of NAMESPACES."""
        return [f"/proc/{(self.net or self.nets[0]) if n == 'net' else self.keeper}/ns/{n}" for n in NAMESPACES]

    @property
    def address(self) -> str:
        return self.addresses[0]

    @property
    def in_url(self) -> str:
        """`address` as a URL has it."""
        return f"[{self.address}]" if ":" in self.address else self.address

    def env(self, rank: int = 0) -> dict[str, str]:
        """Variables by which gloo, NCCL and UCX use the NIC of local rank `rank`."""
        nic = f"nic{rank % (len(self.addresses) // len(self.nets))}"
        return {"GLOO_SOCKET_IFNAME": nic, "NCCL_SOCKET_IFNAME": nic, "UCX_NET_DEVICES": nic, "UCX_TLS": "tcp"}

    def command(self, *words: str) -> list[str]:
        """A command that runs `words` on this host, in the caller's folder."""
        where = [f"--{NAMESPACES[n]}={file}" for n, file in zip(NAMESPACES, self._files()) if n in ENTERED]
        return ["nsenter", *where, f"--wdns={os.getcwd()}", *words]

    def enter(self) -> None:
        """Moves this process, of one thread, to the host. Its children, not itself, then have process ids of that host."""
        libc, folder = ctypes.CDLL(None, use_errno=True), os.getcwd()
        with contextlib.ExitStack() as stack:  # all are opened first: there is another /proc on the host
            files = [stack.enter_context(open(file, "rb")) for file in self._files()]
            for f in files:
                if libc.setns(f.fileno(), 0):
                    raise OSError(code := ctypes.get_errno(), os.strerror(code), f"{f.name} of host {self.name}")
        os.chdir(folder)  # entering a mount namespace leaves one at its root

    def run(self, main: Callable[..., None], *args: Any) -> None:
        """Runs `main(*args)` on the host in a child of this process, of one thread, and returns as the child does.

        The child dies with this process, and this process stops and goes on with the child: tests see one process.
        """
        self.enter()
        child = os.fork()
        if not child:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            main(*args)
            return
        for a in args:
            if isinstance(a, Connection):
                a.close()  # or the child's end would not be seen
        while True:
            _, status = os.waitpid(child, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                break
            os.kill(os.getpid(), signal.SIGSTOP)
            os.kill(child, signal.SIGCONT)
        if os.WIFSIGNALED(status):
            os.kill(os.getpid(), os.WTERMSIG(status))
        os._exit(os.WEXITSTATUS(status))


class Cluster:
    """`hosts` of `ranks` each with a NIC of `mbit` Mbit/s each way: a veth pair, shaped at both ends. `rails`: a NIC of that rate for each
    rank, in a network of its own; gloo listens at the NIC that `env` names, but connects by the kernel's routes, so bytes of two ranks
    travel on the rail of the one that was connected to. `apart`: a NIC for each rank, which sees only its own, as NCCL's bytes use it; all
    on one switch. `ipv6`: all addresses, instead of IPv4. `buffer_s`: how much a NIC holds back. `tcp`: the congestion control. Of those
    that a kernel lets every namespace choose, Reno fills a link that many connections share. (BBR reaches 70 % where four send to four.)"""

    def __init__(
        self, hosts: int, ranks: int = 1, *, mbit: float, rails=False, apart=False, tcp="reno", ipv6=False, buffer_s=BUFFER_S
    ):  # fmt: skip
        if not 1 <= hosts <= 250 or not 1 <= ranks <= 250:  # see _address
            raise ValueError(f"hosts={hosts}, ranks={ranks}: 1 to 250 of each")
        self.ranks, self.rate, self.nics = ranks, mbit * 1e6, ranks if rails or apart else 1
        self.apart, self.ipv6, self.buffer_s = apart, ipv6, buffer_s
        self.hosts: list[Host] = []
        self._count, self._tcp = hosts, tcp
        self._keepers: list[subprocess.Popen] = []
        self._rates: dict[tuple[str, int], float] = {}

    def __enter__(self) -> Cluster:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for k in self._keepers:
            with contextlib.suppress(OSError):
                k.stdin.close()  # its `cat` ends, with it process 1 of the host, and with that all others
        until = time.monotonic() + 10
        for k in self._keepers:
            try:
                k.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise HostError("processes of hosts do not end") from None
        self.hosts, self._keepers = [], []

    def _build(self) -> None:
        names = [f"h{i}" for i in range(self._count)]
        known = "".join(f"{self._address(i, 0)} {n}\n" for i, n in enumerate(names))
        with tempfile.NamedTemporaryFile("w", prefix="hosts") as f:
            f.write(f"127.0.0.1 localhost\n::1 localhost\n{known}")
            f.flush()
            apart = ["--net", "--uts", "--mount-proc", "--pid", "--fork", "--propagation", "private"]
            first = f"mount --bind {f.name} /etc/hosts && hostname"
            switch, *begun = self._keep([["unshare", *apart, "sh", "-c", f"{first} {n}"] for n in ("switch", *names)])
        each = self.nics - 1 if self.apart else 0
        nets = self._keep(
            ["unshare", "--net", "nsenter", *(f"--{NAMESPACES[n]}=/proc/{k}/ns/{n}" for n in SHARED), "sh", "-c", "true"]
            for k in begun for _ in range(each)
        )  # fmt: skip
        self._switch = Host("switch", switch, (), (switch,))
        for i, (n, k) in enumerate(zip(names, begun)):
            addresses = tuple(self._address(i, r) for r in range(self.nics))
            self.hosts.append(Host(n, k, addresses, (k, *nets[i * each : (i + 1) * each])))
        ports = [(h, r) for h in self.hosts for r in range(self.nics)]
        rails = 1 if self.apart else self.nics
        lines = [line for r in range(rails) for line in (f"link add rail{r} type bridge", f"link set rail{r} up")]
        for h, r in ports:
            net = h.nets[r if self.apart else 0]
            lines.append(f"link add {_port(h, r)} type veth peer name {self._nic(r)} netns /proc/{net}/ns/net")
            lines += [f"link set {_port(h, r)} master rail{r % rails}", f"link set {_port(h, r)} up"]
        _batch(self._switch, "ip", lines)
        _batch(self._switch, "tc", [f"qdisc add dev {_port(h, r)} clsact" for h, r in ports])
        for h, r in ports:
            nic, net = self._nic(r), f"{h.addresses[r]}/64 nodad" if self.ipv6 else f"{h.addresses[r]}/16"
            _batch(h.rank(r), "ip", [f"addr add {net} dev {nic}", f"link set {nic} up"])
        for h in self.hosts:
            self.slow(h, 1.0)

    def _keep(self, commands: Iterable[list[str]]) -> list[int]:
        """Starts processes in namespaces of their own; their process ids. The last word of a command is what its shell does first."""
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        up = f"echo {self._tcp} > /proc/sys/net/ipv4/tcp_congestion_control && ip link set lo up && echo up && exec cat"
        begun = [subprocess.Popen([*c[:-1], f"{c[-1]} && {up}"], start_new_session=True, **pipes) for c in commands]
        self._keepers += begun
        for k in begun:
            if k.stdout.readline() != "up\n":
                raise HostError(k.stderr.read().strip() or "a namespace was refused")
        return [k.pid for k in begun]

    def show_nics(self) -> None:
        """Has each host see its own NICs in /sys, where UCX looks for them."""
        for h in self.hosts:
            subprocess.run(h.command("mount", "-t", "sysfs", "sysfs", "/sys"), check=True)

    # ---- what becomes of a link

    def cut(self, host: Host) -> None:
        """From now on no packet leaves or reaches the host. Neither end is told."""
        self.lose(host, 1.0)

    def lose(self, host: Host, part: float) -> None:
        """From now on this part of all packets is lost at random, in each direction."""
        for r in range(self.nics):
            self._filter(host, r, part)

    def slow(self, host: Host, part: float, nics: Sequence[int] | None = None) -> None:
        """From now on the host's NICs, or these of them, have this part of their rate."""
        for r in range(self.nics) if nics is None else nics:
            rate = self._rates[host.name, r] = self.rate * part
            how = f"root tbf rate {rate:.0f}bit burst {BURST} latency {self.buffer_s * 1e3:g}ms"
            _batch(host.rank(r), "tc", [f"qdisc replace dev {self._nic(r)} {how}"])
            _batch(self._switch, "tc", [f"qdisc replace dev {_port(host, r)} {how}"])

    def mend(self, host: Host) -> None:
        """The host's links are whole and fast again."""
        self.lose(host, 0.0)
        self.slow(host, 1.0)

    def bytes_in(self, host: Host) -> int:
        """Bytes that came over the NICs so far, with headers (one for each packet of up to 64 KB that TCP hands over)."""
        return sum(self.by_nic(host))

    def by_nic(self, host: Host, way: Literal["rx", "tx"] = "rx") -> list[int]:
        """`bytes_in` of each NIC, or the bytes that left by it."""
        shown = [_run(host.rank(r), "ip", "-j", "-s", "link", "show", self._nic(r)) for r in range(self.nics)]
        return [json.loads(x)[0]["stats64"][way]["bytes"] for x in shown]

    def _filter(self, host: Host, nic: int, loss: float) -> None:
        """A classic BPF program that draws a random number for each packet: netem is not in every kernel."""
        port = _port(host, nic)
        # Without loss, a packet may stand for 64 KB of TCP's; a random loss is one of packets as they are on the wire.
        segments = 1 if 0 < loss < 1 else 65535
        _batch(host.rank(nic), "ip", [f"link set {self._nic(nic)} gso_max_segs {segments}"])
        for way in ("ingress", "egress"):
            lines = [f"filter del dev {port} {way}"]
            if loss:
                below = min((1 << 32) - 1, int(loss * (1 << 32)))
                program = f"4,32 0 0 {0xFFFFF038},53 0 1 {below},6 0 0 0,6 0 0 2"  # random >= below ? pass : drop
                lines.append(f'filter add dev {port} {way} bpf da bytecode "{program}"')
            _batch(self._switch, "tc", lines)

    def _nic(self, rank: int) -> str:
        return "nic0" if self.apart else f"nic{rank}"

    def _address(self, host: int, nic: int) -> str:
        if self.ipv6:
            return f"fd00:1::{host + 1}:{nic + 1}" if self.apart else f"fd00:{nic + 1}::{host + 1}"
        return f"10.1.{host}.{nic + 1}" if self.apart else f"10.{nic + 1}.{host}.1"

    # ---- what a plan is told

    def place(self, number: int) -> tuple[Host, int]:
        """(host, local rank) of a rank, when ranks are numbered host by host."""
        return self.hosts[number // self.ranks], number % self.ranks

    def fabric(self, trainers: Sequence[int], replicas: Sequence[Sequence[int]], *, rate: float | None = None) -> str:
        """A fabric file (xfer/plan/fabric_file.py) of this cluster.

        Args:
            trainers, replicas: The number of each rank, see `place`.
            rate: bit/s of a NIC that payload reaches; default: the rate to which each is shaped now.
        """
        gpus = [[g] for g in range(self.ranks)] if self.nics > 1 else [list(range(self.ranks))]

        def cards(host: Host) -> str:
            rates = (rate or self._rates[host.name, n] for n in range(self.nics))
            return ", ".join(f"{{gpus = {g}, rate = {int(r / 8)}}}" for g, r in zip(gpus, rates))

        first, *others = (
            json.dumps([f"{h.name}:{r}" for h, r in map(self.place, side)]) for side in (trainers, *replicas)
        )
        hosts = (
            f'[[host]]\nnames = ["{h.name}"]\ngpus = {self.ranks}\nnvlink = {LOCAL}\nnics = [{cards(h)}]\n\n'
            for h in self.hosts
        )
        return f"{''.join(hosts)}[ranks]\ntrainers = {first}\nreplicas = [{', '.join(others)}]\n"


def ended(pid: int) -> bool:
    """Whether a process has ended, whoever waits for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def _port(host: Host, nic: int) -> str:
    return f"{host.name}n{nic}"


def _run(host: Host, *words: str, told: str | None = None) -> str:
    """Run a command in the host's network namespace alone: it names other hosts' namespaces by this machine's process ids."""
    enter = ["nsenter", f"--net=/proc/{host.net or host.nets[0]}/ns/net"]
    done = subprocess.run([*enter, *words], input=told, capture_output=True, text=True)
    if done.returncode:
        raise HostError(f"{' '.join(words)} on {host.name}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _batch(host: Host, tool: str, lines: list[str]) -> None:
    """Runs `ip` or `tc` once for all these lines."""
    _run(host, tool, "-batch", "-", told="\n".join(lines) + "\n")
