"""One process of a toy job, as an operating system starts it: `toy_main trainer RENDEZVOUS SEED RANK RANKS`, `toy_main engine RENDEZVOUS
SEED`. The engine compares every byte with what `SEED` makes. XFER_TOKEN: the token. Exit code 0: all went as it should. Wants torch, numpy
and msgspec only, so that it runs under any Python that has them.
"""

import os
import sys

from tests.support.proc import PATIENCE
from tests.support.world import REFIT, ToyEngine, ToySource, trainer_session, until_true
from xfer.arguments import RefitOptions
from xfer.participants.controller import Controller

DEADLINE_S = 60.0 * PATIENCE


def trainer(rendezvous: str, seed: int, rank: int, ranks: int) -> None:
    source = ToySource(rank, ranks)
    session = trainer_session(source, rendezvous, os.environ["XFER_TOKEN"], deadline_s=DEADLINE_S)
    try:
        session.open(True)
        source.set(seed)
        session.refit(RefitOptions(**REFIT | {"version": seed}))
    finally:
        session.close()


def engine(rendezvous: str, seed: int) -> None:
    made = ToyEngine(2)
    controller = Controller(made, rendezvous, os.environ["XFER_TOKEN"], replica=0, deadline_s=DEADLINE_S)
    try:
        controller.wait_ready()
        controller.wait_version(seed)
        if wrong := [t.wrong(seed) for t in made.takers if t.wrong(seed)]:
            sys.exit(f"not the bytes of seed {seed}: {wrong}")
        until_true(lambda: controller.lost is not None, DEADLINE_S)  # the trainers are to close the job
    finally:
        controller.close()
        for s in made.sessions:
            s.close()


if __name__ == "__main__":
    {"trainer": trainer, "engine": engine}[sys.argv[1]](sys.argv[2], *map(int, sys.argv[3:]))
