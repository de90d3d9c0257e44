"""Agreement of ranks: either all of them go on from here with one digest, or none does and each raises the reason.

A collective that one rank does not join blocks the others, and one that is left alone pairs with the next, of other data. So
ranks agree before they enter it, over a store: a rank that fails does not wait, and the others do not wait for it.

One word in the store decides, and the rank that writes it first (compare-and-set): that all ranks are here, that two differ,
that one has failed, or that one has waited long enough. A counter only tells the last rank that it is the last.

The small collectives of `packed/agree.py`, `any_rank` and the exchanges of `transport/routes.py`, and those of engines among their
own workers are no agreements: every rank is known to come, and each needs the data of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from xfer.errors import DeadlineExceeded, PeerLost, PlanMismatch, XferError, from_wire

_ON = "on"
_MOST = 4000
"""Characters of a reason that are kept."""
_POLL_S, _SLOWEST_S = 0.001, 0.1
"""Seconds between two looks at the store, at first and after a while."""


class Words(Protocol):
    """The methods of a store that an agreement calls. torch's stores and `rendezvous/store.py` have them."""

    def set(self, key: str, value: str) -> None: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def get(self, key: str) -> bytes: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...


def _never() -> bool:
    return False


def poll(store: Words, key: str, until: float, over: Callable[[], bool] = _never) -> bool:
    """Whether the key appears in time. Polls, since a wait of torch's stores would keep their connection from other threads."""
    pause = _POLL_S
    while not store.check([key]):
        if time.monotonic() >= until or over():
            return False
        time.sleep(pause)
        pause = min(2 * pause, _SLOWEST_S)
    return True


class Agreement:
    """One meeting of some ranks.

    Args:
        store: Where they meet.
        name: Name of this meeting, never used before in this store.
        rank: Number of this rank, one of `ranks`.
        ranks: All ranks that must come.
        label: The name of a rank in errors.
        appears: Waits until a key is in the store; called as `poll`.
    """

    def __init__(
        self,
        store: Words,
        name: str,
        rank: int,
        ranks: Sequence[int],
        label: Callable[[int], str] = "rank {}".format,
        appears: Callable[[Words, str, float, Callable[[], bool]], bool] = poll,
    ):
        self._store, self._name, self._rank, self._ranks = store, name, rank, ranks
        self._label, self._appears = label, appears

    def meet(self, until: float, digest: str = "", over: Callable[[], bool] = _never) -> None:
        """Returns on all ranks once all have come with the same digest, or raises the same error on all of them.

        Args:
            until: A time.monotonic() value. Each rank may have its own.
            digest: What has to be equal on all ranks, without spaces; "" on all ranks if there is nothing to compare.
            over: Whether to wait no longer; asked again and again.

        Raises:
            DeadlineExceeded: Some rank gave up waiting; names the ranks that had not come.
            PlanMismatch: Two ranks have different digests; names both.
            XferError: The error with which a rank refused.
            PeerLost: The store is gone.
        """
        with _store_in_use():
            word = self._word(until, digest, over)
        if word != _ON:
            kind, message, *violations = word.split("\n")
            raise from_wire(kind, message, tuple(violations), "")

    def refuse(self, error: XferError) -> str:
        """Lets no rank go on, unless it is decided already. Returns the word that stands."""
        kind, message, violations, _ = error.to_wire()
        said = "\n".join(line.replace("\n", " ") for line in (kind, message, *violations))[:_MOST]
        with _store_in_use():
            return self._decide(said.encode(errors="replace").decode())

    def _word(self, until: float, digest: str, over: Callable[[], bool]) -> str:
        store, here, word = self._store, self._key(self._rank), self._key("word")
        store.set(here, "here")  # shows which ranks are missing
        if digest:
            theirs, first = store.compare_set(self._key("digest"), "", f"{digest} {self._rank}").decode().split(" ")
            if theirs != digest:
                why = f"{self._label(self._rank)}: differs from {self._label(int(first))}"
                return self.refuse(PlanMismatch("ranks differ", [why]))
        if store.add(self._key("n"), 1) == len(self._ranks) or self._appears(store, word, until, over):
            said = self._decide(_ON)
        else:
            missing = [self._label(r) for r in self._ranks if not store.check([self._key(r)])]
            late = f"not all ranks have come: {self._label(self._rank)} has given up waiting"
            said = self.refuse(DeadlineExceeded(late, [f"waiting for {who}" for who in missing]))
        if said == _ON:
            store.delete_key(here)
        return said

    def _decide(self, word: str) -> str:
        return self._store.compare_set(self._key("word"), "", word).decode()

    def _key(self, what: object) -> str:
        return f"{self._name}/{what}"


@contextmanager
def _store_in_use() -> Iterator[None]:
    """torch's stores raise RuntimeErrors."""
    try:
        yield
    except RuntimeError as e:
        why = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:160]}"
        raise PeerLost("the store in which ranks meet is gone", [why]) from e
