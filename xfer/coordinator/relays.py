"""Relays: which replica reads its weights from which others, when it begins, and which replicas fail with it.

With `connect(relay=True)`, replicas with equal plans whose workers are on the same hosts hand bytes on, worker by worker, so
that each byte leaves the trainers once for all of them, and enters each host once. The bytes of a replica are cut into
shares, and `Replica.sources` names the replica that brings each share. There are two forms:

    chain   where workers read trainers of their own host: one share. The first replica takes it from the trainers, each
            other one, by number, reads it from the replica before it.
    ring    where all bytes come over links: a share for each replica that is there. Each replica takes its share from the
            trainers, through its own network cards, and reads the other shares from the replicas that take these.

Each replica still has its own plan, its own part in the refit and its own decision. It begins after the replicas that it
reads from, or, in a ring, together with them, unless these take longer than `TOGETHER_S`. It fails with each of them whose
bytes are not all there yet. A replica that comes late to a ring that has begun takes no share, and reads all of them. A
worker that cannot read from others takes its bytes from the trainers and depends on no replica.

Sources are chosen again in each refit: a replica that gets other ones opens its routes again. What it lets others read
stays the same, so all do that at once. transport/relay_place.py hands the bytes on.

Where replicas take turns (rolling.py), a replica reads from those that have had their turn, or have it with this one. They hold the
version, and may serve it again by then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from xfer.coordinator import messages as m
from xfer.coordinator.deadlines import TOGETHER_S
from xfer.coordinator.state import ReplicaPhase
from xfer.errors import PeerLost, XferError
from xfer.plan.relay import ALL_PARTS

if TYPE_CHECKING:
    from xfer.coordinator.commit import ReplicaRefit
    from xfer.coordinator.coordinator import Coordinator
    from xfer.coordinator.refit import Transfer
    from xfer.coordinator.state import Replica


def turn(roll: bytes, replicas: int) -> int:
    """Return the turn of replicas with this roll (a hexadecimal digest) when sources are chosen.

    It depends on the roll only, so it is equal for all replicas of one layout on the same hosts, and they get equal plans.
    """
    return int(roll, 16) % replicas


def place(co: Coordinator, replica: Replica) -> tuple[tuple[int, int], ...]:
    """Return the `Replica.sources` that the replica should have. Its own number stands for the share that it takes from the trainers."""
    alone = ((replica.index, 0),)
    if not co.options.relay or replica.first is not None:
        return ()
    near = [r for r in _others(co, replica) if _alike(r, replica) and _offers(co, r)]
    if not replica.rings:
        return next((((r.index, r.offered),) for r in near if r.index < replica.index), alone)
    known = {r.index: r.offered for r in near} | {replica.index: 0}
    if begun := [r for r in near if co.refit is not None and not co.refit.parts[r.index].waiting]:
        ring = [i for i, _ in begun[-1].sources]
        return tuple((i, known[i]) for i in ring) if {r.index for r in begun}.issuperset(ring) else alone
    return tuple(sorted(known.items()))


def hands(co: Coordinator, replica: Replica, worker: int) -> tuple[bytes, ...]:
    """Return `OpenLink.hands` of a worker."""
    return tuple(b"" if i == replica.index else co.replicas[i].hands[worker] for i, _ in replica.sources)


def opened(replica: Replica) -> None:
    """Note the answers of a replica's workers to `OpenLink`."""
    offered = {i: said.hand for i, said in replica.opened.items()}
    if offered != replica.hands:
        replica.hands, replica.offered = offered, replica.epoch
    replica.follows = {i for i, said in replica.opened.items() if said.follows}
    replica.apart |= len(replica.sources) > 1 and len(replica.follows) < replica.size
    replica.receives = all(said.receives for said in replica.opened.values())


def out_of_place(co: Coordinator, replica: Replica) -> bool:
    """Whether the replica should have other sources than it has, and so has to open its routes again."""
    return replica.sources != place(co, replica)


def named(replica: Replica) -> str:
    """Name the replicas that this one reads from."""
    return " and ".join(f"replica {i}" for i, _ in replica.sources if i != replica.index)


def _equal(a: Replica, b: Replica) -> bool:
    """Whether they have one layout and are on the same hosts. Plans of replicas on different hosts may be equal."""
    return a.digest == b.digest and a.roll == b.roll


def _alike(a: Replica, b: Replica) -> bool:
    """Whether one can read from the other."""
    return _equal(a, b) and a.rings == b.rings


def _offers(co: Coordinator, r: Replica) -> bool:
    """Whether the offers of this replica's storages are the present ones. If its bytes come into scratch from now on, or no longer do,
    it is about to offer other storages."""
    if co.refit is not None and co.refit.called and r.scratch != co.refit.scratch:
        return False
    return r.phase in (ReplicaPhase.LINKING, ReplicaPhase.READY) and not r.stale and 0 < r.size == len(r.hands)


def _others(co: Coordinator, replica: Replica) -> Iterator[Replica]:
    """Yield the replicas that this one may read from, the highest number first.

    In a refit these are replicas that hold its version, or will soon and have not been waited for too long.
    """
    refit = co.refit
    for i, r in sorted(co.replicas.items(), reverse=True):
        if r is replica or r.controller is None:
            continue
        if refit is not None:
            part, waiting = refit.parts[i], refit.parts[replica.index]
            if part.waiting and refit.rolling.waits(part):
                continue
            late = part.waiting and not part.able_since
            if part.error is not None or late and (r.unsettled or _waited(refit, waiting) >= TOGETHER_S):
                continue
            if not part.waiting and part.epoch != r.epoch:  # another engine by now, without this version
                continue
        yield r


# ---- in a refit


def held_up_by(refit: Transfer, part: ReplicaRefit) -> ReplicaRefit | None:
    """Return a replica that this one waits for before it opens its routes or begins, since it might read from it."""
    mine, co = part.replica, refit.coordinator
    if not co.options.relay or mine.first is not None:
        return None
    for r in _others(co, mine):
        other = refit.parts[r.index]
        if r.index > mine.index and not mine.rings:
            continue  # in a chain, only replicas of lower numbers are read
        if _offers(co, r):
            if not mine.rings and not other.waiting and _alike(r, mine):
                return None
        elif other.waiting and (r.phase.opening or r.phase is ReplicaPhase.READY):
            if not r.phase.opening and r.index > mine.index and not _offers(co, mine):
                continue  # both have to open their routes again: one of them is the first
            known = not (r.stale or mine.stale or r.first) and r.phase is not ReplicaPhase.PLANNING
            if not known or _equal(r, mine):
                return other
    return None


def _sources(refit: Transfer, part: ReplicaRefit) -> list[ReplicaRefit]:
    """The replicas that this one reads from."""
    r = part.replica
    return [refit.parts[i] for i, _ in r.sources if i != r.index] if r.follows else []


def can_begin(refit: Transfer, able: Sequence[ReplicaRefit]) -> list[ReplicaRefit]:
    """Return those of these replicas whose sources have begun, or begin with them, and cut their bytes alike."""

    def follows(part: ReplicaRefit, other: ReplicaRefit) -> bool:
        a, b = ([i for i, _ in p.replica.sources] for p in (part, other))
        return (other in some or not other.waiting) and len(a) == len(b) and (a == b or len(a) == 1)

    some = list(able)
    while len(left := [p for p in some if all(follows(p, o) for o in _sources(refit, p))]) < len(some):
        some = left
    return some


def ahead(refit: Transfer, part: ReplicaRefit) -> ReplicaRefit | None:
    """For reports: return a replica that keeps this one from beginning although all of its workers are armed."""
    if not part.able_since or not refit.coordinator.options.relay:
        return None
    return next((o for o in _sources(refit, part) if o.waiting), None) or held_up_by(refit, part)


def look_again(refit: Transfer, part: ReplicaRefit) -> None:
    """Set a timer, since this replica waits for another one `TOGETHER_S` at most."""
    if not part.waits and _waited(refit, part) < TOGETHER_S:
        part.waits = True
        refit.coordinator.at((part.able_since or refit.coordinator.now) + TOGETHER_S, refit.advance, of=refit)


def _waited(refit: Transfer, part: ReplicaRefit) -> float:
    """Return the seconds since this replica could have begun by itself."""
    return refit.coordinator.now - part.able_since if part.able_since else 0.0


def tells(refit: Transfer, part: ReplicaRefit) -> bool:
    """Whether some replica reads from this one in this refit, or may yet."""
    r = part.replica
    return refit.coordinator.options.relay and any(
        (i > r.index or r.rings) and other is not part and other.error is None and _alike(other.replica, r)
        for i, other in refit.parts.items()
    )


def began(refit: Transfer, part: ReplicaRefit) -> None:
    """This replica was told to go: tell it which parts are ready in those that it reads from."""
    for w in part.replica.follows:
        _tell(refit, part, w)


def part_ready(refit: Transfer, part: ReplicaRefit, worker: int, last: int) -> None:
    """A worker has all parts up to `last`: tell the workers that read from it."""
    part.ready_parts[worker] = max(last, part.ready_parts.get(worker, -1))
    for other in _readers(refit, part):
        if worker in other.replica.follows:
            _tell(refit, other, worker)


def fallen(refit: Transfer, part: ReplicaRefit, error: XferError) -> None:
    """A replica failed. A replica that reads from it cannot get a whole version, unless all parts are ready."""
    for other in _readers(refit, part):
        if any(part.ready_parts.get(w) != ALL_PARTS for w in other.replica.follows):
            why = f"replica {other.replica.index} takes its weights from replica {part.replica.index}, which failed"
            advice = "the next refit takes them from another one, or from the trainers"
            other.why_until = part.why_until
            refit.coordinator.fail(other, PeerLost(why, [str(error), advice]))


def left(co: Coordinator, replica: Replica) -> None:
    """A replica is gone. Replicas that read from it unmap its memory, which is not freed before that."""
    for r in co.replicas.values():
        if r is not replica and replica.index in dict(r.sources):
            if r.phase in (ReplicaPhase.LINKING, ReplicaPhase.READY):
                co.planning.unmap(r)


def _readers(refit: Transfer, part: ReplicaRefit) -> list[ReplicaRefit]:
    """The replicas that move bytes and read from this one."""
    me = part.replica.index, part.replica.offered
    return [p for p in refit.parts.values() if p.moving and p.replica.follows and me in p.replica.sources]


def _tell(refit: Transfer, part: ReplicaRefit, worker: int) -> None:
    """Tell a worker of the parts that all workers have from which it reads."""
    last = min(other.ready_parts.get(worker, -1) for other in _sources(refit, part))
    client = part.replica.workers.get(worker)
    if client is not None and last > part.told_parts.get(worker, -1):
        part.told_parts[worker] = last
        client.send(m.PartReady(part.replica.index, refit.number, last))
