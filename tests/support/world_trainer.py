"""The trainer process of world tests: traces every class of ranks of a Megatron job and leaves the world in a file.

{"do": "row", "folder": checkpoint, "world": file to write, "parallel": TrainerParallel, "provider": …, "versions": n}
"""

import time
import traceback

from tests.support.proc import commands, emit
from xfer.engines.hf_spec import checkpoint_specs
from xfer.mesh.parallel import TrainerParallel
from xfer.testing.te_everywhere import import_bridge
from xfer.testing.world import random_weights
from xfer.testing.world_megatron import Build, Whole, trainers


def row(folder: str, world: str, parallel: dict, provider: dict, versions: int) -> dict:
    began = time.perf_counter()
    specs = checkpoint_specs(folder)
    weights = [Whole.imported(folder, random_weights(specs, v)) for v in range(versions)]
    imported = time.perf_counter()
    build = Build(TrainerParallel(**parallel), provider=provider)
    made = trainers(folder, build, weights)
    made.save(world)
    return dict(
        ranks=len(made.class_of),
        classes=len(made.classes),
        fragments=sum(len(made.classes[c].table) for c in made.class_of),
        import_s=imported - began,
        trace_s=time.perf_counter() - imported,
    )


def main() -> None:
    import_bridge()
    from tests.support import families

    families.register()
    for command in commands():
        try:
            command.pop("do")
            emit("row", **row(**command))
        except Exception:
            emit("failed", text=traceback.format_exc())


if __name__ == "__main__":
    main()
