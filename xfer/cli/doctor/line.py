"""Authenticated connections between doctors: messages with a length and a type, and the door that lets callers in.

Callers prove the job's token as clients of a session do (rendezvous/channel.py). msgspec decodes what they send then; nothing is
unpickled. Every wait has a deadline.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Union

import msgspec
from msgspec import Struct

from xfer.errors import DeadlineExceeded, HandshakeError, PeerLost, ProtocolError, XferError
from xfer.rendezvous.channel import accept_handshake, prepare, read_exactly

MAX_FRAME = 64 << 20
GREETERS = 64
"""Callers that may be in the middle of their proof. One more is sent away, and tries again."""
GREET_S = 5.0
"""Seconds that a caller has for its proof, and again for its first message."""


class Note(Struct, frozen=True, tag=True):
    """Base of the messages between doctors."""


class Line:
    """An authenticated connection of messages. It blocks, and every call has a deadline, a time.monotonic() value."""

    def __init__(self, sock: socket.socket, label: str):
        prepare(sock)
        self.sock, self.label = sock, label

    def send(self, note: Note, until: float) -> bool:
        body = msgspec.msgpack.encode(note)
        try:
            self.sock.settimeout(max(0.001, until - time.monotonic()))
            self.sock.sendall(struct.pack("<I", len(body)) + body)
            return True
        except TimeoutError:
            raise DeadlineExceeded(f"{self.label} does not read") from None
        except OSError as e:
            raise PeerLost(f"{self.label} is gone: {e}") from None

    def take(self, until: float, *kinds: type[Note]) -> Any:
        """The next message, which must be of one of `kinds`.

        Raises:
            DeadlineExceeded, PeerLost: None came. ProtocolError: It is none of these.
        """
        try:
            (size,) = struct.unpack("<I", read_exactly(self.sock, 4, until))
            if size > MAX_FRAME:
                raise ProtocolError(f"{self.label} announced a message of {size} bytes")
            return msgspec.msgpack.decode(read_exactly(self.sock, size, until), type=Union[kinds])  # noqa: UP007
        except TimeoutError:
            raise DeadlineExceeded(f"{self.label} does not answer") from None
        except OSError as e:
            raise PeerLost(f"{self.label} is gone: {e}") from None
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as e:
            raise ProtocolError(f"{self.label} does not speak xfer doctor's protocol: {e}"[:300]) from None

    def close(self) -> None:
        self.sock.close()


class Door:
    """Accepts callers at some listening sockets until it is closed, each in a thread of its own.

    Args:
        welcome: Called with each caller that proved the token, and its address.
        rejected: Called with one line about each that did not.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        token: str,
        welcome: Callable[[socket.socket, str], None],
        rejected: Callable[[str], None] = lambda line: None,
    ):
        self._token, self._welcome, self._rejected = token, welcome, rejected
        self._closed, self._greeters = threading.Event(), threading.Semaphore(GREETERS)
        self._threads = [threading.Thread(target=self._accept, args=(s,), daemon=True) for s in listeners]
        for t in self._threads:
            t.start()

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(0.1)
        with listener:
            while not self._closed.is_set():
                with suppress(OSError):  # mostly a TimeoutError
                    sock, peer = listener.accept()
                    address = peer[0].removeprefix("::ffff:")  # an IPv4 address that came to an IPv6 socket, as itself
                    if self._greeters.acquire(blocking=False):
                        threading.Thread(target=self._greet, args=(sock, address), daemon=True).start()
                    else:
                        sock.close()

    def _greet(self, sock: socket.socket, address: str) -> None:
        try:
            accept_handshake(sock, self._token, time.monotonic() + GREET_S)
        except HandshakeError as e:
            sock.close()
            self._rejected(f"{e.message}, from {address}")
            return
        finally:
            self._greeters.release()
        try:
            self._welcome(sock, address)
        except (XferError, OSError):
            sock.close()

    def close(self) -> None:
        self._closed.set()
        for t in self._threads:
            t.join(2.0)
