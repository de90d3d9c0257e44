"""A real AsyncLLM, with requests under way and an owner who pauses and resumes it too. Commands are `Engine`'s methods; what they return
is told as an event of their name. The event loop is in the main thread, since the engine's processes are forked from it."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter

import xfer
import xfer.metrics
from tests.support import small_vllm
from tests.support.proc import PATIENCE, commands, emit
from tests.support.vllm_main import PROMPTS
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
    asked, request = 0, None

    async def start(self, model: str, **how) -> None:
        self.engine = small_vllm.asynchronous(model, **how)

    async def count(self, tokens: int, rank: int | None = None) -> int:
        """Return the length of the answer to a prompt that is not in the prefix cache."""
        self.asked += 1
        return len((await small_vllm.answer(self.engine, [5, 6, 7, 8 + self.asked % 50], tokens, rank))[0])

    async def observe(self) -> dict:
        answers = [await small_vllm.answer(self.engine, p) for p in PROMPTS]
        version = await self.engine.get_weight_version()
        return dict(outputs=answers, checksums=await self.engine.compute_weight_checksums(), version=version)

    async def begin(self, tokens: int, prompt: int = 0, slowly: bool = False) -> None:
        """Begin a request; later commands run beside it. `slowly`: some of its tokens are there, and it ends after some 20 s, unless the
        engine is told to pause."""
        slow = await self.slow_until_paused() if slowly else ""
        self.request = asyncio.create_task(small_vllm.output(self.engine, PROMPTS[prompt], tokens))
        while slow and not os.path.getsize(slow):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)

    async def slow_until_paused(self) -> str:
        """Returns the file into which the worker writes in slow steps, until it is gone."""
        core, (file, name) = self.engine.engine_core, tempfile.mkstemp()
        os.close(file)
        await self.engine.collective_rpc("xfer_slow", args=(name, 20))

        async def pause(*args, **how) -> None:
            del core.pause_scheduler_async
            paused = asyncio.create_task(core.pause_scheduler_async(*args, **how))
            await asyncio.sleep(0.1)  # the engine's process has been told
            os.unlink(name)
            await paused

        core.pause_scheduler_async = pause
        return name

    async def computed(self) -> dict:
        """Tokens that the workers computed since the last call."""
        return dict(tokens=max(await self.engine.collective_rpc("xfer_computed")))

    async def answer(self) -> dict:
        said = await asyncio.wait_for(self.request, 60)
        return dict(answer=small_vllm.parts(said), versions=[span.version for span in said.weight_versions])

    async def state(self) -> dict:
        c, paused = self.controller, await self.engine.is_paused()
        answered = self.request and self.request.done()
        return dict(torn=c.torn, error=str(c.error or ""), version=c.version, answered=answered, paused=paused)

    async def pause(self) -> None:
        await self.engine.pause_generation(mode="keep", clear_cache=False)

    async def pause_in_refit(self) -> None:
        """The owner pauses the engine as soon as the next refit has."""
        core = self.engine.engine_core

        async def pause(*args, **how):
            del core.pause_scheduler_async
            await core.pause_scheduler_async(*args, **how)
            await self.pause()

        core.pause_scheduler_async = pause

    async def resume(self) -> None:
        await self.engine.resume_generation()

    async def close(self) -> None:
        self.controller.close()

    async def twice(self, who: str) -> dict:
        """The owner resumes the engine during a refit. Then a request begins on one rank, before vLLM's coordinator tells the
        other rank. Then `who` resumes the engine again."""
        handle = handle_for(self.engine)
        await asyncio.to_thread(refit, handle)
        await self.engine.resume_generation()
        (coordinator,) = (p for p in multiprocessing.active_children() if "Coordinator" in p.name)
        os.kill(coordinator.pid, signal.SIGSTOP)
        try:
            request = asyncio.create_task(self.count(4, LATER))
            await self.in_a_step(LATER)
            again = (
                self.engine.resume_generation() if who == "owner" else asyncio.to_thread(handle.resume, 20 * PATIENCE)
            )
            again = asyncio.create_task(again)
            await asyncio.sleep(1.0)
        finally:
            os.kill(coordinator.pid, signal.SIGCONT)
        await asyncio.wait_for(again, 20 * PATIENCE)
        return dict(tokens=await asyncio.wait_for(request, 20 * PATIENCE), paused=await self.engine.is_paused())

    async def in_a_step(self, rank: int) -> None:
        """Waits until this rank does not answer, because it is in a step without the other one."""
        core = self.engine.engine_core
        while True:
            question = core._call_utility_async("is_scheduler_paused", engine=core.core_engines[rank])
            try:
                await asyncio.wait_for(question, 0.5 * PATIENCE)
            except TimeoutError:
                return

    async def serve(self, rendezvous: str, replica: int = 0, pause_mode: str = "keep") -> None:
        self.controller = xfer.serve(
            self.engine,
            rendezvous=rendezvous,
            replica=replica,
            token=os.environ["XFER_TOKEN"],
            deadline_s=60.0 * PATIENCE,
            pause_mode=pause_mode,
        )

    async def ready(self) -> None:
        await asyncio.to_thread(self.controller.wait_ready)

    async def generate(self) -> None:
        """From now on one request after the other. `broken`: those with too few tokens, or with NaN for a logprob."""
        self.answers, self.broken, self.paused = 0, 0, {}
        core, began = self.engine.engine_core, 0.0
        pause = core.pause_scheduler_async

        async def noted(*args, **how) -> None:
            nonlocal began
            began = time.monotonic()
            await pause(*args, **how)

        def note(end: xfer.observers.EngineFinished) -> None:
            self.paused[end.version] = began, end.outage_s

        core.pause_scheduler_async = noted
        xfer.metrics.observe(note)

        async def ask() -> None:
            while True:
                tokens, logprobs = await small_vllm.answer(self.engine, [5, 6, 7, 8 + self.answers % 50], 20)
                self.answers += 1
                self.broken += len(tokens) != 20 or any(x != x for x in logprobs)

        self.asking = asyncio.create_task(ask())

    async def generated(self) -> dict:
        """Ends that, and says how many answers came, and of each version when the engine was paused for it, and how long."""
        self.asking.cancel()
        return dict(count=self.answers, broken=self.broken, paused=list(self.paused.items()))

    async def disturb(self, seed: int) -> None:
        """From now on: requests, and an owner who pauses and resumes the engine at random."""
        chance, self.did = random.Random(seed), Counter()

        async def ask() -> None:
            while True:
                tokens = chance.randint(1, 30)
                self.did["answers"] += await self.count(tokens) == tokens
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

    async def disturbed(self) -> dict:
        """End the disturbance and the requests. Returns the numbers of pauses and resumes, and the version."""
        *asking, disturbing = self.tasks
        disturbing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await disturbing
        await self.engine.resume_generation()
        await asyncio.wait_for(self.count(4), 20 * PATIENCE)
        for task in asking:
            task.cancel()
        return dict(did=self.did, version=self.controller.version)


async def main() -> None:
    engine, words, end = Engine(), commands(), object()
    emit("up")
    while (command := await asyncio.to_thread(next, words, end)) is not end:
        do = command.pop("do")
        try:
            emit(do, **(await getattr(engine, do)(**command) or {}))
        except Exception as e:
            emit("raised", type=type(e).__name__, text=str(e))


if __name__ == "__main__":
    small_vllm.fork_workers()
    asyncio.run(main())
