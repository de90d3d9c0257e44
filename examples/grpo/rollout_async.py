"""The rollout with vLLM's `AsyncLLM`: it answers as rollout.py does, and many requests at once. Requests that are under way when a
refit comes are treated by a policy of in_flight.py.

    python -m examples.grpo.rollout_async --model FOLDER --rendezvous tcp://10.0.0.1:29600 --listen 10.0.0.2:8000 --policy drain

Unlike rollout.py it ends with its trainers, and has one node.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import asdict

from examples.grpo import rollout
from examples.grpo.in_flight import PAUSE, InFlight


class AsyncRollout:
    """What `rollout.listen` asks, in a thread of its own; answers come from the engine's loop."""

    def __init__(self, flight: InFlight, loop: asyncio.AbstractEventLoop):
        self.flight, self.loop = flight, loop

    def tend(self) -> None:
        if self.flight.controller.lost is not None:
            raise SystemExit(f"the trainers are gone: {self.flight.controller.lost}")

    def answer(self, path: str, body: dict) -> dict:
        if path != "/sample":
            raise KeyError(path)
        return asyncio.run_coroutine_threadsafe(self.sample(**body), self.loop).result()

    async def sample(self, prompts: list[list[int]], n: int, tokens: int, seed: int) -> dict:
        asked = [
            self.flight.sample(prompt, tokens=tokens, seed=seed * 100_003 + i * n + k)
            for i, prompt in enumerate(prompts)
            for k in range(n)
        ]
        made = [self._said(asdict(s)) for s in await asyncio.gather(*asked)]
        return {"groups": [made[i : i + n] for i in range(0, len(made), n)]}

    @staticmethod
    def _said(sample: dict) -> dict:
        return {**sample, "spans": [[s["version"], s["start"], s["end"]] for s in sample["spans"]]}


async def serve(args) -> None:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    more = dict(
        max_samples=args.max_samples, max_model_len=args.max_model_len, tp=args.tp, ep=args.ep, dtype=args.dtype
    )
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**rollout.settings(args.model, **more)))
    token = os.environ["XFER_TOKEN"]
    flight = InFlight(engine, policy=args.policy, rendezvous=args.rendezvous, token=token, replica=args.replica)
    version = await asyncio.to_thread(
        flight.controller.wait_version
    )  # the first refit: until then the weights are random
    print(f"rollout {args.replica} serves version {version}", file=sys.stderr, flush=True)
    answers = AsyncRollout(flight, asyncio.get_running_loop())
    await asyncio.to_thread(rollout.listen, answers, args.listen, token)


def main() -> None:
    parser = rollout.arguments()
    parser.description = __doc__.splitlines()[0]
    parser.add_argument("--policy", choices=sorted(PAUSE), default="drain", help="of requests that a refit meets")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
