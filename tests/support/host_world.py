"""The processes of world_processes.py on emulated hosts (hosts.py): a session whose every byte crosses a shaped network interface.

Ranks are numbered, trainers first and then the workers of each replica, and fill the hosts in order. A replica's controller is on
the host of its first worker. The rendezvous is at the name of host 0.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from tests.support.hosts import Cluster, Host
from tests.support.world import TOKEN, ToySource, ToyTaker, trainer_session
from tests.support.world_processes import RDMA, RELAY, ProcessWorld, _controller, _serve_trainer, _worker
from xfer.rendezvous import channel

BYTES = {"layers.0.w": (512, 1024), "layers.1.w": (512, 1024), "embed": (36, 8), "norm": (12,)}
"""2 MB: a sixth of a second at 100 Mbit/s."""
BUCKET = 128 << 10
FASTER = "XFER_TEST_FASTER"
"""In the environment: the factor by which a vanished host is noticed sooner than by `channel.ALIVE`."""


class Copy(ToySource):
    """A trainer that holds all rows, as each of the others does."""

    def rows(self, n: int) -> tuple[int, int]:
        return 0, n


def _trainer(conn, rank: int, world: int, env: dict, source=ToySource, shapes=BYTES) -> None:
    os.environ.update(env)
    if factor := int(env.get(FASTER, 0)):
        channel.ALIVE = {k: v if k == "TCP_KEEPCNT" else v // factor for k, v in channel.ALIVE.items()}
    source = source(rank, world, shapes)

    def made(rendezvous: str, **args):
        direct = dict(relay=RELAY in os.environ, rdma=RDMA in os.environ)
        return trainer_session(source, rendezvous, TOKEN, bucket_bytes=BUCKET, **direct, **args)

    _serve_trainer(conn, made, set=source.set, change=source.turn)


def mains(source=ToySource, shapes: dict[str, tuple[int, ...]] = BYTES) -> tuple:
    """Main functions of trainers with such a source, of workers, and of controllers."""
    trainer = functools.partial(_trainer, source=source, shapes=shapes)
    return trainer, functools.partial(_worker, make=functools.partial(ToyTaker, shapes=shapes)), _controller


class HostWorld(ProcessWorld):
    """See ProcessWorld. The cluster has to hold all ranks. faster: see FASTER."""

    mains = mains()
    address = "h0"

    def __init__(self, cluster: Cluster, folder: Path, *, faster: int = 0, **how):
        self.cluster, self.faster = cluster, faster
        super().__init__(folder, **how)

    def host(self, number: int) -> tuple[Host, dict[str, str]]:
        host, rank = self.cluster.place(number)
        return host.rank(rank), host.env(rank) | {FASTER: str(self.faster)}
