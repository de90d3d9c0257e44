"""Calls that all ranks of a job make together. If one rank fails, all ranks raise its error.

The ranks agree (xfer/agreement.py) over the store of torch's default group and not by a collective, which would wait by that group's
own timeout.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch.distributed as dist

from xfer.agreement import Agreement
from xfer.errors import PeerLost, XferError, from_wire

_PREFIX = "xfer layerwise calls"


class Together:
    """One call that all ranks make.

    Args:
        what: Name of the call, for errors.
        where: This rank, for errors.
        deadline_s: Seconds of each meeting.
        store: Where the ranks meet; None for a process without other ranks.
    """

    def __init__(
        self, what: str, where: str, deadline_s: float, store: dist.Store | None, rank: int = 0, size: int = 1
    ):
        self._what, self._where, self._deadline_s = what, where, deadline_s
        self._rank, self._size, self._met = rank, size, 0
        self._store: dist.Store | None = None
        if store is not None:
            # The store counts the calls, not this process: the store is equally old for all ranks.
            number = store.add(f"{_PREFIX}/{rank}", 1)
            self._store = dist.PrefixStore(f"{_PREFIX}/{number}", store)

    @classmethod
    def over_all(cls, what: str, where: str, deadline_s: float) -> Together:
        """A call of all ranks of torch's default group."""
        if not dist.is_initialized():
            return cls(what, where, deadline_s, None)
        store = dist.distributed_c10d._get_default_store()
        return cls(what, where, deadline_s, store, dist.get_rank(), dist.get_world_size())

    def meet(self) -> None:
        """Returns on all ranks once all have come, or raises on all of them: the error of another rank, with its number, or
        DeadlineExceeded with the ranks that have not come."""
        if self._store is None:
            return
        try:
            self._meeting(self._store, self._met).meet(time.monotonic() + self._deadline_s)
        except XferError as e:
            raise type(e)(f"{self._what}: {e.message}", e.violations, where=self._where) from None
        self._met += 1

    def refuse(self, wrong: Sequence[str], message: str, kind: type[XferError]) -> None:
        """Raises `kind` on a rank with something in `wrong`, and the same on all others; returns if no rank has anything."""
        if wrong:
            raise kind(message, wrong, where=self._where)
        self.meet()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Sends an error that is raised inside to the other ranks, which raise it at their next `meet`."""
        try:
            yield
        except BaseException as e:
            told = e if isinstance(e, XferError) else XferError("a rank failed", [f"{type(e).__name__}: {e}"])
            kind, message, violations, _ = told.to_wire()
            mine = from_wire(kind, message, [f"rank {self._rank}: {line}" for line in violations], "")
            if self._store is not None:
                with suppress(PeerLost):  # the store is gone; the others notice that as well
                    for at in (self._met, self._met + 1):  # the first may be decided, by all but this rank
                        self._meeting(self._store, at).refuse(mine)
            raise

    def _meeting(self, store: dist.Store, number: int) -> Agreement:
        return Agreement(store, str(number), self._rank, range(self._size))
