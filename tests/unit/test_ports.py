"""Ports that are chosen before their listener starts."""

import socket
from contextlib import ExitStack

import pytest

from examples.common.ports import free_port
from xfer.cli.bench.run import kept_port


@pytest.mark.parametrize("choose", [lambda _: free_port(), kept_port], ids=["for tests", "by xfer bench"])
def test_a_port_that_was_chosen_is_its_listeners_alone(choose):
    with ExitStack() as stack:
        at = "127.0.0.1", choose(stack)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(at)  # as another choice would
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(at)
        with socket.create_server(at):
            socket.create_connection(at).close()
