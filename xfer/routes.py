"""The routes by which weights travel, as `connect(route=...)` takes them. A route is chosen here and nowhere else.

    Direct   each byte goes from where it lies to where it belongs
    Packed   whole checkpoint tensors in buckets, loaded by the engine's own loader

A route of another package is an object with the methods of `Route`; the engines' workers find its half by the entry point
group `xfer.routes` (docs/extending.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from xfer.errors import Unsupported, XferError
from xfer.participants import arguments as check

if TYPE_CHECKING:
    from xfer.coordinator.state import Options
    from xfer.participants.data_plane import NewTrainerSide
    from xfer.participants.trainer import Source
    from xfer.participants.worker import WorkerSide
    from xfer.plan.fabric import Site
    from xfer.rendezvous.client import RendezvousClient

BUCKET_BYTES = {"cpu": 64 << 20, "cuda": 240 << 20}


@runtime_checkable
class Route(Protocol):
    """What `connect` asks of a route."""

    def wrong(self, trainer: Source | None, replicas: int) -> list[str]:
        """One line for each option that cannot work with this trainer and number of replicas. None: they are wrong themselves."""

    def source(self, trainer: Source) -> Source:
        """The trainer's adapter as this route reads it."""

    def options(self, options: Options, source: Source) -> Options:
        """`options` with what the coordinator has to know of this route. Equal on all trainer ranks."""

    def side(self, source: Source, drop: Sequence[str]) -> NewTrainerSide:
        """Makes this trainer rank's side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Direct:
    """Each byte goes from where it lies to where it belongs, by peer mapping where a destination can map the source's memory,
    else over NCCL, or gloo on CPUs.

    Attributes:
        bucket_bytes: Largest message. A rank that sends or receives messages keeps two buffers of about that size for each
            direction, beside the model; a rank that is only read from keeps none. Default: 64 MiB on CPUs, 240 MiB on GPUs.
        narrow: Globs of checkpoint tensors that the engine may hold in a dtype which loses bits both of the trainer's and of
            the checkpoint's (fp32 as bf16, bf16 as fp16).
        cache_dir: Folder where plans are kept between runs. None: nowhere. Default: $XFER_CACHE, else `xfer` in the user's
            cache folder.
        fabric: A file with hosts, links, rates and which rank sits where (plan/fabric_file.py), or the `Site` itself. Sources
            are then chosen for time over links. Default: a source on the destination's host goes first, by host name.
        host_pull: Weights in host memory only: engine workers on a trainer's host read its memory themselves, where the
            kernel lets them, instead of having it sent. Weights on GPUs are read so wherever they can be.
        relay: Replicas of one layout on one host form a chain. Each reads from the one before it what it would read from the
            trainers, part by part as it arrives. For few trainers and many replicas, which otherwise share the trainers'
            outgoing links. A replica waits for the one before it, and fails if that one fails while both move bytes. Only
            what is read is relayed, not what is sent.
    """

    bucket_bytes: int | None = None
    narrow: Sequence[str] = ()
    cache_dir: str | os.PathLike[str] | None = "default"
    fabric: str | os.PathLike[str] | Site | None = None
    host_pull: bool = False
    relay: bool = False

    def wrong(self, trainer: Source | None, replicas: int) -> list[str]:
        bad = check.wrong_globs("narrow", self.narrow)
        bad += check.wrong_bucket(self.bucket_bytes) if self.bucket_bytes is not None else []
        if self.cache_dir is not None and not isinstance(self.cache_dir, str | os.PathLike):
            bad.append(f"cache_dir={self.cache_dir!r}: a folder, or None for nowhere")
        if self.relay and self.fabric is not None:
            bad.append(
                "relay=True and fabric=: sources of a fabric are chosen for each replica, and then no two plans are equal"
            )
        if trainer is None:
            return bad
        if self.relay and trainer.device.type == "cpu" and not self.host_pull:
            bad.append(
                "relay=True hands on what engines read; with weights in host memory they read with host_pull=True only"
            )
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
            relay=self.relay and options.replicas > 1,
        )

    def side(self, source: Source, drop: Sequence[str]) -> NewTrainerSide:
        from xfer.direct.trainer import DirectTrainer

        where = default_cache_dir() if self.cache_dir == "default" else self.cache_dir
        return partial(DirectTrainer, index=source.rank, device=source.device, cache_dir=where, drop=drop)

    def _site(self, trainers: int, replicas: int) -> Site | None:
        if self.fabric is None:
            return None
        from xfer.plan.fabric import Site
        from xfer.plan.fabric_file import read_site

        if not isinstance(self.fabric, str | os.PathLike | Site):
            raise XferError(f"{self.fabric!r} is neither a file nor a Site")
        site = self.fabric if isinstance(self.fabric, Site) else read_site(self.fabric)
        placed = len(site.trainers), len(site.replicas)
        if placed != (trainers, replicas):
            raise XferError(
                f"it places {placed[0]} trainers and {placed[1]} replicas; this job has {trainers} and {replicas}"
            )
        return site


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Whole checkpoint tensors are gathered over the trainers in buckets, trainer rank 0 broadcasts each bucket, and the
    engine's own loader takes it in. For engines that cannot be traced (docs/packed.md). No storage is read in place.

    Attributes:
        bucket_bytes: Largest message, and largest buffer. Every rank that has buffers has two.
        colocated: The engines' workers are on the trainers' host and map the trainers' two buffers (shared memory, CUDA IPC)
            instead of receiving them.
    """

    bucket_bytes: int = 1 << 30
    colocated: bool = False

    def wrong(self, trainer: Source | None, replicas: int) -> list[str]:
        return check.wrong_bucket(self.bucket_bytes)

    def source(self, trainer: Source) -> Source:
        from xfer.packed.source import packed_source

        return packed_source(trainer, self.bucket_bytes, colocated=self.colocated)

    def options(self, options: Options, source: Source) -> Options:
        return replace(options, route="packed", bucket_bytes=self.bucket_bytes, colocated=self.colocated, gathers=True)

    def side(self, source: Source, drop: Sequence[str]) -> NewTrainerSide:
        from xfer.packed.sides import PackedTrainer

        return partial(PackedTrainer, source)


def default_cache_dir() -> str:
    """$XFER_CACHE, else xfer/ under the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get("XFER_CACHE") or os.path.join(base, "xfer")


_WORKERS = {"direct": "xfer.direct.worker:DirectWorker", "packed": "xfer.packed.sides:PackedWorker"}


def worker_side(name: str, adapter: Any, client: RendezvousClient, replica: int, index: int) -> WorkerSide:
    """The half of one engine worker for the route that the trainers chose.

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
