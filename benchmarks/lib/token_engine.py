"""The engine of benchmarks.tokens: an AsyncLLM that streams, and notes when each token comes. Commands are `Engine`'s methods."""

from __future__ import annotations

import asyncio
import itertools
import random
import time

import numpy as np

from tests.support import gpu_engine, small_vllm
from tests.support.in_loop import InLoop
from tests.support.proc import methods, obey

PROMPT = 16
"""Tokens of a prompt. Prompts differ, so that nothing of them is in the prefix cache."""


class Load:
    """So many streaming requests of a fixed length at a time. Where one ends the next one begins.

    Args:
        ranks: The engine.
        requests: How many at a time.
        tokens: Length of each answer. The first ones are shorter, so that requests do not end together.
    """

    def __init__(self, ranks: InLoop, requests: int, tokens: int):
        self._ranks, self._numbers, self._came = ranks, itertools.count(), []
        self._tasks = [
            asyncio.run_coroutine_threadsafe(self._ask(i, tokens * (i + 1) // requests, tokens), ranks.loop)
            for i in range(requests)
        ]

    async def _ask(self, slot: int, first: int, tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        chance, length = random.Random(slot), max(1, first)
        while True:
            params = SamplingParams(temperature=0, max_tokens=length, detokenize=False, ignore_eos=True)
            params.output_kind = RequestOutputKind.DELTA
            number = next(self._numbers)
            prompt = {"prompt_token_ids": [chance.randrange(3, 150) for _ in range(PROMPT)]}
            async for said in self._ranks.engine.generate(prompt, params, f"load{id(self)}-{number}"):
                if count := len(said.outputs[0].token_ids):
                    self._came.append((time.monotonic(), count, number))
            length = tokens

    def end(self, path: str) -> None:
        """Stop, and write (monotonic seconds, tokens, request) of all that has come."""
        for t in self._tasks:
            t.cancel()
        np.save(path, np.array(self._came, dtype=np.float64).reshape(-1, 3))


class Engine(gpu_engine.Engine):
    _load = None

    def made(self, cpu: bool = False, **how) -> InLoop:
        if not cpu:
            return gpu_engine.start(asynchronous=True, **how)
        how.pop("tp")
        return InLoop(**small_vllm.arguments(**{"load_format": "dummy", "data_parallel_size": 1, **how}))

    def load(self, requests: int, tokens: int) -> None:
        self._load = Load(self.llm, requests, tokens)

    def unload(self, path: str) -> None:
        self._load.end(path)

    def offer(self, nbytes: int) -> dict:
        return dict(handle=self._workers("offer", nbytes)[0])

    def copy(self, handle: list, **pace) -> None:
        self._workers("copy", handle, pace)

    def copied(self) -> dict:
        return dict(rate=self._workers("copied")[0])


if __name__ == "__main__":
    obey(*methods(Engine()))
