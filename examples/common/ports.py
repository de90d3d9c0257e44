"""Ports of this machine for processes that are started a while after the port was chosen."""

from __future__ import annotations

import random
import socket
from collections import deque

_dice = (
    random.SystemRandom()
)  # not the module's own: whoever seeds that (hypothesis does) would get one port again and again
_kept: deque[socket.socket] = deque(maxlen=100)


def free_port() -> int:
    """A TCP port that nobody listens on now, below those that kernels hand out by themselves (from 32768 on Linux): one of
    these may be the local end of any connection by the time a slow child listens. OSError when none is found.

    This process keeps the port bound, until it ends or has chosen a hundred others, so no other call on this machine chooses
    it meanwhile. Servers that set SO_REUSEADDR, as nearly all do, can listen there all the same.
    """
    for _ in range(100):
        port, sock = _dice.randrange(15000, 32000), socket.socket()
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            sock.close()
            continue
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # only now: it has bound a port of its own
        _kept.append(sock)
        return port
    raise OSError("no free port between 15000 and 32000")
