"""How much memory this process holds, by the kernel's own count (Linux only), and whether a tensor's memory is still held."""

import gc
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class Watched:
    """A tensor's storage. `held`: whether a reference to it is left."""

    def __init__(self, tensor: torch.Tensor):
        self._at = tensor.untyped_storage()._weak_ref()

    @property
    def held(self) -> bool:
        if not torch.UntypedStorage._expired(self._at):
            gc.collect()  # a cycle may hold it
        return not torch.UntypedStorage._expired(self._at)

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._at)


def allocations(call: Callable[[], object]) -> list[int]:
    """Bytes of tensors on the host that a call allocates and frees (negative), one after the other."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    return [e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]


def forget_peak() -> int:
    """Bytes resident now; `grown` counts from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return _line("VmRSS")


def grown(since: int) -> int:
    """Most bytes resident at once after `forget_peak`, beyond what it returned."""
    return _line("VmHWM") - since


def _line(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what + ":"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {what}")
