"""Commands of several hosts that meet at a rendezvous: authenticated connections of messages with a length and a type.

The process that has an address of the rendezvous' host listens there, and the others dial it. They prove the job's token as clients of a
session do (rendezvous/channel.py). msgspec decodes what they send then; nothing is unpickled. Every wait has a deadline.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Union

import msgspec
from msgspec import Struct

from xfer.errors import DeadlineExceeded, HandshakeError, PeerLost, ProtocolError, XferError
from xfer.rendezvous.channel import accept_handshake, listen, prepare, read_exactly

MAX_FRAME = 64 << 20
GREETERS = 64
"""Callers that may be in the middle of their proof. One more is sent away, and tries again."""
GREET_S = 5.0
"""Seconds that a caller has for its proof, and again for its first message."""
MOST_REJECTED = 8


class Note(Struct, frozen=True, tag=True):
    """Base of the messages."""


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
            raise ProtocolError(f"{self.label} does not speak this command's protocol: {e}"[:300]) from None

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


class Gathering:
    """Callers at some listening sockets, with the first message of each.

    Attributes:
        rejected: One line about each of the last callers that did not prove the token or sent something else.
    """

    def __init__(self, listeners: Sequence[socket.socket], token: str, first: type[Note]):
        self.rejected: deque[str] = deque(maxlen=MOST_REJECTED)
        self._first, self._came = first, queue.Queue[tuple[Line, Any, str]]()
        self._door = Door(listeners, token, self._welcome, self.rejected.append)

    def _welcome(self, sock: socket.socket, address: str) -> None:
        line = Line(sock, address)
        try:
            self._came.put((line, line.take(time.monotonic() + GREET_S, self._first), address))
        except XferError as e:
            self.rejected.append(e.message)
            raise

    def wait(self, size: int, seconds: float) -> list[tuple[Line, Any, str]]:
        """Return `size` callers, with their messages and addresses, or those that came in time. Later callers are not accepted."""
        came, until = list[tuple[Line, Any, str]](), time.monotonic() + seconds
        with suppress(queue.Empty):
            while len(came) < size:
                came.append(self._came.get(timeout=max(0.0, until - time.monotonic())))
        self._door.close()
        return came

    def late(self) -> Iterator[tuple[Line, Any]]:
        """Yield the callers that came after the last expected one, with their messages."""
        with suppress(queue.Empty):
            while True:
                line, first, _ = self._came.get_nowait()
                yield line, first


def listeners(rendezvous: str, token: str, anyway: bool = False) -> tuple[list[socket.socket], str]:
    """Return the sockets of the rendezvous if this process listens there; else none, and the reason if it tried to listen.

    Args:
        anyway: It listens, whatever the rendezvous' host resolves to.
    """
    try:
        return listen(rendezvous, token, elsewhere=anyway), ""
    except HandshakeError as e:
        if anyway:
            raise
        return [], e.message  # another process of this machine listens already, or this machine does not know the name


@contextmanager
def advised(command: str, why: str, advice: str = "") -> Iterator[None]:
    """Inside, errors of the first contact get advice.

    Args:
        command: Name of the command that all run.
        why: Why this process does not listen itself, from `listeners`.
        advice: Added to an error that nobody listens.
    """
    try:
        yield
    except DeadlineExceeded as e:
        last = [v for v in e.violations if v.startswith("last attempt")]
        question = f"is xfer {command} running on the machine that has this address?{advice}"
        raise DeadlineExceeded("; ".join((e.message, *last, *filter(None, [why]))), [question]) from None
    except (PeerLost, ProtocolError) as e:
        doubt = f"is a session running at this address? give {command} a port of its own"
        raise type(e)(e.message, [doubt]) from None
