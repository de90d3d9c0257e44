"""The rendezvous server: feeds the coordinator from sockets. One thread, with an asyncio loop, in trainer 0's process.

A caller has HANDSHAKE_S for the proof of the token (rendezvous/channel.py says how it goes), and is one of at most
`GREETERS` that are in the middle of it. When there are more, the oldest one makes room, after PATIENCE_S: a true client
needs milliseconds, and tries again if it was sent away. So callers that only connect can slow the server down but not block it.
"""

from __future__ import annotations

import asyncio
import atexit
import hmac
import itertools
import logging
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from datetime import datetime, timezone

from xfer import logs
from xfer.coordinator.coordinator import Coordinator
from xfer.coordinator.deadlines import STOP_GRACE_S
from xfer.coordinator.events import Close, Connected, Disconnected, Event, Mark, Received, Send, Tick, Unproven
from xfer.coordinator.messages import MAX_FRAME, Message, WireError, decode
from xfer.coordinator.state import Ended, Options
from xfer.errors import ProtocolError
from xfer.participants.timeline import HUB, mark
from xfer.participants.turns import short_sleeps
from xfer.rendezvous.channel import ALIVE, HANDSHAKE_S, MAGIC, NONCE, SEND_S, frame, listen, proof

logger = logging.getLogger("xfer")
GOODBYE_S = 2.0
"""Seconds that clients have to read what they were told before their connection is closed."""
GREETERS = 64
PATIENCE_S = 0.5
"""Seconds that a caller has for its proof, however many others there are."""
_ended: dict[str, Ended] = {}
"""The last session of this process at each rendezvous, if it failed before all its trainers had come."""
_PROOF = len(MAGIC) + NONCE + 32


class Server:
    """Listens at `rendezvous` from construction until `close()`.

    Args:
        rendezvous: "tcp://HOST:PORT".
        token: the job's secret.
        options: what trainer 0 was told.

    Raises:
        HandshakeError: the address or the token cannot be used.
    """

    def __init__(self, rendezvous: str, token: str, options: Options):
        session = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S.%f ") + secrets.token_hex(2)
        self.coordinator = Coordinator(options, session, time.monotonic(), _ended.get(rendezvous))
        self.rendezvous, self.token = rendezvous, token
        self.closing = False
        self._listeners = listen(rendezvous, token)
        expected = f"{logs.counted(options.trainers, 'trainer')} and {logs.counted(options.replicas, 'replica')}"
        logger.info("xfer: listening at %s for %s", rendezvous, expected)
        self._connections: dict[int, _Connection] = {}  # that proved the token
        self.unproven: dict[_Connection, float] = {}  # since when; oldest first
        self._numbers = itertools.count(1)
        self._alarm: asyncio.TimerHandle | None = None
        _servers.add(self)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="xfer-rendezvous", daemon=True)
        self._thread.start()

    # ---- for the owner, on any thread

    def wait_left(self, trainer: int) -> None:
        """Wait until the coordinator has processed this trainer's Leave, and hence everything sent before it, including the reason."""
        until = time.monotonic() + GOODBYE_S
        while trainer in self.coordinator.trainers and self._thread.is_alive() and time.monotonic() < until:
            time.sleep(0.005)

    def rejected(self) -> list[str]:
        """One line per process that was turned away."""
        return self.coordinator.rejected.lines()

    def close(self, until: float = 0.0) -> None:
        """Stop listening, let clients read what they were told, and close their connections.

        Args:
            until: monotonic time up to which trainers that have not come yet are waited for. Here they learn why there is
                nothing to join; at a closed port they would try until their deadline.
        """
        co = self.coordinator
        while (0 in co.trainers or len(co.met) < co.options.trainers) and time.monotonic() < until:
            time.sleep(0.02)
        ends = time.monotonic() + STOP_GRACE_S
        # An engine that hears no more of a refit in the middle of it must assume the worst.
        while co.refit is not None and self._thread.is_alive() and time.monotonic() < ends:
            time.sleep(0.005)
        missing = frozenset(range(co.options.trainers)) - co.met
        if co.failure is not None and missing:
            _ended[self.rendezvous] = Ended(co.session, WireError.of(co.failure, "rendezvous"), missing)
        else:
            _ended.pop(self.rendezvous, None)
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._close(), self.loop)
            self._thread.join(2 * GOODBYE_S + 1.0)

    # ---- on the loop

    def _run(self) -> None:
        short_sleeps()
        asyncio.set_event_loop(self.loop)
        self._accepting = [self.loop.create_task(self._accept(sock)) for sock in self._listeners]
        self.feed(Tick())
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def feed(self, event: Event) -> None:
        """Give the coordinator an event and do what it asks for."""
        if self.closing:
            return
        last: Message | None = None
        for effect in self.coordinator.handle(event, time.monotonic()):
            if isinstance(effect, Mark):
                mark(HUB, effect.text)
                continue
            connection = self._connections.get(effect.client)
            if connection is None:
                continue
            if isinstance(effect, Close):
                connection.finish()
            elif isinstance(effect, Send):
                try:
                    if effect.message is not last:  # a broadcast is encoded once
                        data, last = frame(effect.message), effect.message
                except ProtocolError as e:  # a bug of ours: this client would wait for what it was not told
                    logger.error("xfer: %s", e)
                    connection.finish()
                    continue
                connection.transport.write(data)
        if self._alarm is not None:
            self._alarm.cancel()
        wake = self.coordinator.wake_at
        self._alarm = self.loop.call_at(wake, self.feed, Tick()) if wake is not None else None

    async def _accept(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        while True:
            try:
                sock, peer = await self.loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(
                    0.1
                )  # out of descriptors, or a caller that left again: neither may end the rendezvous
                continue
            while len(self.unproven) >= GREETERS:
                oldest, since = next(iter(self.unproven.items()))
                left = since + PATIENCE_S - time.monotonic()
                if left > 0:
                    await asyncio.sleep(min(left, 0.02))
                else:
                    self.unproven.pop(oldest, None)
                    oldest.transport.abort()
            try:
                await self.loop.connect_accepted_socket(lambda: _Connection(self, sock, str(peer[0])), sock)  # noqa: B023
            except OSError:
                sock.close()

    def proven(self, connection: _Connection) -> int:
        """A connection has proved the token. Returns its number."""
        number = next(self._numbers)
        self._connections[number] = connection
        self.feed(Connected(number))
        return number

    def lost(self, connection: _Connection, reason: str) -> None:
        self.unproven.pop(connection, None)
        if connection.number:
            del self._connections[connection.number]
            self.feed(Disconnected(connection.number, reason))

    async def _close(self) -> None:
        self.closing = True
        for task, listener in zip(self._accepting, self._listeners):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            listener.close()
        if self._alarm is not None:
            self._alarm.cancel()
        for connection in list(self.unproven):
            connection.transport.abort()
        for connection in self._connections.values():
            connection.finish()
        until = time.monotonic() + GOODBYE_S
        while self._connections and time.monotonic() < until:
            await asyncio.sleep(0.005)
        for connection in list(self._connections.values()):
            connection.transport.abort()
        await asyncio.sleep(0)
        self.loop.stop()


class _Connection(asyncio.Protocol):
    """A caller: first the proof of the token, then frames of 4 bytes of little-endian length and one encoded message each.

    Before the proof nothing is parsed but its fixed length.
    """

    transport: asyncio.Transport

    def __init__(self, server: Server, sock: socket.socket, host: str):
        self.server, self.sock, self.host = server, sock, host
        self.number = 0  # of a client that proved the token
        self._nonce = os.urandom(NONCE)
        self._buffer = bytearray()
        self._over = False
        self._reason = ""
        self._limit: asyncio.TimerHandle | None = None  # on the proof, then on a client that does not read

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in ALIVE.items():
            if hasattr(socket, name):
                self.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if self.server.closing:
            return transport.abort()
        self.server.unproven[self] = time.monotonic()
        _open.add(self)
        self._limit = self.server.loop.call_later(HANDSHAKE_S, transport.abort)
        transport.write(MAGIC + self._nonce)

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        self._buffer += data
        if not self.number and not self._prove():
            return
        try:
            self._take_frames()
        except ProtocolError as e:
            self._over, self._reason = True, str(e)
            self.transport.abort()

    def _prove(self) -> bool:
        """Whether the client has proved the token. It is answered either way, so that it knows what to report."""
        if len(self._buffer) < _PROOF:
            return False
        answer = bytes(self._buffer[:_PROOF])
        del self._buffer[:_PROOF]
        magic, theirs, said = answer[: len(MAGIC)], answer[len(MAGIC) : -32], answer[-32:]
        token = self.server.token
        good = magic == MAGIC and hmac.compare_digest(said, proof(token, b"client", self._nonce, theirs))
        self.transport.write(proof(token, b"server", theirs, self._nonce) if good else b"\0" * 32)
        self.server.unproven.pop(self, None)
        self._limit.cancel()
        if good:
            self.number = self.server.proven(self)
        else:
            if magic == MAGIC:
                self.server.feed(Unproven(self.host))
            self.transport.close()
        return good

    def _take_frames(self) -> None:
        while len(self._buffer) >= 4 and not self._over:
            (size,) = struct.unpack_from("<I", self._buffer)
            if size > MAX_FRAME:
                raise ProtocolError(f"a frame of {size} bytes was announced, over the limit of {MAX_FRAME}")
            if len(self._buffer) < 4 + size:
                return
            message = decode(bytes(self._buffer[4 : 4 + size]))
            del self._buffer[: 4 + size]
            self.server.feed(Received(self.number, message))

    def pause_writing(self) -> None:
        """It does not read: a client that reads nothing for SEND_S counts as lost."""
        self._reason = "it did not read what it was sent"
        self._limit = self.server.loop.call_later(SEND_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._reason = ""
        self._limit.cancel()

    def finish(self) -> None:
        """Nothing more is read from it. What was sent still arrives: closing at once would take back what it has not read yet."""
        if not self._over:
            self._over = True
            if self.transport.can_write_eof() and not self.transport.is_closing():
                self.transport.write_eof()
            self.server.loop.call_later(GOODBYE_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        _open.discard(self)
        self.server.lost(self, self._reason or (str(exc) if exc is not None else "connection closed by peer"))


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


@atexit.register
def _stop_feeding() -> None:
    """The interpreter ends, and connections with it: that is no news for a coordinator of this process."""
    for server in list(_servers):
        server.closing = True


_open: weakref.WeakSet[_Connection] = weakref.WeakSet()


def _forked() -> None:
    """In a forked process, connections are the parent's. A copy of theirs would keep them open when the parent dies."""
    for connection in list(_open):
        connection.sock.close()
    _open.clear()


os.register_at_fork(after_in_child=_forked)
