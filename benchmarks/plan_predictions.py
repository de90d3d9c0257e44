"""Print the tables of docs/plan_predictions.md: predicted seconds of every published mapping beside the published ones, and of some
mappings with relays and without; or by how much more bytes enter a host than it needs.

    .venvs/trainer/bin/python -m benchmarks.plan_predictions
    .venvs/trainer/bin/python -m benchmarks.plan_predictions --relay
    .venvs/trainer/bin/python -m benchmarks.plan_predictions --into-hosts
    .venvs/trainer/bin/python -m benchmarks.plan_predictions --row "30B EP4xTP2xDP2" [--html FILE] [--json FILE]

Layouts are declared (lib/layouts.py). `xfer plan` traces them instead, and agrees where both were tried
(tests/functional/test_cli_plan.py). Planner, links and predictor are those of `xfer plan`, on the fabric that it assumes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec

from benchmarks.lib import command
from benchmarks.lib.layouts import FP8_ROWS, ROWS, Model, engine, trainer
from xfer.cli.describe import HOST, LOCAL, NIC, NVLINK
from xfer.cli.html import page, seconds
from xfer.cli.layouts.processes import classes
from xfer.cli.plan_report import Header, Report, make_report
from xfer.mesh.box import Box
from xfer.mesh.parallel import EngineParallel, TrainerParallel
from xfer.plan.explain import size
from xfer.plan.fabric import Fabric, Host, Nic, Site
from xfer.plan.inventory import Inventory
from xfer.plan.planner import plan_replicas
from xfer.plan.predict import predict
from xfer.plan.program import ITEM
from xfer.trace.catalog import Catalog
from xfer.transport.p2p import WAVE_BYTES

ALL = {**ROWS, **FP8_ROWS}
BUCKETS = (240, 64)
"""Sizes of messages, MiB: the default of sessions on GPUs, and a smaller one (`bucket_bytes=`)."""
PUBLISHED = {
    "4B DP8 -> DP8": "0.07-0.08",
    "4B DP8 -> TP8": "0.07-0.08",
    "4B PP2xDP4 -> TP4xDP2": "0.09",
    "4B PP4xDP2 -> TP4xDP2": "0.11-0.15",
    "4B TP2xPP2xDP2 -> TP4xDP2": "0.11-0.15",
    "4B TP2xDP4 -> TP4xDP2": "0.11-0.15",
    "30B EP4xTP2xDP2 -> TP4xDP4": "0.54-0.67",
    "30B EP4xTP2xPP2 -> TP4xDP4": "0.48-0.55",
    "30B EP8xPP2 -> TP2xDP8": "0.48-0.55",
    "30B EP8xPP2 -> TP8xDP2": "0.48-0.55",
    "235B TP4xPP8xEP16 -> TP8xDP16": "4.56-4.85",
    "DeepSeek-V3 PP16xEP16 -> TP32xDP8": "7.65-9.94",
    **{name: "0.05-0.15" if name.startswith("4B") else "1.21-1.69" for name in FP8_ROWS},
}
"""Seconds of a refit that NeMo-RL reports for its own. Rows that share a line there share its range."""

TRACED = {
    "nano-v3 EP8xTP2 -> TP4xDP4": (
        "0.48-0.55",
        "nemotron-3-nano-30b-a3b world=16 tp=2 ep=8 etp=1",
        "tp=4 replicas=4",
    ),
    "super-v3 EP8xTP8xPP2xDP2 -> TP8xDP2": (
        "1.66-1.94",
        "nemotron-3-super-120b-a12b world=32 tp=8 pp=2 ep=8 etp=1",
        "tp=8 replicas=2",
    ),
}
"""Published seconds and both sides of hybrid models, which `xfer plan` traces because they are not declared. The latent experts of super-v3
need Bridge 0.6."""


EMULATED = (
    "4B DP8 -> DP8",
    "4B DP8 -> TP8",
    "4B DP8 -> TP4xDP2",
    "4B PP2xDP4 -> TP4xDP2",
    "4B PP4xDP2 -> TP4xDP2",
    "4B TP2xPP2xDP2 -> TP4xDP2",
    "4B TP2xDP4 -> TP4xDP2",
    "30B EP4xTP2xDP2 -> TP4xDP4",
    "30B EP4xTP2xPP2 -> TP4xDP4",
    "30B EP8xPP2 -> TP2xDP8",
    "30B EP8xPP2 -> TP8xDP2",
    "30B EP8xDP2 -> TP2xDP8",
)
"""Mappings whose parallel shapes, with scaled models, were measured between emulated hosts (benchmarks/RESULTS.md)."""
RELAYED = (
    "4B DP8 -> DP8",
    "4B DP8 -> TP8",
    "4B TP2xDP4 -> TP4xDP2",
    "30B EP4xTP2xDP2 -> TP4xDP4",
    "30B EP8xPP2 -> TP2xDP8",
    "235B TP4xPP8xEP16 -> TP8xDP16",
)
"""Mappings of the second table: one to eight replicas on a host."""


def ranks(
    model: Model, of: TrainerParallel, workers: int, *, fp8: bool = False, folded: bool = True
) -> tuple[Catalog, list[Inventory], list[Inventory]]:
    """The catalog, the trainers and the workers of one replica, as declared. `folded`: see `trainer`."""
    catalog, class_of = model.catalog(fp8=fp8), classes(of, of.world)
    made = {c: trainer(model, of, class_of.index(c), folded=folded).trainer(catalog, 0) for c in sorted(set(class_of))}
    served = [engine(model, EngineParallel(tp=workers), r).in_fp8(catalog) for r in range(workers)]
    sources = [made[c].at(r) for r, c in enumerate(class_of)]
    return catalog, sources, [layout.engine(catalog, r) for r, layout in enumerate(served)]


def job(name: str, gpus_of_nic: int = 1) -> tuple[Catalog, list[Inventory], list[Inventory], Site]:
    """The ranks of a mapping on whole hosts: trainers on the first ones, engines on the others. `gpus_of_nic`: GPUs that share a NIC."""
    config, sizes, workers, replicas = ALL[name]
    of = TrainerParallel(**sizes)
    catalog, sources, destinations = ranks(Model.named(config), of, workers, fp8=name in FP8_ROWS)
    hosts = -(-of.world // HOST) + -(-workers * replicas // HOST)
    gpus = tuple(range(HOST))
    nics = tuple(Nic(gpus[i : i + gpus_of_nic], NIC, i) for i in gpus[::gpus_of_nic])
    fabric = Fabric(tuple(Host(f"host{h}", (gpus,), NVLINK, nics, local=LOCAL) for h in range(hosts)))
    return catalog, sources, destinations, Site.packed(fabric, of.world, replicas, workers)


def reports(name: str, buckets: Sequence[int] = BUCKETS, *, gpus_of_nic: int = 1, relay: bool = False) -> list[Report]:
    """One report per size of `buckets`, MiB, of `job`."""
    catalog, sources, destinations, site = job(name, gpus_of_nic)
    share = "GPU" if gpus_of_nic == 1 else f"{gpus_of_nic} GPUs"
    words = f"hosts of {HOST} GPUs, NVLink {NVLINK / 1e9:g} GB/s, a NIC of {NIC / 1e9:g} GB/s per {share}"
    left, right = name.split(" -> ")
    out = []
    for bucket in buckets:
        wave = max(WAVE_BYTES["cuda"], bucket << 20)
        how = dict(bucket_bytes=bucket << 20, wave_bytes=wave, relay=relay)
        plans = plan_replicas(catalog, sources, destinations, site, **how)
        note = f"Declared layouts, none was traced. Messages of at most {bucket} MiB."
        header = Header(name, left.split()[-1], right, words, (note,))
        out.append(make_report(header, catalog, plans, site, relay=relay))
    return out


def relayed(some: Sequence[str]) -> None:
    """Print floor and prediction of these mappings, with relays and without, for NICs of one GPU and of a whole host."""
    print("| mapping | a NIC per GPU | with relays | a NIC per host | with relays |\n|---|---|---|---|---|")
    for name in some:
        cells = []
        for gpus in (1, HOST):
            for relay in (False, True):
                (r,) = reports(name, BUCKETS[:1], gpus_of_nic=gpus, relay=relay)
                cells.append(f"{seconds(r.transfer_s)} ({seconds(r.floor_s)})")
        print("| " + " | ".join((name, *cells)) + " |", flush=True)


def distinct(inventories: Iterable[Inventory]) -> int:
    """Bytes that some of these workers need, each counted once."""
    seen: dict[int, list[Box]] = {}
    total = 0
    for t in (i.table for i in inventories):
        for tensor, dtype, *box in zip(*(x.tolist() for x in (t.tensor, t.dtype, t.origin, t.extent))):
            before, new = seen.setdefault(tensor, []), [Box(*map(tuple, box))]
            for b in before:
                new = [rest for n in new for rest in n.without(b)]
            before += new
            total += ITEM[dtype] * sum(n.size for n in new)
    return total


def into_hosts(some: Sequence[str]) -> None:
    """Print the bytes that enter a host of engines, and the bytes that its workers need, for the host with the largest ratio."""
    print("| mapping | each replica by itself | with relays |\n|---|---|---|")
    for name in some:
        catalog, sources, destinations, site = job(name)
        at = [(site.fabric.links.host[gpu], w) for replica in site.replicas for w, gpu in enumerate(replica)]
        workers = {h: frozenset(w for g, w in at if g == h) for h, _ in at}
        of = {group: distinct(destinations[w] for w in sorted(group)) for group in set(workers.values())}
        cells = []
        for relay in (False, True):
            plans = plan_replicas(catalog, sources, destinations, site, bucket_bytes=BUCKETS[0] << 20, relay=relay)
            moved = predict(plans, site, relay=relay).host_bytes
            both = [(int(moved[:, h].sum() - moved[h, h]), of[group]) for h, group in workers.items()]
            came, needed = max(both, key=lambda x: x[0] / x[1])
            cells.append(f"{size(came)} for {size(needed)}, {came / needed:.3f}")
        print("| " + " | ".join((name, *cells)) + " |", flush=True)


def traced(trainer: str, engine: str) -> list[dict]:
    """One report per size of BUCKETS, as `xfer plan --json` prints it."""
    out = []
    for bucket in BUCKETS:
        words = [sys.executable, "-m", "xfer", "plan", "--json", "-", "--bucket-mib", str(bucket)]
        words += ["--trainer", trainer, "--engine", engine]
        done = subprocess.run(words, stdout=subprocess.PIPE, check=True)
        out.append(json.loads(done.stdout)["plan"])
    return out


def main() -> None:
    p = command.parser("plan_predictions", __doc__)
    p.add_argument("--row", default="", help="only mappings whose name contains this")
    p.add_argument("--html", help="write the page of the last mapping there")
    p.add_argument("--json", help="write the reports there, as `xfer plan --json` prints them")
    p.add_argument("--relay", action="store_true", help="the table of relays instead")
    p.add_argument("--into-hosts", action="store_true", help="bytes that enter hosts instead")
    a = p.parse_args()
    if a.into_hosts:
        return into_hosts([r for r in ALL if a.row in r])
    if a.relay:
        return relayed([r for r in RELAYED if a.row in r])
    head = (
        "mapping",
        "published",
        "floor",
        *(f"predicted, {b} MiB" for b in BUCKETS),
        "moved",
        "a full broadcast",
        "busiest link",
        "shape measured",
    )
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head), flush=True)
    found = []
    for name in [r for r in ALL if a.row in r]:
        began, both = time.process_time(), reports(name)
        r = both[0]
        cells = (
            name, f"{PUBLISHED[name]} s" if name in PUBLISHED else "-", seconds(r.floor_s),
            *(seconds(x.transfer_s) for x in both), size(r.nbytes), size(r.broadcast_bytes),
            f"{r.busiest[0].name}, {size(r.busiest[0].nbytes)}", "emulated hosts" if name in EMULATED else "-",
        )  # fmt: skip
        print("| " + " | ".join(cells) + " |", flush=True)
        print(f"{name}: {time.process_time() - began:.1f} CPU s", file=sys.stderr, flush=True)
        found.append(msgspec.to_builtins(r))
        if a.html:
            Path(a.html).write_text(page(r))
    for name, (published, left, right) in TRACED.items():
        if a.row in name:
            both = traced(left, right)
            r = both[0]
            cells = (
                name, f"{published} s", seconds(r["floor_s"]), *(seconds(x["transfer_s"]) for x in both),
                size(r["nbytes"]), size(r["broadcast_bytes"]), f"{r['busiest'][0]['name']}, {size(r['busiest'][0]['nbytes'])}", "-",
            )  # fmt: skip
            print("| " + " | ".join(cells) + " |", flush=True)
            found.append(r)
    if a.json:
        Path(a.json).write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
