"""The versions of the frameworks that xfer is tested with.

scripts/setup.sh makes its environments of them, the table in docs/status.md shows them, and adapters warn about others.

    python xfer/tested.py trainers     # one line for each: core, bridge, Python, torch and the transformers that this Bridge takes
    python xfer/tested.py engines      # one line for each: vLLM, Python, torch
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Trainer:
    """Megatron-Core and the Megatron-Bridge that goes with it. `transformers`: a requirement, as pip takes it."""

    core: str
    bridge: str
    python: str
    torch: str
    transformers: str = ""
    transformer_engine: str = ""

    def __str__(self) -> str:
        return f"megatron-core {self.core} with megatron-bridge {self.bridge}"


@dataclass(frozen=True)
class Engine:
    vllm: str
    python: str
    torch: str

    def __str__(self) -> str:
        return f"vLLM {self.vllm}"


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix. `trainer` None: plain modules. `command` runs it; `result` says what ran and how it ended."""

    where: str
    trainer: Trainer | None
    engine: Engine
    command: str
    result: str


CPUS = "CPUs"
_NEWEST = Trainer("0.19.2", "0.6.2", "3.12", "2.13.0", "transformers>=5.8,<=5.12.1")
_OLDEST = Trainer("0.16.1", "0.3.1", "3.11", "2.13.0", "transformers<5")
_NEWEST_ON_GPUS = Trainer("0.19.2", "0.6.2", "3.12", "2.11.0+cu130", transformer_engine="2.20.2")
_OLDEST_ON_GPUS = Trainer("0.16.1", "0.3.1", "3.12", "2.11.0+cu130", transformer_engine="2.11.0")
_CPU_ENGINE = Engine("0.32.0", "3.11", "2.13.0")
_GPU_ENGINE = Engine("0.25.1", "3.12", "2.11.0+cu130")
_NEWEST_GPU_ENGINE = Engine("0.26.0", "3.12", "2.11.0+cu130")  # the newest that takes torch 2.11

MATRIX = (
    Cell(
        CPUS,
        _NEWEST,
        _CPU_ENGINE,
        "scripts/test.sh",
        "all that needs no GPU; what CI runs: 2,968 passed, none failed (ffd49e9, 28 November 2026); all of `--slow`, that day and the day "
        "before: 802 passed (366504f to ffd49e9). Ray's actors did not run: Ray wants one version of Python on both sides",
    ),
    Cell(
        CPUS,
        _OLDEST,
        _CPU_ENGINE,
        "TRAINER=0.16.1 scripts/test.sh",
        "the same; its part in the trainers' environment: 2,644 passed, none failed (37bb98d, 27 November 2026); all of `--slow` there, "
        "Ray's actors too: 414 passed (5281301 to ffd49e9, 28 November 2026)",
    ),
    Cell(
        "H100s; an H200",
        _NEWEST_ON_GPUS,
        _GPU_ENGINE,
        "python -m pytest -m gpu tests/functional/test_gpu_megatron.py tests/functional/test_gpu_layerwise.py",
        "training, export and refits of Megatron-Core: 16 passed; parameters in FP8 on the H200 (`test_gpu_fp8_trainer.py`): 4 passed "
        "([GPU tests](../benchmarks/RESULTS.md#tests-on-gpus), 28 and 29 November 2026)",
    ),
    Cell(
        "H100s and H200s",
        _OLDEST_ON_GPUS,
        _GPU_ENGINE,
        "python -m pytest -m gpu tests",
        "[GPU tests](../benchmarks/RESULTS.md#tests-on-gpus) and [whole refits](../benchmarks/RESULTS.md#whole-refits)",
    ),
    Cell(
        "H100s and H200s",
        None,
        _NEWEST_GPU_ENGINE,
        "python -m pytest -m gpu tests/functional/test_gpu_refit.py",
        "eighteen of its tests passed: [GPU tests](../benchmarks/RESULTS.md#tests-on-gpus)",
    ),
)
"""Newest first. A trainer or engine on CPUs is an environment that scripts/setup.sh can make."""
TRAINERS = tuple(dict.fromkeys(c.trainer for c in MATRIX if c.trainer is not None))
ENGINES = tuple(dict.fromkeys(c.engine for c in MATRIX))


def untested_trainer(core: str, bridge: str) -> str | None:
    """Return a line about a pair whose releases were not tested together; None for one that was."""
    if any((_release(t.core), _release(t.bridge)) == (_release(core), _release(bridge)) for t in TRAINERS):
        return None
    return _untested(f"megatron-core {core} with megatron-bridge {bridge}", TRAINERS)


def untested_engine(vllm: str) -> str | None:
    """Return a line about a vLLM of a release that was not tested; None for one that was."""
    return None if any(_release(e.vllm) == _release(vllm) for e in ENGINES) else _untested(f"vLLM {vllm}", ENGINES)


def named(tested: Iterable[Trainer | Engine]) -> str:
    return "; ".join(dict.fromkeys(map(str, tested)))


def _untested(found: str, tested: Iterable[Trainer | Engine]) -> str:
    return f"{found}: xfer was not tested with it; tested: {named(tested)}"


def _release(version: str) -> tuple[str, ...]:
    """0.19.2, 0.19.0rc1 and 0.19.3+cu13 are all of release 0.19."""
    return tuple(version.split(".")[:2])


if __name__ == "__main__":
    sides: Iterable[Trainer | Engine] = ENGINES if sys.argv[1:] == ["engines"] else TRAINERS
    on_cpus = {side for c in MATRIX if c.where == CPUS for side in (c.trainer, c.engine)}
    print(*(" ".join(astuple(side)) for side in sides if side in on_cpus), sep="\n")
