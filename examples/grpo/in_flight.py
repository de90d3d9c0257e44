"""Sampling that does not stop for a refit: an `AsyncLLM`, requests under way while weights change, and four ways to mean it.

    drain       what is under way ends under the old weights, then the refit begins      every sample has one version
    abort       it is thrown away and asked again under the new weights                  every sample has one version
    continue    it freezes, and goes on under the new weights                            a sample has all that made it
    keep_cache  the same, with the keys and values that it has                           a sample has all that made it

Under `continue` vLLM computes the keys and values of the frozen tokens anew, since xfer drops every cache of old weights. Each
token keeps the logprob that its own weights gave it, so importance ratios stay right; how many versions a sample may
span is for the loop to decide, by `Sample.versions`. vLLM 0.25 does not say which weights made a token. There the version that
the controller serves has to be the same before and after a request, else the answer is asked again; `continue` and `keep_cache`
are refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import xfer
from examples.grpo.samples import Sample, Span
from xfer.errors import Unsupported

Policy = Literal["drain", "abort", "continue", "keep_cache"]
PAUSE = {"drain": "wait", "abort": "abort", "continue": "keep", "keep_cache": "keep_cache"}


class InFlight:
    """Made in a coroutine of the engine's own loop. `under_way`: tokens so far of each request; `again`: how many were
    asked a second time."""

    def __init__(
        self, engine, *, policy: Policy, rendezvous: str, token: str, replica: int = 0, deadline_s: float = 600.0
    ):
        self.engine, self.policy = engine, policy
        self.controller = xfer.serve(
            engine, rendezvous=rendezvous, token=token, replica=replica, deadline_s=deadline_s, pause_mode=PAUSE[policy]
        )
        self.under_way: dict[str, int] = {}
        self.again = 0
        self._names = (f"{id(self):x}-{i}" for i in itertools.count())

    async def sample(
        self, prompt: Sequence[int], *, tokens: int, temperature: float = 1.0, seed: int | None = None
    ) -> Sample:
        """One answer of `tokens` tokens. While a refit runs it waits; a refit's end starts it again by itself."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=temperature,
            max_tokens=tokens,
            min_tokens=tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            seed=seed,
        )
        while True:
            name, before = next(self._names), self.controller.version
            try:
                async for said in self.engine.generate({"prompt_token_ids": list(prompt)}, params, name):
                    answer = said.outputs[0]
                    self.under_way[name] = len(answer.token_ids)
            finally:
                self.under_way.pop(name, None)
            spans = self._spans(answer, before)
            if answer.finish_reason != "abort" and spans:
                break
            self.again += 1  # a refit threw it away: half an answer of old weights is of no use here
        return Sample(
            tuple(prompt),
            tuple(answer.token_ids),
            tuple(d[t].logprob for t, d in zip(answer.token_ids, answer.logprobs, strict=True)),
            spans,
        )

    def _spans(self, answer, before: str) -> tuple[Span, ...]:
        """Of an answer of a vLLM that says nothing: one, if no refit was committed since `before`. A controller has its new version
        before its engine serves again, so weights that it has had all the time made every token."""
        said = getattr(answer, "weight_versions", None)
        if said is not None:
            return tuple(Span(s.version, s.start, s.end) for s in said)
        if self.policy in ("continue", "keep_cache"):
            raise Unsupported(
                "this vLLM does not say which weights made a token, so an answer that a refit changes cannot be told from others",
                ["use policy='drain' or 'abort', or a newer vLLM: 0.32 does"],
            )
        return (Span(str(before), 0, len(answer.token_ids)),) if before == self.controller.version else ()
