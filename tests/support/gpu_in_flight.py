"""The example's sampling that does not stop for a refit (examples/grpo/in_flight.py), on a real AsyncLLM on a GPU, with CUDA graphs.

Does what the test says on standard input: start, serve, ask, under_way, answer, leave.
"""

from __future__ import annotations

import asyncio
import os

from examples.grpo.in_flight import InFlight
from tests.support import gpu_engine
from tests.support.gpu_async import Ranks
from tests.support.proc import emit, obey

PROMPT = [5, 6, 7, 8]
WAIT_S = 120.0
llm: Ranks
flight: InFlight
asked = None  # the future of the sample that is under way


def start(**options) -> None:
    global llm
    llm = gpu_engine.start(asynchronous=True, **options)
    emit("started")


def serve(policy: str, rendezvous: str) -> None:
    global flight

    async def made():
        return InFlight(
            llm.engine, policy=policy, rendezvous=rendezvous, token=os.environ["XFER_TOKEN"], deadline_s=WAIT_S
        )

    flight = llm.wait(made())
    emit("serving")


def _sample(tokens: int):
    return asyncio.run_coroutine_threadsafe(flight.sample(PROMPT, tokens=tokens, temperature=0.0), llm.loop)


def ask(tokens: int) -> None:
    global asked
    asked = _sample(tokens)
    emit("asked")


def under_way() -> None:
    """Tokens so far of what is under way, and whether it has ended."""
    emit("under way", tokens=max(flight.under_way.values(), default=0), ended=asked.done())


def answer() -> None:
    """What was asked, and the same asked now: (tokens, versions) of each, and how often an answer was asked again."""
    got = asked.result(WAIT_S)
    now = _sample(len(got.tokens)).result(WAIT_S)
    emit(
        "answered",
        got=[got.tokens, got.versions],
        now=[now.tokens, now.versions],
        again=flight.again,
        version=str(flight.controller.version),  # as samples name it
    )


def leave() -> None:
    flight.controller.close()
    emit("left")


if __name__ == "__main__":
    obey(start, serve, ask, under_way, answer, leave)
