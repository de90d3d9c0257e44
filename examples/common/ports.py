"""Ports of this machine for processes that are started a while after the port was chosen."""

from __future__ import annotations

import random
import socket

_dice = (
    random.SystemRandom()
)  # not the module's own: whoever seeds that (hypothesis does) would get one port again and again


def free_port() -> int:
    """A TCP port that nobody listens on now, below those that kernels hand out by themselves (from 32768 on Linux): one of
    these may be the local end of any connection by the time a slow child listens. OSError when none is found."""
    for _ in range(100):
        port = _dice.randrange(15000, 32000)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port between 15000 and 32000")
