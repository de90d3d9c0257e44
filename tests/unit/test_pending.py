"""Which gathers an adapter finishes before it reads, and which it leaves alone."""

from __future__ import annotations

import threading

import torch

from xfer import pending


class Gathers:
    """See pending.Gathers."""

    def __init__(self, tensor: torch.Tensor):
        self.named, self.drained = [("w", tensor)], 0

    def drain(self, to_write: bool = True) -> None:
        self.drained += 1


def test_what_one_thread_leaves_alone_another_finishes():
    """A refit from owners gives up while its adapter waits, on a thread of its own, for a peer that does not come. Whoever reads the
    same parameters then took them for whole."""
    gathers, inside, go_on = Gathers(torch.ones(4)), threading.Event(), threading.Event()
    pending.announce(gathers)

    def hung() -> None:
        with pending.left_alone(gathers):
            inside.set()
            go_on.wait(20)
            pending.drain_over([gathers.named[0][1]])

    thread = threading.Thread(target=hung)
    thread.start()
    try:
        assert inside.wait(20)
        pending.drain_over([gathers.named[0][1]])
        assert gathers.drained == 1
    finally:
        go_on.set()
        thread.join(20)
        pending.forget(gathers)
    assert gathers.drained == 1, "and that one leaves them alone"
