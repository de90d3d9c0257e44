"""vLLM's AsyncLLM with the methods of an LLM, for engines of several data-parallel ranks, which LLM does not run."""

from __future__ import annotations

import asyncio
import itertools
import threading


class InLoop:
    """`engine`: the AsyncLLM. `loop`: its event loop, in a thread. Each prompt goes to each rank, one after another."""

    def __init__(self, **options):
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.ranks = range(options["data_parallel_size"])
        self.asked = itertools.count()

        async def made():
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**options))

        self.engine = self.wait(made())

    def wait(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def generate(self, prompts, params, use_tqdm=False) -> list:
        """Final outputs: all ranks' of the first prompt, then of the next."""

        async def one(prompt, rank: int):
            number = f"r{next(self.asked)}"
            async for out in self.engine.generate(prompt, params, number, data_parallel_rank=rank):
                last = out
            return last

        return [self.wait(one(p, r)) for p in prompts for r in self.ranks]

    def flight(self, prompt: list[int], params) -> Flight:
        return Flight(self, prompt, params)

    def collective_rpc(self, method: str, args: tuple = (), kwargs: dict | None = None) -> list:
        """Answers of the workers of all ranks, in their order; AsyncLLM's own has those of the first rank only."""
        core = self.engine.engine_core

        async def everywhere():
            calls = (
                core._call_utility_async("collective_rpc", method, None, args, kwargs, engine=e)
                for e in core.core_engines
            )
            return await asyncio.gather(*calls)

        return [answer for answers in self.wait(everywhere()) for answer in answers]

    def shutdown(self) -> None:
        self.engine.shutdown()
        self.loop.call_soon_threadsafe(self.loop.stop)


class Flight:
    """Sends one request after another, without `serving()`; each is alone in its batch, so that a version always answers the same.

    `log`: (tokens, reason of the end) of finished requests; `now`: number of tokens of the running one."""

    def __init__(self, ranks: InLoop, prompt: list[int], params):
        self.log, self.now, self._ended = [], 0, False
        self._run = asyncio.run_coroutine_threadsafe(self._fly(ranks, prompt, params), ranks.loop)

    async def _fly(self, ranks: InLoop, prompt: list[int], params) -> None:
        while not self._ended:
            async for said in ranks.engine.generate({"prompt_token_ids": prompt}, params, f"f{next(ranks.asked)}"):
                answer = said.outputs[0]
                self.now = len(answer.token_ids)
            self.log.append([list(answer.token_ids), answer.finish_reason])
            self.now = 0

    def land(self, seconds: float = 60.0) -> list:
        self._ended = True
        self._run.result(seconds)
        return self.log
