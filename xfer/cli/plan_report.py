"""A plan of a whole refit as data: all numbers that `xfer plan` prints, draws or writes, computed once.

The numbers are sums over sub-plans, and a prediction. plan.py prints them, html.py draws them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from xfer.plan.explain import size
from xfer.plan.fabric import Site
from xfer.plan.predict import LinkLoad, Prediction, own, predict, sources
from xfer.plan.program import ITEMSIZE
from xfer.plan.subplan import SubPlan
from xfer.trace.catalog import Catalog

RANKS_DRAWN = 64
"""Most ranks of a side that the traffic matrix shows. With more ranks, it shows at most as many hosts or groups of hosts."""
LINKS_KEPT = 24


@dataclass(frozen=True, slots=True)
class Header:
    """The job that was planned, in words. `notes`: how the plan was made."""

    model: str
    trainer: str
    engine: str
    fabric: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Most:
    """The rank that moves most bytes in a refit, and the mean over its side."""

    rank: str
    nbytes: int
    mean: float


@dataclass(frozen=True, slots=True)
class KeptTotal:
    """Bytes of all workers that a refit leaves alone for one reason, and the largest tensor among them."""

    why: str
    nbytes: int
    tensors: int
    example: str

    def __str__(self) -> str:
        return f"{self.why}: {size(self.nbytes)} in {self.tensors:,} tensors, such as {self.example}"


@dataclass(frozen=True, slots=True)
class Matrix:
    """Bytes from row to column. `unit`: the name of what a row stands for."""

    unit: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    nbytes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """All links of one kind in the fabric's order; `seconds` and `nbytes` of each."""

    name: str
    links: tuple[str, ...]
    seconds: tuple[float, ...]
    nbytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wave:
    """Begin of a wave's first message and end of its last, in seconds after the first byte; bytes on the wire."""

    begin: float
    end: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Report:
    header: Header
    tensors: int
    model_bytes: int
    trainers: int
    workers: int  # of a replica
    replicas: int
    hosts: int
    bytes_per_replica: tuple[int, ...]
    nbytes: int
    broadcast_bytes: int
    most_out: Most
    most_in: Most
    between_hosts: int
    pulled_bytes: int
    waves: int
    messages: int
    largest_message: int
    pieces_direct: int
    pieces_staged: int
    fills: int
    byte_classes: dict[str, int]  # over all workers of all replicas
    casts: tuple[str, ...]
    kept: tuple[KeptTotal, ...]
    dropped: tuple[str, ...]
    transfer_s: float
    floor_s: float
    lockstep_s: float
    phases: tuple[tuple[str, float], ...]
    busiest: tuple[LinkLoad, ...]
    kinds: tuple[Kind, ...]
    matrix: Matrix
    timeline: tuple[Wave, ...]


def byte_rows(r: Report) -> list[tuple[str, str, str]]:
    """Lines about a plan's bytes, for text and page: (label, size or number, details)."""
    c, low, high = r.byte_classes, min(r.bytes_per_replica), max(r.bytes_per_replica)
    times = f"{r.broadcast_bytes / r.nbytes:.1f}x of that" if r.nbytes else ""
    return [
        ("a replica", size(high) if low == high else f"{size(low)} to {size(high)}", f"live bytes of all: {size(c['footprint'])}"),
        ("all replicas", size(r.nbytes), f"{size(r.between_hosts)} between hosts, {size(r.pulled_bytes)} inside NVLink islands"),
        ("a full broadcast", size(r.broadcast_bytes), times),
        ("most sent by a rank", size(r.most_out.nbytes), f"{r.most_out.rank}; mean {size(round(r.most_out.mean))}"),
        ("most received by a rank", size(r.most_in.nbytes), f"{r.most_in.rank}; mean {size(round(r.most_in.mean))}"),
        ("straight into place", size(c["written"]), f"{r.pieces_direct:,} pieces"),
        ("staged, then computed", size(c["staged"]), f"{r.pieces_staged:,} pieces through {size(c['scratch'])} of scratch"),
        ("filled", size(c["filled"]), f"{r.fills:,} constant regions"),
        ("kept", size(c["kept"]), "; ".join(map(str, r.kept))),
        ("messages", f"{r.messages:,}", f"in {r.waves:,} waves, the largest {size(r.largest_message)}"),
        *(("cast", "", x) for x in r.casts),
        *([("dropped, as asked", f"{len(r.dropped):,}", ", ".join(r.dropped[:8]))] if r.dropped else []),
    ]  # fmt: skip


def make_report(
    header: Header, catalog: Catalog, plans: Sequence[SubPlan], site: Site, *, relay: bool = False
) -> Report:
    """Computes the report of one refit of all replicas at once. `relay`: see `plan_replicas`."""
    p, summaries = predict(plans, site, relay=relay), [x.summary for x in plans]
    every = range(len(plans))
    # A group of replicas that hand bytes on takes the bytes of one plan from the trainers.
    sent = [plans[i] for i, some in enumerate(site.together(every)) if not relay or some[0] == i]
    first = summaries[0]
    out = np.sum([x.summary.bytes_out for x in sent], axis=0)
    into = np.array([s.bytes_in for s in summaries]).reshape(-1)
    names = ("footprint", "written", "filled", "staged", "kept", "aliased", "scratch")
    at = int(into.argmax())
    return Report(
        header=header,
        tensors=len(catalog.exported),
        model_bytes=sum(prod(s.shape) * ITEMSIZE[s.dtype] for s in catalog.exported),
        trainers=first.trainers,
        workers=first.workers,
        replicas=len(plans),
        hosts=len(site.fabric.hosts),
        bytes_per_replica=tuple(s.nbytes for s in summaries),
        nbytes=sum(s.nbytes for s in summaries),
        broadcast_bytes=sum(s.broadcast_bytes for s in summaries),
        most_out=Most(f"trainer {int(out.argmax())}", int(out.max()), float(out.mean())),
        most_in=Most(f"replica {at // first.workers} worker {at % first.workers}", int(into.max()), float(into.mean())),
        between_hosts=sum(x.summary.remote_bytes for x in sent),
        pulled_bytes=p.pulled_bytes,
        waves=max(s.waves for s in summaries),
        messages=sum(x.summary.messages for x in sent),
        largest_message=max(s.largest_message for s in summaries),
        pieces_direct=sum(s.direct for s in summaries),
        pieces_staged=sum(s.staged for s in summaries),
        fills=sum(s.fills for s in summaries),
        byte_classes={n: sum(getattr(c, n) for s in summaries for c in s.classes) for n in names},
        casts=tuple(f"{c.src} to {c.dst}: {c.tensors:,} tensors, such as {c.example}" for c in first.casts),
        kept=_kept(plans),
        dropped=first.dropped,
        transfer_s=p.transfer_s,
        floor_s=p.floor_s,
        lockstep_s=p.lockstep_s,
        phases=p.phases(),
        busiest=tuple(p.busiest(LINKS_KEPT)),
        kinds=_kinds(p),
        matrix=_matrix(plans, site, p, [own(i, x) for i, x in enumerate(sources(plans, site, every, relay))]),
        timeline=tuple(
            Wave(float(a), float(b), int(n)) for (a, b), n in zip(p.wave_span.tolist(), p.wave_bytes.tolist())
        ),
    )


def _kept(plans: Sequence[SubPlan]) -> tuple[KeptTotal, ...]:
    """Adds up kept bytes by reason. A plan's reasons begin with the tensor's name, which is cut off."""
    found: dict[str, dict[str, int]] = {}
    for x in plans:
        for reason, n in x.summary.kept:
            name, _, why = reason.partition(": ")
            tensors = found.setdefault(why or name, {})
            tensors[name] = tensors.get(name, 0) + n
    return tuple(KeptTotal(why, sum(t.values()), len(t), max(t, key=t.__getitem__)) for why, t in sorted(found.items()))


def _kinds(p: Prediction) -> tuple[Kind, ...]:
    """Links by kind, in the order of Links; kinds that carry no byte are left out."""
    out, at = [], 0
    for name, n in p.links.kinds:
        cut, at = slice(at, at + n), at + n
        if p.link_bytes[cut].any():
            loads = (tuple(x[cut].tolist()) for x in (p.link_seconds, p.link_bytes))
            out.append(Kind(name, p.links.names[cut], *loads))
    return tuple(out)


def _matrix(plans: Sequence[SubPlan], site: Site, p: Prediction, shares: Sequence[tuple[int, int]]) -> Matrix:
    """shares: The share that each replica takes from trainers, see `predict.own`."""
    trainers, workers = plans[0].trainers, sum(x.workers for x in plans)
    if max(trainers, workers) <= RANKS_DRAWN:
        table, at = np.zeros((trainers, workers), np.int64), 0
        for x, (share, of) in zip(plans, shares):
            t, pairs = x.tables, np.zeros((trainers, x.workers), np.int64)
            np.add.at(pairs, (t.share_src, t.share_dst - x.trainers), t.share_end - t.share_begin)
            if of:
                table[:, at : at + x.workers] = pairs * (share + 1) // of - pairs * share // of
            at += x.workers
        workers_named = [f"replica {r} worker {w}" for r, x in enumerate(plans) for w in range(x.workers)]
        return _of("rank", table, [f"trainer {i}" for i in range(trainers)], workers_named)
    host, names = site.fabric.links.host, [h.name for h in site.fabric.hosts]
    rows = np.unique(host[list(site.trainers)])
    columns = np.unique(host[[g for r in site.replicas for g in r]])
    size = -(-max(len(rows), len(columns)) // RANKS_DRAWN)
    sides = [[side[i : i + size] for i in range(0, len(side), size)] for side in (rows, columns)]
    table = np.array([[p.host_bytes[np.ix_(a, b)].sum() for b in sides[1]] for a in sides[0]], np.int64)

    def text(group: np.ndarray) -> str:
        return names[group[0]] + (f" to {names[group[-1]]}" if len(group) > 1 else "")

    return _of("host" if size == 1 else f"group of {size} hosts", table, *([text(g) for g in s] for s in sides))


def _of(unit: str, table: np.ndarray, rows: Sequence[str], columns: Sequence[str]) -> Matrix:
    return Matrix(unit, tuple(rows), tuple(columns), tuple(tuple(r) for r in table.tolist()))
