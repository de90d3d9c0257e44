"""Measures between two processes: reachability, round trips, clocks, a rate, and whether one reads the other's memory."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from types import ModuleType
from typing import Annotated

from msgspec import Meta

from xfer.cli.doctor.addresses import chosen
from xfer.cli.doctor.facts import HostFacts, MemoryRead, NetworkPath
from xfer.cli.line import GREET_S, Door, Line, Note
from xfer.errors import HandshakeError, XferError
from xfer.rendezvous.channel import connect_handshake, read_exactly

CONNECT_S, PINGS_S, STREAM_S = 5.0, 5.0, 5.0
PINGS, STREAMS, BLOCK_BYTES = 20, 4, 1 << 18
WARM_S = 0.3
"""Seconds after a stream's first byte that are not counted: other streams may not have begun, and buffers fill."""
_LOOK_MS = 50
_IP_MTU, _IPV6_MTU = 14, 24
"""Linux: the path MTU of a connected socket."""


class Knock(Note, frozen=True):
    """Visitor -> visited: the first message of a connection.

    `stream_s`: count bytes for so long; 0: answer pings. `lasts_s`: seconds until the visited may hang up.
    """

    stream_s: Annotated[float, Meta(ge=0, le=60)]
    lasts_s: Annotated[float, Meta(ge=0, le=120)]


class Here(Note, frozen=True):
    """Visited -> visitor: who it is."""

    identity: str


# ---- the visited side


def open_door(identity: str, token: str) -> tuple[Door, int]:
    """Answers visitors, on every interface. Returns the door and its port."""
    try:
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):  # no IPv6, or none that takes IPv4 too
        listener = socket.create_server(("", 0))

    def welcome(sock: socket.socket, address: str) -> None:
        line = Line(sock, address)
        knock = line.take(time.monotonic() + GREET_S, Knock)
        until = time.monotonic() + knock.lasts_s
        line.send(Here(identity), until)
        if knock.stream_s:
            _count(sock, knock.stream_s, until)
        else:
            _answer(sock, until)
        sock.close()

    return Door([listener], token, welcome), listener.getsockname()[1]


def _answer(sock: socket.socket, until: float) -> None:
    """Answers each byte with this machine's clock, until the visitor hangs up."""
    while True:
        sock.settimeout(max(0.001, until - time.monotonic()))
        if not sock.recv(1):
            return
        sock.sendall(struct.pack("<d", time.time()))


def _count(sock: socket.socket, stream_s: float, until: float) -> None:
    """Counts the bytes of `stream_s` seconds, and answers their number. Then reads until the visitor hangs up."""
    buffer, total, warm, end = bytearray(4 * BLOCK_BYTES), 0, 0.0, 0.0
    told = False
    while True:
        sock.settimeout(max(0.001, until - time.monotonic()))
        got = sock.recv_into(buffer)
        if not got:
            return
        now = time.monotonic()
        warm = warm or now + WARM_S
        if not end:
            end = now + stream_s if now >= warm else 0.0
        elif now < end:
            total += got
        elif not told:
            sock.sendall(struct.pack("<Q", total))
            told = True


# ---- the visiting side


def longest_s(other: HostFacts, seen: str, stream_s: float) -> float:
    """Most seconds that a visit of that process takes."""
    return len(chosen(other, seen)) * ((2 + STREAMS) * CONNECT_S + PINGS_S + WARM_S + stream_s + STREAM_S)


def visit(
    me: HostFacts, other: HostFacts, seen: str, token: str, stream_s: float, names: dict[str, str]
) -> Iterator[NetworkPath]:
    """Measures the path to each address of another process.

    Args:
        seen: Address from which it reached the rendezvous; "" if that means nothing here.
        stream_s: See `Terms`.
        names: Labels by identity.
    """
    for address, users in chosen(other, seen).items():
        found = NetworkPath(me.label, other.label, address, tuple(users))
        try:
            yield _measure(found, other, token, stream_s, names)
        except XferError as e:
            yield replace(found, error=e.message)
        except OSError as e:
            late = isinstance(e, TimeoutError)
            yield replace(found, error=f"no answer within {CONNECT_S:g} s" if late else e.strerror or str(e))


def _measure(found: NetworkPath, other: HostFacts, token: str, stream_s: float, names: dict[str, str]) -> NetworkPath:
    at = found.address, other.port
    with _call(at, other, token, names, 0, PINGS_S) as sock:
        until = time.monotonic() + PINGS_S
        trips = []
        for _ in range(PINGS):
            began, clock = time.perf_counter(), time.time()
            sock.sendall(b"?")
            (theirs,) = struct.unpack("<d", read_exactly(sock, 8, until))
            took = time.perf_counter() - began
            trips.append((took, theirs - (clock + took / 2)))
        v6 = sock.family == socket.AF_INET6
        try:
            mtu = sock.getsockopt(*(socket.IPPROTO_IPV6, _IPV6_MTU) if v6 else (socket.IPPROTO_IP, _IP_MTU))
        except OSError:
            mtu = 0
    round_trip, ahead = min(trips)
    found = replace(found, round_trip_s=round_trip, clock_ahead_s=ahead, path_mtu=mtu)
    if not stream_s:
        return found
    lasts = WARM_S + stream_s + STREAM_S
    streams = []
    try:
        for _ in range(STREAMS):
            streams.append(_call(at, other, token, names, stream_s, lasts + STREAMS * CONNECT_S))
        return replace(found, nbytes=_send(streams, time.monotonic() + lasts), seconds=stream_s)
    except OSError as e:
        why = f"nothing within {lasts:g} s" if isinstance(e, TimeoutError) else e.strerror or str(e)
        return replace(found, error=f"small messages arrive, a stream of bytes does not: {why}")
    finally:
        for sock in streams:
            sock.close()


def _call(
    at: tuple[str, int], other: HostFacts, token: str, names: dict[str, str], stream_s: float, lasts_s: float
) -> socket.socket:
    """Connects, and makes sure that it is `other` that answers."""
    until = time.monotonic() + CONNECT_S
    sock = socket.create_connection(at, CONNECT_S)
    try:
        connect_handshake(sock, token, f"{at[0]} port {at[1]}", until)
        line = Line(sock, f"{at[0]} port {at[1]}")
        line.send(Knock(stream_s, lasts_s), until)
        identity = line.take(until, Here).identity
        if identity != other.identity:
            raise HandshakeError(f"{names.get(identity, 'another process')} answers there, not {other.label}")
        sock.settimeout(lasts_s)
        return sock
    except BaseException:
        sock.close()
        raise


def _send(streams: Sequence[socket.socket], until: float) -> int:
    """Sends over all streams until all have answered: each of them counts while all others run. Returns how many bytes arrived in time.
    Raises OSError if one does not answer."""
    block, arrived, failed = bytes(BLOCK_BYTES), list[int](), threading.Event()

    def send(sock: socket.socket) -> None:
        answer, poll = b"", select.poll()
        poll.register(sock, select.POLLIN | select.POLLOUT)
        sock.setblocking(False)
        try:
            while len(answer) < 8 or (len(arrived) < len(streams) and not failed.is_set()):
                if time.monotonic() > until:
                    raise TimeoutError
                for _, event in poll.poll(_LOOK_MS):
                    if not event & ~select.POLLOUT:
                        sock.send(block)  # or a part of it: all bytes are alike
                        continue
                    answer += (got := sock.recv(8 - len(answer) or 1))
                    if not got:
                        raise ConnectionError("connection closed")
                    if len(answer) == 8:
                        arrived.append(struct.unpack("<Q", answer)[0])
        except OSError:
            failed.set()
            raise

    with ThreadPoolExecutor(len(streams)) as pool:
        for sent in [pool.submit(send, s) for s in streams]:
            sent.result()
    return sum(arrived)


def _memories(facts: HostFacts) -> list[tuple[str, ModuleType, str]]:
    """The memories that can be read: name, module of transport/ that reads it in a session, device."""
    from xfer.transport import peer, peer_host

    return [("host memory", peer_host, "cpu"), ("GPU memory", peer, "cuda:0")][: 2 if facts.gpus else 1]


def offer_probes(facts: HostFacts) -> tuple[dict[str, bytes], list[object]]:
    """Offers of a probe in each memory of this process, and the objects to keep for as long as others may read the probes."""
    import torch

    offers, kept = {}, []
    for memory, route, device in _memories(facts):
        with suppress(RuntimeError):  # out of memory, say; then there is nothing to read
            kept.append(route.Export(0, (), torch.device(device)))
            offers[memory] = kept[-1].to_bytes()
    return offers, kept


def read_probes(me: HostFacts, other: HostFacts, offers: Mapping[str, bytes]) -> Iterator[MemoryRead]:
    """Reads the probes of another process of this machine, as a worker that pulls would."""
    import torch

    for memory, route, device in _memories(me):
        if memory not in offers:
            continue
        mapping = route.Mapping(1, torch.device(device))
        try:
            mapping.open(offers[memory], 0, ())
            why = mapping.why(0)
        except (XferError, RuntimeError) as e:
            why = str(e)
        finally:
            mapping.close()
        yield MemoryRead(other.label, me.label, memory, why)
