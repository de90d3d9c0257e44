"""What `xfer status` and the log are told: who is connected, who is doing what, who is waited for. Reads the hub's state, changes
nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xfer.session import messages as m

SHOWN = 8
"""Runs of numbers that are listed; the others are counted."""

if TYPE_CHECKING:
    from xfer.session.hub import Hub


def here(hub: Hub) -> str:
    o, ready = hub.options, sum(r.state == "ready" for r in hub.replicas.values())
    return f"{len(hub.trainers)} of {o.trainers} trainers have joined, {ready} of {o.replicas} replicas are ready"


def waited_for(hub: Hub) -> list[str]:
    """What keeps a refit, or the job's beginning, one short line each: what runs, else what is missing."""
    if hub.attempt is not None:
        return hub.attempt.waiting_for()
    o, out = hub.options, []
    if away := [i for i in range(o.trainers) if i not in hub.trainers]:
        out.append(f"{_named('trainer', away)}: not connected; has xfer.connect() been called there?")
    if silent := [i for i in range(o.trainers) if i in hub.trainers and i not in hub.specs]:
        out.append(f"{_named('trainer', silent)}: reading the layout of its model")
    if away := [r.index for r in hub.replicas.values() if r.state == "absent"]:
        out.append(f"{_named('replica', away)}: not connected; has xfer.serve() been called there?")
    for r in hub.replicas.values():
        if r.state in ("failed", "lost") and r.error is not None:
            out.append(f"replica {r.index}: {r.error.line()}"[:250])
        elif r.state == "joining":
            if away := [w for w in range(r.size) if w not in r.workers]:
                out.append(f"replica {r.index} {_named('worker', away)}: not connected; is its engine still starting?")
            elif silent := [w for w in range(r.size) if w not in r.inventories]:
                out.append(f"replica {r.index} {_named('worker', silent)}: reading the layout of its model")
        elif r.state in ("planning", "linking"):
            out += [f"{c.label}: {r.state}" for c in sorted(r.pending, key=lambda c: c.label)]
    return out


def _named(kind: str, numbers: list[int]) -> str:
    """ "trainer 3", "trainers 1 to 3, 7", "workers 0, 2, 4 and 93 more"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], n]
        else:
            runs.append([n])
    shown = ", ".join(" to ".join(map(str, run)) for run in runs[:SHOWN])
    more = sum(run[-1] - run[0] + 1 for run in runs[SHOWN:])
    return f"{kind}{'s' * (len(numbers) > 1)} {shown}{f' and {more} more' if more else ''}"


def status(hub: Hub) -> m.StatusReply:
    parties = []
    for c in sorted(hub.clients, key=lambda c: c.label):
        if c.hello is None or c.hello.role == "observer":
            continue
        p = c.progress
        phase = hub.attempt.phase_of(c) if hub.attempt else "idle"
        parties.append(
            m.PartyStatus(c.label, c.hello.host, phase, *((p.wave, p.bytes_done, p.bytes_planned) if p else ()))
        )
    state = "; ".join(
        f"replica {r.index}: {r.state}{' (dirty)' if r.dirty else ''} {'' if r.version is None else f'version {r.version}'}".strip()
        for r in hub.replicas.values()
    )
    return m.StatusReply(
        hub.attempt.number if hub.attempt else 0,
        state,
        tuple(w[:256] for w in waited_for(hub)),
        tuple(parties),
        tuple((r.index, r.version) for r in hub.replicas.values() if r.version is not None),
    )
