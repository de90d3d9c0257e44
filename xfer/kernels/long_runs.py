"""Long runs among the moves of a pull, which a copy engine brings while the kernel moves all else.

Loads by multiprocessors level off at 94 % of what a copy engine gets over NVLink, and a copy engine pauses between two copies. Side
by side they reach what one long copy gets (docs/results/gpu_2026-11-22_wire.md). Not here: tiles and kernels (triton_impl.py),
whose storages these are and how a pull is stopped (transport/peer.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import torch

from xfer.kernels.strided import Move
from xfer.kernels.tiles import Turns

LONG_BYTES = 8 << 20
"""A run below this is the kernel's: between copies of 4 MiB an engine is idle for a fifth of the time."""
SHARE = 0.65
"""Of all bytes. A copy engine and a kernel that pull at once end together at about this share; one that ends early leaves the
link to the other, so a smaller share costs little."""
MOST = 2048
"""Copies in one pull. Launching them takes time too."""
_CUT = 1 << 20


def divided(found: Sequence[Move], share: float, long_bytes: int, turns: Turns) -> tuple[list[Move], list[Move]]:
    """(for the kernel, for a copy engine): the longest runs of at least `long_bytes`, up to `share` of the bytes that do not lie
    `turns.beside`, on the taker's own GPU. Both together move what `found` does; a run may be cut in two. Those of the engine
    come from one sender after the other, beginning with number `turns.rotation`, as takers that begin alike share a sender.
    """
    groups = turns.groups or [0] * (1 + max((m.left_root for m in found), default=0))
    away = [groups[m.left_root] not in turns.beside for m in found]
    left = int(share * sum(_bytes(m) for m, a in zip(found, away) if a))
    runs: list[Move] = []
    kernel: list[Move] = []
    for m, a in zip(found, away):
        long = m.left_dtype == m.right_dtype and m.dims and m.dims[-1][1:] == (1, 1) and m.dims[-1][0] >= long_bytes
        if a and long and not m.mirrored and len(runs) + prod(m.extent[:-1]) <= MOST:
            runs += _single(m)
        else:
            kernel.append(m)
    engine: list[Move] = []
    for run in sorted(runs, key=_bytes, reverse=True):
        n = _bytes(run) if left >= _bytes(run) else left // _CUT * _CUT
        if n < long_bytes:
            kernel.append(run)
            continue
        left -= n
        engine.append(run._replace(dims=((n, 1, 1),)))
        if n < _bytes(run):
            rest = ((_bytes(run) - n, 1, 1),)
            kernel.append(run._replace(left=run.left + n, right=run.right + n, dims=rest))
    return kernel, _in_turns(engine, [groups[m.left_root] for m in engine], turns.rotation)


def _single(m: Move) -> list[Move]:
    """One move for each run."""
    out = []
    for at in product(*(range(n) for n in m.extent[:-1])):
        a, b = (sum(i * d[k] for i, d in zip(at, m.dims)) for k in (1, 2))
        out.append(m._replace(left=m.left + a, right=m.right + b, dims=m.dims[-1:]))
    return out


def _bytes(m: Move) -> int:
    """Of a move between equal dtypes, whose innermost dim counts bytes; of a cast, elements."""
    return prod(m.extent)


def _in_turns(runs: Sequence[Move], groups: Sequence[int], rotation: int) -> list[Move]:
    count = max(groups, default=0) + 1
    total, done = [0] * count, [0] * count
    for m, g in zip(runs, groups):
        total[g] += _bytes(m)
    when = []
    for m, g in zip(runs, groups):
        when.append((done[g] / total[g], (g - rotation) % count))
        done[g] += _bytes(m)
    return [runs[i] for i in sorted(range(len(runs)), key=when.__getitem__)]


class CopyEngine:
    """Copies on a stream of its own, between `begin` and `end` of the caller's. May be recorded in a graph."""

    def __init__(
        self, runs: Sequence[Move], left: Sequence[torch.Tensor], right: Sequence[torch.Tensor], device: torch.device
    ):
        self._copies = [
            (right[m.right_root][m.right : m.right + _bytes(m)], left[m.left_root][m.left : m.left + _bytes(m)])
            for m in runs
        ]
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._fork, self._join = torch.cuda.Event(), torch.cuda.Event()

    def begin(self) -> None:
        """After what the current stream was given before."""
        self._fork.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._fork)
        with torch.cuda.stream(self._stream):
            for dst, src in self._copies:
                dst.copy_(src, non_blocking=True)

    def end(self) -> None:
        """What the current stream is given next comes after the copies."""
        self._join.record(self._stream)
        torch.cuda.current_stream(self._device).wait_event(self._join)
