"""Calls that all ranks make together: either all go on, or all raise, and soon, with the reason of the one that could not.

Ranks are threads here; with processes: tests/functional/test_layerwise_torch.py.
"""

from __future__ import annotations

import threading
import time

import pytest
from torch.distributed import HashStore

from xfer.errors import DeadlineExceeded, PeerLost, StaleWeights, Unsupported, XferError
from xfer.layerwise.together import Together


def asked(store, size: int, call, deadline_s: float = 20.0) -> list:
    """What `call` gives or raises on each rank."""
    out: list = [None] * size

    def run(r: int) -> None:
        try:
            ranks = Together("save", f"rank {r}", deadline_s, store, r, size)
            with ranks.telling():
                out[r] = call(r, ranks)
        except BaseException as e:
            out[r] = e

    threads = [threading.Thread(target=run, args=(r,)) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    return out


def steps(raises: dict[tuple[int, int], BaseException], meetings: int = 3):
    """Meets that often; `raises`: by (rank, how often it has met)."""

    def call(r: int, ranks: Together) -> str:
        for i in range(meetings):
            if (e := raises.get((r, i))) is not None:
                raise e
            ranks.meet()
        return "done"

    return call


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("e", [StaleWeights("broke off", ["b 3", "b 4"]), ValueError("two\nlines"), OSError("\udc80")])
def test_what_one_rank_raises_all_raise_at_once_and_the_next_call_is_whole(at, e):
    store, began = HashStore(), time.monotonic()
    seen = asked(store, 4, steps({(2, at): e}))
    assert time.monotonic() - began < 10 and seen[2] is e
    kind = type(e) if isinstance(e, XferError) else XferError
    lines = e.violations if kind is StaleWeights else [f"{type(e).__name__}: {e}"]
    why = [f"rank 2: {line}".replace("\n", " ").replace("\udc80", "?") for line in lines]
    for r in (0, 1, 3):
        assert type(seen[r]) is kind and list(seen[r].violations) == why and seen[r].where == f"rank {r}", seen[r]
    assert asked(store, 4, steps({})) == ["done"] * 4


def test_an_interrupted_rank_tells_the_others_too():
    seen = asked(HashStore(), 3, steps({(0, 1): KeyboardInterrupt()}))
    assert isinstance(seen[0], KeyboardInterrupt) and all("rank 0: KeyboardInterrupt" in str(e) for e in seen[1:])


def test_who_has_something_against_it_says_so_in_its_own_words_and_the_others_in_one_of_them():
    def call(r: int, ranks: Together) -> None:
        ranks.refuse([f"parameter {r}"] if r % 2 else [], "cannot be saved", Unsupported)

    seen = asked(HashStore(), 4, call)
    assert all(type(e) is Unsupported for e in seen)
    assert [seen[1].violations, seen[3].violations] == [("parameter 1",), ("parameter 3",)]
    assert {*seen[0].violations, *seen[2].violations} <= {"rank 1: parameter 1", "rank 3: parameter 3"}


def test_a_rank_that_does_not_come_is_named_by_the_deadline():
    store = HashStore()
    seen = asked(store, 3, lambda r, ranks: None if r == 1 else ranks.meet(), deadline_s=0.3)
    assert all(type(e) is DeadlineExceeded and "waiting for rank 1" in str(e) for e in (seen[0], seen[2])), seen
    assert asked(store, 3, steps({})) == ["done"] * 3


@pytest.mark.parametrize("late", range(1, 40, 3))
def test_either_all_go_on_or_none_does_when_the_last_comes_as_the_others_give_up(late):
    def call(r: int, ranks: Together) -> str:
        time.sleep(late / 1000 * (r == 2))
        ranks.meet()
        return "on"

    seen = asked(HashStore(), 3, call, deadline_s=0.02)
    assert seen == ["on"] * 3 or "on" not in seen, seen


def test_a_word_that_comes_second_decides_nothing():
    store = HashStore()
    ranks = [Together("save", "", 0.2, store, r, 2) for r in range(2)]
    with pytest.raises(DeadlineExceeded, match="not all ranks have come"):
        ranks[0].meet()
    with pytest.raises(DeadlineExceeded, match="not all ranks have come"):
        ranks[1].meet()  # now all have


def test_nothing_is_left_of_who_came():
    store = HashStore()
    asked(store, 3, steps({}))
    assert store.num_keys() == 3 + 2 * 3


def test_a_store_that_is_gone_is_a_typed_error():
    class Gone:
        def __getattr__(self, name: str):
            raise RuntimeError("Connection reset by peer")

    ranks = Together("save", "", 1.0, HashStore(), 0, 2)
    ranks._store = Gone()
    with pytest.raises(PeerLost, match="store in which ranks meet is gone"), ranks.telling():
        ranks.meet()


def test_a_process_without_others_meets_nobody():
    ranks = Together("save", "", 0.1, None)
    with pytest.raises(Unsupported), ranks.telling():
        ranks.meet()
        ranks.refuse([], "", Unsupported)
        ranks.refuse(["no"], "", Unsupported)
