"""Ports that are chosen before their listener starts."""

import socket

import pytest

from examples.common.ports import free_port


def test_a_port_that_was_chosen_is_its_listeners_alone():
    at = "127.0.0.1", free_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(at)  # as another choice would
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(at)
    with socket.create_server(at):
        socket.create_connection(at).close()
