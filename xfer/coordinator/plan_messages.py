"""Control messages about layouts, plans and links. Who sends which, and when, is told by layouts.py and planning.py."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from xfer.coordinator.wire import Blob, Bytes64, Count, Digest, Name, Seconds, WireMessage

Holds = Annotated[str, Meta(pattern="^(whole|mix|nothing)$")]
"""Weights of a worker: of one version; of two, after a refit that failed; or only the random ones it was started with."""


class Specs(WireMessage):
    """trainer -> coordinator: canonical tensors that this rank's export touches, as an encoded partial catalog."""

    catalog: Blob


class CatalogMsg(WireMessage):
    """coordinator -> trainer, worker: the union over all trainer ranks."""

    catalog: Blob
    generation: Count


class InventoryMsg(WireMessage):
    """trainer, worker -> coordinator: what it has, by digest; whoever needs the inventory asks for it."""

    inventory: Digest
    generation: Count


class RollAsk(WireMessage):
    """domain -> coordinator: answered with the `Roll`."""

    roll: Digest


class Roll(WireMessage):
    """coordinator -> domain: one side of a replica's domain, in rank order. `roll` is the digest of the rest."""

    roll: Digest
    inventories: Annotated[tuple[Digest, ...], Meta(max_length=65536)]
    hosts: Annotated[tuple[Name, ...], Meta(max_length=65536)]


class LayoutsAsk(WireMessage):
    """domain -> coordinator: answered with `Layouts`, when all of them have come."""

    roll: Digest


class Layouts(WireMessage):
    """coordinator -> domain: the inventories that a roll names, each once, in order of first appearance (packing.py)."""

    roll: Digest
    packed: Blob


class LayoutAsk(WireMessage):
    """coordinator -> one trainer or worker that announced this inventory."""

    inventory: Digest


class Layout(WireMessage):
    """trainer, worker -> coordinator: the inventory that was asked for (packing.py)."""

    inventory: Digest
    packed: Blob


class PlanInputs(WireMessage):
    """coordinator -> domain: plan this replica, one of `replicas`, from the inventories that two rolls name. `turn`: which of them it
    counts as where senders take turns; that of all replicas of one layout where these hand on what they pull."""

    replica: Count
    epoch: Count
    trainers: Digest
    workers: Digest
    turn: Count = 0
    replicas: Count = 0
    drop: Annotated[tuple[Name, ...], Meta(max_length=4096)] = ()
    narrow: Annotated[tuple[Name, ...], Meta(max_length=4096)] = ()
    bucket_bytes: Bytes64 = 0
    deadline_s: Seconds = 600.0


class Planned(WireMessage):
    replica: Count
    epoch: Count
    digest: Name
    seconds: Seconds
    bytes_in: Bytes64 = 0
    bytes_out: Bytes64 = 0


class OpenLink(WireMessage):
    """coordinator -> domain: digests agree; open the data link of this epoch, and the routes over it. `fresh` False: the link
    of the last epoch stands, only the routes are opened again, since some rank's storages lie elsewhere now. `workers`:
    of the replica, for ranks that made no plan of theirs (packed route). `relay`: replicas of one layout stand in a row.
    `before`: to a worker, what the same worker of the replica before this one lets it read, as `LinkOpen` brought it."""

    replica: Count
    epoch: Count
    fresh: bool = True
    workers: Count = 0
    host_pull: bool = False
    relay: bool = False
    before: Blob = b""


class LinkOpen(WireMessage):
    """domain -> coordinator. Of a worker in a row of replicas: `hand` is what the next one may read (transport/relay_place.py), `follows`
    whether this one reads from the one before it."""

    replica: Count
    epoch: Count
    hand: Blob = b""
    follows: bool = False


class Found(WireMessage):
    """coordinator -> controller: what the workers that have come so far said of their engine. Unless it `holds` one whole version, it
    may not serve before its next commit, whether it joins or not. `workers`: how many have."""

    workers: Count = 0
    holds: Holds = "whole"
    session_open: bool = False


class ReplicaReady(WireMessage):
    """coordinator -> domain, controller: this replica takes part in refits from now on. It has a plan and a link, unless it joined when
    there was nothing to link to, or its plan is of a layout that is gone: then the next refit makes them."""

    replica: Count
    epoch: Count
    digest: Name
