"""The store in which communicators meet: values, and clients that wait for a key. rendezvous/store.py is the clients' half."""

from __future__ import annotations

from collections import defaultdict

from xfer.coordinator import messages as m
from xfer.coordinator.state import Client
from xfer.errors import ProtocolError


class KeyValues:
    """Each call checks its keys against the client's prefix and raises ProtocolError, which ends that connection."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._parked: dict[str, list[tuple[Client, int]]] = defaultdict(list)

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for client, call in self._parked.pop(key, ()):
            client.send(m.StoreReply(call, value))

    def set(self, msg: m.StoreSet, prefix: str) -> None:
        m.check_store_key(msg.key, prefix)
        self._put(msg.key, msg.value)

    def get(self, client: Client, msg: m.StoreGet, prefix: str) -> None:
        m.check_store_key(msg.key, prefix)
        if msg.key in self._values:
            client.send(m.StoreReply(msg.call, self._values[msg.key]))
        else:
            self._parked[msg.key].append((client, msg.call))

    def add(self, client: Client, msg: m.StoreAdd, prefix: str) -> None:
        m.check_store_key(msg.key, prefix)
        try:
            value = int(self._values.get(msg.key, b"0")) + msg.amount
        except ValueError:
            raise ProtocolError(f"store key {msg.key!r} does not hold a number") from None
        self._put(msg.key, str(value).encode())
        client.send(m.StoreReply(msg.call, str(value).encode()))

    def compare_set(self, client: Client, msg: m.StoreCompareSet, prefix: str) -> None:
        m.check_store_key(msg.key, prefix)
        if msg.key not in self._values:
            self._put(msg.key, msg.value)
        client.send(m.StoreReply(msg.call, self._values[msg.key]))

    def check(self, client: Client, msg: m.StoreCheck, prefix: str) -> None:
        for key in msg.keys:
            m.check_store_key(key, prefix)
        client.send(m.StoreReply(msg.call, flag=all(k in self._values for k in msg.keys)))

    def forget(self, prefix: str) -> None:
        """Delete the values of an epoch that is over."""
        for key in [k for k in self._values if k.startswith(prefix)]:
            del self._values[key]

    def drop(self, client: Client) -> None:
        """Forget what a client that is gone waits for."""
        for parked in self._parked.values():
            parked[:] = [p for p in parked if p[0] is not client]
