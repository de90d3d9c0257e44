"""How layouts reach the ranks that plan: announced by digest, published once per class of equal ranks, fetched when needed.

    rank --InventoryMsg(digest)--> coordinator                       every rank announces its layout
    coordinator --PlanInputs(rolls)--> rank --Fetch(rolls)--> coordinator --Reply--> rank     enough for the cache
    rank --Fetch(layouts)--> coordinator --LayoutAsk(digest)--> one owner --Layout--> coordinator --Reply--> rank

A *roll* lists the trainers, or the workers of a replica: the digest of each rank's layout, and its host. Rolls and layouts are both
fetched by the digest of their content, which the receiver compares. A rank asks for what it does not have yet: the trainers' roll
is the same for all replicas, and so are the layouts of equal engines. Contents of one question travel in one compressed stream
that is made once, so the coordinator's traffic hardly grows with the number of classes. A rank that has the plan in its cache
receives no layout.

The clients' half is in rendezvous/layouts.py.

On the wire, layouts are lists of byte strings in one compressed stream. Layouts of trainers, or of the workers of a replica,
differ in a few numbers, so a thousand of them in one stream are hardly longer than a few. The size of the unpacked bytes is
limited, whatever the stream claims.
"""

from __future__ import annotations

import lzma
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
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


def digest_of(content: bytes) -> bytes:
    """Return the digest of a layout's or a roll's content."""
    return col.digest([content]).encode()


class Roll(msgspec.Struct, frozen=True, array_like=True):
    """The trainers, or the workers of a replica, in rank order: the digest of each one's layout, and its host."""

    inventories: tuple[bytes, ...]
    hosts: tuple[str, ...]

    def content(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_content(cls, content: bytes) -> Roll:
        """Decode `content`. Raises ProtocolError if it is no roll."""
        try:
            roll = _rolls.decode(content)
        except msgspec.MsgspecError as e:
            raise ProtocolError(f"roll: {e}") from e
        if len(roll.inventories) != len(roll.hosts):
            raise ProtocolError(f"roll: {len(roll.inventories)} layouts and {len(roll.hosts)} hosts")
        return roll


_rolls = msgspec.msgpack.Decoder(Roll)


@dataclass(eq=False)
class _Bundle:
    """Contents that some clients asked for together, and those of them that are not here yet."""

    missing: set[bytes]
    asked: list[tuple[Client, int]] = field(default_factory=list)  # clients, and the numbers of their calls


class LayoutExchange:
    """The coordinator's half of the exchange.

    Args:
        owners: returns the connected clients that announced a digest.
        later: runs an action when an owner has had `OWNER_S` to answer.

    Attributes:
        sent: bytes of rolls and layouts sent so far.
        received: bytes of layouts received so far.
    """

    def __init__(self, owners: Callable[[bytes], Iterable[Client]], later: Callable[[Callable[[], None]], None]):
        self._owners, self._later = owners, later
        self._rolls: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()  # roll -> the layouts that it names
        self._known: dict[bytes, bytes] = {}  # digest -> content
        self._packed: dict[tuple[bytes, ...], bytes] = {}  # contents that were asked for together
        self._wanted: dict[tuple[bytes, ...], _Bundle] = {}
        self._asked: dict[bytes, set[Client]] = {}  # digest -> the clients that were asked for it
        self.sent = self.received = 0

    def roll(self, inventories: Sequence[bytes], hosts: Sequence[str], keep: int) -> bytes:
        """Make the roll of these ranks and return its digest. The latest `keep` rolls are kept, and the layouts that they name."""
        content = Roll(tuple(inventories), tuple(hosts)).content()
        digest = digest_of(content)
        if digest not in self._rolls:
            self._rolls[digest], self._known[digest] = tuple(inventories), content
            while len(self._rolls) > keep:
                self._rolls.popitem(last=False)
            named = self._rolls.keys() | {d for some in self._rolls.values() for d in some}
            self._known = {d: c for d, c in self._known.items() if d in named}
            self._packed = {some: p for some, p in self._packed.items() if named.issuperset(some)}
            self._wanted = {some: w for some, w in self._wanted.items() if named.issuperset(some)}
        self._rolls.move_to_end(digest)
        return digest

    def fetch(self, client: Client, msg: m.Fetch) -> None:
        """Answer a rank that asks for contents, once all of them are here. It gets no answer if its plan is not needed any more."""
        wanted = self._wanted.get(msg.digests)
        if wanted is None:
            wanted = self._wanted[msg.digests] = _Bundle({d for d in msg.digests if d not in self._known})
        wanted.asked.append((client, msg.call))
        if wanted.missing:
            self._ask(msg.digests)
        else:
            self._answer(msg.digests)

    def came(self, client: Client, msg: m.Layout) -> None:
        """A layout arrived.

        Raises:
            ProtocolError: its content has another digest than it was announced with. Every rank would plan from it.
        """
        self.received += len(msg.packed)
        content = unpack_one(msg.packed, f"layout of {client.label}")
        if digest_of(content) != msg.inventory:
            raise ProtocolError(f"{client.label} sent a layout with another digest than it announced")
        self._known[msg.inventory] = content
        self._asked.pop(msg.inventory, None)
        for digests, wanted in list(self._wanted.items()):
            wanted.missing.discard(msg.inventory)
            if not wanted.missing:
                self._answer(digests)

    def gone(self, client: Client) -> None:
        """Ask other ranks of its class for the layouts that this client has not sent."""
        self._asked = {d: rest for d, some in self._asked.items() if (rest := some - {client})}
        for digests, wanted in list(self._wanted.items()):
            wanted.asked = [(c, call) for c, call in wanted.asked if c is not client]
            if wanted.asked:
                self._ask(digests)
            else:
                del self._wanted[digests]

    def _ask(self, digests: tuple[bytes, ...]) -> None:
        for d in digests:
            if d in self._wanted[digests].missing and d not in self._asked:
                self._ask_an_owner(d)

    def _ask_an_owner(self, digest: bytes) -> None:
        """Ask an owner that was not asked yet, and later the next one: the first may hang, and replicas that wait would fall with it."""
        asked = self._asked.pop(digest, set())
        if (owner := next((c for c in self._owners(digest) if c not in asked), None)) is not None:
            self._asked[digest] = asked | {owner}
            owner.send(m.LayoutAsk(digest))
            self._later(lambda: self._ask_an_owner(digest) if digest in self._asked else None)

    def _answer(self, digests: tuple[bytes, ...]) -> None:
        if digests not in self._packed:
            self._packed[digests] = pack([self._known[d] for d in digests])
        for client, call in self._wanted.pop(digests).asked:
            self.sent += len(self._packed[digests])
            client.send(m.Reply(call, self._packed[digests]))
