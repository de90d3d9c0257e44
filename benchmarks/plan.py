"""Measure what a plan costs each rank (seconds, memory, bytes through the rendezvous), and what tracing a layout costs.

    .venvs/trainer/bin/python -m benchmarks.plan                      # every mapping of lib/layouts.py
    .venvs/trainer/bin/python -m benchmarks.plan --row "DeepSeek-V3" [--unfolded] [--no-fabric] [--json FILE]
    .venvs/trainer/bin/python -m benchmarks.plan --trace trainer --row "30B EP4xTP2xDP2" [--rank 0]
    .venvs/engine/bin/python  -m benchmarks.plan --trace engine  --row "30B EP4xTP2xDP2" [--rank 0]

A plan: the layouts of all ranks are declared (lib/layouts.py), packed and announced as in a session. Then one worker (its one
sub-plan) and one trainer (the sub-plans of all replicas) plan in a process each, from what the coordinator would send them.
Printed are that process's seconds and peak memory, with Python and numpy. "again" is a new process that reads the plans from
disk. Links are hosts of 8 GPUs with NICs of 400 Gb/s and NVLink of 396 GB/s; with --no-fabric all ranks are equally near.
Bytes are those that the coordinator receives and sends, by the session's own code.

A trace: the framework's own code at full size, on meta tensors or untouched memory, for one rank: Bridge's export of a
Megatron-Core model, or vLLM's load_weights. Its fragments are compared with the declared ones. Before its first refit a rank
spends trace + inventory + plan; imports are shown apart.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
START = time.perf_counter(), time.process_time()

import msgspec  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks.lib import command  # noqa: E402
from benchmarks.lib.layouts import CONFIGS, ROWS, Model, engine, trainer  # noqa: E402
from xfer.coordinator import messages as m  # noqa: E402
from xfer.coordinator.layouts import (  # noqa: E402
    LayoutExchange,
    Roll,
    pack,
    unpack_one,
)
from xfer.mesh.parallel import EngineParallel, TrainerParallel  # noqa: E402
from xfer.plan.cache import PlanCache  # noqa: E402
from xfer.plan.fabric import Fabric, Site  # noqa: E402
from xfer.plan.options import PlanOptions  # noqa: E402
from xfer.rendezvous.client import Questions  # noqa: E402
from xfer.rendezvous.layouts import Shelf  # noqa: E402
from xfer.trace.catalog import Catalog  # noqa: E402

BUCKET = 64 << 20


class Clock:
    """Wall and processor seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def __call__(self, name: str, call):
        t = time.perf_counter(), time.process_time()
        out = call()
        spent = self.seconds.setdefault(name, [0.0, 0.0])
        spent[0] += time.perf_counter() - t[0]
        spent[1] += time.process_time() - t[1]
        return out

    def rounded(self) -> dict[str, list[float]]:
        return {n: [round(x, 3) for x in s] for n, s in self.seconds.items()}


def peak_gib() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)


class Job(msgspec.Struct):
    """What a rank gets from the coordinator: the catalog, both sides' layouts, and the options of each replica's plan."""

    catalog: bytes  # packed
    rolls: list[bytes]  # digests of the trainers' roll and of a replica's
    answers: list[tuple[tuple[bytes, ...], bytes]]  # what a rank asks for, and the answer
    site: bytes
    replicas: int
    seconds: float = 3600.0

    def options(self, replica: int, links: Site | None) -> PlanOptions:
        site = {"site": links, "replica": replica} if links is not None else {}
        return PlanOptions(bucket_bytes=BUCKET, rotation=replica, rotations=self.replicas, **site)


# ---- one rank, in a process of its own


def child(role: str, path: str, cache: str) -> None:
    """Plan as a lane of a session does; print the figures as JSON."""
    job = msgspec.msgpack.decode(Path(path).read_bytes(), type=Job)
    clock, answers = Clock(), dict(job.answers)
    questions = Questions(lambda x, _: questions.put(m.Reply(x.call, answers[x.digests])), "a rank")
    shelf = Shelf(questions)
    clock.seconds["imports"] = [time.perf_counter() - START[0], time.process_time() - START[1]]
    catalog = clock("catalog", lambda: Catalog.from_bytes(unpack_one(job.catalog, "catalog")))
    links = clock("links", lambda: Site.from_bytes(job.site) if job.site else None)
    disk = PlanCache(cache, 8 << 30) if cache else None
    parts, rank = [], 0
    if role == "worker":
        trainers = unpack_one(answers[job.rolls[0],], "roll")
        rank = len(Roll.from_content(trainers).inventories)
    for r in range(job.replicas if role == "trainer" else 1):
        inputs = m.PlanInputs(r, 1, *job.rolls, replicas=job.replicas, deadline_s=job.seconds)
        part, _ = clock(
            "plan", lambda r=r, i=inputs: shelf.plan(i, rank, catalog, job.options(r, links), disk, lambda: False)
        )
        parts.append(part)
    first, s = parts[0], parts[0].summary
    figures = {
        "seconds": clock.rounded(), "peak_gib": peak_gib(), "sub_plans": len(parts), "rows": sum(len(p.program.rows) for p in parts),
        "pieces": int(sum(s.pieces_in)), "messages": s.messages, "waves": s.waves, "digest": first.digest[:12],
        "part_bytes": len(first.to_bytes()),
    }  # fmt: skip
    print(json.dumps(figures))


# ---- the job


def measure(name: str, folded: bool, fabric: bool) -> dict:
    config, sizes, workers, replicas = ROWS[name]
    of, model = TrainerParallel(**sizes), Model.named(config)
    catalog = model.catalog()
    clock = Clock()
    one = trainer(model, of, 0, folded=folded)
    clock("trainer inventory", lambda: one.trainer(catalog, 0))
    one = engine(model, EngineParallel(tp=workers), 0)
    clock("worker inventory", lambda: one.engine(catalog, 0))
    sources = [trainer(model, of, r, folded=folded).trainer(catalog, r) for r in range(of.world)]
    destinations = [engine(model, EngineParallel(tp=workers), r).engine(catalog, r) for r in range(workers)]
    hosts = -(-of.world // 8) + -(-workers * replicas // 8)
    site = b""
    if fabric:
        links = Fabric.uniform(hosts, nvlink=396 * 10**9, nic=48_500_000_000, local=1600 * 10**9)
        site = Site.packed(links, of.world, replicas, workers).to_bytes()
    relay = LayoutExchange(lambda d: owners.get(d, []), lambda ask: None)
    inventories = {i.digest().encode(): i for i in (*sources, *destinations)}

    class Everybody:
        """All ranks of a class, and one more that asks for layouts."""

        label = "a rank"

        def send(self, message: m.Message) -> None:
            if isinstance(message, m.LayoutAsk):
                content = inventories[message.inventory].content()
                relay.came(self, m.Layout(message.inventory, pack([content])))
            else:
                answers[asked[message.call]] = message.value

    rank = Everybody()
    owners = {d: [rank] for d in inventories}
    rolls = [
        relay.roll([i.digest().encode() for i in side], [f"host{k // 8}" for k in range(len(side))], keep=4)
        for side in (sources, destinations)
    ]
    t = time.perf_counter()
    asked = [(roll,) for roll in rolls] + [
        tuple(dict.fromkeys(i.digest().encode() for i in side)) for side in (sources, destinations)
    ]
    answers: dict[tuple[bytes, ...], bytes] = {}
    for call, digests in enumerate(asked):
        relay.fetch(rank, m.Fetch(call, digests))
    packing = time.perf_counter() - t
    packed_catalog = pack([catalog.to_bytes()])
    job = Job(packed_catalog, rolls, list(answers.items()), site, replicas)
    per_rank = {"layouts": relay.sent, "catalog": len(packed_catalog), "site": len(site)}
    ranks = of.world + workers * replicas
    inputs = len(m.encode(m.PlanInputs(0, 1, *rolls, replicas=replicas)))
    # A trainer hears of every replica with its roll of hosts, and gets the layouts of equal replicas once.
    hosts_of = len(answers[rolls[1],])
    told = of.world * replicas * (inputs + hosts_of) + workers * replicas * inputs
    total = ranks * (relay.sent + len(packed_catalog) + len(site)) + told
    out = {
        "row": name, "ranks": ranks, "trainers": of.world, "workers": workers, "replicas": replicas,
        "tensors": len(catalog.specs), "classes": [len({i.digest() for i in side}) for side in (sources, destinations)],
        "fragments": [len(i.table) for i in (sources[0], destinations[0])], "folded": folded, "fabric": fabric,
        "bytes_to_one_rank": sum(per_rank.values()), "bytes_to_one_rank_parts": per_rank,
        "bytes_to_hub": relay.received, "bytes_from_hub": total,
        "bytes_without_classes": ranks * sum(len(i.content()) for i in (*sources, *destinations)),
        "hub_packing_s": round(packing, 2), "inventory_s": clock.rounded(),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "job"
        path.write_bytes(msgspec.msgpack.encode(job))
        for role in ("worker", "trainer"):
            for again in ("", " again"):
                words = [
                    sys.executable,
                    "-m",
                    "benchmarks.plan",
                    "--child",
                    role,
                    str(path),
                    str(Path(work) / f"{role}.cache"),
                ]
                done = subprocess.run(words, capture_output=True, text=True, check=True)
                out[role + again] = json.loads(done.stdout)
    return out


def show(f: dict) -> None:
    def line(name: str) -> str:
        x = f[name]
        spent = {k: v for k, v in x["seconds"].items() if k != "imports"}
        wall, cpu = (sum(v[i] for v in spent.values()) for i in (0, 1))
        parts = ", ".join(f"{k} {v[0]:.2f}" for k, v in spent.items())
        return f"  {name:14} {wall:6.2f} s ({cpu:.2f} CPU: {parts}), peak {x['peak_gib']:.2f} GiB, {x['sub_plans']} sub-plans"

    w = f["worker"]
    print(
        f"{f['row']}: {f['trainers']} + {f['replicas']} x {f['workers']} ranks, {f['tensors']:,} tensors, classes "
        f"{f['classes']}, fragments {f['fragments']}, {w['pieces']:,} pieces and {w['messages']:,} messages a replica"
    )
    for name in ("worker", "worker again", "trainer", "trainer again"):
        print(line(name))
    print(
        f"  bytes: {f['bytes_to_one_rank']:,} to a rank, {f['bytes_to_hub']:,} to the coordinator, {f['bytes_from_hub']:,} from it "
        f"(each rank every inventory, unpacked: {f['bytes_without_classes']:,}); inventory {f['inventory_s']}"
    )
    sys.stdout.flush()


# ---- traces


def trace_engine(name: str, rank: int) -> dict:
    """Read one vLLM worker's layout as its session does, from the model class on meta tensors."""
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    clock = Clock()
    import torch

    from xfer.engines.hf_spec import canonical_specs
    from xfer.engines.meta_model import make_meta_model
    from xfer.engines.vllm_layout import EngineModel
    from xfer.engines.vllm_ranks import rank_of
    from xfer.plan.inventory import engine_inventory

    config, _, workers, _ = ROWS[name]
    hf = json.loads((CONFIGS / f"{config}.json").read_text())
    catalog = Model.named(config).catalog()
    clock("imports", lambda: __import__("vllm.model_executor.models"))
    clock("names by the engine's config", lambda: canonical_specs(hf))
    with rank_of(hf, EngineParallel(tp=workers), rank) as vllm_config, torch.no_grad():
        live = clock("(model)", lambda: make_meta_model(vllm_config))
        layout = clock("trace", lambda: EngineModel(vllm_config, live, torch.device("meta")).read(catalog))
    inventory = clock(
        "inventory",
        lambda: engine_inventory(
            catalog, rank=0, host="", roots=layout.roots, fragments=layout.traced.fragments, fills=layout.traced.fills,
            footprint=layout.footprint, kept=layout.kept, staged=layout.staged, reads=layout.traced.reads,
        ),
    )  # fmt: skip
    declared = engine(Model.named(config), EngineParallel(tp=workers), rank).engine(catalog, 0)
    return _traced(name, rank, clock, layout.traced.fragments, inventory, declared)


def trace_trainer(name: str, rank: int) -> dict:
    """Read one Megatron-Core rank's layout by Bridge's own export; parameters are untouched memory."""
    clock = Clock()
    from xfer.plan.inventory import trainer_inventory
    from xfer.trainers.megatron import MegatronTrainer
    from xfer.trainers.megatron_ranks import chunks_of, import_bridge, rank_of, write_no_parameter

    config, sizes, _, _ = ROWS[name]
    of, catalog = TrainerParallel(**sizes), Model.named(config).catalog()
    bridge_class = clock("imports", import_bridge)
    write_no_parameter()
    with rank_of(of, rank):
        from transformers import AutoConfig

        bridge = bridge_class.from_hf_config(AutoConfig.from_pretrained(_folder(config)))
        chunks = clock("(model)", lambda: chunks_of(bridge, of, _uneven(Model.named(config), of, rank)))
        source = MegatronTrainer(chunks, bridge, hf_names=[s.name for s in catalog.specs])
        layout = clock("trace", source.read)
        inventory = clock(
            "inventory",
            lambda: trainer_inventory(catalog, rank=0, host="", roots=layout.roots, fragments=layout.traced.fragments),
        )
    declared = trainer(Model.named(config), of, rank, folded=False).trainer(catalog, 0)
    return _traced(name, rank, clock, layout.traced.fragments, inventory, declared)


def _folder(config: str) -> str:
    folder = tempfile.mkdtemp(prefix="xfer-config-")
    (Path(folder) / "config.json").write_text((CONFIGS / f"{config}.json").read_text())
    return folder


def _uneven(model: Model, of: TrainerParallel, rank: int) -> dict:
    """Provider options for unequal stages: the last stage has the remaining layers, as such jobs are configured."""
    if model.layers % of.pp == 0:
        return {}
    per = -(-model.layers // of.pp)
    return {"num_layers_in_last_pipeline_stage": model.layers - per * (of.pp - 1)}


def _traced(name: str, rank: int, clock: Clock, fragments, inventory, declared) -> dict:
    size = lambda i: int(i.table.extent.prod(axis=1).sum())  # noqa: E731
    return {
        "row": name, "rank": rank, "seconds": clock.rounded(), "peak_gib": peak_gib(), "traced": len(fragments),
        "fragments": len(inventory.table), "declared": len(declared.table), "elements": size(inventory),
        "declared_elements": size(declared), "content_bytes": len(inventory.content()),
        "same_boxes": _boxes(inventory) == _boxes(declared),
    }  # fmt: skip


def _boxes(inventory) -> bytes:
    """The boxes of checkpoint tensors that an inventory holds, without their places."""
    t = inventory.table
    columns = np.concatenate([t.tensor[:, None].astype(np.int64), t.origin, t.extent], axis=1)
    return np.unique(columns, axis=0).tobytes()


def main() -> None:
    p = command.parser("plan", __doc__)
    p.add_argument("--row", default="", help="only mappings whose name contains this")
    p.add_argument("--unfolded", action="store_true", help="give every trainer parameter its own storage")
    p.add_argument("--no-fabric", action="store_true", help="plan without a description of links")
    p.add_argument("--trace", choices=["engine", "trainer"], help="trace one rank instead of planning")
    p.add_argument("--rank", type=int, default=0, help="the rank to trace")
    p.add_argument("--json", help="write all figures there, JSON")
    p.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.child:
        child(*a.child)
        return
    found = []
    for name in [r for r in ROWS if a.row in r]:
        if a.trace:
            found.append((trace_engine if a.trace == "engine" else trace_trainer)(name, a.rank))
            print(json.dumps(found[-1]), flush=True)
            break  # one model per process
        found.append(measure(name, not a.unfolded, not a.no_fabric))
        show(found[-1])
    if a.json:
        Path(a.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
