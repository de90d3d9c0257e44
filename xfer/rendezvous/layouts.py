"""The layouts of other ranks, as far as this process knows them, shared by its lanes.

coordinator/layouts.py describes the whole exchange and has the coordinator's half. Inventories and plans are plan/'s.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from xfer.coordinator import messages as m
from xfer.coordinator.layouts import Roll, digest_of, pack, unpack
from xfer.errors import DeadlineExceeded, PeerLost, ProtocolError
from xfer.plan.cache import PlanCache
from xfer.plan.inventory import Inventory
from xfer.plan.options import PlanOptions
from xfer.plan.part import PlanPart
from xfer.plan.planner import Drafts, key_of

if TYPE_CHECKING:
    from xfer.rendezvous.client import Questions
    from xfer.trace.catalog import Catalog

T = TypeVar("T", Roll, Inventory)
KEPT = 4
"""Own inventories that a rank can still send: the present one, and those of plans that are being made."""


_WHAT, _LATE = "the layouts of other ranks", "another rank has not sent its layout"


class Shelf:
    """The clients' half of the exchange. Thread-safe.

    Attributes:
        exchange_s: by replica, the seconds until the layouts of its last plan were here, unpacked and checked.
        cached: by replica, whether its last plan came from the cache.
    """

    def __init__(self, questions: Questions):
        self._questions = questions
        self.exchange_s: dict[int, float] = {}
        self.cached: dict[int, bool] = {}
        self._own: OrderedDict[bytes, Inventory] = OrderedDict()
        self._rolls: dict[bytes, Roll] = {}
        self._layouts: dict[bytes, Inventory] = {}
        self._coming: set[bytes] = set()  # digests that a lane has asked for
        self._used: dict[int, tuple[bytes, bytes]] = {}  # replica -> the rolls of its last plan
        self._came = threading.Condition()
        self._drafts = Drafts()

    def offer(self, inventory: Inventory) -> bytes:
        """Return the digest to announce. The inventory itself is sent when a rank asks for it."""
        digest = inventory.digest().encode()
        with self._came:
            self._own[digest] = self._own.pop(digest, inventory)
            while len(self._own) > KEPT:
                self._own.popitem(last=False)
        return digest

    def give(self, digest: bytes) -> None:
        """Send this layout, if it is one of the last that were offered. Called on the thread that reads the connection."""
        with self._came:
            own = self._own.get(digest)
        if own is not None:
            with contextlib.suppress(PeerLost):
                self._questions.send(m.Layout(digest, pack([own.content()])))

    # ---- on a lane's thread

    def plan(
        self,
        p: m.PlanInputs,
        rank: int,
        catalog: Catalog,
        options: PlanOptions,
        cache: PlanCache | None,
        stopped: Callable[[], bool],
    ) -> tuple[PlanPart, tuple[bytes, ...]]:
        """Plan one rank's part.

        A part that is not in the cache is not put there either, since it is not known yet whether all ranks agree on it.

        Args:
            p: what to plan.
            rank: joint rank: the ranks that have the weights first, then workers.
            options: without a site, the rolls' hosts are used.
            stopped: whether to wait no longer.

        Returns:
            The part, and the digest of each joint rank's inventory.

        Raises:
            DeadlineExceeded: a layout did not come in time.
            PeerLost: the coordinator is gone, or `stopped` returned True.
            ProtocolError: the coordinator sent something else than was asked for.
            XferError: what planning raises.
        """
        t0, until = time.perf_counter(), time.monotonic() + p.deadline_s
        self._forget_others(p)
        self._fetch(self._rolls, Roll.from_content, [(p.trainers,), (p.workers,)], until, stopped)
        rolls = self._rolls[p.trainers], self._rolls[p.workers]
        if options.site is None:
            options = replace(options, hosts=(*rolls[0].hosts, *rolls[1].hosts))
        digests = [[d.decode() for d in r.inventories] for r in rolls]
        key = key_of(catalog.digest(), digests[0], digests[1], options)
        part = cache.get(key, rank) if cache is not None else None
        self.cached[p.replica] = part is not None
        if part is None:
            self._fetch(self._layouts, Inventory.from_content, [r.inventories for r in rolls], until, stopped)
        self.exchange_s[p.replica] = time.perf_counter() - t0
        if part is None:
            sources, destinations = self._side(rolls[0]), self._side(rolls[1])
            if p.donor >= 0:
                sources = [inventory.as_source() for inventory in sources]
            part = PlanPart.of(self._drafts.plan(catalog, sources, destinations, options), rank)
        return part, (*rolls[0].inventories, *rolls[1].inventories)

    def _side(self, roll: Roll) -> list[Inventory]:
        """Return the inventories in rank order. Ranks of one class share everything but their number."""
        return [self._layouts[d].at(i, h) for i, (d, h) in enumerate(zip(roll.inventories, roll.hosts))]

    def _forget_others(self, p: m.PlanInputs) -> None:
        """Forget the rolls that neither this plan nor another replica's last plan is made from, and the layouts that only they name."""
        with self._came:
            self._used[p.replica] = (p.trainers, p.workers)
            for roll in self._rolls.keys() - {r for rolls in self._used.values() for r in rolls}:
                del self._rolls[roll]
            for layout in self._layouts.keys() - {d for roll in self._rolls.values() for d in roll.inventories}:
                del self._layouts[layout]

    def _fetch(
        self,
        held: dict[bytes, T],
        decode: Callable[[bytes], T],
        sides: Sequence[Sequence[bytes]],
        until: float,
        stopped: Callable[[], bool],
    ) -> None:
        """Get the contents with these digests that are not held yet.

        Both sides are asked for at once, since a question costs a round trip. If several lanes need a content, one of them asks.
        """
        while True:
            with self._came:
                missing = [[d for d in dict.fromkeys(side) if d not in held] for side in sides]
                mine = [some for side in missing if (some := tuple(d for d in side if d not in self._coming))]
                if not any(missing):
                    return
                if not mine and stopped():
                    raise PeerLost(f"cancelled while waiting for {_WHAT}")
                if not mine and time.monotonic() >= until:
                    raise DeadlineExceeded(f"no answer in time: {_WHAT}", [_LATE])
                if not mine:
                    self._came.wait(min(0.2, max(0.0, until - time.monotonic())))
                self._coming.update(*mine)
            found: dict[bytes, T] = {}
            try:
                questions = [partial(m.Fetch, digests=some) for some in mine]
                for some, packed in zip(
                    mine, self._questions.ask(_WHAT, until, *questions, cancelled=stopped, why=_LATE)
                ):
                    found |= _opened(some, packed, decode)
            finally:  # also if this lane is cancelled: then another one asks
                with self._came:
                    held.update(found)
                    self._coming.difference_update(*mine)
                    self._came.notify_all()


def _opened(digests: Sequence[bytes], packed: bytes, decode: Callable[[bytes], T]) -> Mapping[bytes, T]:
    """Return the contents of an answer by digest."""
    contents = unpack(packed, _WHAT)
    if [digest_of(c) for c in contents] != list(digests):
        raise ProtocolError("the coordinator sent something with another digest than was asked for")
    return {d: decode(c) for d, c in zip(digests, contents)}
