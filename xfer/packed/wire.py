"""Descriptions of buckets of tensors, and their checks before a byte of a bucket is read.

A `BucketRequest` names the tensors of one buffer and their places in it. A `Manifest` holds all requests of one plan. It travels
once, and refits refer to it by its digest. Both ends speak the same wire version, or never meet (rendezvous/channel.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from xfer.errors import ProtocolError
from xfer.plan.program import ITEMSIZE
from xfer.trace.fragment import TensorSpec

MAX_TENSORS = 1 << 20
MAX_MANIFEST = 256 << 20
"""Bytes of an encoded manifest; a model of 45,000 tensors needs about 5 MB."""

_Size = Annotated[int, Meta(ge=0, le=1 << 50)]
_Name = Annotated[str, Meta(min_length=1, max_length=1024)]
_Shape = Annotated[tuple[_Size, ...], Meta(max_length=16)]


class BucketRequest(Struct, frozen=True):
    """Tensors that one buffer holds. All lists are parallel.

    Attributes:
        names: The tensors' names.
        dtypes: torch's names of their dtypes ("bfloat16").
        shapes: Their shapes, in elements.
        sizes: Bytes of each tensor in this bucket.
        offsets: First byte of each tensor in the buffer.
        nbytes: Bytes of the whole message.
        starts: First byte, in the tensor, of the part in this bucket; for tensors longer than a buffer. None: all whole.
    """

    names: Annotated[tuple[_Name, ...], Meta(max_length=MAX_TENSORS)]
    dtypes: Annotated[tuple[str, ...], Meta(max_length=MAX_TENSORS)]
    shapes: Annotated[tuple[_Shape, ...], Meta(max_length=MAX_TENSORS)]
    sizes: Annotated[tuple[_Size, ...], Meta(max_length=MAX_TENSORS)]
    offsets: Annotated[tuple[_Size, ...], Meta(max_length=MAX_TENSORS)]
    nbytes: _Size
    starts: Annotated[tuple[_Size, ...], Meta(max_length=MAX_TENSORS)] | None = None


class Manifest(Struct, frozen=True):
    """All buckets of a plan, in the order in which they are sent. `limit`: most bytes of a message; 0: no limit."""

    buckets: Annotated[tuple[BucketRequest, ...], Meta(max_length=MAX_TENSORS)]
    limit: _Size = 0


class Exporters(Struct, frozen=True, forbid_unknown_fields=True):
    """Trainer ranks whose buffers workers map, trainer 0 first, and the place of each. Empty: messages are broadcast."""

    ranks: tuple[int, ...] = ()
    places: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BucketPart:
    """Bytes `start <= b < start + size` of a contiguous tensor, at byte `offset` of a message."""

    spec: TensorSpec
    start: int
    size: int
    offset: int

    @property
    def whole(self) -> bool:
        return self.start == 0 and self.size == nbytes_of(self.spec)


@dataclass(frozen=True, slots=True)
class PackedMessage:
    """One buffer on the wire: its parts in order, and its length in bytes."""

    parts: tuple[BucketPart, ...]
    nbytes: int


def nbytes_of(spec: TensorSpec) -> int:
    return prod(spec.shape) * ITEMSIZE[spec.dtype]


def longest_of(messages: Iterable[PackedMessage]) -> int:
    """Return the bytes of the longest message; 0 without messages."""
    return max((x.nbytes for x in messages), default=0)


_encode = msgspec.msgpack.Encoder().encode
_exporters = msgspec.msgpack.Decoder(Exporters)
_manifests = msgspec.msgpack.Decoder(Manifest)


def encode(what: Manifest | Exporters) -> bytes:
    return _encode(what)


def decode_manifest(data: bytes) -> Manifest:
    """Decode one manifest, else ProtocolError."""
    return _decoded(_manifests, data, "the list of buckets")


def decode_exporters(data: bytes) -> Exporters:
    """Decode one `Exporters`, else ProtocolError."""
    return _decoded(_exporters, data, "the trainers' list of exporters")


def _decoded(decoder, data: bytes, what: str):
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as e:
        raise ProtocolError(f"{what} of {len(data)} bytes cannot be read: {e}"[:500]) from None


def digest(data: bytes) -> bytes:
    """Return the 16-byte digest of `data`."""
    return hashlib.blake2b(data, digest_size=16).digest()


def message_of(request: BucketRequest, limit: int = 0) -> PackedMessage:
    """Return the message of a request.

    Args:
        request: The request.
        limit: Most bytes of a message; 0: no limit.

    Raises:
        ProtocolError: with every violation: lists of unequal length, an unknown dtype, a size that does not fit the shape, parts
            that overlap or leave their buffer, a message over `limit` bytes.
    """
    bad: list[str] = []
    n = len(request.names)
    for field in ("dtypes", "shapes", "sizes", "offsets", "starts"):
        value = getattr(request, field)
        if value is not None and len(value) != n:
            bad.append(f"{field}: {len(value)} entries for {n} names")
    if bad:
        raise ProtocolError("a request for a bucket is inconsistent", bad)
    parts, at = [], 0
    for i, name in enumerate(request.names):
        dtype, shape = request.dtypes[i], tuple(request.shapes[i])
        if dtype not in ITEMSIZE:
            bad.append(f"{name}: dtype {dtype!r} is unknown; known dtypes are {', '.join(sorted(ITEMSIZE))}")
            continue
        spec = TensorSpec(name, shape, dtype)
        full = nbytes_of(spec)
        start = request.starts[i] if request.starts is not None else 0
        size, offset = request.sizes[i], request.offsets[i]
        if request.starts is None and size != full:
            bad.append(f"{name}: {size} bytes are announced, but {dtype}{list(shape)} has {full}")
        elif start + size > full:
            bad.append(f"{name}: bytes {start} to {start + size} are announced, but {dtype}{list(shape)} has {full}")
        if offset < at:
            bad.append(f"{name}: begins at byte {offset} of its buffer, but the tensor before it ends at byte {at}")
        at = offset + size
        parts.append(BucketPart(spec, start, size, offset))
    if at > request.nbytes:
        bad.append(f"its last tensor ends at byte {at}, but its buffer has {request.nbytes} bytes")
    if limit and request.nbytes > limit:
        bad.append(f"a message has {request.nbytes} bytes, but the limit is {limit}")
    if bad:
        raise ProtocolError("a request for a bucket is inconsistent", bad)
    return PackedMessage(tuple(parts), request.nbytes)


def checked(manifest: Manifest, expected: Mapping[str, TensorSpec]) -> tuple[PackedMessage, ...]:
    """Return all messages of a refit.

    Args:
        manifest: The trainers' buckets.
        expected: All checkpoint tensors, by name.

    Raises:
        ProtocolError: with every violation, unless the messages bring every byte of `expected` exactly once, and nothing else.
    """
    messages = [message_of(b, manifest.limit) for b in manifest.buckets]
    bad: list[str] = []
    ranges: dict[str, list[tuple[int, int]]] = {}
    for part in (p for x in messages for p in x.parts):
        want = expected.get(part.spec.name)
        if want is None:
            bad.append(f"{part.spec.name}: no tensor of this name was announced")
        elif (want.shape, want.dtype) != (part.spec.shape, part.spec.dtype):
            bad.append(
                f"{want.name}: {part.spec.dtype}{list(part.spec.shape)} is in a bucket, but "
                f"{want.dtype}{list(want.shape)} was announced"
            )
        ranges.setdefault(part.spec.name, []).append((part.start, part.start + part.size))
    for name, want in expected.items():
        found = ranges.get(name)
        if found is None:
            bad.append(f"{name}: is in no bucket")
        elif not _covers(found, nbytes_of(want)):
            bad.append(f"{name}: its parts do not make up its {nbytes_of(want)} bytes exactly once, in order")
    if bad:
        raise ProtocolError("the announced buckets do not match the model", bad)
    return tuple(messages)


def _covers(ranges: Sequence[tuple[int, int]], nbytes: int) -> bool:
    if not nbytes:  # an empty tensor must appear exactly once
        return ranges == [(0, 0)]
    at = 0
    for start, stop in ranges:
        if start != at or stop <= start:
            return False
        at = stop
    return at == nbytes


def request_of(message: PackedMessage) -> BucketRequest:
    """Return the request that announces one packed message."""
    split = any(not p.whole for p in message.parts)
    return BucketRequest(
        names=tuple(p.spec.name for p in message.parts),
        dtypes=tuple(p.spec.dtype for p in message.parts),
        shapes=tuple(p.spec.shape for p in message.parts),
        sizes=tuple(p.size for p in message.parts),
        offsets=tuple(p.offset for p in message.parts),
        starts=tuple(p.start for p in message.parts) if split else None,
        nbytes=message.nbytes,
    )
