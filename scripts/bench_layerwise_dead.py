"""Not a command. One rank of a layer-wise training is killed, or stops, in a gather; what the others see, and when. A part of
bench_layerwise_gpu.py, in processes of its own.

Only the optimizer's own communicators are used while it happens: what torch does about collectives of the default group, or of
DDP, is not measured here.
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
from bench_layerwise_net import Net, Shape, batch, loss_of

from xfer.layerwise import LayerWiseOptimizer

HOW = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


@dataclass(frozen=True, slots=True)
class Use:
    """What a rank did with the model or the optimizer: error is the class of what it raised, "" if nothing."""

    what: str
    error: str
    text: str


@dataclass(frozen=True, slots=True)
class Survivor:
    """One rank's view. freed_s: seconds from the end of its step until the forward's loss could be read, or an error came
    instead. loss: what was read, None if nothing. wrong_bytes: of what this rank owns, changed by the failure."""

    rank: int
    freed_s: float
    loss: float | None
    uses: tuple[Use, ...]
    device_computes: bool
    wrong_bytes: int


@dataclass(frozen=True, slots=True)
class Dead:
    """One death. missing: survivors that said nothing, because they hung or failed."""

    how: str
    ranks: int
    deadline_s: float
    survivors: tuple[Survivor, ...]
    missing: tuple[int, ...]
    route: str = "broadcast"

    @property
    def verdict(self) -> str:
        """ "" if every other rank had a typed error at every use, in time, and lost nothing of its own."""
        wrong = [f"rank {r}: said nothing" for r in self.missing]
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
    """Which rank it is."""
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
    """Train, and die or write what was seen to `folder`. Does not return."""
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
                begin()  # the first buckets are on their way
            # Else before the sign that this owner has stepped: behind it the others would have all bytes in no time.
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

    # Over NCCL the first forward is launched as a whole and gives NaN; over gloo its hooks wait.
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
    """Of what `flat` gives, as a person reads it."""
    freed = [s["freed_s"] for s in x["survivors"]]
    kinds = sorted({u["error"] or "nothing" for s in x["survivors"] for u in s["uses"]})
    uses = list(dict.fromkeys(u["what"] for s in x["survivors"] for u in s["uses"]))
    out = [
        f"dead: rank {victim(x['ranks'])} {x['how']} in a gather ({x['route']}), {len(freed)} of {x['ranks'] - 1} others told of it: "
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
