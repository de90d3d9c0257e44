"""Training steps of benchmarks.layerwise_gpu with clocks around the gather of parameters: device events, torch's profiler, and
the byte counters of NVLink. The caller chooses which gather runs.
"""

from __future__ import annotations

import gzip
import math
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from benchmarks.lib.layerwise_net import Shape, Timeline, batch, loss_of, timeline

STEPS_TOGETHER = 4
"""Whole steps that are timed together."""
PROFILED = 3
"""Profiled steps of each way."""
GATHERS = 10
"""Gathers between two readings of NVLink's counters, which count in KiB and include other small messages."""


def before(gather, hook: Callable[[], None]) -> None:
    """Call `hook` at the beginning of every `gather.begin`, until `gather.begin` is set again."""
    inner = gather.begin

    def begin() -> None:
        hook()
        inner()

    gather.begin = begin


class Step:
    """Training steps of a large network, with clocks around what follows the owners' updates.

    rank: a layerwise_gpu.Rank. announce: called once per step with a function that must run after the inner optimizers'
    steps and before the gather starts.
    """

    def __init__(self, rank, shape: Shape, module, optimizer, announce: Callable[[Callable[[], None]], None]):
        self.rank, self.shape, self.module, self.optimizer, self.announce = rank, shape, module, optimizer, announce
        self.number, self.loss = 0, None

    def forward(self) -> torch.Tensor:
        self.number += 1
        return loss_of(self.module, batch(self.shape, self.number, self.rank.rank, self.rank.device))

    def once(self) -> None:
        loss = self.forward()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def timed(self) -> float:
        """Milliseconds from the end of all ranks' updates to the end of the next forward.

        Begins and ends in the middle of a step, after the forward.
        """
        marks = []

        def here() -> None:
            self.rank.abreast()  # do not count a slow owner as a slow gather
            marks.append(self.rank.clock.mark())

        self.optimizer.zero_grad()
        self.loss.backward()
        self.announce(here)
        self.optimizer.step()
        self.loss = self.forward()
        end = self.rank.clock.mark()
        self.rank.sync()
        return self.rank.clock.ms(marks[0], end)

    def measure(self, ways: dict[str, Callable[[], None]], rounds: int):
        """(forward ms, whole step ms, timelines) by way. Ways take turns; after `args.limit` seconds rounds stop, but not
        before the second."""
        until = time.monotonic() + self.rank.args.limit
        for name in (next(iter(ways)), *ways):  # warm up allocators and the order of buckets
            ways[name]()
            self.once()
        self.loss = self.forward()
        forward = {n: [] for n in ways}
        for n in range(rounds):
            if n >= 2 and self.rank.late(until):
                break
            for name, choose in ways.items():
                choose()
                forward[name].append(self.timed())
        lines = {}
        if self.rank.cuda:
            for name, choose in ways.items():
                if name != "none":
                    lines[name] = self.rank.everybody(self._profiled(choose, name))
        self.loss.backward()
        self.loss = None
        whole = {n: [] for n in ways}
        for name, choose in ways.items():
            self.rank.meet()
            began = time.perf_counter()
            for _ in range(STEPS_TOGETHER):
                choose()
                self.once()
            self.rank.sync()
            whole[name].append((time.perf_counter() - began) * 1e3 / STEPS_TOGETHER)
        slowest = self.rank.slowest
        return {n: slowest(x) for n, x in forward.items()}, {n: slowest(x) for n, x in whole.items()}, lines

    def _profiled(self, choose: Callable[[], None], name: str) -> Timeline:
        seen = [t for n in range(PROFILED) if (t := self._profiled_step(choose, name, n)) is not None]
        if not seen:
            return Timeline(math.nan, math.nan)
        exposed = [t.exposed_ms for t in seen]
        return Timeline(median(t.gather_ms for t in seen), median(exposed), tuple(exposed))

    def _profiled_step(self, choose: Callable[[], None], name: str, number: int) -> Timeline | None:
        from torch.profiler import ProfilerActivity, profile

        with tempfile.TemporaryDirectory() as folder:
            with profile(activities=[ProfilerActivity.CUDA]) as prof:
                choose()
                self.timed()
            trace = Path(folder) / "trace.json"
            prof.export_chrome_trace(str(trace))
            keep = self.rank.args.traces
            if keep and number == PROFILED - 1:
                Path(keep).mkdir(parents=True, exist_ok=True)
                slug = f"{self.rank.rank}_of_{self.rank.size}_{type(self.optimizer).__name__}_{name.replace(' ', '_')}.json.gz"
                (Path(keep) / slug).write_bytes(gzip.compress(trace.read_bytes(), 6))
            try:
                return timeline(trace)
            except ValueError as e:  # the other ranks go on, so this one must
                print(f"# rank {self.rank.rank}, {name}: {e}", flush=True)
                return None


# ---- counters of NVLink


def parsed(text: str) -> int | None:
    """Bytes received over all links of one GPU, from the output of `nvidia-smi nvlink -gt d`; None without counters."""
    found = re.findall(r"^\s*Link \d+:.*?Data Rx:\s*(\d+) KiB", text, re.M)
    return 1024 * sum(map(int, found)) if found else None


def received(device: torch.device) -> int | None:
    """Bytes that a GPU received over NVLink since the driver was loaded; None if unknown."""
    if device.type != "cuda":
        return None
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    command = ["nvidia-smi", "nvlink", "-gt", "d", "-i", uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parsed(done.stdout) if done.returncode == 0 else None


def travelled(rank, gather: Callable[[], None]) -> tuple[int, ...]:
    """Bytes received in one call of `gather`, by rank; () if some rank has no counters. Collective."""
    seen = []
    for again in range(2):
        rank.meet()
        seen.append(received(rank.device))
        rank.meet()  # no rank begins before all have read
        for _ in range(0 if again else GATHERS):
            gather()
    each = rank.everybody(None if None in seen else (seen[1] - seen[0]) // GATHERS)
    return () if None in each else tuple(each)
