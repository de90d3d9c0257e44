"""The routes of `connect(route=...)`, by which weights move. Only this module chooses a route.

    Direct   moves each byte from its source storage to its destination storage
    Packed   moves whole checkpoint tensors in buckets; the engine's own loader loads them

A route of another package is an object with the methods of `Route`. The engines' workers find their side of it by the entry
point group `xfer.routes` (docs/extending.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from xfer import arguments as check
from xfer.errors import Unsupported, XferError

if TYPE_CHECKING:
    from xfer.coordinator.state import Options
    from xfer.packed.source import PackedSource
    from xfer.participants.data_plane import NewTrainerSide
    from xfer.participants.trainer import Source
    from xfer.participants.worker import WorkerSide
    from xfer.plan.fabric import Site
    from xfer.rendezvous.client import RendezvousClient

BUCKET_BYTES = {"cpu": 64 << 20, "cuda": 240 << 20}


@runtime_checkable
class Route(Protocol):
    """A route, as `connect` uses it."""

    def wrong(self, trainer: Source | None, replicas: int) -> list[str]:
        """Return one line for each option that cannot work.

        Args:
            trainer: The trainer's adapter; None if it cannot work itself.
            replicas: Number of replicas.
        """

    def source(self, trainer: Source) -> Source:
        """Return the trainer's adapter as this route reads it."""

    def options(self, options: Options, source: Source) -> Options:
        """Return `options` with this route's own, for the coordinator. Equal on all trainer ranks."""

    def side(self, source: Source, drop: Sequence[str]) -> NewTrainerSide:
        """Return a function that makes this trainer rank's side.

        Args:
            source: The adapter, from `source`.
            drop: Globs of checkpoint tensors that engines do not take.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Direct:
    """Moves each byte from its source storage to its destination storage: by peer mapping if the destination can map the
    source's memory, else over NCCL, or gloo on CPUs.

    Attributes:
        bucket_bytes: Largest message. A rank that sends or receives messages keeps two buffers of about that size for each
            direction, beside the model; a rank that is only read from keeps none. Default: 64 MiB on CPUs, 240 MiB on GPUs.
        narrow: Globs of checkpoint tensors that the engine may hold in a dtype that loses bits both of the trainer's and of
            the checkpoint's dtype (fp32 as bf16, bf16 as fp16).
        cache_dir: Folder for plans, which later runs use again. None: no folder. Default: $XFER_CACHE, else `xfer` in the
            user's cache folder.
        fabric: A file with hosts, links, rates and the place of each rank (plan/fabric_file.py), or the `Site` itself. The
            plan then chooses sources by time over links. Default: it prefers a source on the destination's host, by host
            name.
        host_pull: For weights in host memory: engine workers on a trainer's host read its memory themselves if the kernel
            allows it, so that the trainer sends nothing. Weights on GPUs are read so wherever possible.
        relay: Replicas of one layout on one host hand bytes on to each other, so that each byte enters the host once. What comes
            over the network they receive in equal shares, all through their own network cards, and each reads the other
            shares from the others as they arrive (a relay ring). What is read from trainers of the same host the first
            one reads, and each other one reads it from the one before it (a relay chain). For few trainers and many
            replicas, which otherwise share the trainers' outgoing links. A replica waits for those from which it reads,
            and fails if one of them fails before what it brings is there. Within a replica, what several workers of a host
            need from other hosts is sent to one of them, which sends it on to the others.
        rdma: For weights in host memory: engine workers read the trainers' memory by NIXL, on any host, so that the trainers
            send nothing but short runs. For hosts with RDMA network cards, on which it was never run; needs the extra `nixl`
            on both sides (docs/hosts.md).
    """

    bucket_bytes: int | None = None
    narrow: Sequence[str] = ()
    cache_dir: str | os.PathLike[str] | None = "default"
    fabric: str | os.PathLike[str] | Site | None = None
    host_pull: bool = False
    relay: bool = False
    rdma: bool = False

    def wrong(self, trainer: Source | None, replicas: int) -> list[str]:
        bad = check.wrong_globs("narrow", self.narrow)
        bad += check.wrong_bucket(self.bucket_bytes) if self.bucket_bytes is not None else []
        if self.cache_dir is not None and not isinstance(self.cache_dir, str | os.PathLike):
            bad.append(f"cache_dir={self.cache_dir!r}: a folder, or None for nowhere")
        if self.relay and self.fabric is not None:
            bad.append(
                "relay=True and fabric=: sources of a fabric are chosen for each replica, and then no two plans are equal"
            )
        if self.rdma and (self.relay or self.host_pull):
            bad.append(
                "rdma=True and relay=True or host_pull=True: workers read host memory in one way, and hand none of it on"
            )
        if self.rdma:
            from xfer.transport.peer_rdma import missing

            bad += [f"rdma=True: {why}"] if (why := missing()) else []
        if trainer is None:
            return bad
        if self.rdma and trainer.device.type != "cpu":
            bad.append("rdma=True: weights on GPUs are not read by NIXL yet")
        try:
            self._site(trainer.world, replicas)
        except XferError as e:
            bad += [f"fabric: {e.message}", *e.violations]
        return bad

    def source(self, trainer: Source) -> Source:
        return trainer

    def options(self, options: Options, source: Source) -> Options:
        site = self._site(options.trainers, options.replicas)
        return replace(
            options,
            route="direct",
            bucket_bytes=self.bucket_bytes or BUCKET_BYTES.get(source.device.type, BUCKET_BYTES["cpu"]),
            narrow=tuple(self.narrow),
            site=site.to_bytes() if site is not None else b"",
            host_pull=self.host_pull,
            relay=self.relay,
            rdma=self.rdma,
            first_copies=options.replicas > 1,
        )

    def side(self, source: Source, drop: Sequence[str]) -> NewTrainerSide:
        from xfer.direct.trainer import DirectTrainer

        where = default_cache_dir() if self.cache_dir == "default" else self.cache_dir
        cache_dir = None if where is None else os.fspath(where)
        return partial(DirectTrainer, index=source.rank, device=source.device, cache_dir=cache_dir, drop=drop)

    def _site(self, trainers: int, replicas: int) -> Site | None:
        if self.fabric is None:
            return None
        from xfer.plan.fabric import Site
        from xfer.plan.fabric_file import read_site

        if not isinstance(self.fabric, str | os.PathLike | Site):
            raise XferError(f"{self.fabric!r} is neither a file nor a Site")
        site = self.fabric if isinstance(self.fabric, Site) else read_site(os.fspath(self.fabric))
        placed = len(site.trainers), len(site.replicas)
        if placed != (trainers, replicas):
            raise XferError(
                f"it places {placed[0]} trainers and {placed[1]} replicas; this job has {trainers} and {replicas}"
            )
        return site


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Gathers whole checkpoint tensors over the trainers in buckets. Trainer rank 0 broadcasts each bucket, and the engine's
    own loader loads it. For engines that cannot be traced (docs/packed.md). No storage is read in place.

    Attributes:
        bucket_bytes: Largest message and largest buffer. A rank has two buffers or none.
        colocated: The engines' workers are on the trainers' host and read the trainers' two buffers (on GPUs by CUDA IPC)
            instead of receiving messages.
    """

    bucket_bytes: int = 1 << 30
    colocated: bool = False

    def wrong(self, trainer: Source | None, replicas: int) -> list[str]:
        return check.wrong_bucket(self.bucket_bytes)

    def source(self, trainer: Source) -> PackedSource:
        from xfer.packed.source import packed_source

        return packed_source(trainer, self.bucket_bytes, colocated=self.colocated)

    def options(self, options: Options, source: Source) -> Options:
        return replace(options, route="packed", bucket_bytes=self.bucket_bytes, colocated=self.colocated, gathers=True)

    def side(self, source: Source, drop: Sequence[str]) -> NewTrainerSide:
        from xfer.packed.trainer import PackedTrainer

        return partial(PackedTrainer, self.source(source))


def default_cache_dir() -> str:
    """$XFER_CACHE, else xfer/ under the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get("XFER_CACHE") or os.path.join(base, "xfer")


_WORKERS = {"direct": "xfer.direct.worker:DirectWorker", "packed": "xfer.packed.worker:PackedWorker"}


def worker_side(name: str, adapter: Any, client: RendezvousClient, replica: int, index: int) -> WorkerSide:
    """Make one engine worker's side of the route that the trainers chose.

    Args:
        name: The route's name.
        adapter: The engine framework's adapter on this worker.
        client: The worker's connection.
        replica: Number of its replica.
        index: Rank of the worker in its replica.

    Raises:
        Unsupported: No installed package has a route of that name.
    """
    others = {e.name: e.value for e in entry_points(group="xfer.routes")} if name not in _WORKERS else {}
    where = {**others, **_WORKERS}.get(name)
    if where is None:
        known = ", ".join(sorted({**others, **_WORKERS}))
        raise Unsupported(
            f"the trainers chose route {name!r}, which is not installed here", [f"routes in this environment: {known}"]
        )
    module, _, attribute = where.partition(":")
    make: Callable[..., WorkerSide] = getattr(import_module(module), attribute)
    return make(adapter, client, replica, index)
