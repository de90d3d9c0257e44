"""From a catalog and inventories to a sub-plan: draft, balance, schedule. Pure and deterministic.

Equal inputs give equal sub-plans on every rank and in every run: nothing here reads a clock, an address, a hash seed
or the order of a dict. draft.py makes the part that replicas of one layout share; subplan.py has the tables.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from xfer.errors import LayoutError
from xfer.plan import columns as col
from xfer.plan.balance import Demand, SourceShare, balance
from xfer.plan.draft import Draft, make_draft
from xfer.plan.explain import PlanSummary
from xfer.plan.fabric import Site
from xfer.plan.flow import Flow
from xfer.plan.inventory import Inventory
from xfer.plan.options import PlanOptions
from xfer.plan.program import LAG
from xfer.plan.schedule import Schedule, schedule
from xfer.plan.subplan import PLANNER, SubPlan, Tables

if TYPE_CHECKING:
    from xfer.trace.catalog import Catalog

__all__ = ["Drafts", "PlanOptions", "PlanSummary", "SubPlan", "key_of", "plan_key", "plan_replica", "plan_replicas"]


def key_of(catalog: str, sources: Sequence[str], destinations: Sequence[str], options: PlanOptions) -> str:
    """Digest of everything a plan depends on, from the digests of the catalog and of each rank's inventory."""
    parts: list[str | bytes] = [f"plan by {PLANNER}", catalog, options.to_bytes()]
    for side in (sources, destinations):
        parts += [str(len(side)), *side]
    return col.digest(parts)


def plan_key(
    catalog: Catalog, sources: Sequence[Inventory], destinations: Sequence[Inventory], options: PlanOptions
) -> str:
    """`key_of` these inputs."""
    return key_of(catalog.digest(), [i.digest() for i in sources], [i.digest() for i in destinations], options)


def plan_replica(
    catalog: Catalog,
    sources: Sequence[Inventory],
    destinations: Sequence[Inventory],
    options: PlanOptions | None = None,
) -> SubPlan:
    """The sub-plan that refits one replica.

    `sources`: inventories of trainers 0..T-1 in rank order; `destinations`: of engine workers 0..W-1. Raises
    LayoutError (inventories that do not fit the catalog or each other), CoverageError (a refit would not be whole),
    Unsupported (too many dims).
    """
    options = options or PlanOptions()
    _refuse_misplaced(len(sources), len(destinations), options)
    draft = make_draft(catalog, sources, destinations, options)
    return finish(draft, Deal(draft, options), plan_key(catalog, sources, destinations, options), options)


class Drafts:
    """Keeps the last draft for the plans of several replicas. Thread-safe: a second caller waits for the draft."""

    def __init__(self) -> None:
        self._draft: tuple[str, Draft] | None = None
        self._deal: tuple[str, Deal] | None = None
        self._lock = threading.Lock()

    def plan(
        self, catalog: Catalog, sources: Sequence[Inventory], destinations: Sequence[Inventory], options: PlanOptions
    ) -> SubPlan:
        """As plan_replica."""
        _refuse_misplaced(len(sources), len(destinations), options)
        sides = [i.digest() for i in sources], [i.digest() for i in destinations]
        draft_key = key_of(catalog.digest(), *sides, options.for_draft())
        deal_key = col.digest([draft_key, b"" if options.site is None else options.site.to_bytes()])
        with self._lock:
            if self._draft is None or self._draft[0] != draft_key:
                self._draft = draft_key, make_draft(catalog, sources, destinations, options)
            if self._deal is None or self._deal[0] != deal_key:
                self._deal = deal_key, Deal(self._draft[1], options)
            draft, deal = self._draft[1], self._deal[1]
        return finish(draft, deal, key_of(catalog.digest(), *sides, options), options)


def plan_replicas(
    catalog: Catalog,
    sources: Sequence[Inventory],
    destinations: Sequence[Inventory],
    site: Site,
    *,
    bucket_bytes: int,
    wave_bytes: int = 0,
    drop: Sequence[str] = (),
    narrow: Sequence[str] = (),
    relay: bool = False,
    told: Callable[[int], None] = lambda done: None,
) -> list[SubPlan]:
    """Plans each replica of the site with the options that a session would give.

    Args:
        relay: Replicas on the same hosts hand bytes on to each other, and so do workers of a replica. These replicas have one plan, and
            the sources are chosen for the first of them only.
        told: Called with the number of replicas planned so far.

    Raises:
        XferError: as plan_replica.
    """
    drafts, plans = Drafts(), list[SubPlan]()
    every = range(len(site.replicas))
    first = [some[0] if relay else i for i, some in enumerate(site.together(every))]
    planned = replace(site, replicas=tuple(site.replicas[i] for i in every if first[i] == i))
    number = 0
    for i in every:
        if first[i] == i:
            options = PlanOptions(
                bucket_bytes=bucket_bytes, wave_bytes=wave_bytes, rotation=number, rotations=len(planned.replicas),
                site=planned, replica=number, drop=tuple(drop), narrow=tuple(narrow), relay=relay,
            )  # fmt: skip
            number += 1
        plans.append(drafts.plan(catalog, sources, destinations, options) if first[i] == i else plans[first[i]])
        told(len(plans))
    return plans


def _refuse_misplaced(trainers: int, workers: int, options: PlanOptions) -> None:
    """Raise LayoutError if the options' site has other ranks. Called for each replica, since replicas may differ in size."""
    if options.site is None:
        return
    placed = len(options.site.trainers), len(options.site.replicas[options.replica])
    if placed != (trainers, workers):
        raise LayoutError(
            "the site does not place these ranks",
            [
                f"it has {placed[0]} trainers and {placed[1]} workers of replica {options.replica}; there are "
                f"{trainers} and {workers}"
            ],
        )


def finish(draft: Draft, deal: Deal, key: str, options: PlanOptions) -> SubPlan:
    """The sub-plan of one replica. Draft and deal must be made with options of equal `for_draft()`, and the deal with the
    same site.
    """
    shares = deal.shares(options)
    pair_src, pair_dst, pair_common, pair_bytes = _pairs(shares)
    moved = _moved(shares, draft.trainers + draft.workers)
    when = schedule(
        pair_src, pair_dst, pair_bytes, message=options.message_bytes, per_rank=options.wave_bytes,
        least=-(-int(moved.max(initial=0)) // options.wave_bytes),
        unit=options.align_bytes, rotation=options.rotation, rotations=options.rotations, way=_ways(pair_src, pair_dst, options),
        far=_far(pair_src, pair_dst, options),
    )  # fmt: skip
    atoms, stream = draft.atoms, draft.stream
    tables = Tables(
        draft.source_class, draft.destination_class, draft.fill_class,
        draft.fill_rows, atoms.origin, atoms.extent, atoms.signature, atoms.hold_first, atoms.hold_row, draft.place,
        stream.atom, stream.want, stream.start, shares.src, shares.dst, shares.common, shares.begin, shares.end,
        shares.copy_share, shares.copy_dst, shares.copy_begin,
        pair_src, pair_dst, pair_common, when.first, when.wave, when.begin, when.turn,
    )  # fmt: skip
    waves = max(when.waves + LAG * bool(len(shares.copy_dst)), int(len(draft.fill_rows) > 0))
    summary = _summary(draft, shares, (pair_src, pair_dst, pair_bytes), moved, when, waves, options)
    return SubPlan(
        key, draft.trainers, draft.workers, waves, options.message_bytes, options.align_bytes, draft.sources,
        draft.destinations, tables, summary,
    )  # fmt: skip


# ---- shares


@dataclass(frozen=True, slots=True, eq=False)
class _Shares:
    """The columns of subplan.Tables that begin with `share_` and `copy_`."""

    src: np.ndarray
    dst: np.ndarray
    common: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    copy_share: np.ndarray
    copy_dst: np.ndarray
    copy_begin: np.ndarray

    @property
    def nbytes(self) -> np.ndarray:
        return self.end - self.begin


class Deal:
    """The choice of sources for the replicas of a draft, which all have a place on the options' site
    (`_refuse_misplaced`)."""

    def __init__(self, draft: Draft, options: PlanOptions) -> None:
        unit, stream = options.align_bytes, draft.stream
        ends = np.append(stream.start, int(stream.nbytes.sum()))
        self._demands: list[Demand] = []
        self._base: list[tuple[int, int]] = []  # where a demand's bytes begin and end in the stream
        self._others: list[list[tuple[int, int]]] = []  # other destinations that need them, and where they begin there
        takers: dict[tuple[int, Hashable], list[tuple[int, int, int]]] = defaultdict(list)
        for g, (holders, common) in enumerate(zip(stream.group_holders, stream.group_common)):
            for d in stream.group_destinations[g]:
                key = (g, d) if common < 0 else (common, holders)
                takers[key].append((d, int(ends[stream.group_first[g]]), g))
        for some in takers.values():
            g = some[0][2]
            nbytes = int(ends[stream.group_first[g + 1]] - ends[stream.group_first[g]])
            for i, (d, begin, _) in enumerate(some):
                low, high = (-(-nbytes // unit) * k // len(some) * unit for k in (i, i + 1))
                high = min(high, nbytes)
                self._demands.append(Demand(stream.group_holders[g], d, -(-(high - low) // unit), stream.group_cost[g]))
                self._base.append((begin + low, begin + high))
                self._others.append([(other, at + low) for other, at, _ in some if other != d])
        self._flow: Flow | None = None
        if options.site is None:
            self._rows = self._columns(balance(self._demands, draft.trainers), unit)
            return
        self._alike = [i for i, r in enumerate(options.site.replicas) if len(r) == draft.workers]
        self._flow = Flow(
            self._demands,
            np.array(options.site.trainers, np.int64),
            np.array([options.site.replicas[i] for i in self._alike], np.int64),
            options.site.fabric.links,
            unit,
        )

    def shares(self, options: PlanOptions) -> _Shares:
        if self._flow is None:
            return self._rows
        return self._columns(self._flow.shares(self._alike.index(options.replica)), options.align_bytes)

    def _columns(self, shares: Sequence[SourceShare], unit: int) -> _Shares:
        demand = np.array([s.demand for s in shares], np.int64)
        src = np.array([s.source for s in shares], np.int32)
        dst = np.array([d.destination for d in self._demands], np.int32)[demand]
        begin, end = np.array(self._base, np.int64).reshape(-1, 2)[demand].T
        first = begin + unit * np.array([s.begin for s in shares], np.int64)
        last = np.minimum(end, begin + unit * np.array([s.end for s in shares], np.int64))
        common = np.array([bool(o) for o in self._others], bool)[demand]
        order = np.lexsort((last, first, common, dst, src))
        copies = [
            (k, other, at + first[s] - begin[s])
            for k, s in enumerate(order.tolist())
            for other, at in self._others[demand[s]]
        ]
        share, other, at = np.array(copies, np.int64).reshape(-1, 3).T
        number = (common[order].cumsum() * common[order]).astype(np.int32)
        return _Shares(src[order], dst[order], number, first[order], last[order], share, other.astype(np.int32), at)


def _pairs(shares: _Shares) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Distinct (src, dst, whether these are common bytes) and their bytes; shares come sorted by them."""
    common = shares.common > 0
    if not len(shares.src):
        return shares.src, shares.dst, common, shares.begin
    fresh = np.any([np.diff(x, prepend=-1) != 0 for x in (shares.src, shares.dst, common.astype(np.int8))], axis=0)
    heads = np.flatnonzero(fresh)
    return shares.src[heads], shares.dst[heads], common[heads], np.add.reduceat(shares.nbytes, heads)


def _moved(shares: _Shares, ranks: int) -> np.ndarray:
    """Bytes that leave each rank, and that come to it. int64 [2, ranks]."""
    out, handed = np.zeros((2, ranks), np.int64), shares.nbytes[shares.copy_share]
    for end, rank, nbytes in (
        (0, shares.src, shares.nbytes), (1, shares.dst, shares.nbytes),
        (0, shares.dst[shares.copy_share], handed), (1, shares.copy_dst, handed),
    ):  # fmt: skip
        np.add.at(out[end], rank, nbytes)
    return out


def _ways(src: np.ndarray, dst: np.ndarray, options: PlanOptions) -> np.ndarray | None:
    """The link by which each pair's bytes leave, where links are known."""
    if options.site is None:
        return None
    gpu = options.site.gpus(options.replica)
    return options.site.fabric.links.paths(gpu[src], gpu[dst])[:, 0]


def _far(src: np.ndarray, dst: np.ndarray, options: PlanOptions) -> np.ndarray | None:
    """Whether each pair's ranks are on different hosts, where hosts are known."""
    host = np.array(options.host_numbers(), np.int64)
    return host[src] != host[dst] if len(host) else None


# ---- numbers


def _summary(
    draft: Draft,
    shares: _Shares,
    pairs: tuple[np.ndarray, np.ndarray, np.ndarray],
    moved: np.ndarray,
    when: Schedule,
    waves: int,
    options: PlanOptions,
) -> PlanSummary:
    (pair_src, pair_dst, pair_bytes), trainers, start = pairs, draft.trainers, draft.stream.start
    ranks = trainers + draft.workers
    parts = np.searchsorted(start, shares.end, "left") - np.searchsorted(start, shares.begin, "right") + 1
    count = np.zeros((2, ranks), np.int64)
    np.add.at(count[0], shares.src, parts)
    np.add.at(count[1], shares.dst, parts)
    np.add.at(count[1], shares.copy_dst, parts[shares.copy_share])
    hosts = np.array(options.host_numbers(), np.int64)
    remote = int(pair_bytes[hosts[pair_src] != hosts[pair_dst]].sum()) if len(hosts) else 0
    ends = np.concatenate([when.begin[1:], [0]])
    ends[when.first[1:] - 1] = pair_bytes
    pair = np.repeat(np.arange(len(pair_src)), np.diff(when.first))
    _, message = np.unique(np.stack([pair_src[pair], pair_dst[pair], when.wave]), axis=1, return_inverse=True)
    sizes = np.bincount(message.reshape(-1), ends - when.begin).astype(np.int64)
    f = draft.facts
    return PlanSummary(
        trainers=trainers,
        workers=draft.workers,
        waves=waves,
        messages=len(sizes),
        tensors=f.tensors,
        bytes_out=tuple(moved[0, :trainers].tolist()),
        bytes_in=tuple(moved[1, trainers:].tolist()),
        pieces_out=tuple(count[0, :trainers].tolist()),
        pieces_in=tuple(count[1, trainers:].tolist()),
        largest_piece=f.largest_piece,
        largest_message=int(sizes.max(initial=0)),
        remote_bytes=remote,
        fills=f.fills,
        direct=f.direct,
        staged=f.staged,
        classes=f.classes,
        casts=f.casts,
        kept=f.kept,
        dropped=f.dropped,
        broadcast_bytes=f.broadcast_bytes,
    )
