"""The layouts of other ranks, as far as this process knows them, shared by its lanes.

coordinator/layouts.py describes the whole exchange and has the coordinator's half. Inventories and plans are plan/'s.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from xfer.coordinator import messages as m
from xfer.coordinator.layouts import pack, roll_digest, unpack
from xfer.errors import DeadlineExceeded, ProtocolError
from xfer.plan.cache import PlanCache
from xfer.plan.inventory import Inventory
from xfer.plan.options import PlanOptions
from xfer.plan.part import PlanPart
from xfer.plan.planner import Drafts, key_of

if TYPE_CHECKING:
    from xfer.trace.catalog import Catalog

KEPT = 4
"""Own inventories that a rank can still send: the present one, and those of plans that are being made."""


class Shelf:
    """The clients' half of the exchange. Thread-safe.

    Attributes:
        exchange_s: by replica, the seconds until the layouts of its last plan were here, unpacked and checked.
        cached: by replica, whether its last plan came from the cache.
    """

    def __init__(self, send: Callable[[m.Message], None]):
        self._send = send
        self.exchange_s: dict[int, float] = {}
        self.cached: dict[int, bool] = {}
        self._own: OrderedDict[bytes, Inventory] = OrderedDict()
        self._rolls: dict[bytes, m.Roll] = {}
        self._layouts: dict[bytes, dict[bytes, Inventory]] = {}  # roll -> digest -> inventory
        self._packed: dict[bytes, bytes] = {}  # roll -> not yet unpacked
        self._asked: set[m.RollAsk | m.LayoutsAsk] = set()
        self._used: OrderedDict[int, tuple[bytes, bytes]] = OrderedDict()  # replica -> the rolls it was planned from
        self._came, self._unpacking = threading.Condition(), threading.Lock()
        self._drafts = Drafts()

    def offer(self, inventory: Inventory) -> bytes:
        """Return the digest to announce. The inventory itself is sent when a rank asks for it."""
        digest = inventory.digest().encode()
        with self._came:
            self._own[digest] = self._own.pop(digest, inventory)
            while len(self._own) > KEPT:
                self._own.popitem(last=False)
        return digest

    # ---- on the thread that reads the connection

    def take(self, message: m.LayoutAsk | m.Roll | m.Layouts) -> None:
        with self._came:
            if isinstance(message, m.Roll):
                self._rolls[message.roll] = message
            elif isinstance(message, m.Layouts):
                self._packed[message.roll] = message.packed
            self._came.notify_all()
            own = self._own.get(message.inventory) if isinstance(message, m.LayoutAsk) else None
        if own is not None and isinstance(message, m.LayoutAsk):
            self._send(m.Layout(message.inventory, pack([own.content()])))

    # ---- on a lane's thread

    def plan(
        self,
        p: m.PlanInputs,
        rank: int,
        catalog: Catalog,
        options: PlanOptions,
        cache: PlanCache | None,
        check: Callable[[], None],
    ) -> tuple[PlanPart, tuple[bytes, ...]]:
        """Plan one rank's part.

        A part that is not in the cache is not put there either, since it is not known yet whether all ranks agree on it.

        Args:
            p: what to plan.
            rank: joint rank: trainers first, then workers.
            options: without a site, the rolls' hosts are used.
            check: called while waiting; it raises to stop the wait.

        Returns:
            The part, and the digest of each joint rank's inventory.

        Raises:
            DeadlineExceeded: a layout did not come in time.
            ProtocolError: the coordinator sent something else than was asked for.
            XferError: what planning raises.
        """
        t0 = time.perf_counter()
        until = time.monotonic() + p.deadline_s
        self._forget_others(p)
        sides = self._both_rolls((p.trainers, p.workers), until, check, early=cache is None)
        if options.site is None:
            options = replace(options, hosts=(*sides[0].hosts, *sides[1].hosts))
        digests = [[d.decode() for d in s.inventories] for s in sides]
        key = key_of(catalog.digest(), digests[0], digests[1], options)
        part = cache.get(key, rank) if cache is not None else None
        self.exchange_s[p.replica], self.cached[p.replica] = time.perf_counter() - t0, part is not None
        if part is None:
            sources, takers = self._both_sides(sides, until, check)
            self.exchange_s[p.replica] = time.perf_counter() - t0
            part = PlanPart.of(self._drafts.plan(catalog, sources, takers, options), rank)
        return part, (*sides[0].inventories, *sides[1].inventories)

    def _forget_others(self, p: m.PlanInputs) -> None:
        """Forget the rolls that neither this plan nor another replica's last plan was made from."""
        with self._came:
            self._used[p.replica] = (p.trainers, p.workers)
            used = {r for rolls in self._used.values() for r in rolls}
            for held in (self._rolls, self._layouts, self._packed):
                for roll in held.keys() - used:
                    del held[roll]

    def _both_rolls(
        self, rolls: Sequence[bytes], until: float, check: Callable[[], None], *, early: bool
    ) -> list[m.Roll]:
        """Wait for both rolls. `early`: ask for their layouts, too, since no cache can have the plan."""
        with self._came:
            asks: dict[m.RollAsk | m.LayoutsAsk, Callable[[], bool]] = {
                m.RollAsk(r): partial(self._rolls.__contains__, r) for r in rolls
            }
            if early:
                asks |= self._layouts_of(rolls)
            self._wait(asks, until, check)
            found = [self._rolls[r] for r in rolls]
        for roll, asked in zip(found, rolls):
            if roll_digest(roll.inventories, roll.hosts) != asked:
                raise ProtocolError("the coordinator sent a roll with another digest than was asked for")
        return found

    def _both_sides(self, rolls: Sequence[m.Roll], until: float, check: Callable[[], None]) -> list[list[Inventory]]:
        """Wait for all inventories and return them in rank order. Ranks of one class share everything but their number."""
        with self._came:
            self._wait(self._layouts_of([r.roll for r in rolls]), until, check)
        sides = []
        for roll in rolls:
            with self._unpacking:  # not under the condition: the reader thread must not wait for it
                found = self._layouts.get(roll.roll)
                if found is None:
                    found = self._layouts[roll.roll] = _unpacked(roll, self._packed[roll.roll])
                    del self._packed[roll.roll]  # afterwards: a lane that finds it in neither asks for it again
            sides.append([found[d].at(i, h) for i, (d, h) in enumerate(zip(roll.inventories, roll.hosts))])
        return sides

    def _layouts_of(self, rolls: Iterable[bytes]) -> dict[m.RollAsk | m.LayoutsAsk, Callable[[], bool]]:
        def known(roll: bytes) -> bool:
            return roll in self._layouts or roll in self._packed

        return {m.LayoutsAsk(r): partial(known, r) for r in rolls}

    def _wait(
        self, asks: Mapping[m.RollAsk | m.LayoutsAsk, Callable[[], bool]], until: float, check: Callable[[], None]
    ) -> None:
        """Wait inside the condition until every question is answered.

        All are sent at once, since each costs a round trip. If several lanes wait for one answer, one of them asks.
        """
        mine: list[m.RollAsk | m.LayoutsAsk] = []
        try:
            while waiting := [ask for ask, done in asks.items() if not done()]:
                check()
                if time.monotonic() >= until:
                    names = " and ".join(sorted({type(ask).__name__ for ask in waiting}))
                    raise DeadlineExceeded(f"no answer in time: {names}: another rank has not sent its layout")
                for ask in waiting:
                    if ask not in self._asked:
                        mine.append(ask)
                        self._asked.add(ask)
                        self._send(ask)
                self._came.wait(min(0.2, max(0.0, until - time.monotonic())))
        finally:
            self._asked.difference_update(mine)  # also if this lane is cancelled: then another one asks


def _unpacked(roll: m.Roll, packed: bytes) -> dict[bytes, Inventory]:
    distinct, contents = list(dict.fromkeys(roll.inventories)), unpack(packed, "layouts of a roll")
    if len(contents) != len(distinct):
        raise ProtocolError(f"{len(contents)} layouts for a roll of {len(distinct)} classes")
    out = {}
    for digest, content in zip(distinct, contents):
        out[digest] = Inventory.from_content(content)
        if out[digest].digest().encode() != digest:
            raise ProtocolError("the coordinator sent a layout with another digest than the roll says")
    return out
