"""For all tests: property tests have no deadline per example, which a busy machine would miss. What they test is not speed. CI takes the
same examples in every run (tests/support/examples.py). Processes of pytest-xdist share the forges of one folder (tests/support/forge.py).

Under pytest-xdist each worker begins at another GPU: tests take GPUs from the first on, and would all meet on that one."""

import atexit
import os
import shutil
import subprocess
import tempfile

from hypothesis import settings

from tests.support.examples import FIXED

settings.register_profile("xfer", deadline=None, derandomize=FIXED)
settings.load_profile("xfer")

if "XFER_TEST_FORGES" not in os.environ:
    os.environ["XFER_TEST_FORGES"] = forges = tempfile.mkdtemp(prefix="forges")
    atexit.register(shutil.rmtree, forges, ignore_errors=True)


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
