"""Time refits between emulated hosts beside raw streams and the prediction: real sessions over gloo and shaped interfaces.

    .venvs/trainer/bin/python -m benchmarks.hosts [--map "4B"] [--ranks 1] [--mbit 40] [--json FILE]

Needs root, iproute2 and no GPU. Ranks run in network namespaces, `--ranks` of them on a host, with a NIC of `--mbit` Mbit/s for each
host (tests/support/hosts.py). Mappings have their published parallel shapes; models are scaled so that the floor is about `--seconds`,
and messages with them. All figures are of one run, take turns, and are medians of `--repeats`:

  floor      raw gloo: as many bytes as the plan's busiest NIC carries, between disjoint pairs of NICs, on all of them at once
  raw        raw gloo: one message for each pair of ranks, with the bytes of the plan, all at once: no schedule
  xfer       transfer of a session's refit, from the last rank ready to the decision
  predicted  xfer.plan.predict with a fabric file of the cluster, whose NICs have the floor's rate

Every refit moves other bits, and every worker compares all its bytes after each. The last lines say how many mappings reach the goals:
xfer within 1.15 of the floor, and predicted within 15 % of xfer. CPU: share of the machine's time that all processes used in xfer's
refits; figures of a busy machine (near 100 %) say nothing about the network.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the hosts have no reverse names

from benchmarks.lib import command
from benchmarks.lib.host_ranks import Mapping, MappingWorld, first_fit, nbytes
from benchmarks.lib.layouts import ROWS
from examples.common.ports import free_port
from tests.support.hosts import Cluster, missing
from xfer.cli.plan_report import make_plans
from xfer.plan.fabric import Site
from xfer.plan.fabric_file import read_site
from xfer.plan.predict import Costs, predict
from xfer.plan.subplan import SubPlan

MAPPINGS = [name for name in ROWS if name.startswith(("4B", "30B"))]
FLOOR_GOAL, PREDICTION_GOAL = 1.15, 0.15
SPREAD, FIRST_FIT = "spread", "first-fit"
MIB = 1 << 20
PAYLOAD = 0.956
"""Of a frame's bits, those of TCP's payload."""


@dataclass(frozen=True)
class Measured:
    """One row. Seconds are medians; `xfer_all` has every refit's."""

    mapping: str
    schedule: str
    message_mib: float
    hosts: int
    layers: int
    nbytes: int
    busiest_bytes: int
    floor_s: float
    raw_s: float
    xfer_s: float
    predicted_s: float
    xfer_all: tuple[float, ...]
    wrong: int
    cpu: float


def scaled(name: str, replicas: int, seconds: float, byte_rate: float, nics: int) -> Mapping:
    """The mapping with as many layers as keep the trainers' `nics` busy for `seconds`."""
    pp = 4  # of every mapping the number of stages divides it
    one, two = (nbytes(Mapping(name, pp * k).catalog) for k in (1, 2))
    wanted = seconds * byte_rate * nics / replicas
    return Mapping(name, pp * max(1, round((wanted - 2 * one + two) / (two - one))))


def plans_of(mapping: Mapping, site: Site, bucket: int) -> list[SubPlan]:
    """The plans that a session with these options makes."""
    catalog = mapping.catalog
    sources = [mapping.trainer(r).trainer(catalog, r) for r in range(mapping.of.world)]
    destinations = [mapping.engine(r).engine(catalog, r) for r in range(mapping.workers)]
    return make_plans(catalog, sources, destinations, site, bucket_bytes=bucket)


def pairs_of(plans: list[SubPlan], mapping: Mapping) -> list[tuple[int, int, int]]:
    """(source, destination, bytes) by number of rank on the cluster."""
    out = []
    for i, plan in enumerate(plans):
        t = plan.tables
        for a, b, n in zip(t.share_src.tolist(), t.share_dst.tolist(), (t.share_end - t.share_begin).tolist()):
            out.append((a, b + i * mapping.workers, n))
    total: dict[tuple[int, int], int] = {}
    for a, b, n in out:
        total[a, b] = total.get((a, b), 0) + n
    return [(a, b, n) for (a, b), n in total.items()]


def disjoint(cluster: Cluster, mapping: Mapping, busiest: int) -> list[tuple[int, int, int]]:
    """Streams of `busiest` bytes in all from every host of trainers to one of engines: one from each rank of the host."""
    first, each = mapping.of.world, cluster.ranks
    senders, takers = range(0, first, each), range(first, mapping.ranks, each)
    return [(a + k, b + k, busiest // each) for a, b in zip(senders, takers) for k in range(each)]


def busy_seconds() -> tuple[float, float]:
    """(processors' time that was used, processors' time) since the machine started."""
    with open("/proc/stat") as f:
        ticks = list(map(int, f.readline().split()[1:9]))
    return float(sum(ticks) - ticks[3] - ticks[4]), float(sum(ticks))


def measure(a: argparse.Namespace, name: str) -> list[Measured]:
    """One row for each size of messages."""
    config, sizes, workers, replicas = ROWS[name]
    world = int(sizes["world"])
    hosts = -(-world // a.ranks) + -(-workers * replicas // a.ranks)
    rate = a.mbit * 1e6 / 8 * PAYLOAD
    mapping = scaled(name, replicas, a.seconds, rate, -(-world // a.ranks))
    trainers = list(range(world))
    places = [list(range(world + i * workers, world + (i + 1) * workers)) for i in range(replicas)]
    rows = []
    with tempfile.TemporaryDirectory() as folder, Cluster(hosts, a.ranks, mbit=a.mbit, tcp=a.tcp) as cluster:
        with MappingWorld(cluster, Path(folder), mapping, a.deadline) as w:
            port = free_port()
            each = [{"rank": r} for r in range(mapping.ranks)]
            w.on_ranks("open_streams", each, world=mapping.ranks, address=w.address, port=port)

            def raw(messages: list[tuple[int, int, int]]) -> float:
                return max(w.on_ranks("stream", messages=messages))

            def site_at(rate: float) -> Site:
                path = Path(folder) / "fabric.toml"
                path.write_text(cluster.fabric(trainers, places, rate=8 * rate))
                return read_site(path)

            site = site_at(rate)
            for message, by in [(size, by) for size in a.messages for by in a.schedules]:
                w.on_ranks("first_fit", on=by == FIRST_FIT)
                first_fit(by == FIRST_FIT)
                bucket = max(4096, int(message * MIB / mapping.scale()) // 512 * 512)
                plans = plans_of(mapping, site, bucket)
                p, pairs = predict(plans, site), pairs_of(plans, mapping)
                nic = [i for i, n in enumerate(p.links.names) if " NIC " in n]
                busiest = int(p.link_bytes[nic].max())
                level = disjoint(cluster, mapping, busiest)
                met = w.meet(site=site.to_bytes(), bucket_bytes=bucket)
                if bad := [r for r in met if r["kind"] != "done"]:
                    raise SystemExit(f"{name}: {bad[0]}")
                seconds: dict[str, list[float]] = {"floor": [], "raw": [], "xfer": []}
                wrong, used, passed = 0, 0.0, 0.0
                for turn in range(a.repeats + 1):  # the first warms connections up
                    seconds["floor"].append(raw(level))
                    seconds["raw"].append(raw(pairs))
                    for t in w.trainers:
                        t.value("set", version=turn + 1)
                    before = busy_seconds()
                    said = w.on_all("refit", verify=False)
                    after = busy_seconds()
                    if bad := [r for r in said if r["kind"] != "done"]:
                        raise SystemExit(f"{name}: {bad[0]}")
                    used, passed = used + after[0] - before[0], passed + after[1] - before[1]
                    seconds["xfer"].append(said[0]["value"]["transfer_s"])
                    wrong += w.wrong(turn + 1)
                mid = {k: statistics.median(v[1:]) for k, v in seconds.items()}
                found = predict(plans, site_at(busiest / mid["floor"]), costs=Costs(at_once=2))
                rows.append(
                    Measured(
                        name, by, message, hosts, mapping.depth, p.nbytes, busiest, mid["floor"], mid["raw"], mid["xfer"],
                        found.transfer_s, tuple(seconds["xfer"][1:]), wrong, used / passed,
                    )
                )  # fmt: skip
                print(line(rows[-1]), flush=True)
    return rows


def line(m: Measured) -> str:
    cells = (
        m.mapping, m.schedule, f"{m.message_mib:g}", f"{m.hosts}", f"{m.nbytes / 1e6:.0f}", f"{m.floor_s:.2f}",
        f"{m.raw_s:.2f}", f"{m.xfer_s:.2f}", f"{m.xfer_s / m.floor_s:.2f}", f"{m.predicted_s:.2f}",
        f"{m.predicted_s / m.xfer_s:.2f}", "right" if not m.wrong else f"WRONG: {m.wrong}", f"{m.cpu:.0%}",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "mapping", "schedule", "message, MiB at full size", "hosts", "MB moved", "floor, s", "raw, s", "xfer, s",
    "xfer / floor", "predicted, s", "predicted / xfer", "bits", "CPU",
)  # fmt: skip


def arguments() -> argparse.Namespace:
    p = command.parser("hosts", __doc__)
    p.add_argument("--map", default="", help="only mappings whose name contains this")
    p.add_argument("--ranks", type=int, default=1, help="ranks of a host, which share its NIC")
    p.add_argument("--mbit", type=float, default=100.0, help="rate of a NIC, Mbit/s each way")
    p.add_argument("--tcp", default="reno", help="congestion control, such as bbr; the kernel must have it")
    p.add_argument(
        "--seconds", type=float, default=1.0, help="about the floor of each mapping; decides the size of models"
    )
    p.add_argument(
        "--messages", type=float, nargs="+", default=[64.0], help="largest message, MiB of the real model's bytes"
    )
    p.add_argument(
        "--schedules", nargs="+", choices=(SPREAD, FIRST_FIT), default=[SPREAD],
        help=f"{FIRST_FIT}: messages of pairs on different hosts as of those on one",
    )  # fmt: skip
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--deadline", type=float, default=60.0, help="of one refit, seconds")
    p.add_argument("--json", type=Path, help="write all figures there")
    return p.parse_args()


def main() -> int:
    a = arguments()
    if why := missing():
        print(why)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # hosts and ranks end with this process's objects
    print(
        f"{a.ranks} ranks a host, a NIC of {a.mbit:g} Mbit/s for each host, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}"
    )
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD), flush=True)
    rows = [row for name in MAPPINGS if a.map in name for row in measure(a, name)]
    print()
    for by in a.schedules:
        mine = [m for m in rows if m.schedule == by]
        near = sum(m.xfer_s <= FLOOR_GOAL * m.floor_s for m in mine)
        print(f"{by}: within {FLOOR_GOAL} of the floor: {near} of {len(mine)} rows (goal: 8)")
    told = sum(abs(m.predicted_s / m.xfer_s - 1) <= PREDICTION_GOAL for m in rows)
    wrong = sum(m.wrong for m in rows)
    print(f"predicted within {PREDICTION_GOAL:.0%} of xfer: {told} of {len(rows)} rows")
    print(f"workers with a wrong bit after a refit: {wrong} (goal: 0)")
    if a.json:
        meta = command.facts("hosts", processors=os.cpu_count(), ranks=a.ranks, mbit=a.mbit)
        a.json.write_text(json.dumps({"meta": meta, "hosts": [asdict(m) for m in rows]}) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
