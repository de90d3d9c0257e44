"""Predicts the time of a refit from its sub-plans and the fabric alone: no GPU, no weights.

All replicas are refitted at once. A link carries the waves in their order, and each as soon as its messages come and the
wave before is through. For each link l and wave w let t[l, w] be the wire bytes of all sub-plans over it / rate[l].
With the routes that sessions choose:

    pulled bytes    pairs on one GPU or in one island: one kernel per destination;
                        pull = max over l of (pulled bytes / rate)
    wired bytes     all others, by message; one of pair (s, d) in wave w begins when the data is packed and both ends
                    are through with wave w - a, where a waves are under way at once:
                        packed(s, w) = max(packed(s, w-1), sent(s, w-2)) + bytes packed by s in w / local
                        begin(m)     = max(packed(s, w), busy(s, w-a), busy(d, w-a))
                        free(l, w)   = max(max(free(l, w-1), min begin(m) over l) + t[l, w],
                                           max over m on l of (begin(m) + bytes of m / rate[l]))
                        done(m)      = message_s + max over links l on its path of free(l, w)
                        busy(r, w)   = max(max over messages m of r in w of done(m),
                                           busy(r, w-a) + message_s * messages of r in w)
                        unpacked(d, w) = max(unpacked(d, w-1), busy(d, w)) + bytes unpacked by d in w / local
    relayed bytes   with `relay`, bytes that replicas on the same hosts read from each other, worker by worker. If some of their bytes
                    are pulled from trainers, they form a chain, in which each reads all bytes from the one before it. Else they
                    form a ring: each takes the k-th part of the bytes of each pair, and reads the other parts from the others.
                    They count as pulled. A read ends one part after the bytes were taken or read there. A part has at most the
                    bytes of a message;
                        relay = max over chains of the sum over replicas behind the first of (a part / rate of its path),
                                and over rings of (a part of each other replica / rate of its path)
                    With `relay`, common bytes that workers of one replica hand on count as pulled, too.
    transfer        control_s + max(pull, last unpacked) + relay + constants (padding) written / local

`floor` is max over l of all bytes / rate: no schedule of these bytes is faster. `lockstep` is the sum over w of max
over l of t[l, w]: the time if every wave waited for its slowest link. The prediction of the wire lies between the
two.

The prediction leaves out pauses and resumes of engines (the outage of a refit is longer by them), checksums, launch times
of kernels, and congestion inside switches; it packs long dense rows, which a refit does not. Use rates that are reached in
practice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from xfer.plan.fabric import Links, Site
from xfer.plan.subplan import SubPlan, pair_key


@dataclass(frozen=True, slots=True)
class Costs:
    """Inputs of the formula beside the fabric, in seconds."""

    message_s: float = 40e-6
    """Per message: posting it, its handshake, a launch on each side. A rank does this for one message after another, beside the bytes of
    those before. `python -m benchmarks.messages --hosts` measures it: 40 us over NCCL's sockets."""
    control_s: float = 0.5e-3
    """From the last rank ready to the first byte, and from the last byte to the decision."""
    at_once: Literal[1, 2] = 1
    """Waves of a rank that are under way at once: over NCCL one, since its groups follow one another on a stream; over
    gloo two, as many as there are buffers."""


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """One link of the fabric in one refit."""

    name: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """Seconds, by the module's formula. `pack_s` and `unpack_s`: the part that the wire does not hide."""

    transfer_s: float
    pull_s: float
    pack_s: float
    wire_s: float
    unpack_s: float
    relay_s: float
    fill_s: float
    control_s: float
    floor_s: float
    lockstep_s: float
    nbytes: int
    pulled_bytes: int
    link_bytes: np.ndarray  # int64 [links of the fabric]
    link_seconds: np.ndarray  # float64 [links]
    wave_span: np.ndarray  # float64 [waves, 2]: when the first message of a wave begins and the last one ends
    wave_bytes: np.ndarray  # int64 [waves], wired
    host_bytes: np.ndarray  # int64 [hosts, hosts], from row to column
    links: Links

    def phases(self) -> tuple[tuple[str, float], ...]:
        """In order; the pull runs beside pack, wire and unpack."""
        names = ("control", "pull", "pack", "wire", "unpack", "relay", "fill")
        return tuple((n, getattr(self, f"{n}_s")) for n in names)

    def busiest(self, most: int = 8) -> list[LinkLoad]:
        """Links by falling time; those without bytes are left out."""
        order = np.argsort(-self.link_seconds, kind="stable")[:most]
        return [
            LinkLoad(self.links.names[i], int(self.link_bytes[i]), float(self.link_seconds[i]))
            for i in order
            if self.link_bytes[i]
        ]


def predict(
    plans: Sequence[SubPlan],
    site: Site,
    *,
    replicas: Sequence[int] | None = None,
    costs: Costs | None = None,
    relay: bool = False,
) -> Prediction:
    """Predict one refit that runs `plans[i]` for replica `replicas[i]` of the site (default: 0, 1, …), all at the
    same time. `relay`: replicas on the same hosts hand bytes on to each other (`sources`).

    ValueError when a plan has other ranks than the site places for its replica.
    """
    replicas, costs = range(len(plans)) if replicas is None else replicas, costs or Costs()
    for plan, r in zip(plans, replicas, strict=True):
        if (plan.trainers, plan.workers) != (len(site.trainers), len(site.replicas[r])):
            raise ValueError(
                f"replica {r}: the plan has {plan.trainers} + {plan.workers} ranks, the site places others"
            )
    links = site.fabric.links
    taken = sources(plans, site, replicas, relay)
    m = _Messages.of(plans, [site.gpus(r) for r in replicas], [own(i, some) for i, some in enumerate(taken)])
    chains = _handed_on(plans, [site.replicas[r] for r in replicas], taken, links)
    near = links.island[m.src_gpu] == links.island[m.dst_gpu]
    within = _within(plans, [site.gpus(r) for r in replicas], [own(i, some) for i, some in enumerate(taken)])
    handed = tuple(np.concatenate(both) for both in zip((chains.src_gpu, chains.dst_gpu, chains.nbytes), within))
    pulled = links.loads(m.src_gpu[near], m.dst_gpu[near], m.nbytes[near]) + links.loads(*handed)
    link_bytes = links.loads(m.src_gpu, m.dst_gpu, m.nbytes) + links.loads(*handed)
    wired = m.take(~near)
    local = np.concatenate([[h.local] * h.gpus for h in site.fabric.hosts]).astype(np.float64)
    wire = _wire(wired, links, local, costs)
    hosts = np.zeros((len(site.fabric.hosts),) * 2, np.int64)
    np.add.at(hosts, (links.host[m.src_gpu], links.host[m.dst_gpu]), m.nbytes)
    np.add.at(hosts, (links.host[handed[0]], links.host[handed[1]]), handed[2])
    fill = max(
        (
            float(_over(c.filled, local[g]))
            for p, r in zip(plans, replicas)
            for c, g in zip(p.summary.classes, site.replicas[r])
        ),
        default=0.0,
    )
    pull = float(links.seconds(pulled).max(initial=0.0))
    return Prediction(
        transfer_s=costs.control_s + max(pull, wire.end) + chains.seconds + fill,
        pull_s=pull,
        pack_s=wire.pack,
        wire_s=wire.wire,
        unpack_s=wire.unpack,
        relay_s=chains.seconds,
        fill_s=fill,
        control_s=costs.control_s,
        floor_s=float(links.seconds(link_bytes).max(initial=0.0)),
        lockstep_s=wire.lockstep,
        nbytes=int(m.nbytes.sum() + handed[2].sum()),
        pulled_bytes=int(m.nbytes[near].sum() + handed[2].sum()),
        link_bytes=link_bytes,
        link_seconds=links.seconds(link_bytes),
        wave_span=wire.span,
        wave_bytes=np.bincount(wired.wave, wired.nbytes, len(wire.span)).astype(np.int64),
        host_bytes=hosts,
        links=links,
    )


def sources(plans: Sequence[SubPlan], site: Site, replicas: Sequence[int], relay: bool) -> list[list[int]]:
    """For each plan and each share of its bytes, the number of the plan whose replica brings the share; its own number if it takes the
    share from trainers. The choice is that of coordinator/relays.py, if all pairs in one island are pulled."""
    if not relay:
        return [[i] for i, _ in enumerate(plans)]
    out, island = [], site.fabric.links.island
    for i, (plan, some) in enumerate(zip(plans, site.together(replicas))):
        gpus, t = site.gpus(replicas[i]), plan.tables
        if (island[gpus[t.pair_src]] == island[gpus[t.pair_dst]]).any():
            some = [max((k for k in some if k < i), default=i)]
        out.append(some)
    return out


def own(i: int, sources: list[int]) -> tuple[int, int]:
    """The share that plan `i` takes from trainers, and the number of shares; of 0 shares it takes none."""
    return (sources.index(i), len(sources)) if i in sources else (0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class _Messages:
    """The messages of all sub-plans. A trainer has a lane per replica, each with its own progress: `src` and `dst`
    number lanes."""

    src: np.ndarray
    dst: np.ndarray
    src_gpu: np.ndarray
    dst_gpu: np.ndarray
    wave: np.ndarray
    nbytes: np.ndarray
    gpu_of_lane: np.ndarray

    @classmethod
    def of(cls, plans: Sequence[SubPlan], gpus: Sequence[np.ndarray], shares: Sequence[tuple[int, int]]) -> _Messages:
        """shares: the share of the bytes of each pair that each plan's replica takes, see `own`."""
        columns: list[list[np.ndarray]] = [[], [], [], []]
        base = 0
        for plan, (share, of) in zip(plans, shares):
            t = plan.tables
            count = np.diff(t.message_first)
            total = np.zeros(len(count), np.int64)
            of_share = pair_key(t.share_src, t.share_dst, t.share_common > 0)
            at = np.searchsorted(pair_key(t.pair_src, t.pair_dst, t.pair_common), of_share)
            np.add.at(total, at, t.share_end - t.share_begin)
            end = np.append(t.message_begin[1:], 0)
            end[t.message_first[1:] - 1] = total
            low, high = (np.repeat(total * k // max(1, of), count) for k in (share, share + 1))
            nbytes = np.minimum(end, high) - np.maximum(t.message_begin, low)
            whole = np.where(t.message_wave * of // plan.waves == share, end - t.message_begin, 0)  # as `relay.shares`
            nbytes = np.where(np.repeat(t.pair_common, count), whole, nbytes)
            some = np.flatnonzero((nbytes > 0) & (of > 0))
            waves = np.unique(t.message_wave[some], return_inverse=True)[1]  # ranks step over waves without messages
            src, dst = np.repeat(t.pair_src, count) + base, np.repeat(t.pair_dst, count) + base
            for out, c in zip(columns, (src[some], dst[some], waves if of > 1 else t.message_wave[some], nbytes[some])):
                out.append(c.astype(np.int64))
            base += len(plan.ranks)
        src, dst, wave, nbytes = (np.concatenate([np.zeros(0, np.int64), *c]) for c in columns)
        lane = np.concatenate([np.zeros(0, np.int64), *gpus])
        return cls(src, dst, lane[src], lane[dst], wave, nbytes, lane)

    def take(self, rows: np.ndarray) -> _Messages:
        return _Messages(
            self.src[rows], self.dst[rows], self.src_gpu[rows], self.dst_gpu[rows], self.wave[rows], self.nbytes[rows],
            self.gpu_of_lane,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Relayed:
    """Reads of workers from other replicas: one entry per worker and replica that it reads from. `seconds`: how much later the last
    replica ends than the transfer from the trainers."""

    src_gpu: np.ndarray
    dst_gpu: np.ndarray
    nbytes: np.ndarray
    seconds: float


def _handed_on(
    plans: Sequence[SubPlan], gpus: Sequence[Sequence[int]], taken: Sequence[list[int]], links: Links
) -> _Relayed:
    columns: list[list[np.ndarray]] = [[np.zeros(0, np.int64)] for _ in range(3)]
    late = [0.0] * len(plans)
    for i, some in enumerate(taken):
        for share, b in enumerate(some):
            if b == i:
                continue
            total = np.array(plans[i].summary.bytes_in, np.int64)
            nbytes = total * (share + 1) // len(some) - total * share // len(some)
            src, dst = (np.array(c, np.int64) for c in (gpus[b], gpus[i]))
            part = np.minimum(nbytes, plans[i].message_bytes)
            path = links.paths(src, dst)
            took = float(np.where(path >= 0, _over(part[:, None], links.rate[path]), 0.0).max(initial=0.0))
            late[i] += took + (late[b] if len(some) == 1 else 0.0)
            for column, more in zip(columns, (src, dst, nbytes)):
                column.append(more)
    src, dst, nbytes = (np.concatenate(c) for c in columns)
    return _Relayed(src, dst, nbytes, max(late, default=0.0))


def _within(
    plans: Sequence[SubPlan], gpus: Sequence[np.ndarray], shares: Sequence[tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes that workers hand on to others of their replica: source GPU, destination GPU, bytes. shares: see `_Messages.of`."""
    columns: list[list[np.ndarray]] = [[np.zeros(0, np.int64)] for _ in range(3)]
    for plan, gpu, (share, of) in zip(plans, gpus, shares):
        t = plan.tables
        total = (t.share_end - t.share_begin)[t.copy_share]
        some = total * (share + 1) // of - total * share // of if of else total[:0]
        for column, more in zip(columns, (gpu[t.share_dst[t.copy_share]], gpu[t.copy_dst], some)):
            column.append(more[: len(some)])
    src, dst, nbytes = (np.concatenate(c) for c in columns)
    return src, dst, nbytes


@dataclass(frozen=True, slots=True, eq=False)
class _WireTimes:
    pack: float
    wire: float
    unpack: float
    end: float
    lockstep: float
    span: np.ndarray


def _wire(m: _Messages, links: Links, local: np.ndarray, costs: Costs) -> _WireTimes:
    lanes = len(m.gpu_of_lane)
    packed, busy, before, unpacked = (np.zeros(lanes) for _ in range(4))  # `before`: busy, one wave earlier
    path = links.paths(m.src_gpu, m.dst_gpu)
    order = np.argsort(m.wave, kind="stable")
    waves = int(m.wave.max(initial=-1)) + 1
    cuts = np.searchsorted(m.wave[order], np.arange(waves + 1))
    span, lockstep, first = np.zeros((waves, 2)), 0.0, None  # `first`: when the first message begins
    rate, link_rate = local[m.gpu_of_lane], np.append(links.rate, 0)  # the last one is where -1 points
    free = np.zeros(len(link_rate))
    for w in range(waves):
        rows = order[cuts[w] : cuts[w + 1]]
        if not len(rows):
            span[w] = span[w - 1, 1] if w else 0.0
            continue
        src, dst, n, on = m.src[rows], m.dst[rows], m.nbytes[rows], path[rows]
        load = np.zeros(len(link_rate), np.int64)
        np.add.at(load, on, n[:, None])
        time = _over(load, link_rate)
        lockstep += float(time.max())
        out, into = (np.bincount(side, n, lanes) for side in (src, dst))
        packed = np.where(out > 0, np.maximum(packed, before) + _over(out, rate), packed)
        through = busy if costs.at_once == 1 else before
        count = np.bincount(np.concatenate([src, dst]), minlength=lanes)
        posted = np.where(count > 0, through + costs.message_s * count, 0.0)
        begin = np.maximum(packed[src], np.maximum(through[src], through[dst]))
        come, alone = np.full(len(free), np.inf), np.zeros(len(free))
        np.minimum.at(come, on, begin[:, None])
        np.maximum.at(alone, on, begin[:, None] + _over(n[:, None], link_rate[on]))
        free = np.where(load > 0, np.maximum(np.maximum(free, come) + time, alone), free)
        free[-1] = 0.0
        done = costs.message_s + np.maximum(begin, free[on].max(axis=1))
        before = busy.copy()
        np.maximum.at(busy, src, done)
        np.maximum.at(busy, dst, done)
        busy = np.maximum(busy, posted)
        unpacked = np.where(into > 0, np.maximum(unpacked, busy) + _over(into, rate), unpacked)
        span[w] = begin.min(), done.max()
        first = float(begin.min()) if first is None else first
    first = first or 0.0
    last, end = float(busy.max(initial=0.0)), float(unpacked.max(initial=0.0))
    return _WireTimes(first, last - first, max(0.0, end - last), max(end, last), lockstep, span)


def _over(nbytes, rate):
    """Seconds; a rate of 0 stands for no limit."""
    return np.where(rate > 0, nbytes / np.maximum(rate, 1.0), 0.0)
