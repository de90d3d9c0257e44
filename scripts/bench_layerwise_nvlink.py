"""Not a command. Bytes that came to a GPU over NVLink, as its own counters have them (nvidia-smi): what a gather is planned to carry
is held against it by bench_layerwise_gpu.py. Measures no time.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import torch

GATHERS = 10
"""Counters are in KiB, and other small messages are among them."""


def parsed(text: str) -> int | None:
    """Bytes received over all links of one GPU, of what `nvidia-smi nvlink -gt d` prints; None where it has no counters."""
    found = re.findall(r"^\s*Link \d+:.*?Data Rx:\s*(\d+) KiB", text, re.M)
    return 1024 * sum(map(int, found)) if found else None


def received(device: torch.device) -> int | None:
    """Since the driver was loaded. None where nobody says it."""
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
    """Bytes of one of `gather`'s calls, by rank; () where some rank has no counters. rank: bench_layerwise_gpu.Rank. Collective."""
    seen = []
    for again in range(2):
        rank.meet()
        seen.append(received(rank.device))
        rank.meet()  # nobody begins before all have looked
        for _ in range(0 if again else GATHERS):
            gather()
    each = rank.everybody(None if None in seen else (seen[1] - seen[0]) // GATHERS)
    return () if None in each else tuple(each)
