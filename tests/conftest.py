"""For all tests: property tests have no deadline per example, which a busy machine would miss. What they test is not speed.

Under pytest-xdist each worker begins at another GPU: tests take GPUs from the first on, and would all meet on that one."""

import os
import shutil
import subprocess

from hypothesis import settings

settings.register_profile("xfer", deadline=None)
settings.load_profile("xfer")


def beginning_at(worker: str, devices: list[str]) -> str:
    """CUDA_VISIBLE_DEVICES of a worker of pytest-xdist ("gw3"): all of `devices`, in an order of its own."""
    k = int(worker.removeprefix("gw")) % len(devices)
    return ",".join(devices[k:] + devices[:k])


def visible() -> list[str]:
    """The GPUs that this process may use, asked without making CUDA look, which would keep the order that it saw."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [d for d in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if d]
    if not (tool := shutil.which("nvidia-smi")):
        return []
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=60).stdout
    return [str(i) for i in range(sum(line.startswith("GPU ") for line in listed.splitlines()))]


if (worker := os.environ.get("PYTEST_XDIST_WORKER", "")).startswith("gw") and (devices := visible()):
    os.environ["CUDA_VISIBLE_DEVICES"] = beginning_at(worker, devices)
