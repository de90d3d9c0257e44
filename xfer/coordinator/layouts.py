"""How layouts reach the ranks that plan: announced by digest, published once per class of equal ranks, fetched when needed.

    rank --InventoryMsg(digest)--> coordinator                              every rank announces its layout
    coordinator --PlanInputs(rolls)--> rank --RollAsk--> coordinator --Roll--> rank     digests and hosts: enough for the cache
    rank --LayoutsAsk(roll)--> coordinator --LayoutAsk(digest)--> one owner --Layout--> coordinator --Layouts(roll)--> rank

A *roll* lists the trainers, or the workers of a replica: the digest of each rank's layout, and its host. The trainers'
roll is the same for all replicas. All layouts of a roll travel in one compressed stream that is made once, so the
coordinator's traffic hardly grows with the number of classes. A rank that has the plan in its cache receives no layout.

The clients' half is in rendezvous/layouts.py.

On the wire, layouts are lists of byte strings in one compressed stream. Layouts of trainers, or of the workers of a replica,
differ in a few numbers, so a thousand of them in one stream are hardly longer than a few. The size of the unpacked bytes is
limited, whatever the stream claims.
"""

from __future__ import annotations

import lzma
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from xfer.coordinator import messages as m
from xfer.errors import ProtocolError
from xfer.plan import columns as col

if TYPE_CHECKING:
    from xfer.coordinator.state import Client


MAX_UNPACKED = 1 << 30
"""Bytes of all strings of one stream. 4,096 ranks of a model of a trillion parameters need a tenth of that."""
MEMORY = 64 << 20
"""Bytes that the decompressor may use beside its output; preset 1 uses 2 MiB."""

SMALL = 256 << 10
"""Bytes up to which preset 0 is used: its window. Its streams are a few per cent longer than those of preset 1, whose tables take
longer to set up than such layouts take to pack."""

_strings, _names = msgspec.msgpack.Decoder(list[bytes]), msgspec.msgpack.Decoder(list[str])


def pack(parts: Sequence[bytes]) -> bytes:
    """Compress some byte strings into one stream."""
    raw = msgspec.msgpack.encode(list(parts))
    return lzma.compress(raw, preset=0 if len(raw) <= SMALL else 1)


def unpack(data: bytes, what: str) -> list[bytes]:
    """Return the arguments of `pack`.

    Args:
        what: name of the data, for the error.

    Raises:
        ProtocolError: `data` does not come from `pack`.
    """
    try:
        stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MEMORY)
        raw = stream.decompress(data, MAX_UNPACKED)
        if not stream.eof or stream.unused_data:
            raise ValueError(f"cut short, followed by more, or more than {MAX_UNPACKED} bytes")
        return _strings.decode(raw)
    except (lzma.LZMAError, msgspec.MsgspecError, ValueError, EOFError) as e:
        raise ProtocolError(f"{what}: {e}") from e


def pack_specs(catalog: bytes, trained: Iterable[str]) -> bytes:
    """Pack what one trainer exports: its catalog, and the names of the tensors that require grad."""
    return pack([catalog, msgspec.msgpack.encode(sorted(trained))])


def unpack_specs(data: bytes) -> tuple[bytes, list[str]]:
    """Return the arguments of `pack_specs`. Raises ProtocolError if `data` does not come from it."""
    parts = unpack(data, "specs")
    if len(parts) != 2:
        raise ProtocolError(f"specs: {len(parts)} strings where two were expected")
    try:
        return parts[0], _names.decode(parts[1])
    except msgspec.MsgspecError as e:
        raise ProtocolError(f"specs: {e}") from e


def unpack_one(data: bytes, what: str) -> bytes:
    """Return the only string of a stream. Raises ProtocolError as `unpack` does, and for any other number of strings."""
    parts = unpack(data, what)
    if len(parts) != 1:
        raise ProtocolError(f"{what}: {len(parts)} strings where one was expected")
    return parts[0]


def roll_digest(inventories: Sequence[bytes], hosts: Sequence[str]) -> bytes:
    return col.digest([b"".join(inventories), *hosts]).encode()


class LayoutExchange:
    """The coordinator's half of the exchange.

    Args:
        owners: returns the connected clients that announced a digest.

    Attributes:
        sent: bytes of rolls and layouts sent so far.
        received: bytes of layouts received so far.
    """

    def __init__(self, owners: Callable[[bytes], Iterable[Client]]):
        self._owners = owners
        self._rolls: OrderedDict[bytes, m.Roll] = OrderedDict()
        self._known: dict[bytes, bytes] = {}  # digest -> content
        self._packed: dict[bytes, bytes] = {}  # roll -> all its contents
        self._waiting: dict[bytes, list[Client]] = {}  # roll -> clients that asked
        self._asked: dict[bytes, Client] = {}  # digest -> the client that was asked for it
        self.sent = self.received = 0

    def roll(self, inventories: Sequence[bytes], hosts: Sequence[str], keep: int) -> bytes:
        """Make the roll of these ranks and return its digest. The latest `keep` rolls are kept."""
        digest = roll_digest(inventories, hosts)
        self._rolls.setdefault(digest, m.Roll(digest, tuple(inventories), tuple(hosts)))
        self._rolls.move_to_end(digest)
        while len(self._rolls) > keep:
            old, _ = self._rolls.popitem(last=False)
            self._packed.pop(old, None)
            self._waiting.pop(old, None)
        named = {d for r in self._rolls.values() for d in r.inventories}
        self._known = {d: c for d, c in self._known.items() if d in named}
        return digest

    def roll_asked(self, client: Client, msg: m.RollAsk) -> None:
        roll = self._rolls.get(msg.roll)
        if roll is not None:  # else the plan that it was for is no longer wanted
            self.sent += 32 * len(roll.inventories) + sum(map(len, roll.hosts))
            client.send(roll)

    def layouts_asked(self, client: Client, msg: m.LayoutsAsk) -> None:
        roll = self._rolls.get(msg.roll)
        if roll is None:
            return
        self._waiting.setdefault(msg.roll, []).append(client)
        self._ask(roll)
        self._answer(msg.roll)

    def came(self, client: Client, msg: m.Layout) -> None:
        """A layout arrived.

        Raises:
            ProtocolError: its content has another digest than it was announced with. Every rank would plan from it.
        """
        self.received += len(msg.packed)
        content = unpack_one(msg.packed, f"layout of {client.label}")
        if col.digest([content]).encode() != msg.inventory:
            raise ProtocolError(f"{client.label} sent a layout with another digest than it announced")
        self._known[msg.inventory] = content
        self._asked.pop(msg.inventory, None)
        for roll in list(self._waiting):
            self._answer(roll)

    def gone(self, client: Client) -> None:
        """Ask other ranks of its class for the layouts that this client has not sent."""
        for d in [d for d, c in self._asked.items() if c is client]:
            del self._asked[d]
        for roll, clients in self._waiting.items():
            self._waiting[roll] = [c for c in clients if c is not client]
            self._ask(self._rolls[roll])

    def _ask(self, roll: m.Roll) -> None:
        for d in dict.fromkeys(roll.inventories):
            if d not in self._known and d not in self._asked:
                owner = next(iter(self._owners(d)), None)
                if owner is not None:
                    self._asked[d] = owner
                    owner.send(m.LayoutAsk(d))

    def _answer(self, digest: bytes) -> None:
        roll = self._rolls[digest]
        distinct = list(dict.fromkeys(roll.inventories))
        if not self._waiting.get(digest) or not all(d in self._known for d in distinct):
            return
        if digest not in self._packed:
            self._packed[digest] = pack([self._known[d] for d in distinct])
        for client in self._waiting.pop(digest):
            self.sent += len(self._packed[digest])
            client.send(m.Layouts(digest, self._packed[digest]))
