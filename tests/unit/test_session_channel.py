"""Control connections: nobody is heard who has not proved the token, and no frame can hurt whoever reads it."""

import contextlib
import os
import socket
import struct
import threading
import time

import pytest

from examples.common.ports import free_port
from tests.support.proc import PATIENCE
from xfer.coordinator import messages as m
from xfer.coordinator.events import Disconnected, Received, Unproven
from xfer.coordinator.state import Options
from xfer.errors import DeadlineExceeded, HandshakeError, PeerLost
from xfer.rendezvous import channel as c
from xfer.rendezvous.server import Server

TOKEN = "a token for tests"


class Listener:
    """A real rendezvous server. What it feeds to its coordinator is kept here instead."""

    def __init__(self, token=TOKEN):
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.got, self.ended, self.refused = [], [], []
        self.done = threading.Event()
        self.server = Server(self.address, token, Options(1, 1, 20.0, 4096))
        self.server.feed = self._feed

    def _feed(self, event):
        if isinstance(event, Received):
            self.got.append(event.message)
        elif isinstance(event, Disconnected):
            self.ended.append(event.reason)
            self.done.set()
        elif isinstance(event, Unproven):
            self.refused.append(event.host)
            self.done.set()

    def close(self):
        self.server.close()


@pytest.fixture
def listener():
    one = Listener()
    yield one
    one.close()


def wait(test, seconds=5.0):
    until = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.01)


def test_both_prove_the_token_and_talk(listener):
    client = c.dial(listener.address, TOKEN, 5.0)
    client.start(lambda msg: None, lambda reason: None)
    client.send(m.StoreSet("r0/a", b"x" * 60000))
    client.send(m.Leave())
    wait(lambda: len(listener.got) == 2)
    assert listener.got[0].value == b"x" * 60000 and isinstance(listener.got[1], m.Leave)
    client.close()


def test_a_wrong_token_is_refused_on_both_sides(listener):
    with pytest.raises(HandshakeError, match="different tokens"):
        c.dial(listener.address, "another token", 5.0)
    wait(listener.done.is_set)
    assert listener.refused and not listener.got


def test_a_listener_that_does_not_know_the_token_is_not_talked_to():
    impostor = Listener("what the impostor guesses")
    with pytest.raises(HandshakeError):
        c.dial(impostor.address, TOKEN, 5.0)
    assert not impostor.got
    impostor.close()


def test_replaying_a_seen_proof_does_not_open_the_door(listener):
    """A proof is made of both nonces, so what was seen on another connection is worthless."""
    host, port = c.parse_address(listener.address)
    sock = socket.create_connection((host, port))
    greeting = sock.recv(8 + 32)
    sock.sendall(c.MAGIC + os.urandom(32) + c.proof(TOKEN, b"client", os.urandom(32), os.urandom(32)))
    sock.recv(32)
    wait(listener.done.is_set)
    assert greeting.startswith(c.MAGIC) and listener.refused and not listener.got


@pytest.mark.parametrize(
    "frame", [struct.pack("<I", 0xFFFFFFFF), struct.pack("<I", 5) + b"\x93abcd", struct.pack("<I", 3) + b"\x80\x05."]
)
def test_hostile_frames_end_the_connection_and_nothing_else(listener, frame):
    client = c.dial(listener.address, TOKEN, 5.0)
    client._sock.setblocking(True)
    client._sock.sendall(frame)
    wait(listener.done.is_set)
    assert not listener.got and listener.ended
    client.close()


def test_garbage_instead_of_a_challenge_is_dropped(listener):
    host, port = c.parse_address(listener.address)
    with socket.create_connection((host, port)) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"\0" * 200)
        sock.settimeout(5.0)
        with contextlib.suppress(ConnectionError):
            while sock.recv(1 << 10):
                pass
    assert not listener.got and not listener.ended


def test_another_version_of_xfer_is_told_apart_before_anything_is_said_that_it_could_not_read():
    with socket.create_server(("127.0.0.1", 0)) as sock:

        def greet():
            client, _ = sock.accept()
            with client:
                client.sendall(b"xfer" + struct.pack("<I", m.WIRE_VERSION + 1) + b"n" * 32)
                client.recv(1 << 10)

        threading.Thread(target=greet, daemon=True).start()
        with pytest.raises(
            HandshakeError, match=f"version {m.WIRE_VERSION + 1}, this process {m.WIRE_VERSION}(.|\n)*same xfer"
        ):
            c.dial(f"tcp://127.0.0.1:{sock.getsockname()[1]}", TOKEN, 20.0)


def test_nobody_at_the_address_ends_at_the_deadline():
    t0 = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="no xfer rendezvous"):
        c.dial(f"tcp://127.0.0.1:{free_port()}", TOKEN, 1.0)
    assert time.monotonic() - t0 < 4.0 * PATIENCE


@pytest.mark.parametrize("greeting", [b"", c.MAGIC, c.MAGIC + b"n" * 32])
def test_a_listener_that_falls_silent_is_waited_for_until_the_deadline_only(greeting):
    with socket.create_server(("127.0.0.1", 0)) as sock:

        def greet():
            client, _ = sock.accept()
            client.sendall(greeting)
            client.recv(1 << 10)  # what it proves, and then its end
            while client.recv(1 << 10):
                pass

        threading.Thread(target=greet, daemon=True).start()
        t0 = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="accepts connections and says nothing: is that process stopped"):
            c.dial(f"tcp://127.0.0.1:{sock.getsockname()[1]}", TOKEN, 0.3)
        assert time.monotonic() - t0 < 3.0 * PATIENCE


def test_a_closed_peer_is_an_error_on_send(listener):
    client = c.dial(listener.address, TOKEN, 5.0)
    client.start(lambda msg: None, lambda reason: None)
    wait(lambda: listener.server._connections)
    listener.close()
    with pytest.raises(PeerLost):
        for _ in range(100):
            client.send(m.Leave())
            time.sleep(0.01)


@pytest.mark.parametrize("address", ["10.0.0.1:1", "tcp://x", "tcp://:1", "tcp://h:0", "tcp://h:99999", "http://h:1"])
def test_addresses_are_checked(address):
    with pytest.raises(HandshakeError):
        c.parse_address(address)


def test_short_tokens_are_refused():
    with pytest.raises(HandshakeError, match="8 characters"):
        c.dial("tcp://127.0.0.1:1", "short", 1.0)
