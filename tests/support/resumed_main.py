"""A real AsyncLLM with two data-parallel ranks that share experts, whose owner resumes it, too. For test_refit_resumed.py.

    {"do": "start", "model"}   {"do": "twice", "who"}
    {"do": "serve", "rendezvous"}   {"do": "ready"}   {"do": "disturb", "seconds"}   {"do": "disturbed"}

One event loop in the main thread, since the engine's processes are forked from it; commands are read in another.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
from collections import Counter

import xfer
from tests.support import small_vllm
from tests.support.proc import PATIENCE, commands, emit
from xfer.engines.choose_handle import handle_for

UPDATE = {"attempt": 1, "deadline_s": 5.0}
LATER = 1
"""The rank that gets a request while the other one is not told of it."""


def refit(handle) -> None:
    """A controller's calls up to the resume. No session is connected: nothing is received."""
    handle.pause(60)
    handle.set_version("xfer:mixed", 60)
    handle.start_update(60)
    handle.update(UPDATE, 60)
    handle.finish("1", 60)
    handle.reset_caches(60)


class Engine:
    asked = 0

    async def start(self, model: str) -> None:
        self.engine = small_vllm.asynchronous(
            model,
            data_parallel_size=2,
            enable_expert_parallel=True,
            worker_extension_cls="tests.support.live_main.Probe",
        )
        emit("started")

    async def answer(self, tokens: int, rank: int | None = None) -> int:
        from vllm import SamplingParams

        self.asked += 1
        how, count = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True), 0
        prompt = {"prompt_token_ids": [5, 6, 7, 8 + self.asked % 50]}
        async for out in self.engine.generate(prompt, how, f"r{self.asked}", data_parallel_rank=rank):
            count = len(out.outputs[0].token_ids)
        return count

    async def twice(self, who: str) -> None:
        """Its owner resumes the engine during a refit; then a request begins on one rank, of which the coordinator has not told the other
        one; then `who` resumes the engine once more."""
        handle = handle_for(self.engine)
        await asyncio.to_thread(refit, handle)
        await self.engine.resume_generation()
        (coordinator,) = (p for p in multiprocessing.active_children() if "Coordinator" in p.name)
        os.kill(coordinator.pid, signal.SIGSTOP)
        try:
            request = asyncio.create_task(self.answer(4, LATER))
            await self.in_a_step(LATER)
            again = (
                self.engine.resume_generation() if who == "owner" else asyncio.to_thread(handle.resume, 20 * PATIENCE)
            )
            again = asyncio.create_task(again)
            await asyncio.sleep(1.0)
        finally:
            os.kill(coordinator.pid, signal.SIGCONT)
        await asyncio.wait_for(again, 20 * PATIENCE)
        emit("answered", tokens=await asyncio.wait_for(request, 20 * PATIENCE), paused=await self.engine.is_paused())

    async def in_a_step(self, rank: int) -> None:
        """Waits until this rank does not answer, because it is in a step without the other one."""
        core = self.engine.engine_core
        while True:
            question = core._call_utility_async("is_scheduler_paused", engine=core.core_engines[rank])
            try:
                await asyncio.wait_for(question, 0.5 * PATIENCE)
            except TimeoutError:
                return

    async def serve(self, rendezvous: str) -> None:
        self.controller = xfer.serve(
            self.engine, rendezvous=rendezvous, token=os.environ["XFER_TOKEN"], deadline_s=60.0 * PATIENCE
        )
        emit("serving")

    async def ready(self) -> None:
        await asyncio.to_thread(self.controller.wait_ready)
        emit("ready")

    async def disturb(self, seed: int) -> None:
        """From now on: requests, and an owner who pauses and resumes the engine at random."""
        chance, self.did = random.Random(seed), Counter()

        async def ask() -> None:
            while True:
                tokens = chance.randint(1, 30)
                self.did["answers"] += await self.answer(tokens) == tokens
                await asyncio.sleep(chance.random() * 0.05)

        async def disturb() -> None:
            while True:
                await asyncio.sleep(chance.random() * 0.3)
                if chance.random() < 0.3:
                    await self.engine.pause_generation(mode=chance.choice(["keep", "wait"]), clear_cache=False)
                    self.did["pauses"] += 1
                    await asyncio.sleep(chance.random() * 0.1)
                await self.engine.resume_generation()
                self.did["resumes"] += 1

        self.tasks = [asyncio.create_task(task()) for task in (ask, ask, disturb)]
        emit("disturbing")

    async def disturbed(self) -> None:
        """Ends that, and says what was done."""
        *asking, disturbing = self.tasks
        disturbing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await disturbing
        await self.engine.resume_generation()
        await asyncio.wait_for(self.answer(4), 20 * PATIENCE)
        for task in asking:
            task.cancel()
        emit("disturbed", did=self.did, version=self.controller.version)


async def main() -> None:
    engine, words, end = Engine(), commands(), object()
    emit("up")
    while (command := await asyncio.to_thread(next, words, end)) is not end:
        try:
            await getattr(engine, command.pop("do"))(**command)
        except Exception as e:
            emit("raised", type=type(e).__name__, text=str(e))


if __name__ == "__main__":
    small_vllm.fork_workers()
    asyncio.run(main())
