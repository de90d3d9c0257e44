"""The rendezvous' sockets: addresses, strangers, tokens, and the last bytes of a connection."""

import contextlib
import re
import socket
import threading
import time

import pytest
from typer.testing import CliRunner

import xfer
from examples.common.ports import free_port
from tests.functional.test_session_connect import on_all, somewhere
from tests.support.connect import flat_connect
from tests.support.proc import PATIENCE
from tests.support.world import TOKEN, ToyEngine, ToySource, World
from xfer import errors as e
from xfer.cli import app
from xfer.coordinator import messages as m
from xfer.coordinator.state import Options
from xfer.participants.trainer import TrainerSession
from xfer.rendezvous.client import RendezvousClient
from xfer.rendezvous.server import GREETERS, Server

# ---- addresses

NAME = "trainer-0.test"
V4, V6 = "127.0.0.1", "::1"
ELSEWHERE = "2001:db8::1"
"""For documentation; no host has it."""


def _has_ipv6() -> bool:
    try:
        with socket.create_server((V6, 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6 loopback")


@pytest.fixture
def named(monkeypatch):
    """Gives a function: from now on NAME has these addresses."""
    real = socket.getaddrinfo

    def has(*addresses: str) -> None:
        def look_up(host, port, family=0, *more, **how):
            if host != NAME:
                return real(host, port, family, *more, **how)
            found = [x for a in addresses for x in real(a, port, 0, socket.SOCK_STREAM) if family in (0, x[0])]
            if not found:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return found

        monkeypatch.setattr(socket, "getaddrinfo", look_up)

    return has


@ipv6
@pytest.mark.parametrize(
    ("host", "addresses", "others"),
    [(f"[{V6}]", (), ()), (NAME, (V6,), ()), (NAME, (V4, ELSEWHERE), ()),
     (NAME, (V6, V4), (V4, f"[{V6}]")), (NAME, (V4, V6), (V4, f"[{V6}]"))],
)  # fmt: skip
def test_a_job_meets_at_addresses_of_both_families_and_names_of_them(named, host, addresses, others):
    """`others`: the same rendezvous by other names; another host may know, or reach, one of them only."""
    named(*addresses)
    port, engine = free_port(), ToyEngine(2)
    where = dict(rendezvous=f"tcp://{host}:{port}", token=TOKEN, deadline_s=10.0 * PATIENCE)
    controller = xfer.serve(engine, **where)

    def run(rank: int):
        with flat_connect(trainer=ToySource(rank, 2), **where) as session:
            for other in (host, *others) if rank else ():
                seen = CliRunner().invoke(app, ["status", f"tcp://{other}:{port}", "--token", TOKEN])
                assert seen.exit_code == 0 and "trainer 1" in seen.output, (other, seen.output)
            return xfer.nccl_xfer_refit(session, verify=True).committed

    assert on_all(2, run) == [1, 1]
    controller.close()
    assert not [t.wrong(0) for t in engine.takers if t.wrong(0)]


REJECTED = {
    "an engine with another token": "replica 0: not connected.*\n.*rejected: a caller with another token, last from",
    "a trainer of another world": "trainer 1: not connected.*\n.*\n.*rejected: .*there are 3 trainer",
}


@pytest.mark.parametrize("case", REJECTED)
def test_a_rank_that_waits_in_vain_is_told_which_processes_were_rejected_meanwhile(monkeypatch, case):
    """All ranks hear it, also when the deadline of rank 0 comes last."""
    opened = TrainerSession.open
    monkeypatch.setattr(TrainerSession, "open", lambda s, wait: (time.sleep(0.0 if s.index else 0.3), opened(s, wait)))
    common, engine = dict(rendezvous=somewhere(), token=TOKEN), "engine" in case

    def run(i: int):
        if i < 2:
            size = 3 if i and not engine else 2
            return flat_connect(trainer=ToySource(i, size), deadline_s=2.0, **common)
        controller = xfer.serve(ToyEngine(1), **common | dict(token=TOKEN + "?"), deadline_s=20.0)
        try:
            controller.wait_ready()
        finally:
            controller.close()

    *vain, rejected = on_all(2 + engine, run)
    for error in vain:
        assert isinstance(error, e.DeadlineExceeded) and re.search(REJECTED[case], str(error)), error
    assert isinstance(rejected, e.HandshakeError)


# ---- the last bytes


def test_the_last_message_of_the_coordinator_arrives_though_it_has_unread_bytes():
    """Closing a socket with unread bytes discards bytes that the other side has not read yet."""
    at = somewhere()
    server = Server(at, TOKEN, Options(2, 1, 20.0, 4096))
    one, other = (RendezvousClient(at, TOKEN, "trainer", index=i, size=2, deadline_s=10.0) for i in range(2))
    one.send(m.Failed(m.WireError.of(e.Unsupported("layer 1 cannot be read"), "trainer 0")))
    with pytest.raises(e.Unsupported, match="layer 1 cannot be read"):
        for i in range(100):
            if i == 3:
                threading.Thread(target=server.close).start()
            other.send(m.Specs(b"x" * 1_000_000))
            time.sleep(0.02)
    one.close()
    other.close()


# ---- strangers


@pytest.mark.parametrize("say", [b"", b"xfer\x01"])
def test_strangers_that_do_not_prove_the_token_hold_nobody_up(say):
    """There are more of them than the server greets at once. A client with the token connects at once."""
    with World() as w, contextlib.ExitStack() as idle:
        port = int(w.rendezvous.rsplit(":", 1)[1])
        for _ in range(3 * GREETERS):
            sock = idle.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(OSError):
                sock.sendall(say)
        began = time.monotonic()
        RendezvousClient(w.rendezvous, TOKEN, "observer", deadline_s=10.0).close()
        assert time.monotonic() - began < 5.0
        w.commits(1)
        assert len(w.sessions[0]._server.unproven) <= GREETERS
