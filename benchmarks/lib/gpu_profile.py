"""What benchmarks measure inside a process of a refit on GPUs: its GPU's and threads' work, and an engine's round trips."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch


class Profile:
    """The work of a process's GPU between two moments, and its calls of CUDA, by torch's profiler."""

    def __init__(self, device: torch.device):
        self._device = device

    def begin(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.synchronize(self._device)
        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self._profile.__enter__()

    def end(self, path: str = "") -> dict:
        """Ends the profile.

        Args:
            path: file for the trace, if any, to look at in a browser.

        Returns:
            In milliseconds: `span` from the first work on the GPU to the end of the last, `busy`: the part of it with any
            work; `ran` by name on the GPU [times, sum, longest]; `calls` of CUDA by name [times, sum].
        """
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
    """Length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for a, b in sorted(spans):
        total += max(0.0, b - max(a, reached))
        reached = max(reached, b)
    return total


def noop(llm, handle, times: int, took_ms: float = 0.0, pause_ms: float = 0.0) -> list[dict]:
    """Times vLLM's round trips of a refit, in the controller's order, with a call that does nothing in place of the update.

    Args:
        took_ms: time that the update takes; it is not counted.
        pause_ms: time between two refits.

    Returns:
        Milliseconds by call, and of "all", for each of `times` refits.
    """
    calls = [
        ("pause", lambda: handle.pause(30)),
        ("label", lambda: handle.set_version("noop", 30)),
        ("start", lambda: handle.start_update(30)),
        ("update", lambda: llm.collective_rpc("xfer_nothing", args=(took_ms / 1e3,))),
        ("finish", lambda: handle.finish(None, 30)),
        ("reset caches", lambda: handle.reset_caches(30)),
        ("label again", lambda: handle.set_version("noop", 30)),
        ("resume", lambda: handle.resume(30)),
    ]
    out = []
    for _ in range(times):
        time.sleep(pause_ms / 1e3)
        at, asleep = [time.perf_counter()], 0.0
        for name, call in calls:
            call()
            asleep += took_ms / 1e3 if name == "update" else 0.0
            at.append(time.perf_counter() - asleep)
        row = {name: (b - a) * 1e3 for (name, _), a, b in zip(calls, at, at[1:])}
        out.append({**row, "all": (at[-1] - at[0]) * 1e3})
    return out
