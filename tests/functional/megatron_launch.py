"""Starts a script on every rank of a local gloo world and waits for it, with a deadline. No Megatron."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from examples.common.ports import free_port
from tests.support import forge
from tests.support.proc import PATIENCE, environment

HERE = Path(__file__).resolve().parent


def launch(script: str, *args: str, world: int, folder: Path, seconds: float = 420) -> None:
    """Runs `script args…` (a file beside this one) as `world` processes. Output goes to `folder`/rank{r}.log.

    Raises:
        RuntimeError: A rank failed or the deadline passed, with the ends of the logs. The other ranks are killed.
    """
    env = environment(
        WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), PYTHONWARNINGS="ignore"
    )
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"rank{r}.log" for r in range(world)]
    ranks: list[forge.Forged | subprocess.Popen] = []
    try:
        for r, log in enumerate(logs):
            with log.open("w") as out:
                mine = dict(env, RANK=str(r), LOCAL_RANK=str(r))
                ranks.append(forge.start(sys.executable, [str(HERE / script), *args], mine, Path.cwd(), out, out))
        seconds *= PATIENCE
        end = time.monotonic() + seconds
        while any(p.poll() is None for p in ranks) and not any(p.poll() for p in ranks) and time.monotonic() < end:
            time.sleep(0.1)
        if any(p.poll() != 0 for p in ranks):
            codes = [p.poll() for p in ranks]
            tails = "\n".join(f"--- rank {r}\n{log.read_text()[-3000:]}" for r, log in enumerate(logs) if codes[r] != 0)
            raise RuntimeError(f"{script} {args}: exit codes {codes} (None: still running after {seconds} s)\n{tails}")
    finally:
        for p in ranks:
            if p.poll() is None:
                p.kill()
            p.wait(10)
