"""The rendezvous' door: listens, lets every caller prove the token, hands over those that did. Says nothing to the others.

A caller has HANDSHAKE_S for its proof and is one of at most `GREETERS` that are in the middle of it. When there are more,
the one that has been there longest makes room, once it had PATIENCE_S: a true client needs milliseconds, and tries again if
it was turned away, so callers that only connect can slow the door down but not block it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from xfer.errors import HandshakeError
from xfer.session.channel import Channel, OtherTokenError, accept_handshake, listen

GREETERS = 64
PATIENCE_S = 0.5
"""Seconds that a caller surely has for its proof, however many others there are."""


class Door:
    """`admit` is called on a thread of its own with each authenticated connection, `unproven` with the host of who holds another
    token. Listens until `close()`."""

    def __init__(
        self, rendezvous: str, token: str, admit: Callable[[Channel], None], unproven: Callable[[str], None] = lambda _: None
    ):
        self._token, self._admit, self._unproven = token, admit, unproven
        self._listeners = listen(rendezvous, token)
        self._closing = threading.Event()
        self._greeting: dict[socket.socket, float] = {}  # since when; oldest first
        self._changed = threading.Condition()
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), name="xfer-hub-accept", daemon=True).start()

    def close(self) -> None:
        """Callers that have not proved the token yet are turned away."""
        self._closing.set()
        for listener in self._listeners:
            _wake(listener)
            listener.close()
        with self._changed:
            for sock in self._greeting:
                _wake(sock)
            self._changed.notify_all()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                sock, peer = listener.accept()
            except OSError:
                if self._closing.is_set():
                    return
                time.sleep(0.1)  # out of descriptors, or a client that left again: neither may end the rendezvous
                continue
            self._make_room(sock)
            threading.Thread(target=self._greet, args=(sock, peer), name="xfer-hub-greet", daemon=True).start()

    def _make_room(self, sock: socket.socket) -> None:
        with self._changed:
            while len(self._greeting) >= GREETERS and not self._closing.is_set():
                oldest, since = next(iter(self._greeting.items()))
                left = since + PATIENCE_S - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                else:
                    del self._greeting[oldest]
                    _wake(oldest)
            self._greeting[sock] = time.monotonic()

    def _greet(self, sock: socket.socket, peer: tuple) -> None:
        host = str(peer[0])
        try:
            accept_handshake(sock, self._token)
        except HandshakeError as e:
            sock.close()
            if isinstance(e, OtherTokenError):
                self._unproven(host)
            return
        finally:
            with self._changed:
                kept = self._greeting.pop(sock, None) is not None
                self._changed.notify_all()
        if not kept or self._closing.is_set():
            sock.close()
            return
        self._admit(Channel(sock, str(peer)))


def _wake(sock: socket.socket) -> None:
    """Ends what another thread waits for on it; that thread closes it, or its descriptor could be somebody else's by then."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
