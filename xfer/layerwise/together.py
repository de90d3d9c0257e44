"""Calls that all ranks of a job make together, of which one alone may fail: then all raise, with that one's reason.

Said over the store of torch's default group and not by a collective: who has failed waits for nobody, and the others not for it,
nor by that group's own timeout. Whoever comes first decides for all, in one step with looking whether somebody has: that all are
there, that one has failed, or that one has waited long enough.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch.distributed as dist

from xfer import errors
from xfer.errors import PeerLost, XferError

_PREFIX = "xfer layerwise calls"
_ON = "on"
_MOST = 4000
"""Letters of a reason that are told."""
_POLL_S, _SLOWEST_S = 0.001, 0.1
"""Between two looks, at first and after a while. Not a wait of the store's, which nobody else can use meanwhile."""


class Together:
    """One call. what, where: name it and this rank in errors. deadline_s: of each meeting. store: None for a process without others."""

    def __init__(
        self, what: str, where: str, deadline_s: float, store: dist.Store | None, rank: int = 0, size: int = 1
    ):
        self._what, self._where, self._deadline_s = what, where, deadline_s
        self._rank, self._size, self._store, self._met = rank, size, None, 0
        if store is not None:
            # Counted there, not here: all ranks have as long a past as the store has.
            number = store.add(f"{_PREFIX}/{rank}", 1)
            self._store = dist.PrefixStore(f"{_PREFIX}/{number}", store)

    @classmethod
    def over_all(cls, what: str, where: str, deadline_s: float) -> Together:
        """Ranks of torch's default group."""
        if not dist.is_initialized():
            return cls(what, where, deadline_s, None)
        store = dist.distributed_c10d._get_default_store()
        return cls(what, where, deadline_s, store, dist.get_rank(), dist.get_world_size())

    def meet(self) -> None:
        """Returns when all ranks have come, on all of them. Else raises, on all: what another rank has failed of, with that rank's
        number; DeadlineExceeded with who has not come."""
        if self._store is None:
            return
        try:
            said = self._said()
        except RuntimeError as e:
            why = [f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:160]}"]
            raise PeerLost(f"{self._what}: the process group's store is gone", why, where=self._where) from e
        if said == _ON:
            return
        name, message, *violations = said.split("\n")
        raise getattr(errors, name)(f"{self._what}: {message}", violations, where=self._where)

    def refuse(self, wrong: Sequence[str], message: str, kind: type[XferError]) -> None:
        """Raised, as `kind` on those that have something against it, unless no rank has anything."""
        if wrong:
            raise kind(message, wrong, where=self._where)
        self.meet()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """The others hear, where they meet next, of what is raised within."""
        try:
            yield
        except BaseException as e:
            told = e if isinstance(e, XferError) else XferError("a rank failed", [f"{type(e).__name__}: {e}"])
            kind, message, violations, _ = told.to_wire()
            with suppress(RuntimeError):  # the store is gone, of which they hear, too
                for at in (self._met, self._met + 1):  # that one may be decided, by all but this rank
                    self._decide(at, kind, message, violations)
            raise

    def _said(self) -> str:
        at, until, pause = str(self._met), time.monotonic() + self._deadline_s, _POLL_S
        mine, count = f"{at}/{self._rank}", f"{at}/n"
        self._store.set(mine, "here")
        if self._store.add(count, 1) == self._size:
            self._store.compare_set(at, "", _ON)
        while not self._store.check([at]):
            if time.monotonic() >= until:
                missing = [r for r in range(self._size) if not self._store.check([f"{at}/{r}"])]
                late = f"not all ranks have come within {self._deadline_s:g} s"
                self._decide(self._met, "DeadlineExceeded", late, [f"waited for rank {r}" for r in missing])
            else:
                time.sleep(pause)
                pause = min(2 * pause, _SLOWEST_S)
        said = self._store.get(at).decode()
        if said == _ON:
            self._met += 1
            self._store.delete_key(mine)  # it was to tell who is missing
        return said

    def _decide(self, at: int, kind: str, message: str, violations: Sequence[str]) -> None:
        """Against going on; the first word stays."""
        if self._store is not None:
            lines = (kind, message, *(f"rank {self._rank}: {v}" for v in violations))
            said = "\n".join(line.replace("\n", " ") for line in lines)[:_MOST]
            self._store.compare_set(str(at), "", said.encode(errors="replace").decode())
