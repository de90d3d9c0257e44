"""What a rollout gives back: tokens, the engine's logprobs of them, and the version of the weights that made each token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from xfer.errors import XferError


@dataclass(frozen=True)
class Span:
    """Tokens `start` to `end` (not included) of an answer were sampled from weights of this version."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class Sample:
    """One answer. `logprobs`: natural, at temperature 1, of exactly these tokens, by the engine that drew them."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]

    @property
    def versions(self) -> tuple[str, ...]:
        return tuple(s.version for s in self.spans)

    @classmethod
    def read(cls, said: dict) -> Sample:
        """From JSON; XferError when the parts do not fit each other."""
        made = cls(
            tuple(map(int, said["prompt"])),
            tuple(map(int, said["tokens"])),
            tuple(map(float, said["logprobs"])),
            tuple(Span(str(v), int(a), int(b)) for v, a, b in said["spans"]),
        )
        covered = [i for s in made.spans for i in range(s.start, s.end)]
        bad = []
        if len(made.logprobs) != len(made.tokens):
            bad.append(f"{len(made.tokens)} tokens but {len(made.logprobs)} logprobs")
        if covered != list(range(len(made.tokens))):
            bad.append(f"the version spans {made.spans} do not cover {len(made.tokens)} tokens once each")
        if bad:
            raise XferError("a rollout answered with a sample that cannot be used", bad)
        return made


def require_version(samples: Iterable[Sample], version: str) -> None:
    """XferError unless every token of every sample was made by these weights. This is what sees a refit that was
    skipped: one step of training changes so few bf16 elements that no logprob tells."""
    found: dict[str, int] = {}
    for s in samples:
        for span in s.spans:
            found[span.version] = found.get(span.version, 0) + span.end - span.start
    if set(found) - {version}:
        lines = [f"{n} tokens were made by version {v!r}" for v, n in sorted(found.items()) if v != version]
        raise XferError(
            f"the optimizer's last step is version {version!r}, but the rollout used other weights",
            [*lines, "was nccl_xfer_refit() called after every optimizer step, and did it return?"],
        )
