"""Time refits between emulated hosts beside raw streams and the prediction: real sessions over gloo and shaped interfaces.

    .venvs/trainer/bin/python -m benchmarks.hosts [--map "4B"] [--ranks 1] [--mbit 40] [--json FILE]
    .venvs/trainer/bin/python -m benchmarks.hosts --map "4B DP8 -> DP8" --ranks 4 --apart --relay none chain ring

Needs root, iproute2 and no GPU. Ranks run in network namespaces, `--ranks` of them on a host, with a NIC of `--mbit` Mbit/s for each
host, or with `--apart` for each rank (tests/support/hosts.py). `--relay` compares replicas that hand bytes on: in a chain, whose first
replica receives all, and in a ring, whose replicas receive a share each. "into a host": the bytes that entered a host of engines, for
one of those that its ranks need (the most of all hosts). Mappings have their published parallel shapes; models are scaled so that the
floor is about `--seconds`, and messages with them. All figures are of one run, take turns, and are medians of `--repeats`:

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
import itertools
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

import numpy as np

from benchmarks.lib import command
from benchmarks.lib.host_ranks import Mapping, MappingWorld, first_fit, nbytes
from benchmarks.lib.layouts import SHAPES
from examples.common.ports import free_port
from tests.support.hosts import BUFFER_S, Cluster, missing
from xfer.plan.fabric import Site
from xfer.plan.fabric_file import read_site
from xfer.plan.planner import plan_replicas
from xfer.plan.predict import Costs, Prediction, own, predict, sources
from xfer.plan.subplan import SubPlan

MAPPINGS = [name for name in SHAPES if name.startswith(("4B", "30B"))]
FLOOR_GOAL, PREDICTION_GOAL = 1.15, 0.15
SPREAD, FIRST_FIT = "spread", "first-fit"
NONE, CHAIN, RING = "none", "chain", "ring"
MIB = 1 << 20
PAYLOAD = 0.956
"""Of a frame's bits, those of TCP's payload."""


@dataclass(frozen=True)
class Measured:
    """One row. Seconds are medians; `xfer_all` has every refit's."""

    mapping: str
    schedule: str
    relay: str
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
    into_host: float


def scaled(name: str, replicas: int, seconds: float, byte_rate: float, nics: int) -> Mapping:
    """The mapping with as many layers as keep the trainers' `nics` busy for `seconds`."""
    pp = 4  # of every mapping the number of stages divides it
    one, two = (nbytes(Mapping(name, pp * k).catalog) for k in (1, 2))
    wanted = seconds * byte_rate * nics / replicas
    return Mapping(name, pp * max(1, round((wanted - 2 * one + two) / (two - one))))


def plans_of(mapping: Mapping, site: Site, bucket: int, relay: bool) -> list[SubPlan]:
    """The plans that a session with these options makes."""
    catalog = mapping.catalog
    sources = [mapping.trainer(r).trainer(catalog, r) for r in range(mapping.of.world)]
    destinations = [mapping.engine(r).engine(catalog, r) for r in range(mapping.workers)]
    return plan_replicas(catalog, sources, destinations, site, bucket_bytes=bucket, relay=relay)


def predicted(plans: list[SubPlan], site: Site, how: str, costs: Costs | None = None) -> Prediction:
    """Of a chain: of the replicas that receive."""
    if how != CHAIN:
        return predict(plans, site, costs=costs, relay=how == RING)
    first = sorted({some[0] for some in site.together(range(len(plans)))})
    return predict([plans[i] for i in first], site, replicas=first, costs=costs)


def pairs_of(plans: list[SubPlan], mapping: Mapping, site: Site, how: str) -> list[tuple[int, int, int]]:
    """(source, destination, bytes) by number of rank on the cluster."""
    total: dict[tuple[int, int], int] = {}
    for i, (plan, some) in enumerate(zip(plans, sources(plans, site, range(len(plans)), how != NONE))):
        of = own(i, some)[1] if how != CHAIN else int(min(some) == i)
        t = plan.tables
        for a, b, n in zip(t.share_src.tolist(), t.share_dst.tolist(), (t.share_end - t.share_begin).tolist()):
            pair = a, b + i * mapping.workers
            total[pair] = total.get(pair, 0) + (n // of if of else 0)
    return [(a, b, n) for (a, b), n in total.items()]


def needed(plans: list[SubPlan], site: Site) -> dict[str, int]:
    """By host, the bytes that its workers need: those of replicas that are alike once, and those that workers hand on once."""
    out = {h.name: 0 for h in site.fabric.hosts}
    for i, some in enumerate(site.together(range(len(plans)))):
        if some[0] == i:
            t = plans[i].tables
            taken = np.bincount(t.share_dst - plans[i].trainers, t.share_end - t.share_begin, plans[i].workers)
            for gpu, nbytes in zip(site.replicas[i], taken.tolist()):
                out[site.fabric.hosts[site.fabric.links.host[gpu]].name] += int(nbytes)
    return out


def disjoint(cluster: Cluster, mapping: Mapping, busiest: int) -> list[tuple[int, int, int]]:
    """Streams of `busiest` bytes in all from every NIC of trainers to one of engines."""
    first, each = mapping.of.world, cluster.ranks
    senders, takers = range(0, first, each), range(first, mapping.ranks, each)
    nbytes = busiest // each * cluster.nics
    return [(a + k, b + k, nbytes) for a, b in zip(senders, takers) for k in range(each)]


def busy_seconds() -> tuple[float, float]:
    """(processors' time that was used, processors' time) since the machine started."""
    with open("/proc/stat") as f:
        ticks = list(map(int, f.readline().split()[1:9]))
    return float(sum(ticks) - ticks[3] - ticks[4]), float(sum(ticks))


def measure(a: argparse.Namespace, name: str) -> list[Measured]:
    """One row for each size of messages."""
    config, sizes, workers, replicas = SHAPES[name]
    world = int(sizes["world"])
    hosts = -(-world // a.ranks) + -(-workers * replicas // a.ranks)
    rate = a.mbit * 1e6 / 8 * PAYLOAD
    mapping = scaled(name, replicas, a.seconds, rate, world if a.apart else -(-world // a.ranks))
    trainers = list(range(world))
    places = [list(range(world + i * workers, world + (i + 1) * workers)) for i in range(replicas)]
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(hosts, a.ranks, mbit=a.mbit, tcp=a.tcp, apart=a.apart, buffer_s=a.buffer_ms / 1e3) as cluster,
    ):
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
            engines = cluster.hosts[-(-world // a.ranks) :]
            for message, by, how in itertools.product(a.messages, a.schedules, a.relay):
                w.on_ranks("first_fit", on=by == FIRST_FIT)
                w.on_ranks("no_rings", on=how == CHAIN)
                first_fit(by == FIRST_FIT)
                bucket = max(4096, int(message * MIB / mapping.scale()) // 512 * 512)
                plans = plans_of(mapping, site, bucket, how != NONE)
                p, pairs = predicted(plans, site, how), pairs_of(plans, mapping, site, how)
                once = needed(plans, site)
                nic = [i for i, n in enumerate(p.links.names) if " NIC " in n]
                busiest = int(p.link_bytes[nic].max())
                level = disjoint(cluster, mapping, busiest)
                relayed = dict(site=b"", relay=True) if how != NONE else dict(site=site.to_bytes())
                met = w.meet(**relayed, bucket_bytes=bucket)
                if bad := [r for r in met if r["kind"] != "done"]:
                    raise SystemExit(f"{name}: {bad[0]}")
                seconds: dict[str, list[float]] = {"floor": [], "raw": [], "xfer": []}
                wrong, used, passed, entered = 0, 0.0, 0.0, 0.0
                for turn in range(a.repeats + 1):  # the first warms connections up
                    seconds["floor"].append(raw(level))
                    seconds["raw"].append(raw(pairs))
                    for t in w.trainers:
                        t.value("set", version=turn + 1)
                    came = [cluster.bytes_in(h) for h in engines]
                    before = busy_seconds()
                    said = w.on_all("refit", verify=False)
                    after = busy_seconds()
                    if bad := [r for r in said if r["kind"] != "done"]:
                        raise SystemExit(f"{name}: {bad[0]}")
                    used, passed = used + after[0] - before[0], passed + after[1] - before[1]
                    seconds["xfer"].append(said[0]["value"]["transfer_s"])
                    entered = max((cluster.bytes_in(h) - n) / once[h.name] for h, n in zip(engines, came))
                    wrong += w.wrong(turn + 1)
                mid = {k: statistics.median(v[1:]) for k, v in seconds.items()}
                found = predicted(plans, site_at(busiest / mid["floor"]), how, Costs(at_once=2))
                rows.append(
                    Measured(
                        name, by, how, message, hosts, mapping.depth, p.nbytes, busiest, mid["floor"], mid["raw"], mid["xfer"],
                        found.transfer_s, tuple(seconds["xfer"][1:]), wrong, used / passed, entered,
                    )
                )  # fmt: skip
                print(line(rows[-1]), flush=True)
    return rows


def line(m: Measured) -> str:
    cells = (
        m.mapping, m.schedule, m.relay, f"{m.message_mib:g}", f"{m.hosts}", f"{m.nbytes / 1e6:.0f}", f"{m.floor_s:.2f}",
        f"{m.raw_s:.2f}", f"{m.xfer_s:.2f}", f"{m.xfer_s / m.floor_s:.2f}", f"{m.predicted_s:.2f}",
        f"{m.predicted_s / m.xfer_s:.2f}", "right" if not m.wrong else f"WRONG: {m.wrong}", f"{m.into_host:.2f}", f"{m.cpu:.0%}",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "mapping", "schedule", "relay", "message, MiB at full size", "hosts", "MB moved", "floor, s", "raw, s", "xfer, s",
    "xfer / floor", "predicted, s", "predicted / xfer", "bits", "into a host", "CPU",
)  # fmt: skip


def arguments() -> argparse.Namespace:
    p = command.parser("hosts", __doc__)
    p.add_argument("--map", default="", help="only mappings whose name contains this")
    p.add_argument("--ranks", type=int, default=1, help="ranks of a host, which share its NIC")
    p.add_argument("--tcp", default="reno", help="congestion control, such as bbr; the kernel must have it")
    p.add_argument(
        "--buffer-ms", type=float, default=1e3 * BUFFER_S, help="how much a NIC holds back, each way, in ms at its rate"
    )
    p.add_argument(
        "--messages", type=float, nargs="+", default=[64.0], help="largest message, MiB of the real model's bytes"
    )
    p.add_argument(
        "--schedules", nargs="+", choices=(SPREAD, FIRST_FIT), default=[SPREAD],
        help=f"{FIRST_FIT}: messages of pairs on different hosts as of those on one",
    )  # fmt: skip
    p.add_argument("--apart", action="store_true", help="a NIC for each rank")
    p.add_argument(
        "--relay",
        nargs="+",
        choices=(NONE, CHAIN, RING),
        default=[NONE],
        help="whether replicas hand bytes on, and how",
    )
    return with_hosts(p)


def with_hosts(p: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line of a benchmark on emulated hosts, or exit with 2 if this machine cannot make any."""
    p.add_argument("--mbit", type=float, default=100.0, help="rate of a NIC, Mbit/s each way")
    p.add_argument(
        "--seconds", type=float, default=1.0, help="about the floor of each mapping; decides the size of models"
    )
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--deadline", type=float, default=60.0, help="of one refit, seconds")
    p.add_argument("--json", type=Path, help="write all figures there")
    a = p.parse_args()
    if why := missing():
        print(why)
        sys.exit(2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # hosts and ranks end with this process's objects
    return a


def main() -> int:
    a = arguments()
    nic = f"a NIC of {a.mbit:g} Mbit/s for each {'rank' if a.apart else 'host'}"
    print(f"{a.ranks} ranks a host, {nic}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
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
