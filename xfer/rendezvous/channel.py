"""Authenticated connections of typed messages: addresses, the mutual challenge, frames, one reader thread per connection.

Until the challenge has succeeded in both directions, only reads of fixed length happen and nothing is parsed. After that a
frame is 4 bytes of little-endian length and one encoded message. Messages have no meaning here.

This does not authenticate the data plane, the sockets of gloo or NCCL: those libraries have no such feature. Addresses
travel over this channel only, so a stranger has to find an open port at the moment of connecting. Run the data plane on a
trusted network, as with NCCL in general.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import hmac
import ipaddress
import logging
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from xfer.coordinator.messages import MAX_FRAME, WIRE_VERSION, Message, decode, encode
from xfer.ending import wait_for_all
from xfer.errors import DeadlineExceeded, HandshakeError, PeerLost, ProtocolError

_XFER = b"xfer"
MAGIC = _XFER + struct.pack("<I", WIRE_VERSION)
NONCE = 32
PROOF = 32
ANSWER = len(MAGIC) + NONCE + PROOF
"""Bytes that a client sends before anything of it is parsed."""
HANDSHAKE_S = 20.0
"""Seconds that either side may take for the challenge."""
SEND_S = 120.0
"""Seconds that sending one frame may take; a peer that does not read for so long counts as lost."""


def frame(message: Message) -> bytes:
    """Encode a message with its length in front. Raises ProtocolError if the receiver would reject it."""
    body = encode(message)
    return struct.pack("<I", len(body)) + body


def proof(token: str, side: bytes, first: bytes, second: bytes) -> bytes:
    """Return the proof that one side knows the token, over both sides' nonces."""
    return hmac.new(token.encode(), side + first + second, hashlib.sha256).digest()


def read_exactly(sock: socket.socket, n: int, until: float) -> bytes:
    """Read `n` bytes by monotonic `until`, however slowly they arrive."""
    parts, left = [], n
    while left:
        sock.settimeout(max(0.001, until - time.monotonic()))
        part = sock.recv(min(left, 1 << 20))
        if not part:
            raise ConnectionError("connection closed")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def check_token(token: str) -> None:
    """Raise HandshakeError for a token that is too short or cannot be encoded. The token is not shown."""
    if not isinstance(token, str) or len(token) < 8:
        raise HandshakeError(
            "the token must be a string of at least 8 characters, the same on every process of the job"
        )
    try:
        token.encode()
    except UnicodeEncodeError:  # os.environ gives such strings for bytes that are not UTF-8
        raise HandshakeError(
            "the token holds characters that are not text: make it one of letters and digits, e.g. by secrets.token_hex(16)"
        ) from None


def judge(token: str, nonce: bytes, answer: bytes) -> tuple[bool, bytes]:
    """Check what a client answered to MAGIC and `nonce`.

    Args:
        answer: ANSWER bytes: MAGIC, the client's nonce and its proof.

    Returns:
        Whether it proves the token, and the reply: the server's proof, or zeros, so that the client knows what to report.
    """
    magic, theirs, said = answer[: len(MAGIC)], answer[len(MAGIC) : -PROOF], answer[-PROOF:]
    if magic == MAGIC and hmac.compare_digest(said, proof(token, b"client", nonce, theirs)):
        return True, proof(token, b"server", theirs, nonce)
    return False, bytes(PROOF)


class _Unanswered(HandshakeError):
    """The challenge was not answered: the server had no room, or something else listens there. Try again."""


def connect_handshake(sock: socket.socket, token: str, address: str, until: float) -> None:
    """Do the client's half of the challenge by monotonic `until`.

    Raises:
        HandshakeError: the listener is no xfer of this wire version, or holds another token.
    """
    until = min(until, time.monotonic() + HANDSHAKE_S)
    try:
        greeting = read_exactly(sock, len(MAGIC) + NONCE, until)
        if not greeting.startswith(_XFER):
            raise HandshakeError(f"{address} is not an xfer rendezvous")
        if not greeting.startswith(MAGIC):
            (version,) = struct.unpack_from("<I", greeting, len(_XFER))
            raise HandshakeError(
                f"the rendezvous at {address} speaks wire version {version}, this process {WIRE_VERSION}",
                ["install the same xfer on all sides"],
            )
        theirs, mine = greeting[len(MAGIC) :], os.urandom(NONCE)
        sock.sendall(MAGIC + mine + proof(token, b"client", theirs, mine))
        said = read_exactly(sock, PROOF, until)
    except TimeoutError:
        raise _Unanswered(
            f"{address} accepts connections and says nothing: is that process stopped, or is it another service?"
        ) from None
    except (OSError, ConnectionError) as e:
        raise _Unanswered(f"the rendezvous at {address} closed the connection during the challenge: {e}") from None
    if not hmac.compare_digest(said, proof(token, b"server", mine, theirs)):
        raise HandshakeError(
            f"the rendezvous at {address} and this process hold different tokens",
            ["pass the same token= on every rank"],
        )
    sock.settimeout(None)


def accept_handshake(sock: socket.socket, token: str, until: float) -> None:
    """Do the server's half of the challenge by monotonic `until`, on a socket that blocks.

    Raises:
        HandshakeError: the caller holds another token, or does not speak the protocol.
    """
    nonce = os.urandom(NONCE)
    try:
        sock.settimeout(max(0.001, until - time.monotonic()))
        sock.sendall(MAGIC + nonce)
        good, reply = judge(token, nonce, read_exactly(sock, ANSWER, until))
        sock.sendall(reply)
    except OSError as e:
        raise HandshakeError(f"a caller did not prove the token: {e}") from None
    if not good:
        raise HandshakeError("a caller holds another token")


ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
"""A host that vanished counts as gone after a minute, since its successor waits for that. Keepalive (seconds) asks a host to which
nothing is sent; without it, that would take two hours. The last entry (ms) is for a host that has not acknowledged what was sent. The
kernel does not ask such a host, but would send again for a quarter of an hour."""


def prepare(sock: socket.socket) -> None:
    """Make a connected socket non-blocking, without delay, alive as long as its host is, and closed in forked processes."""
    _own.add(sock)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in ALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Channel:
    """One authenticated connection. `send` may be called on any thread."""

    def __init__(self, sock: socket.socket, label: str):
        prepare(sock)
        self.label = label
        self._sock, self._lock = sock, threading.Lock()
        self._closed = threading.Event()
        self.theirs = False  # it belongs to the process that this one was forked from
        self._reader: threading.Thread | None = None
        self._starting = threading.Lock()  # a thread that is not started yet cannot be joined
        _open.add(self)

    def start(self, on_message: Callable[[Message], None], on_close: Callable[[str], None]) -> None:
        """Start the reader thread. It calls `on_message` for each message, and `on_close` once with the reason of the end."""

        def read() -> None:
            reason = "connection closed"
            try:
                while True:
                    on_message(self._receive())
            except ProtocolError as e:
                reason = str(e)
            except (OSError, ConnectionError, ValueError) as e:
                reason = str(e) or "connection closed"
            self.close()
            if not _ending.is_set():
                on_close(reason)

        reader = threading.Thread(target=read, name=f"xfer-read-{self.label}", daemon=True)
        with self._starting:
            reader.start()
            self._reader = reader

    def ask(self, message: Message, until: float) -> Message:
        """Before `start`: send a message and return the answer.

        Raises:
            PeerLost: the connection ended.
            TimeoutError: no answer came by monotonic `until`.
        """
        self.send(message, max(0.0, until - time.monotonic()))
        try:
            self._wait(False, until)
            return self._receive()
        except TimeoutError:
            raise
        except (OSError, ProtocolError) as e:
            raise PeerLost(f"lost the connection to {self.label}: {e}") from None

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def join(self, seconds: float) -> None:
        """Wait until the connection has closed and `on_close` has returned. On the reader thread, return at once."""
        with self._starting:
            reader = self._reader
        if reader is not None and reader is not threading.current_thread():
            reader.join(seconds)

    def _wait(self, write: bool, until: float | None) -> None:
        while not self._closed.is_set():
            left = 1.0 if until is None else min(1.0, until - time.monotonic())
            if left <= 0:
                raise TimeoutError("peer does not read")
            poll = select.poll()  # not select(): a coordinator of a large job has descriptors above 1023
            poll.register(self._sock, select.POLLOUT if write else select.POLLIN)
            if poll.poll(left * 1000):
                return
        raise ConnectionError("connection closed")

    def _read(self, n: int) -> bytes:
        out = bytearray(n)
        view, at = memoryview(out), 0
        while at < n:
            try:
                got = self._sock.recv_into(view[at:], n - at)
            except BlockingIOError:
                self._wait(False, None)
                continue
            if not got:
                raise ConnectionError("connection closed by peer")
            at += got
        return bytes(out)

    def _receive(self) -> Message:
        (size,) = struct.unpack("<I", self._read(4))
        if size > MAX_FRAME:
            raise ProtocolError(f"{self.label} announced a frame of {size} bytes, over the limit of {MAX_FRAME}")
        return decode(self._read(size))

    def send(self, message: Message, seconds: float = SEND_S) -> None:
        """Send a message.

        Raises:
            PeerLost: the connection is gone, or the peer did not read for `seconds`. The connection is closed then.
        """
        if self.theirs:
            raise PeerLost(
                f"cannot send {type(message).__name__} to {self.label}: this process was forked from the one that connected",
                ["a session belongs to one process: call from that one, or connect in this one"],
            )
        data = memoryview(frame(message))
        until = time.monotonic() + seconds
        mine = self._lock.acquire(timeout=seconds)  # not `with`: its holder may be waiting for the same peer
        try:
            if not mine:
                raise TimeoutError("peer does not read")
            while data:
                try:
                    data = data[self._sock.send(data) :]
                except BlockingIOError:
                    self._wait(True, until)
        except (OSError, ConnectionError, ValueError) as e:
            self.close()
            raise PeerLost(f"cannot send {type(message).__name__} to {self.label}: {e}") from None
        except BaseException:
            self.close()  # interrupted: half a frame may be on its way
            raise
        finally:
            if mine:
                self._lock.release()

    def leave(self) -> None:
        """In a forked process: the connection is the parent's."""
        self.theirs = True
        self._closed = threading.Event()  # a thread of the parent may have held the old one's lock
        self._closed.set()

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            self._sock.close()


_open: weakref.WeakSet[Channel] = weakref.WeakSet()
_ending = threading.Event()
"""Set when the interpreter ends. Connections end with it, and nobody in this process has to hear of that."""


@atexit.register
def _stop_reading() -> None:
    """Join the readers: when its connection ends, a reader frees lanes, in gloo's C++."""
    _ending.set()
    channels = list(_open)
    for channel in channels:
        channel.close()
    wait_for_all(channel.join for channel in channels)


_own: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Sockets of this process, also those that listen."""


def _forked() -> None:
    """In a forked process no other thread runs, so no connection works. Close the copies, so that the parent's death is noticed."""
    for channel in list(_open):
        channel.leave()
    for sock in list(_own):
        sock.close()
    _open.clear()


os.register_at_fork(after_in_child=_forked)


def parse_address(rendezvous: str) -> tuple[str, int]:
    """Parse `tcp://HOST:PORT`. An IPv6 address stands in brackets: `tcp://[fd00::1]:29600` -> ("fd00::1", 29600).

    Raises:
        HandshakeError: `rendezvous` has another form.
    """
    told = rendezvous if isinstance(rendezvous, str) else ""
    host, _, port = told.removeprefix("tcp://").rpartition(":")
    if not told.startswith("tcp://") or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise HandshakeError(f"rendezvous {rendezvous!r} is not of the form tcp://HOST:PORT")
    inside = host.removeprefix("[").removesuffix("]")
    try:
        if ":" in inside or inside != host:
            if host != f"[{inside}]":
                raise ValueError("an IPv6 address stands in brackets, as in tcp://[fd00::1]:29600")
            ipaddress.IPv6Address(inside)
        inside.encode("idna")
    except ValueError as e:  # a UnicodeError too
        raise HandshakeError(f"rendezvous {rendezvous!r}: {host!r} is not a host name: {e}") from None
    return inside, int(port)


def _resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple]]:
    """Return all addresses of a host, of every family, in the resolver's order."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def dial(rendezvous: str, token: str, deadline_s: float, given_up: Callable[[], bool] = lambda: False) -> Channel:
    """`dial_socket`, as a channel."""
    return Channel(dial_socket(rendezvous, token, deadline_s, given_up), "rendezvous")


def dial_socket(
    rendezvous: str, token: str, deadline_s: float, given_up: Callable[[], bool] = lambda: False
) -> socket.socket:
    """Connect and prove the token. Waits for the listener until the deadline, since processes start in any order.

    Args:
        given_up: called before each attempt.

    Raises:
        DeadlineExceeded: no rendezvous answered within `deadline_s`.
        HandshakeError: the listener holds another token, or is no xfer of this wire version.
        PeerLost: `given_up` returned True.
    """
    check_token(token)
    host, port = parse_address(rendezvous)
    until, last = time.monotonic() + deadline_s, "nothing tried"
    while True:
        left = until - time.monotonic()
        if given_up():
            raise PeerLost(f"gave up connecting to {rendezvous}: closed by this process itself")
        if left <= 0:
            raise DeadlineExceeded(
                f"no xfer rendezvous answered at {rendezvous} within {round(deadline_s, 1):g} s",
                [f"last attempt: {last}", "trainer rank 0 hosts it: has it called xfer.connect()?"],
            )
        try:
            # Connects to the first address of the host, of either family, that accepts.
            sock = socket.create_connection((host, port), timeout=min(left, 5.0))
        except OSError as e:
            last = str(e)
            time.sleep(min(0.2, max(left, 0.01)))
            continue
        try:
            connect_handshake(sock, token, rendezvous, until)
        except _Unanswered as e:
            sock.close()
            last = e.message
            time.sleep(min(0.05, max(left, 0.01)))
            continue
        except HandshakeError:
            sock.close()
            raise
        return sock


def listen(rendezvous: str, token: str, *, elsewhere: bool = True) -> list[socket.socket]:
    """Listen at every address of the host, since a client may know only some of them.

    Args:
        elsewhere: whether to listen on every interface if no address of the host is this machine's. Otherwise return none.

    Raises:
        HandshakeError: an address is in use, or the host has none.
    """
    check_token(token)
    host, port = parse_address(rendezvous)
    try:
        addresses = _resolve(host, port)
        socks = _listen_at(addresses)
        if not socks and elsewhere:
            # The addresses are not this host's own (a service address, NAT): listen on every interface.
            logging.getLogger("xfer").warning(
                "xfer: %s is not an address of this host; listening on all interfaces", host
            )
            families = dict.fromkeys(family for family, _ in addresses)
            socks = _listen_at([(f, ("::" if f == socket.AF_INET6 else "0.0.0.0", port)) for f in families])
        if not socks and elsewhere:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    except OSError as e:
        raise HandshakeError(f"cannot listen at {rendezvous}: {e}", _why_not_listening(e)) from None
    return socks


def _listen_at(addresses: Sequence[tuple[socket.AddressFamily, tuple]]) -> list[socket.socket]:
    """Return a listening socket for each address that belongs to this host."""
    socks: list[socket.socket] = []
    for family, address in addresses:
        sock = None
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:  # else "::" takes the port of "0.0.0.0" too
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
            sock.listen(1024)
            socks.append(sock)
        except OSError as e:
            if sock is not None:
                sock.close()
            if e.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                for s in socks:
                    s.close()
                raise
    _own.update(socks)
    return socks


def _why_not_listening(e: OSError) -> list[str]:
    if isinstance(e, socket.gaierror):
        return ["this host does not know that name; give an address of trainer rank 0's host, by name or number"]
    if e.errno != errno.EADDRINUSE:
        return []
    return [
        "does another job use this port, or an earlier session of this one that was not closed? does another rank believe that "
        "it is trainer rank 0, too (an adapter that was made before torch.distributed was initialized)?"
    ]
