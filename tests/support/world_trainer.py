"""The trainer process of world tests: traces every class of ranks of a Megatron job and leaves the world in a file.

{"do": "row", "folder": checkpoint, "world": file to write, "parallel": TrainerParallel, "provider": …, "versions": n,
 "every": trace each rank of a class, "deriving": (matrix, rule) of those that an engine wants in FP8,
 "native": in block_fp8.NATIVE, trainers that keep weights in FP8 themselves}
"""

import time

import torch

from tests.support.one_process import Trainers, random_weights
from tests.support.one_process_megatron import Build, Whole, import_bridge, trainers
from tests.support.proc import emit, obey
from xfer.engines.hf_spec import checkpoint_specs
from xfer.mesh.parallel import TrainerParallel


def row(
    folder: str,
    world: str,
    parallel: dict,
    provider: dict,
    versions: int,
    every: bool = False,
    deriving: list = (),
    native: str = "",
) -> None:
    began = time.perf_counter()
    specs = checkpoint_specs(folder)
    weights = [Whole.imported(folder, random_weights(specs, v)) for v in range(versions)]
    imported = time.perf_counter()
    build = Build(TrainerParallel(**parallel), provider=provider)
    made = trainers(folder, build, weights, deriving=[tuple(pair) for pair in deriving], native=native)
    made.save(world)
    traced = time.perf_counter()
    unlike = _unlike(made, trainers(folder, build, weights, every=True)) if every else []
    emit(
        "row",
        ranks=len(made.class_of),
        classes=len(made.classes),
        fragments=sum(len(made.classes[c].table) for c in made.class_of),
        import_s=imported - began,
        trace_s=traced - imported,
        unlike=unlike,
    )


def _unlike(by_class: Trainers, by_rank: Trainers) -> list[int]:
    """Ranks that are not what the first rank of their class is."""

    def same(rank: int, c: int) -> bool:
        pairs = ((a, b) for v, w in zip(by_class.weights, by_rank.weights) for a, b in zip(v[c], w[rank]))
        alike = by_class.classes[c].digest() == by_rank.classes[rank].digest()
        return alike and all(torch.equal(a, b) for a, b in pairs)

    return [rank for rank, c in enumerate(by_class.class_of) if not same(rank, c)]


if __name__ == "__main__":
    import_bridge()
    from tests.support import families

    families.register()
    obey(row)
