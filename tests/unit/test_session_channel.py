"""Control connections: a peer must prove the token first, no frame harms its reader, and closing leaves no peer waiting. Without torch."""

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
OPTIONS = Options(1, 1, 20.0, 4096)


def until_true(condition, seconds=5.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.01)


class Listener:
    """A real rendezvous server. What it feeds to its coordinator is kept here instead."""

    def __init__(self, token=TOKEN):
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.got, self.ended, self.refused = [], [], []
        self.server = Server(self.address, token, OPTIONS)
        self.server.feed = self._feed

    def _feed(self, event):
        if isinstance(event, Received):
            self.got.append(event.message)
        elif isinstance(event, Disconnected):
            self.ended.append(event.reason)
        elif isinstance(event, Unproven):
            self.refused.append(event.host)

    def connect(self) -> socket.socket:
        return socket.create_connection(c.parse_address(self.address), timeout=5.0)


@pytest.fixture
def listener():
    one = Listener()
    yield one
    one.server.close()


def talking(address: str, ended=lambda reason: None) -> c.Channel:
    client = c.dial(address, TOKEN, 5.0)
    client.start(lambda message: None, ended)
    return client


def test_both_prove_the_token_and_talk(listener):
    client = talking(listener.address)
    client.send(m.StoreAsk(m.StoreCall.SET, ("r0/a",), b"x" * 60000))
    client.send(m.Leave())
    until_true(lambda: len(listener.got) == 2)
    assert listener.got[0].value == b"x" * 60000 and isinstance(listener.got[1], m.Leave)
    client.close()


def test_a_wrong_token_is_refused_on_both_sides_and_nothing_is_said(listener):
    with pytest.raises(HandshakeError, match="different tokens"):
        c.dial(listener.address, "another token", 5.0)
    until_true(lambda: listener.refused)
    assert not listener.got
    with pytest.raises(HandshakeError, match="8 characters"):
        c.dial(listener.address, "short", 1.0)


REPLAYED = c.MAGIC + os.urandom(32) + c.proof(TOKEN, b"client", os.urandom(32), os.urandom(32))
"""A proof for the nonces of another connection."""


@pytest.mark.parametrize("says", [REPLAYED, b"GET / HTTP/1.1\r\n\r\n" + b"\0" * 200], ids=["a replayed proof", "HTTP"])
def test_a_caller_that_does_not_prove_the_token_is_dropped(listener, says):
    with listener.connect() as sock, contextlib.suppress(ConnectionError):
        assert sock.recv(8 + 32).startswith(c.MAGIC)
        sock.sendall(says)
        while sock.recv(1 << 10):
            pass
    until_true(lambda: listener.refused or says != REPLAYED)
    assert not listener.got and not listener.ended


FRAMES = struct.pack("<I", 0xFFFFFFFF), struct.pack("<I", 5) + b"\x93abcd", struct.pack("<I", 3) + b"\x80\x05."


@pytest.mark.parametrize("frame", FRAMES, ids=["too long", "cut", "pickled"])
def test_hostile_frames_end_the_connection_and_nothing_else(listener, frame):
    client = c.dial(listener.address, TOKEN, 5.0)
    client._sock.setblocking(True)
    client._sock.sendall(frame)
    until_true(lambda: listener.ended)
    assert not listener.got
    client.close()


@pytest.fixture
def greeted():
    """Gives a function: where a listener says this, and then hears to the end."""
    with socket.create_server(("127.0.0.1", 0)) as sock:

        def with_(greeting: bytes) -> str:
            def greet():
                client, _ = sock.accept()
                with client:
                    client.sendall(greeting)
                    while client.recv(1 << 10):
                        pass

            threading.Thread(target=greet, daemon=True).start()
            return f"tcp://127.0.0.1:{sock.getsockname()[1]}"

        yield with_


def test_another_version_of_xfer_is_told_apart_before_anything_is_said_that_it_could_not_read(greeted):
    at = greeted(b"xfer" + struct.pack("<I", m.WIRE_VERSION + 1) + b"n" * 32)
    with pytest.raises(
        HandshakeError, match=f"version {m.WIRE_VERSION + 1}, this process {m.WIRE_VERSION}(.|\n)*same xfer"
    ):
        c.dial(at, TOKEN, 20.0)


@pytest.mark.parametrize("greeting", [None, b"", c.MAGIC, c.MAGIC + b"n" * 32])
def test_a_listener_that_is_not_there_or_falls_silent_is_waited_for_until_the_deadline_only(greeted, greeting):
    at = f"tcp://127.0.0.1:{free_port()}" if greeting is None else greeted(greeting)
    said = "accepts connections and says nothing: is that process stopped"
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="no xfer rendezvous" if greeting is None else said):
        c.dial(at, TOKEN, 0.3)
    assert time.monotonic() - began < 3.0 * PATIENCE


# ---- a rendezvous that closes


@pytest.mark.parametrize("inside", [True, False])
def test_a_client_that_has_proved_the_token_when_the_rendezvous_closes_is_not_left_waiting(inside):
    """It has sent nothing yet, or is about to be admitted. It once waited for a welcome to its deadline. To send is an error then."""
    at, ended = f"tcp://127.0.0.1:{free_port()}", threading.Event()
    server = Server(at, TOKEN, OPTIONS)
    prove = server.proven
    if not inside:
        server.proven = lambda connection: setattr(server, "closing", True) or prove(connection)
    client = talking(at, lambda reason: ended.set())
    server.close()
    assert ended.wait(5)
    with pytest.raises(PeerLost):
        client.send(m.Leave())


def test_a_caller_that_comes_as_the_rendezvous_closes_is_let_go_at_once():
    """Its connection was once accepted and forgotten, so that a trainer waited 20 s for a greeting."""
    one, at, go_on = Listener(), threading.Event(), threading.Event()
    one.server.loop.call_soon_threadsafe(lambda: (at.set(), go_on.wait(10)))
    assert at.wait(10)
    with one.connect() as caller:
        closing = threading.Thread(target=one.server.close)
        closing.start()
        time.sleep(0.2)  # until it has asked the thread that stands still
        go_on.set()
        closing.join(20)
        with contextlib.suppress(ConnectionError):
            assert not caller.recv(1)
