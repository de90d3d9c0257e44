"""One replica's line in an attempt: its state, whom it waits for, and what is reported of it. What moves it: attempt.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xfer.errors import XferError
from xfer.kernels.checksum import added
from xfer.session import messages as m
from xfer.session import relays
from xfer.session.wire import Label

if TYPE_CHECKING:
    from xfer.session.attempt import Attempt
    from xfer.session.roster import Replica


@dataclass(eq=False)
class Run:
    """One replica in this attempt."""

    replica: Replica
    state: str = "arming"
    armed: set[int] = field(default_factory=set)
    unread: dict[int, m.Armed] = field(default_factory=dict)  # of workers that could make nothing of the catalog that they had
    done: dict[str, m.Done] = field(default_factory=dict)
    committed: set[int] = field(default_factory=set)
    stopped: dict[int, bool] = field(default_factory=dict)
    told: bool = False  # its controller was sent Arm
    error: XferError | None = None
    armed_at: float = 0.0
    decided_at: float = 0.0
    settled: m.Settled | None = None
    dirty: bool = False
    verified: bool = False
    readers: dict[int, m.Reader] = field(default_factory=dict)  # workers that may read trainers' storages
    drained: bool = False  # trainers were told that nobody does or will
    brought: dict[int, int] = field(default_factory=dict)  # worker -> the last part that it has (relays.py)
    waits: bool = False  # for the replica before it, and will look again
    epoch: int = 0  # of the routes by which it moves
    why_until: float = 0.0  # its error is of a connection that closed, as a rank tells: whoever closed it may say why

    @property
    def over(self) -> bool:
        return self.state == "over"


def waiting_for(attempt: Attempt, run: Run) -> list[str]:
    """Who keeps the line where it is, one sentence each."""
    r, hub = run.replica, attempt.hub
    who = [
        f"trainer {i}: it has not called nccl_xfer_refit()"
        for i in range(hub.options.trainers)
        if i not in attempt.entered
    ]
    who += [
        f"trainer {i}: it has called, and is not ready: it finishes parameter gathers in flight, or computes what it exports"
        for i in sorted(attempt.entered)
        if i not in attempt.drained
    ]
    if run.state == "arming" and r.unsettled:
        who.append(f"replica {r.index} controller: bringing its engine back after attempt {r.unsettled}")
    elif run.state == "arming":
        who += [
            f"replica {r.index} worker {w}: not armed (its controller is pausing the engine or a request is still running)"
            for w in range(r.size)
            if w not in run.armed
        ]
        who += [
            f"{c.label}: {r.state}"
            for c in sorted(r.pending, key=lambda c: c.label)
            if r.state in ("planning", "linking")
        ]
        if r.stale and len(attempt.drained) == hub.options.trainers and len(run.armed) == r.size:
            some = [i for i in range(hub.options.trainers) if i not in hub.trainer_inventories]
            who += [f"trainer {i}: it has not said how what it exports now lies in its memory" for i in some]
        who += [
            f"replica {r.index} worker {w}: it cannot read what trainers exported so far: {a.unread.message}"
            for w, a in sorted(run.unread.items())
        ]
        ahead = relays.ahead(attempt, run)
        if ahead is not None:
            who.append(f"replica {r.index}: stands behind replica {ahead.replica.index}, which has not begun")
    if run.state == "moving":
        for c in hub.domain(r):
            if c.label not in run.done:
                p = c.progress
                far = (
                    f", wave {p.wave}, {p.bytes_done} of {p.bytes_planned} bytes"
                    if p and p.attempt == attempt.number and p.replica == r.index
                    else ""
                )
                behind = (
                    f", behind replica {r.before[0]}"
                    if r.before and c.hello.index in r.follows and c.hello.role == "worker"
                    else ""
                )
                who.append(f"{c.label}: still moving{far}{behind}")
    if run.state == "committing":
        who += [f"replica {r.index} worker {w}: installing" for w in range(r.size) if w not in run.committed]
    if run.state == "settling":
        who.append(f"replica {r.index} controller: resuming")
    return who


def differences(entered: Mapping[int, m.Enter]) -> list[str]:
    """What trainers asked for that must be equal and is not: one line per trainer, with those arguments only."""
    odd = [
        a
        for a in ("version", "verify", "min_replicas", "deadline_s")
        if len({getattr(e, a) for e in entered.values()}) > 1
    ]
    return [
        f"trainer {i}: " + ", ".join(f"{a}={getattr(e, a)!r}" for a in odd) for i, e in sorted(entered.items()) if odd
    ]


def checksum_violations(run: Run) -> list[str]:
    sent, lies = dict.fromkeys(range(run.replica.size), 0), {}
    for label, done in run.done.items():
        for c in done.checksums:
            value = int.from_bytes(c.value, "little")
            if label.startswith("trainer"):
                sent[c.worker] = added(sent[c.worker], value)
            else:
                lies[c.worker] = value
    return [
        f"replica {run.replica.index} worker {w}: trainers sent checksum {sent[w]:016x}, its live bytes have {lies.get(w, 0):016x}; "
        "the replica stays paused until a refit succeeds" for w in sent if w not in lies or lies[w] != sent[w]
    ]  # fmt: skip


def outcome_of(attempt: Attempt, run: Run) -> m.OutcomeMsg:
    s, ok = run.settled, run.error is None
    per_worker = tuple(
        run.done[c.label].bytes_in for _, c in sorted(run.replica.workers.items()) if c.label in run.done
    )
    phases = (
        ("arm", max(0.0, run.armed_at - attempt.began) if run.armed_at else 0.0),
        ("plan", run.replica.plan_s),
        ("link", run.replica.link_s),
        ("pack", max((d.pack_s for d in run.done.values()), default=0.0)),
        ("wire", max((d.wire_s for d in run.done.values()), default=0.0)),
        ("unpack", max((d.unpack_s for d in run.done.values()), default=0.0)),
        ("verify", max((d.verify_s for d in run.done.values()), default=0.0)),
        ("drain", max((e.drained_s for e in attempt.drained.values()), default=0.0)),
        *(s.phases if s else ()),
    )
    return m.OutcomeMsg(
        run.replica.index, ok and bool(s), bool(s and s.serving), _serves(run),
        max(0.0, run.decided_at - max(attempt.ready_at, run.armed_at)) if run.decided_at else 0.0, s.outage_s if s else 0.0,
        sum(per_worker), per_worker, phases, run.verified, run.dirty and not ok,
        None if ok else m.WireError.of(run.error, "rendezvous"),
        _routes(run.done.values()), tuple(run.readers.values()),
    )  # fmt: skip


def _serves(run: Run) -> Label:
    """The version, None for none or not known yet."""
    if run.settled is not None:
        return run.settled.version
    return None if run.dirty or run.replica.unsettled else run.replica.version


def _routes(done: Iterable[m.Done]) -> tuple[m.RouteBytes, ...]:
    """Over all ranks: bytes add up, the slowest rank's seconds count."""
    out: dict[str, m.RouteBytes] = {}
    for r in (r for d in done for r in d.routes):
        old = out.get(r.route, m.RouteBytes(r.route, 0, 0.0))
        out[r.route] = m.RouteBytes(r.route, old.nbytes + r.nbytes, max(old.seconds, r.seconds))
    return tuple(out[k] for k in sorted(out))
