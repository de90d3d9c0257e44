"""What a process's GPU did between two moments, and what its threads asked of CUDA, by torch's profiler. Used by
benchmarks/profile_refit.py, in trainers and in vLLM's workers."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Profile:
    def __init__(self, device: torch.device):
        self._device = device

    def begin(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.synchronize(self._device)
        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self._profile.__enter__()

    def end(self, path: str = "") -> dict:
        """`path`: where the trace goes, to look at in a browser. Milliseconds: `span` from the first thing on the GPU to the end of
        the last, `busy` of it with anything running; by name [times, all together, the longest] on the GPU, and [times, all
        together] of calls."""
        torch.cuda.synchronize(self._device)
        self._profile.__exit__(None, None, None)
        if path:
            self._profile.export_chrome_trace(path)
        ran: dict[str, list[float]] = {}
        calls: dict[str, list[float]] = {}
        spans = []
        for e in self._profile.events():
            ms = e.time_range.elapsed_us() / 1e3
            if e.device_type.name == "CUDA":
                ran.setdefault(e.name, []).append(ms)
                spans.append((e.time_range.start / 1e3, e.time_range.end / 1e3))
            elif e.name.startswith("cu"):
                calls.setdefault(e.name, []).append(ms)
        return dict(
            span=max((b for _, b in spans), default=0.0) - min((a for a, _ in spans), default=0.0),
            busy=covered(spans),
            ran={k: [len(v), sum(v), max(v)] for k, v in ran.items()},
            calls={k: [len(v), sum(v)] for k, v in calls.items()},
        )


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much the spans cover together."""
    total, reached = 0.0, float("-inf")
    for a, b in sorted(spans):
        total += max(0.0, b - max(a, reached))
        reached = max(reached, b)
    return total
