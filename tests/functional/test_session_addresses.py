"""Where the rendezvous is: addresses of both families, and names that have one, the other, or both.

By xfer's public calls and `xfer status`; trainers and engines are small stand-ins (tests/support/world.py).
"""

import socket

import pytest
from typer.testing import CliRunner

import xfer
from examples.common.ports import free_port
from tests.support.connect import flat_connect
from tests.support.proc import PATIENCE
from tests.support.world import TOKEN, ToyEngine, ToySource, World
from xfer.cli import app
from xfer.errors import HandshakeError, XferError

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


pytestmark = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6 loopback")


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


def refits(host: str, *others: str) -> None:
    """Two trainers and an engine meet at `host`; `others` are looks at the same rendezvous by other names."""
    port, engine = free_port(), ToyEngine(2)
    where = dict(rendezvous=f"tcp://{host}:{port}", token=TOKEN, deadline_s=10.0 * PATIENCE)
    controller = xfer.serve(engine, **where)

    def run(rank: int):
        source = ToySource(rank, 2)
        source.set(1)
        with flat_connect(trainer=source, **where) as refit:
            for other in (host, *others) if rank else ():
                seen = CliRunner().invoke(app, ["status", f"tcp://{other}:{port}", "--token", TOKEN])
                assert seen.exit_code == 0 and "trainer 1" in seen.output, (other, seen.output)
            return xfer.nccl_xfer_refit(refit, verify=True).committed

    assert World(trainers=2).on_all(run) == [1, 1]
    controller.close()
    assert not [t.wrong(1) for t in engine.takers if t.wrong(1)]


def test_an_ipv6_address():
    refits(f"[{V6}]")


def test_a_name_that_has_an_ipv6_address_only(named):
    """Trainer 0's host was said not to know it."""
    named(V6)
    refits(NAME)


@pytest.mark.parametrize("order", [(V6, V4), (V4, V6)])
def test_a_name_with_both_is_listened_at_by_both(named, order):
    """Another host may know, or reach, one of them only."""
    named(*order)
    refits(NAME, V4, f"[{V6}]")


def test_a_name_of_which_one_address_is_not_this_hosts(named):
    named(V4, ELSEWHERE)
    refits(NAME)


def test_a_name_that_has_no_address_at_all_is_said_to_be_unknown(named):
    named()
    with pytest.raises(HandshakeError, match="this host does not know that name"):
        flat_connect(trainer=ToySource(0, 1), rendezvous=f"tcp://{NAME}:{free_port()}", token=TOKEN)


@pytest.mark.parametrize(
    "address", ["tcp://::1:29600", "tcp://[::1:29600", "tcp://::1]:29600", "tcp://[one]:29600", "tcp://[]:29600"]
)
def test_an_ipv6_address_stands_in_brackets(address):
    with pytest.raises(XferError, match="is not a host name"):
        xfer.serve(ToyEngine(1), rendezvous=address, token=TOKEN)
    seen = CliRunner().invoke(app, ["status", address, "--token", TOKEN])
    assert seen.exit_code == 1 and "is not a host name" in seen.output, seen.output
