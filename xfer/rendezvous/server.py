"""The rendezvous server connects the coordinator to sockets. It is one thread with an asyncio loop, in trainer 0's process.

A caller has HANDSHAKE_S to prove the token (rendezvous/channel.py describes the proof). At most `GREETERS` callers may be in
the middle of it. If there are more, the oldest one is dropped after PATIENCE_S: a real client needs milliseconds, and tries
again. So callers that only connect can slow the server down but not block it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from datetime import datetime, timezone

from xfer import logs
from xfer.coordinator.coordinator import Coordinator
from xfer.coordinator.deadlines import STOP_GRACE_S
from xfer.coordinator.events import Close, Connected, Disconnected, Event, Received, Send, Tick, Unproven
from xfer.coordinator.messages import MAX_FRAME, WireError, decode
from xfer.coordinator.state import Ended, Options
from xfer.errors import ProtocolError
from xfer.rendezvous.channel import ANSWER, HANDSHAKE_S, MAGIC, NONCE, SEND_S, frame, judge, listen, prepare

logger = logging.getLogger("xfer")
GOODBYE_S = 2.0
"""Seconds that clients have to read what they were sent before their connection is closed."""
GREETERS = 64
PATIENCE_S = 0.5
"""Seconds that a caller has for its proof, however many others there are."""
READ_BYTES = 1 << 16
_ended: dict[str, Ended] = {}
"""By rendezvous: the last session of this process there, if it failed before all its trainers had come."""


class Server:
    """Listens at `rendezvous` from construction until `close()`.

    Args:
        rendezvous: "tcp://HOST:PORT".
        token: the job's secret.
        options: the arguments of trainer 0's connect().
        mark: called with each moment of the coordinator's timeline.
        prepare_thread: called on the server's thread before anything else.

    Raises:
        HandshakeError: the address or the token cannot be used.
    """

    def __init__(
        self,
        rendezvous: str,
        token: str,
        options: Options,
        mark: Callable[[str], None] = lambda text: None,
        prepare_thread: Callable[[], object] = lambda: None,
    ):
        self.mark, self._prepare_thread = mark, prepare_thread
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
        self._batch: defaultdict[_Connection, list[bytes]] = defaultdict(list)  # frames of this pass of the loop
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

    def close(self, until: float = 0.0) -> None:
        """Stop listening, let clients read what they were told, and close their connections.

        Args:
            until: monotonic time until which the server waits for trainers that have not come yet. Here they learn why
                they cannot join; at a closed port they would try until their deadline.
        """
        co = self.coordinator
        while (0 in co.trainers or len(co.met) < co.options.trainers) and time.monotonic() < until:
            time.sleep(0.02)
        ends = time.monotonic() + STOP_GRACE_S
        # An engine that hears nothing more of a running refit must assume the worst.
        while co.refit is not None and self._thread.is_alive() and time.monotonic() < ends:
            time.sleep(0.005)
        self._remember()
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop_listening)
            asyncio.run_coroutine_threadsafe(self._close(), self.loop)
            self._thread.join(2 * GOODBYE_S + 1.0)

    def _remember(self) -> None:
        """Keep why the session failed, for trainers that come late to the next one at this address."""
        co = self.coordinator
        missing = frozenset(range(co.options.trainers)) - co.met
        if co.failure is not None and missing:
            _ended[self.rendezvous] = Ended(co.session, WireError.of(co.failure), missing)
        else:
            _ended.pop(self.rendezvous, None)

    # ---- on the loop

    def _run(self) -> None:
        self._prepare_thread()
        asyncio.set_event_loop(self.loop)
        for listener in self._listeners:
            listener.setblocking(False)
            self._watch(listener)
        self.feed(Tick())
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def feed(self, event: Event) -> None:
        """Give the coordinator an event and carry out the effects."""
        if self.closing:
            return
        for effect in self.coordinator.handle(event, time.monotonic()):
            if isinstance(effect, Send):
                self._send(effect)
            elif isinstance(effect, Close):
                if effect.client in self._connections:
                    self._connections[effect.client].finish()
            else:
                self.mark(effect.text)
        wake = self.coordinator.wake_at
        if wake is not None and (self._alarm is None or wake < self._alarm.when()):
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = self.loop.call_at(wake, self._tick)

    def _tick(self) -> None:
        self._alarm = None
        self.feed(Tick())

    def _send(self, send: Send) -> None:
        some = [self._connections[n] for n in send.clients if n in self._connections]
        try:
            data = frame(send.message)  # encoded once for all
        except ProtocolError as e:  # a bug here: these clients would wait for what they were not told
            logger.error("xfer: %s", e)
            for connection in some:
                connection.finish()
            return
        if not self.coordinator.hold_s:
            for connection in some:
                connection.write(data)
            return
        # In a large job, frames for one client that are due in one pass of the loop leave together.
        if not self._batch:
            self.loop.call_soon(self._flush)
        for connection in some:
            self._batch[connection].append(data)

    def _flush(self) -> None:
        batch, self._batch = self._batch, defaultdict(list)
        for connection, frames in batch.items():
            connection.write(b"".join(frames))

    def _watch(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self.loop.add_reader(listener, self._accept, listener)

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            self.loop.remove_reader(listener)
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        """Somebody dials."""
        if len(self.unproven) >= GREETERS:
            oldest, since = next(iter(self.unproven.items()))
            left = since + PATIENCE_S - time.monotonic()
            if left > 0:
                return self._look_away(listener, min(left, 0.02))
            oldest.end("it did not prove the token in time")
        try:
            sock, peer = listener.accept()
        except BlockingIOError:
            return  # the caller has left again
        except OSError:
            return self._look_away(listener, 0.1)  # out of descriptors, which must not end the rendezvous
        connection = _Connection(self, sock, str(peer[0]))
        try:
            connection.start()
        except OSError as e:
            connection.end(str(e))

    def _look_away(self, listener: socket.socket, seconds: float) -> None:
        self.loop.remove_reader(listener)
        self.loop.call_later(seconds, self._watch, listener)

    def proven(self, connection: _Connection) -> int:
        """A connection has proved the token. Returns its number."""
        number = next(self._numbers)
        self._connections[number] = connection
        self.feed(Connected(number))
        return number

    def lost(self, connection: _Connection, reason: str) -> None:
        self.unproven.pop(connection, None)
        self._batch.pop(connection, None)
        if connection.number:
            del self._connections[connection.number]
            self.feed(Disconnected(connection.number, reason))

    async def _close(self) -> None:
        self._flush()
        self.closing = True
        if self._alarm is not None:
            self._alarm.cancel()
        for connection in list(self.unproven):
            connection.end("the session is closed")
        for connection in self._connections.values():
            connection.finish()
        until = time.monotonic() + GOODBYE_S
        while self._connections and time.monotonic() < until:
            await asyncio.sleep(0.005)
        for connection in list(self._connections.values()):
            connection.end("the session is closed")
        self.loop.stop()


class _Connection:
    """One caller: first the proof of the token, then frames of 4 bytes of little-endian length and one encoded message each.

    Before the proof, nothing but its fixed length is parsed. The socket is read and written directly: an asyncio transport
    costs more than all of the coordinator's work for a message.
    """

    def __init__(self, server: Server, sock: socket.socket, host: str):
        self.server, self.sock, self.host = server, sock, host
        self.number = 0  # of a client that proved the token
        self._nonce = os.urandom(NONCE)
        self._buffer, self._unsent = bytearray(), bytearray()
        self._over = False  # nothing more is taken from it
        self._finishing = False  # it is closed once everything is sent
        self._ended = False
        self._limit: asyncio.TimerHandle | None = None  # for the proof, then for a client that does not read

    def start(self) -> None:
        """Greet the caller and read from it.

        Raises:
            OSError: it is gone already.
        """
        loop = self.server.loop
        prepare(self.sock)
        self.server.unproven[self] = time.monotonic()
        self._limit = loop.call_later(HANDSHAKE_S, self.end, "it did not prove the token in time")
        loop.add_reader(self.sock, self._readable)
        self.write(MAGIC + self._nonce)

    # ---- reading

    def _readable(self) -> None:
        try:
            data = self.sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as e:
            return self.end(str(e))
        if not data:
            return self.end("connection closed by peer")
        if self._over:
            return
        self._buffer += data
        if self.number or self._prove():
            try:
                self._take_frames()
            except ProtocolError as e:
                self.end(str(e))

    def _prove(self) -> bool:
        """Check the proof. The caller is answered in any case, so that it knows what to report."""
        if len(self._buffer) < ANSWER:
            return False
        answer = bytes(self._buffer[:ANSWER])
        del self._buffer[:ANSWER]
        good, reply = judge(self.server.token, self._nonce, answer)
        self.write(reply)
        self.server.unproven.pop(self, None)
        self._set_limit(None)
        if good:
            self.number = self.server.proven(self)
        else:
            if answer.startswith(MAGIC):
                self.server.feed(Unproven(self.host))
            self.end("it did not prove the token")
        return good

    def _take_frames(self) -> None:
        buffer, at = self._buffer, 0
        while len(buffer) >= at + 4 and not self._over:
            size = int.from_bytes(buffer[at : at + 4], "little")
            if size > MAX_FRAME:
                raise ProtocolError(f"a frame of {size} bytes was announced, over the limit of {MAX_FRAME}")
            if len(buffer) < at + 4 + size:
                break
            message = decode(bytes(buffer[at + 4 : at + 4 + size]))
            at += 4 + size
            self.server.feed(Received(self.number, message))
        del buffer[:at]

    # ---- writing

    def write(self, data: bytes) -> None:
        """Send bytes now, or when the client reads again. One that reads nothing for SEND_S counts as lost."""
        if self._ended or self._finishing:
            return
        if self._unsent:
            self._unsent += data
            return
        sent = self._try_send(data)
        if sent < len(data) and not self._ended:
            self._unsent += memoryview(data)[sent:]
            self.server.loop.add_writer(self.sock, self._writable)
            if self.number:
                self._set_limit(self.server.loop.call_later(SEND_S, self.end, "it did not read what it was sent"))

    def _try_send(self, data: bytes | bytearray) -> int:
        try:
            return self.sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as e:
            self._over = True
            self.server.loop.call_soon(self.end, str(e))  # later: the coordinator's effects are being carried out
            return len(data)

    def _writable(self) -> None:
        del self._unsent[: self._try_send(self._unsent)]
        if not self._unsent:
            self.server.loop.remove_writer(self.sock)
            self._set_limit(None)
            if self._finishing:
                self._half_close()

    def _set_limit(self, limit: asyncio.TimerHandle | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._limit = limit

    # ---- the end

    def finish(self) -> None:
        """Take nothing more from the client, and close when it has read everything: closing now would discard unread bytes."""
        if self._finishing or self._ended:
            return
        frames = self.server._batch.pop(self, None)
        if frames:
            self.write(b"".join(frames))
        self._over = self._finishing = True
        if not self._unsent:
            self._half_close()
        self.server.loop.call_later(GOODBYE_S, self.end, "the session closed the connection")

    def _half_close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def end(self, reason: str) -> None:
        """Close the connection now and tell the coordinator, once."""
        if self._ended:
            return
        self._ended = self._over = True
        self._set_limit(None)
        if self.sock.fileno() >= 0:
            self.server.loop.remove_reader(self.sock)
            self.server.loop.remove_writer(self.sock)
            self.sock.close()
        self.server.lost(self, reason)


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


@atexit.register
def _stop_feeding() -> None:
    """The interpreter ends, and all connections with it: the coordinators of this process need not hear of that."""
    for server in list(_servers):
        server.closing = True
