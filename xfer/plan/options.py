"""Options of a plan. All of them are part of the plan's digest; none is about one refit."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from xfer.plan.fabric import Site

if TYPE_CHECKING:
    from xfer.trace.catalog import Catalog

MAX_BUCKET = 1 << 60
"""Bytes: what planning adds up stays within 64 bits."""
ALIGN = 512
"""Streams are cut at multiples of this many bytes, so that a cut never costs a kernel its vector loads."""

MOST_WRITTEN = 24
"""Patterns of an argument that an error writes out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """`bucket_bytes`: most wire bytes of one message (one source, one destination, one wave).
    `wave_bytes`: most wire bytes that one rank sends, and most that it receives, in one wave: what staging buffers
    must hold; 0 stands for two buckets.
    `drop`: checkpoint tensors that no engine need read. `narrow`: tensors that may be cast to a dtype that can represent
    the values of neither the trainer's dtype nor the checkpoint's. Both: names or fnmatch patterns; a grouped name
    (`…experts.*.up_proj.weight`) counts as a pattern.
    `hosts`: host of every joint rank (trainers first), or empty when no rank is nearer than another.
    `site`: the links between ranks and who sits where, in place of `hosts`; sources are then chosen for time over
    links. `replica`: which of the site's replicas this plan is for.
    `remote_cost`: what a byte to another host costs a source, in bytes to its own host.
    `rotation`: shifts the source with which a destination starts. `rotations`: number of sub-plans that run at once,
    of which this one is number `rotation`; they start as far from each other as possible. 0: `rotation` counts sources.
    `align_bytes`: granule of all cuts; a power of two and at least 8, the largest element.
    `relay`: bytes that come from other hosts and that several workers of one host need are sent to one of these, which hands
    them on to the others.
    """

    bucket_bytes: int = 64 << 20
    wave_bytes: int = 0
    drop: tuple[str, ...] = ()
    narrow: tuple[str, ...] = ()
    hosts: tuple[str | int, ...] = ()
    remote_cost: int = 8
    rotation: int = 0
    rotations: int = 0
    align_bytes: int = ALIGN
    site: Site | None = None
    replica: int = 0
    relay: bool = False

    def __post_init__(self) -> None:
        a = self.align_bytes
        if a < 8 or a & (a - 1):
            raise ValueError(f"align_bytes={a}: a power of two of at least 8 is needed")
        if self.wave_bytes == 0:
            object.__setattr__(self, "wave_bytes", 2 * self.bucket_bytes)
        if self.wave_bytes > 2 * MAX_BUCKET:
            raise ValueError(
                f"bucket_bytes={self.bucket_bytes}, wave_bytes={self.wave_bytes}: at most {MAX_BUCKET} and twice that"
            )
        if not a <= self.bucket_bytes <= self.wave_bytes:
            raise ValueError(
                f"align_bytes={a} <= bucket_bytes={self.bucket_bytes} <= wave_bytes={self.wave_bytes} must hold"
            )
        if self.site is not None and (self.hosts or not 0 <= self.replica < len(self.site.replicas)):
            raise ValueError(
                f"replica={self.replica}: the site has {len(self.site.replicas)} replicas, and it is given in place of hosts"
            )
        if self.remote_cost < 1 or self.rotation < 0 or self.rotations < 0:
            raise ValueError(
                f"remote_cost={self.remote_cost} must be at least 1, rotation={self.rotation} and "
                f"rotations={self.rotations} at least 0"
            )

    @property
    def message_bytes(self) -> int:
        """bucket_bytes, rounded down to whole granules."""
        return self.bucket_bytes // self.align_bytes * self.align_bytes

    def host_numbers(self) -> tuple[int, ...]:
        """Host of every joint rank, numbered by first appearance, since plans do not depend on hosts' names. Empty when not
        known.
        """
        seen: dict[str | int, int] = {}
        hosts = self.site.hosts(self.replica) if self.site is not None else self.hosts
        return tuple(seen.setdefault(h, len(seen)) for h in hosts)

    def for_draft(self) -> PlanOptions:
        """Equal for options under which plans have one draft: with a site, for any placement of ranks, unless workers hand bytes on."""
        hosts = self.host_numbers() if self.site is None or self.relay else ()
        return replace(self, rotation=0, rotations=0, wave_bytes=self.bucket_bytes, site=None, replica=0, hosts=hosts)

    def to_bytes(self) -> bytes:
        """Canonical: order and repeats in `drop` and `narrow` do not matter."""
        names = sorted(set(self.drop)), sorted(set(self.narrow))
        numbers = self.message_bytes, self.wave_bytes, self.remote_cost, self.rotation, self.rotations, self.align_bytes
        where = None if self.site is None else (self.site.to_bytes(), self.replica)
        return msgspec.msgpack.encode((numbers, names, self.host_numbers(), where, self.relay))


def sent(catalog: Catalog, drop: Sequence[str]) -> np.ndarray:
    """Whether engines may take each checkpoint tensor: not those of which `drop` names all members. bool [tensors]."""
    drop = tuple(drop)
    return np.array([not all(matches(n, drop) for n in catalog.members(t.name)) for t in catalog.tensors], bool)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(name == p or fnmatchcase(name, p) for p in patterns)


def written(option: str, names: Sequence[str], among: Collection[str]) -> str:
    """The argument that names exactly these of the names `among`, e.g. `narrow=["model.layers.*.mlp.gate.weight"]`."""
    if len(names) == len(among):
        return f'{option}=["*"]'
    by_pattern: dict[str, list[str]] = {}
    for name in names:
        by_pattern.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append(name)
    given = set(names)
    others = [name for name in among if name not in given]
    patterns: list[str] = []
    for pattern, some in by_pattern.items():
        fits = len(some) > 1 and not any(fnmatchcase(name, pattern) for name in others)
        patterns += [pattern] if fits else some
    more = ", …" if len(patterns) > MOST_WRITTEN else ""
    return f"{option}=[{', '.join(json.dumps(p) for p in patterns[:MOST_WRITTEN])}{more}]"
