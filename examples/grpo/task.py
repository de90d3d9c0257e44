"""The task and its reward: sort a few digits. No model, no framework; anything with a reward can stand in its place.

A prompt is START d d … SORT, an answer is as many tokens as there were digits. The reward is the share of positions that
are right, so that a model of random weights has something to climb.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

VOCAB = 32
START, SORT = 10, 11  # tokens 0 to 9 are the digits


@dataclass(frozen=True)
class SortDigits:
    digits: int = 3

    @property
    def prompt_tokens(self) -> int:
        return self.digits + 2

    def prompts(self, step: int, count: int) -> list[list[int]]:
        """`count` prompts of step `step`; the same for the same step, so that a job that is started again goes on."""
        dice = random.Random(step)
        return [[START, *(dice.randrange(10) for _ in range(self.digits)), SORT] for _ in range(count)]

    def reward(self, prompt: list[int], answer: list[int]) -> float:
        right = sorted(prompt[1 : 1 + self.digits])
        return sum(a == b for a, b in zip(answer, right)) / self.digits
