"""The part `dead` of benchmarks.layerwise_gpu: one rank is killed, or stops, in a gather; what do the others see, and when?

Only the optimizer's own communicators are in use then. What torch does about collectives of the default group or of DDP is
not measured.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.lib.layerwise_net import Net, Shape, batch, loss_of
from xfer.layerwise import LayerWiseOptimizer

HOW = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


@dataclass(frozen=True, slots=True)
class Use:
    """A use of the model or the optimizer. error: the class of the exception it raised, "" if none."""

    what: str
    error: str
    text: str


@dataclass(frozen=True, slots=True)
class Survivor:
    """One surviving rank.

    freed_s: seconds from the end of its step until the forward's loss was read or raised. loss: the loss read, None if
    none. wrong_bytes: bytes of this rank's own parameters that the failure changed.
    """

    rank: int
    freed_s: float
    loss: float | None
    uses: tuple[Use, ...]
    device_computes: bool
    wrong_bytes: int


@dataclass(frozen=True, slots=True)
class Dead:
    """One death. missing: surviving ranks without a result, which hung or failed."""

    how: str
    ranks: int
    deadline_s: float
    survivors: tuple[Survivor, ...]
    missing: tuple[int, ...]
    route: str = "broadcast"

    @property
    def verdict(self) -> str:
        """ "" if every other rank got a typed error at every use, in time, and kept its own parameters."""
        wrong = [f"rank {r}: no result" for r in self.missing]
        for s in self.survivors:
            wrong += [f"rank {s.rank}: {u.what}: {u.error or 'no error'}" for u in s.uses if u.error not in TYPED]
            if s.freed_s > self.deadline_s + GRACE_S:
                wrong.append(f"rank {s.rank}: {s.freed_s:.1f} s")
            if not s.device_computes:
                wrong.append(f"rank {s.rank}: its device does not compute any more")
            if s.loss is not None and s.loss == s.loss:
                wrong.append(f"rank {s.rank}: a forward gave {s.loss}")
            if s.wrong_bytes:
                wrong.append(f"rank {s.rank}: {s.wrong_bytes} bytes of its own parameters changed")
        return "; ".join(wrong)


TYPED, GRACE_S = ("DeadlineExceeded", "PeerLost"), 10.0


def victim(ranks: int) -> int:
    """The rank that dies."""
    return ranks - 1


def live_through(
    rank: int,
    size: int,
    device,
    shape: Shape,
    groups: Callable,
    how: str,
    deadline_s: float,
    bucket: int,
    folder: Path,
    route: str = "broadcast",
) -> None:
    """Train, then die, or write a Survivor to `folder`. Does not return."""
    net = Net(shape, device, torch.float32, torch.float32)
    optimizer = LayerWiseOptimizer(net, groups(net), bucket_bytes=bucket, deadline_s=deadline_s, route=route)
    begin, number = optimizer.gather.begin, 0

    def backward() -> None:
        nonlocal number
        number += 1
        optimizer.zero_grad()
        loss_of(net, batch(shape, number, rank, device)).backward()

    for _ in range(3):
        backward()
        optimizer.step()
    backward()
    if rank == victim(size):

        def begin_and_die() -> None:
            if route == "broadcast":
                begin()  # the first buckets are under way
            # route="pull": die before the signal that this owner has stepped, after which the others get all bytes at once.
            os.kill(os.getpid(), HOW[how])

        optimizer.gather.begin = begin_and_die
    optimizer.step()
    began = time.monotonic()
    mine = [o.param.detach().to("cpu", copy=True) for o in optimizer.owned]
    uses, read, freed_s = [], None, None
    loss = None

    def forward() -> None:
        nonlocal loss, read
        loss = loss_of(net, batch(shape, 99, rank, device))
        read = loss.item()

    def again() -> None:
        loss_of(net, batch(shape, 98, rank, device)).item()

    # With NCCL the first forward is launched as a whole and yields NaN; with gloo its hooks wait.
    for what, use in (
        ("forward", forward),
        ("backward", lambda: loss.backward()),
        ("another forward", again),
        ("step", optimizer.step),
        ("drain", optimizer.drain),
        ("state_dict", net.state_dict),
        ("close", optimizer.close),
    ):
        if what == "backward" and loss is None:
            continue
        try:
            use()
            error, text = "", ""
        except Exception as e:
            error, text = type(e).__name__, str(e)[:600]
        if freed_s is None:
            freed_s = time.monotonic() - began
        if what != "forward" or error:
            uses.append(Use(what, error, text))
    computes = bool((torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device) == 64).all())
    changed = sum(int((a != o.param.detach().cpu()).sum()) * 4 for a, o in zip(mine, optimizer.owned))
    seen = Survivor(rank, freed_s, read, tuple(uses), computes, changed)
    (folder / f"{rank}.json.part").write_text(json.dumps(asdict(seen)))
    os.replace(folder / f"{rank}.json.part", folder / f"{rank}.json")
    os._exit(0)


def collect(folder: Path, how: str, ranks: int, deadline_s: float, route: str = "broadcast") -> Dead:
    found = []
    for path in sorted(folder.glob("*.json")):
        x = json.loads(path.read_text())
        found.append(Survivor(**(x | {"uses": tuple(Use(**u) for u in x["uses"])})))
    found.sort(key=lambda s: s.rank)
    missing = set(range(ranks)) - {victim(ranks)} - {s.rank for s in found}
    return Dead(how, ranks, deadline_s, tuple(found), tuple(sorted(missing)), route)


def lines(x: dict) -> list[str]:
    """The lines to print for a result of `flat`."""
    freed = [s["freed_s"] for s in x["survivors"]]
    kinds = sorted({u["error"] or "nothing" for s in x["survivors"] for u in s["uses"]})
    uses = list(dict.fromkeys(u["what"] for s in x["survivors"] for u in s["uses"]))
    out = [
        f"dead: rank {victim(x['ranks'])} {x['how']} in a gather ({x['route']}), {len(freed)} of {x['ranks'] - 1} others reported: "
        f"{x['verdict'] or 'ALL RIGHT'}"
    ]
    if freed:
        out += [
            f"  freed after {min(freed):.1f} to {max(freed):.1f} s (deadline {x['deadline_s']:g} s); "
            f"{', '.join(uses)} raised {', '.join(kinds)}",
            f"  the forward in flight gave {sorted({str(s['loss']) for s in x['survivors']})}; "
            f"devices compute: {all(s['device_computes'] for s in x['survivors'])}",
            *(f"  | {line}" for line in x["survivors"][0]["uses"][0]["text"].splitlines()[:4]),
        ]
    return out


def flat(x: Dead) -> dict:
    return asdict(x) | {"verdict": x.verdict}
