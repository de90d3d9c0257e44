"""Encoded layouts for the wire: lists of byte strings in one compressed stream.

Layouts of ranks of one side differ in a few numbers, so a thousand of them in one stream are hardly longer than a few.
What is unpacked is bounded, whatever the stream says of itself.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Sequence

import msgspec

from xfer.errors import ProtocolError

MAX_UNPACKED = 1 << 30
"""Bytes of all strings of one stream; those of 4,096 ranks of a model of a trillion parameters are a tenth of that."""
MEMORY = 64 << 20
"""Bytes that the decompressor may take beside its output; preset 1 takes 2 MiB."""

SMALL = 256 << 10
"""The window of preset 0. Up to here its streams are a few per cent longer than those of preset 1, whose tables take longer
to set up than such layouts to pack."""

_strings, _names = msgspec.msgpack.Decoder(list[bytes]), msgspec.msgpack.Decoder(list[str])


def pack(parts: Sequence[bytes]) -> bytes:
    raw = msgspec.msgpack.encode(list(parts))
    return lzma.compress(raw, preset=0 if len(raw) <= SMALL else 1)


def unpack(data: bytes, what: str) -> list[bytes]:
    """What `pack` was given. ProtocolError for anything else."""
    try:
        stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MEMORY)
        raw = stream.decompress(data, MAX_UNPACKED)
        if not stream.eof or stream.unused_data:
            raise ValueError(f"cut short, followed by more, or more than {MAX_UNPACKED} bytes")
        return _strings.decode(raw)
    except (lzma.LZMAError, msgspec.MsgspecError, ValueError, EOFError) as e:
        raise ProtocolError(f"{what}: {e}") from e


def pack_specs(catalog: bytes, trained: Iterable[str]) -> bytes:
    """What one trainer exports: its catalog, and which of those tensors require grad."""
    return pack([catalog, msgspec.msgpack.encode(sorted(trained))])


def unpack_specs(data: bytes) -> tuple[bytes, list[str]]:
    """As given to `pack_specs`. ProtocolError for anything else."""
    parts = unpack(data, "specs")
    if len(parts) != 2:
        raise ProtocolError(f"specs: {len(parts)} strings where two were expected")
    try:
        return parts[0], _names.decode(parts[1])
    except msgspec.MsgspecError as e:
        raise ProtocolError(f"specs: {e}") from e


def unpack_one(data: bytes, what: str) -> bytes:
    parts = unpack(data, what)
    if len(parts) != 1:
        raise ProtocolError(f"{what}: {len(parts)} strings where one was expected")
    return parts[0]
