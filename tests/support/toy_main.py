"""One process of a toy job, as an operating system starts it: connects, refits, closes, ends. The model is world.py's.

    python -m tests.support.toy_main trainer RENDEZVOUS SEED RANK RANKS
    python -m tests.support.toy_main engine RENDEZVOUS SEED

The token is XFER_TOKEN. The engine compares every byte with what `SEED` makes. Exit code 0: all went as it should. Wants torch,
numpy and msgspec only, so that it runs under any Python that has them.
"""

import os
import sys
import threading

from tests.support.proc import PATIENCE
from tests.support.world import ToyEngine, ToySource

DEADLINE_S = 60.0 * PATIENCE
WORKERS = 2


def trainer(rendezvous: str, seed: int, rank: int, ranks: int) -> None:
    from tests.support.world import trainer_session

    source = ToySource(rank, ranks)
    session = trainer_session(
        source, rendezvous, os.environ["XFER_TOKEN"], replicas=1, deadline_s=DEADLINE_S, bucket_bytes=4096, drop=(), narrow=(),
        cache_dir=None,
    )  # fmt: skip
    try:
        session.open(True)
        source.set(seed)
        session.refit(version=seed, verify=True, wait="commit", min_replicas=None, deadline_s=None)
    finally:
        session.close()


def engine(rendezvous: str, seed: int) -> None:
    from xfer.participants.controller import Controller

    made = ToyEngine(WORKERS)
    controller = Controller(made, rendezvous, os.environ["XFER_TOKEN"], replica=0, deadline_s=DEADLINE_S)
    try:
        controller.wait_ready()
        controller.wait_version(seed)
        if wrong := [t.wrong(seed) for t in made.takers if t.wrong(seed)]:
            sys.exit(f"not the bytes of seed {seed}: {wrong}")
        _until_trainers_left(controller)
    finally:
        controller.close()
        for s in made.sessions:
            s.close()


def _until_trainers_left(controller) -> None:
    """Whoever leaves first takes the job down, and here the trainers are to close it."""
    pause, left = threading.Event(), DEADLINE_S
    while controller.lost is None and left > 0:
        pause.wait(0.05)
        left -= 0.05


if __name__ == "__main__":
    {"trainer": trainer, "engine": engine}[sys.argv[1]](sys.argv[2], *map(int, sys.argv[3:]))
