"""Counts what all threads of this process do between two moments: calls of Python functions except polling ones, torch's
allocations, and operations for which the host waits for the device."""

from __future__ import annotations

import threading
import warnings
from collections import Counter

import torch

POLLED = {"is_set", "stopped", "poll", "query"}
"""Functions that a wait calls repeatedly; their number depends on the GPU's load, not on the number of tensors."""


class Watch:
    def __init__(self, device: torch.device):
        self._device, self.on = device, False

    def begin(self) -> None:
        self._calls: Counter[str] = Counter()
        self._syncs, self.on = 0, True
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self._warned
        torch.cuda.set_sync_debug_mode("warn")
        self._allocated = self._allocations()
        if hasattr(threading, "setprofile_all_threads"):  # Python 3.12
            threading.setprofile_all_threads(self._called)

    def end(self) -> dict[str, object]:
        self.on = False
        if hasattr(threading, "setprofile_all_threads"):
            threading.setprofile_all_threads(None)
        allocations = self._allocations() - self._allocated
        torch.cuda.set_sync_debug_mode("default")
        self._warnings.__exit__(None, None, None)
        return dict(calls=self._calls.total(), functions=dict(self._calls), allocations=allocations, syncs=self._syncs)

    def _allocations(self) -> int:
        return torch.cuda.memory_stats(self._device)["allocation.all.allocated"]

    def _called(self, frame, event: str, arg) -> None:
        if event == "call" and frame.f_code.co_name not in POLLED:
            self._calls[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1

    def _warned(self, message, *_args, **_more) -> None:
        self._syncs += "synchronizing CUDA operation" in str(message)
