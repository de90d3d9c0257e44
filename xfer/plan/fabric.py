"""The machine between the ranks: hosts, NVLink islands, NICs, rails, their rates, and who sits where.

A *link* is something that bytes of several transfers share, in one direction: a GPU's port to its NVLink island, an
island's way to the other islands of its host, a NIC, a rail's way to the other rails, a GPU's own memory. A transfer
from one GPU to another loads the links of its path, at most `MAX_PATH` of them, each with all its bytes:

    same GPU                    local memory
    same island                 GPU out, GPU in
    same host                   island out, island in
    other host, same rail       NIC out, NIC in
    other host, other rail      "nvlink": GPU out, relay GPU in, NIC out of the relay, NIC in (what NCCL calls PXN);
                                "spine": NIC out, NIC in, rail up, rail down

Time over a link is bytes over rate. This module has these types, and arithmetic on integers. Not here: the file that
describes a fabric (fabric_file.py), the choice of sources (flow.py), the time of a refit (predict.py).
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import msgspec
import numpy as np

from xfer.errors import ProtocolError, XferError
from xfer.plan.plain_data import unfit

MAX_PATH = 4
"""Links of the longest path."""
MAX_RATE = 10**15
"""Bytes/s; a thousand times what one NVLink switch moves."""
MAX_GPUS = 1 << 20


def host_identity() -> str:
    """Return the name of this host, since plans prefer sources on the same host. XFER_HOST overrides it."""
    return os.environ.get("XFER_HOST") or socket.gethostname()


@dataclass(frozen=True, slots=True)
class Nic:
    """`gpus`: numbers, within the host, of the GPUs whose traffic goes through it. `rate`: bytes/s each way.
    `rail`: the switch that it hangs on; NICs of one rail reach each other without leaving it.
    """

    gpus: tuple[int, ...]
    rate: int
    rail: int = 0


@dataclass(frozen=True, slots=True)
class Host:
    """`islands`: GPU numbers that reach each other over NVLink; together 0..n-1, each once. Rates are bytes/s each way:
    `nvlink` of one GPU in its island, `bridge` of one island to the others of this host, `local` of a copy inside a GPU
    (0: never the limit).
    """

    name: str
    islands: tuple[tuple[int, ...], ...]
    nvlink: int
    nics: tuple[Nic, ...] = ()
    bridge: int = 0
    local: int = 0

    @property
    def gpus(self) -> int:
        return sum(map(len, self.islands))


@dataclass(frozen=True)
class Fabric:
    """`hosts` in order: GPUs are numbered through all of them. `spine`: bytes/s of one rail to and from all others, 0
    where that is never the limit. `cross_rail`: how traffic between rails travels (see the module's first lines).

    XferError lists everything that is wrong with the description.
    """

    hosts: tuple[Host, ...]
    spine: int = 0
    cross_rail: Literal["nvlink", "spine"] = "nvlink"

    def __post_init__(self) -> None:
        bad = list(_violations(self))
        if bad:
            raise XferError("this is no fabric", bad)

    @classmethod
    def uniform(cls, hosts: int, gpus: int = 8, *, nvlink: int, nic: int, local: int = 0, **more) -> Fabric:
        """`hosts` equal hosts of one island each, a NIC of `nic` bytes/s per GPU, GPU i on rail i."""
        nics = tuple(Nic((i,), nic, i) for i in range(gpus)) if nic else ()
        one = [Host(f"host{h}", (tuple(range(gpus)),), nvlink, nics, local=local) for h in range(hosts)]
        return cls(tuple(one), **more)

    @cached_property
    def gpus(self) -> int:
        return sum(h.gpus for h in self.hosts)

    @cached_property
    def links(self) -> Links:
        return Links.of(self)


@dataclass(frozen=True)
class Site:
    """The place of each rank: GPU number of each trainer, and of each worker of each replica. A trainer and a
    worker may share a GPU. XferError lists what does not fit.
    """

    fabric: Fabric
    trainers: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        bad = list(_misplaced(self))
        if bad:
            raise XferError("ranks do not fit the fabric", bad)

    @classmethod
    def packed(
        cls, fabric: Fabric, trainers: int, replicas: int, workers: int, *, first_worker: int | None = None
    ) -> Site:
        """Trainers on GPUs 0.., then `replicas` times `workers` workers from GPU `first_worker` on (default: on the
        next host that no trainer is on).
        """
        if first_worker is None:
            ends = np.cumsum([h.gpus for h in fabric.hosts])
            first_worker = int(ends[np.searchsorted(ends, trainers)]) if trainers <= fabric.gpus else trainers
        at = range(first_worker, first_worker + replicas * workers)
        return cls(
            fabric, tuple(range(trainers)), tuple(tuple(at[i : i + workers]) for i in range(0, len(at), workers))
        )

    def gpus(self, replica: int) -> np.ndarray:
        """GPU of each joint rank of one replica's sub-plan (trainers first), int64."""
        return np.array((*self.trainers, *self.replicas[replica]), np.int64)

    def hosts(self, replica: int) -> tuple[int, ...]:
        """Host number of each joint rank of one replica's sub-plan."""
        return tuple(self.fabric.links.host[self.gpus(replica)].tolist())

    def together(self, replicas: Sequence[int]) -> list[list[int]]:
        """For each of these replicas, the indices in `replicas` of all whose workers are on the same hosts, with its own. With `relay`
        these replicas hand bytes on to each other."""
        hosts = [tuple(self.fabric.links.host[list(self.replicas[r])].tolist()) for r in replicas]
        return [[k for k, h in enumerate(hosts) if h == mine] for mine in hosts]

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Site:
        """ProtocolError for anything that `to_bytes` does not write."""
        try:
            return _site.decode(data)
        except (msgspec.MsgspecError, XferError, UnicodeDecodeError, RecursionError) as e:
            raise ProtocolError(f"not a site: {e}") from e


_site = msgspec.msgpack.Decoder(Site)  # once: see inventory.py


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """All links of a fabric, numbered, and which of them each GPU uses. A rate of 0 stands for no limit."""

    rate: np.ndarray  # int64 [links], bytes/s
    host: np.ndarray  # int64 [gpus]
    island: np.ndarray  # int64 [gpus], numbered over all hosts
    nic: np.ndarray  # int64 [gpus], -1: none
    rail: np.ndarray  # int64 [gpus], numbered by order of rail numbers, -1: no NIC
    relay_gpu: np.ndarray  # int64 [islands, rails]: the island's first GPU whose NIC is on that rail, -1: none
    cross_nvlink: bool
    names: tuple[str, ...] = field(repr=False)
    kinds: tuple[tuple[str, int], ...]  # name and number of the links of each kind, in order

    @classmethod
    def of(cls, f: Fabric) -> Links:
        host, island, nic, rail = (np.full(f.gpus, -1, np.int64) for _ in range(4))
        port: list[float] = []
        local: list[float] = []
        bridge: list[float] = []
        nic_rate: list[float] = []
        names: tuple[list[str], list[str], list[str]] = ([], [], [])
        rails = sorted({n.rail for h in f.hosts for n in h.nics})
        number_of = {r: i for i, r in enumerate(rails)}
        first = 0
        for number, h in enumerate(f.hosts):
            for i, members in enumerate(h.islands):
                island[first + np.array(members)] = len(bridge)
                bridge.append(h.bridge)
                names[1].append(f"{h.name} island {i}")
            for n in h.nics:
                at = first + np.array(n.gpus)
                nic[at], rail[at] = len(nic_rate), number_of[n.rail]
                nic_rate.append(n.rate)
                names[2].append(f"{h.name} NIC of GPU {','.join(map(str, n.gpus))} (rail {n.rail})")
            host[first : first + h.gpus] = number
            names[0].extend(f"{h.name} GPU {g}" for g in range(h.gpus))
            port += [h.nvlink] * h.gpus
            local += [h.local] * h.gpus
            first += h.gpus
        relay = np.full((len(bridge), max(1, len(rails))), -1, np.int64)
        backwards = np.flatnonzero(rail >= 0)[::-1]  # of several GPUs the first is written last, and stays
        relay[island[backwards], rail[backwards]] = backwards
        gpu, isle, card = names
        spine = [f.spine] * len(rails)
        kinds = (
            ("GPU to NVLink", port, [f"{n} out" for n in gpu]), ("NVLink to GPU", port, [f"{n} in" for n in gpu]),
            ("GPU memory", local, [f"{n} memory" for n in gpu]), ("island out", bridge, [f"{n} out" for n in isle]),
            ("island in", bridge, [f"{n} in" for n in isle]), ("NIC out", nic_rate, [f"{n} out" for n in card]),
            ("NIC in", nic_rate, [f"{n} in" for n in card]), ("rail up", spine, [f"rail {r} up" for r in rails]),
            ("rail down", spine, [f"rail {r} down" for r in rails]),
        )  # fmt: skip
        rate = np.array([x for _, rates, _ in kinds for x in rates], np.int64)
        text, numbers = tuple(n for *_, some in kinds for n in some), tuple((k, len(some)) for k, _, some in kinds)
        return cls(rate, host, island, nic, rail, relay, f.cross_rail == "nvlink", text, numbers)

    def __len__(self) -> int:
        return len(self.rate)

    def paths(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """Links of transfers from GPU `src[i]` to GPU `dst[i]` (any equal shape): int64 [..., MAX_PATH], -1 for none.

        Columns keep their meaning: way out, way in, and two more (up and down, or out to and into a relay).
        """
        src, dst = np.broadcast_arrays(np.asarray(src, np.int64), np.asarray(dst, np.int64))
        gpus, islands = len(self.host), int(self.island.max()) + 1
        nics, rails = int(self.nic.max(initial=-1)) + 1, self.relay_gpu.shape[1]
        out_of, into = np.arange(gpus), gpus + np.arange(gpus)
        at_nic = 3 * gpus + 2 * islands
        p = np.full((*src.shape, MAX_PATH), -1, np.int64)

        def put(where: np.ndarray, column: int, link: np.ndarray) -> None:
            p[..., column] = np.where(where, link, p[..., column])

        same_gpu, near = src == dst, (self.island[src] == self.island[dst]) & (src != dst)
        inside = (self.host[src] == self.host[dst]) & ~near & ~same_gpu
        far = self.host[src] != self.host[dst]
        put(same_gpu, 0, 2 * gpus + src)
        put(near, 0, out_of[src])
        put(near, 1, into[dst])
        put(inside, 0, 3 * gpus + self.island[src])
        put(inside, 1, 3 * gpus + islands + self.island[dst])
        put(far, 0, at_nic + self.nic[src])
        put(far, 1, at_nic + nics + self.nic[dst])
        cross = far & (self.rail[src] != self.rail[dst])
        relay = self.relay_gpu[self.island[src], self.rail[dst]]
        hop = cross & (relay >= 0) & self.cross_nvlink
        put(hop, 0, at_nic + self.nic[relay])
        put(hop, 2, out_of[src])
        put(hop, 3, into[relay])
        put(cross & ~hop, 2, at_nic + 2 * nics + self.rail[src])
        put(cross & ~hop, 3, at_nic + 2 * nics + rails + self.rail[dst])
        p[(p >= 0) & (self.rate[p] == 0)] = -1
        return p

    def loads(self, src: np.ndarray, dst: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """Bytes over each link, int64 [links], when `nbytes[i]` go from GPU `src[i]` to GPU `dst[i]`."""
        path = self.paths(src, dst)
        out = np.zeros(len(self) + 1, np.int64)
        np.add.at(out, path, np.broadcast_to(np.asarray(nbytes, np.int64)[..., None], path.shape))
        return out[:-1]  # the last one is where -1 points

    def seconds(self, nbytes: np.ndarray) -> np.ndarray:
        """float64 [links]: time that each link needs for these bytes."""
        return np.where(self.rate > 0, nbytes / np.maximum(self.rate, 1), 0.0)


def _violations(f: Fabric) -> Iterator[str]:
    if not f.hosts:
        yield "no host at all"
    names = Counter(h.name for h in f.hosts if isinstance(h.name, str))
    yield from (f"host {n!r} is there {times} times" for n, times in names.items() if times > 1)
    if f.cross_rail not in ("nvlink", "spine"):
        yield f"cross_rail={f.cross_rail!r}: 'nvlink' or 'spine'"
    yield from _rate(f.spine, "spine", zero=True)
    if sum(h.gpus for h in f.hosts) > MAX_GPUS:
        yield f"more than {MAX_GPUS} GPUs"
        return
    for h in f.hosts:
        n = h.gpus
        if not isinstance(h.name, str) or unfit(h.name):
            yield f"host {h.name!a}: a name that is text and has a UTF-8 form is needed"
        yield from _rate(h.nvlink, f"host {h.name}: nvlink", zero=n == len(h.islands))
        yield from _rate(
            h.bridge, f"host {h.name}: bridge (between its {len(h.islands)} islands)", zero=len(h.islands) < 2
        )
        yield from _rate(h.local, f"host {h.name}: local", zero=True)
        odd = list(_no_numbers([g for i in h.islands for g in i], f"host {h.name}: islands"))
        if not odd and (sorted(g for i in h.islands for g in i) != list(range(n)) or not all(h.islands)):
            yield f"host {h.name}: islands {h.islands}: each of the GPUs 0, 1, 2, … must be in exactly one"
        for c in h.nics:
            who = f"host {h.name}: NIC of GPUs {c.gpus}"
            yield from _rate(c.rate, who)
            if not _whole(c.rail) or not 0 <= c.rail < 1 << 16:
                yield f"{who}: rail {c.rail!r} must be an integer from 0 to 65535"
            if not len(c.gpus):
                yield f"host {h.name}: a NIC (rail {c.rail}) of no GPU; name the GPUs that it serves, or leave it out"
            odd += _no_numbers(c.gpus, who)
        yield from odd
        served = [g for c in h.nics for g in c.gpus]
        if not odd and sorted(served) != list(range(n)) and (served or len(f.hosts) > 1):
            times = Counter(served)
            lacks = [g for g in range(n) if times[g] != 1]
            yield (
                f"host {h.name}: each GPU must be in exactly one NIC (add the rates of NICs that serve the same GPU), and no "
                f"NIC may name a GPU beyond {n - 1}" + (f"; not so: GPUs {_some(lacks)}" if lacks else "")
            )


def _whole(value: object) -> bool:
    """Whether it is a plain int: numpy's integers cannot be encoded."""
    return isinstance(value, int) and not isinstance(value, bool)


def _no_numbers(gpus: Sequence[int], what: str) -> Iterator[str]:
    for odd in [g for g in gpus if not _whole(g)][:1]:
        yield f"{what}: {odd!r} is no GPU number but {type(odd).__name__}; int is needed, as by tuple(map(int, …))"


def _rate(value: int, what: str, zero: bool = False) -> Iterator[str]:
    if not _whole(value) or not (0 if zero else 1) <= value <= MAX_RATE:
        yield f"{what}: {value!r} bytes/s: an integer from {0 if zero else 1} to {MAX_RATE} is needed"


def _misplaced(s: Site) -> Iterator[str]:
    workers = [g for r in s.replicas for g in r]
    for what, gpus in (("trainers", s.trainers), ("workers", workers)):
        odd = list(_no_numbers(gpus, what))
        if odd:
            yield from odd
            continue
        outside = sorted({g for g in gpus if not 0 <= g < s.fabric.gpus})
        if outside:
            yield f"{what} on GPUs {_some(outside)}; the fabric has GPUs 0..{s.fabric.gpus - 1}"
        twice = sorted(g for g, times in Counter(gpus).items() if times > 1)
        if twice:
            yield f"several {what} on GPUs {_some(twice)}; one process per GPU and side is needed"
    if not len(s.trainers):
        yield "no trainer is placed"
    yield from (f"replica {i} has no worker" for i, r in enumerate(s.replicas) if not len(r))


def _some(items: Sequence[int]) -> str:
    return ", ".join(map(str, items[:8])) + (f" and {len(items) - 8} more" if len(items) > 8 else "")
