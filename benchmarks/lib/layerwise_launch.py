"""How benchmarks.layerwise_gpu starts its ranks, and how it keeps their figures when some are stopped."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from torch.distributed import TCPStore

SETTINGS = {
    "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0", "PYTHONWARNINGS": "ignore",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",  # torch: the store exists, be a client
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}  # fmt: skip
_PR_SET_PDEATHSIG, _LAUNCHER = 1, "BENCH_LAYERWISE_LAUNCHER"


def keep(path: str | Path, result: dict) -> None:
    """Merge one run's figures into the list in `path`, by number of ranks. The file is replaced at once."""
    path = Path(path)
    runs = json.loads(path.read_text()) if path.exists() else []
    old = next((r for r in runs if r["ranks"] == result["ranks"]), None)
    if old is None:
        runs.append(result)
    else:
        skipped = {**old["skipped"], **result["skipped"]}
        seconds = {**old.get("seconds", {}), **result.get("seconds", {})}
        old.update(result | {"skipped": skipped, "seconds": seconds})
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".part")
    aside.write_text(json.dumps(runs, indent=1))
    os.replace(aside, path)


def lacking(cuda: bool) -> str | None:
    """Why Megatron-Core's own gather cannot run here, None if it can.

    A process of its own finds out: to import Megatron changes a process, and what its ranks then measure.
    """
    code = f"from benchmarks.lib.layerwise_megatron import unavailable; print('@', unavailable({cuda}) or '', sep='')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    said = [line[1:] for line in done.stdout.splitlines() if line.startswith("@")]
    if not said:
        return f"could not be asked ({(done.stderr.strip().splitlines() or ['no word'])[-1]})"
    return said[-1] or None


def stopped_is_an_exit() -> None:
    """Turn SIGTERM into SystemExit, so that ranks are ended and known figures are printed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))


def end_with_launcher() -> None:
    """Kill this rank when the launcher ends in whatever way. Without a launcher do nothing."""
    launcher = os.environ.get(_LAUNCHER)
    if launcher is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(launcher):  # it has ended already
            os._exit(1)


def run(command: list[str], n: int, seconds: float, may_die: frozenset[int] = frozenset()) -> str:
    """Run `command` as ranks 0 to n - 1 of one host; returns "" or what went wrong.

    Ranks in `may_die` are not waited for and are killed at the end. The ranks' store is in this process, so that its port
    is free and it survives every rank.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    settings = SETTINGS | {"WORLD_SIZE": str(n), "MASTER_PORT": str(store.port), _LAUNCHER: str(os.getpid())}
    ranks: list[subprocess.Popen] = []
    try:
        for r in range(n):
            env = os.environ | settings | {"RANK": str(r), "LOCAL_RANK": str(r)}
            ranks.append(subprocess.Popen(command, env=env))
        return _wait([p for r, p in enumerate(ranks) if r not in may_die], seconds)
    finally:
        for p in ranks:
            if p.poll() is None:
                p.kill()
        for p in ranks:
            p.wait()


def _wait(ranks: list[subprocess.Popen], seconds: float) -> str:
    """Wait until all have ended, one has failed, or `seconds` are over; returns "" or what went wrong."""
    until = time.monotonic() + seconds
    while any(p.poll() is None for p in ranks):
        if any(p.poll() for p in ranks):
            return "a rank failed"
        if time.monotonic() > until:
            return f"not done within {seconds:.0f} s"
        time.sleep(0.1)
    return "a rank failed" if any(p.returncode for p in ranks) else ""
