"""One rank of four: index digits of every family's first layout through Bridge's real conversion and real collectives.

`python family_digits.py FOLDER`, started by megatron_launch.py. FOLDER/specs.json: the checkpoint tensors of each family
(tests/support/specs_main.py). Rank 0 writes what was seen to FOLDER/seen.json: family -> what differs, per rank.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from tests.support.one_process_megatron import Build, bridge_of, chunks_of, import_bridge

import_bridge()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from examples.common import megatron_cpu  # noqa: E402
from tests.support.families import FAMILIES, Family, register  # noqa: E402
from tests.support.family_trainer import paint  # noqa: E402
from tests.support.one_process import random_weights  # noqa: E402
from xfer.errors import LayoutError  # noqa: E402
from xfer.trace.fragment import TensorSpec  # noqa: E402
from xfer.trainers.megatron import MegatronTrainer  # noqa: E402


def differs(family: Family, folder: Path) -> dict[str, list[str]]:
    """`differ`: tensors of which digits and trace say different things; `computed`, `refused`: of the two refusals."""
    p = family.trainer[0]
    build = Build(p, distopt=False, provider=family.provider)
    with megatron_cpu.parallel(tp=p.tp, pp=p.pp, vpp=p.vpp, ep=p.ep, etp=p.etp):
        bridge = bridge_of(folder)
        chunks = chunks_of(bridge, build)
        traced = MegatronTrainer(chunks, bridge).read().traced
        computed = sorted({r.target for r in traced.recipes})
        try:
            probed = MegatronTrainer(chunks, bridge, probe="all").read().traced
        except LayoutError as e:
            return dict(differ=[], computed=computed, refused=sorted(line.split(":")[0] for line in e.violations))
        a, b = paint(probed), paint(traced)
        differ = sorted(n for n in a.keys() | b.keys() if n not in a or n not in b or not torch.equal(a[n], b[n]))
        return dict(differ=differ, computed=computed, refused=[])


def main() -> None:
    folder = Path(sys.argv[1])
    register()
    rank, _ = megatron_cpu.init_world()
    specs = json.loads((folder / "specs.json").read_text())
    seen = {}
    for number, family in enumerate(f for f in FAMILIES if f.trainer):
        here = folder / str(number)
        if rank == 0:
            here.mkdir()
            (here / "config.json").write_text(json.dumps(family.config))
            tensors = random_weights((TensorSpec(n, tuple(s), d) for n, s, d in specs[family.name]), 0)
            save_file(tensors, str(here / "model.safetensors"), metadata={"format": "pt"})
        dist.barrier()
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, differs(family, here))
        seen[family.name] = everyone
    if rank == 0:
        (folder / "seen.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # peers may wait in a collective for this rank
