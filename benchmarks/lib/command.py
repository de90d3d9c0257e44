"""The command line of a benchmark, and the facts of the machine that are written beside its figures."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import time
from typing import Any


def parser(name: str, doc: str) -> argparse.ArgumentParser:
    """A parser for `python -m benchmarks.<name>` whose help is `doc` as it stands."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def facts(name: str, **more: Any) -> dict[str, Any]:
    """The command, the date, versions of torch, CUDA, NCCL and Python, and the GPUs; `more` is added."""
    import torch

    gpus = torch.cuda.device_count()
    found = {
        "command": shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]), "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus,
    }  # fmt: skip
    if gpus:
        found |= {
            "gpu": torch.cuda.get_device_name(0),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "nvls": os.environ.get("NCCL_NVLS_ENABLE", ""),
        }
    return found | more
