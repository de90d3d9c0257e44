"""Time refits that send what changed, between emulated hosts, beside those that send all bytes: real sessions over gloo.

    .venvs/trainer/bin/python -m benchmarks.delta [--map "4B TP2xDP4"] [--mbit 100] [--changed 0.001 0.01 0.1] [--json FILE]

Needs root, iproute2 and no GPU. Hosts, mappings and models are those of benchmarks.hosts, one rank on each host. For each share of
elements that change from version to version (anywhere, at random) a row has medians of `--repeats`:

  whole     seconds of a refit that sends all bytes, and bytes into the engines' hosts, counted at their interfaces
  delta     the same with `refit(delta="auto")`
  copies    bytes that all trainers keep to compare with

Every worker compares all its bytes after each refit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the hosts have no reverse names

from benchmarks.hosts import MIB, PAYLOAD, scaled, with_hosts
from benchmarks.lib import command
from benchmarks.lib.host_ranks import MappingWorld, some
from benchmarks.lib.layouts import ROWS
from tests.support.hosts import Cluster
from xfer.plan.fabric_file import read_site

HEAD = (
    "mapping",
    "changed",
    "whole, s",
    "delta, s",
    "delta / whole",
    "whole, MB",
    "delta, MB",
    "delta / whole",
    "bits",
)


@dataclass(frozen=True)
class Measured:
    """One row. Seconds and bytes are medians."""

    mapping: str
    changed: float
    whole_s: float
    delta_s: float
    whole_bytes: float
    delta_bytes: float
    wrong: int

    def line(self) -> str:
        cells = (
            self.mapping, f"{self.changed:.2%}", f"{self.whole_s:.3f}", f"{self.delta_s:.3f}", f"{self.delta_s / self.whole_s:.3f}",
            f"{self.whole_bytes / 1e6:.2f}", f"{self.delta_bytes / 1e6:.2f}", f"{self.delta_bytes / self.whole_bytes:.3f}",
            "right" if not self.wrong else f"WRONG: {self.wrong}",
        )  # fmt: skip
        return "| " + " | ".join(cells) + " |"


class Series:
    """Refits of one world, one version after the other."""

    def __init__(self, cluster: Cluster, world: MappingWorld, first_taker: int):
        self.cluster, self.world, self.takers, self.number = cluster, world, cluster.hosts[first_taker:], 0

    def run(self, share: float, delta: str | None, repeats: int) -> tuple[float, float, int]:
        """Return seconds, bytes into the engines' hosts, and the number of workers with a wrong bit. The first refit is not counted."""
        seconds, came, wrong = [], [], 0
        for _ in range(repeats + 1):
            self.number += 1
            version = some(self.number, share)
            for t in self.world.trainers:
                t.value("set", version=version)
            before = sum(map(self.cluster.bytes_in, self.takers))
            said = self.world.on_all("refit", verify=False, delta=delta)
            if bad := [r for r in said if r["kind"] != "done"]:
                raise SystemExit(f"{bad[0]}")
            came.append(sum(map(self.cluster.bytes_in, self.takers)) - before)
            seconds.append(said[0]["value"]["transfer_s"])
            wrong += self.world.wrong(version)
        return statistics.median(seconds[1:]), statistics.median(came[1:]), wrong


def measure(a: argparse.Namespace, name: str) -> list[Measured]:
    """One row for each share of changed elements."""
    _, sizes, workers, replicas = ROWS[name]
    world = int(sizes["world"])
    mapping = scaled(name, replicas, a.seconds, a.mbit * 1e6 / 8 * PAYLOAD, world)
    places = [list(range(world + i * workers, world + (i + 1) * workers)) for i in range(replicas)]
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(mapping.ranks, 1, mbit=a.mbit) as cluster,
        MappingWorld(cluster, Path(folder), mapping, a.deadline) as w,
    ):
        path = Path(folder) / "fabric.toml"
        path.write_text(cluster.fabric(list(range(world)), places, rate=a.mbit * 1e6 * PAYLOAD))
        bucket = max(4096, int(64 * MIB / mapping.scale()) // 512 * 512)
        met = w.meet(site=read_site(path).to_bytes(), bucket_bytes=bucket)
        if bad := [r for r in met if r["kind"] != "done"]:
            raise SystemExit(f"{name}: {bad[0]}")
        series = Series(cluster, w, world)
        for share in a.changed:
            whole, delta = (series.run(share, how, a.repeats) for how in (None, "auto"))
            rows.append(Measured(name, share, whole[0], delta[0], whole[1], delta[1], whole[2] + delta[2]))
            print(rows[-1].line(), flush=True)
    return rows


def arguments() -> argparse.Namespace:
    p = command.parser("delta", __doc__)
    p.add_argument("--map", default="4B TP2xDP4", help="mappings whose name contains this")
    p.add_argument(
        "--changed",
        type=float,
        nargs="+",
        default=[0.001, 0.01, 0.05, 0.1, 0.5],
        help="shares of the elements that change",
    )
    return with_hosts(p)


def main() -> int:
    a = arguments()
    print(f"a NIC of {a.mbit:g} Mbit/s for each host, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD), flush=True)
    rows = [row for name in ROWS if a.map in name for row in measure(a, name)]
    if a.json:
        meta = command.facts("delta", processors=os.cpu_count(), mbit=a.mbit)
        a.json.write_text(json.dumps({"meta": meta, "delta": [asdict(m) for m in rows]}) + "\n")
    return int(any(m.wrong for m in rows))


if __name__ == "__main__":
    sys.exit(main())
