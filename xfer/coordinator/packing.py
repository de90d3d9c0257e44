"""Layouts on the wire: lists of byte strings in one compressed stream.

Layouts of trainers, or of the workers of a replica, differ in a few numbers, so a thousand of them in one stream are
hardly longer than a few. The size of the unpacked bytes is limited, whatever the stream claims.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Sequence

import msgspec

from xfer.errors import ProtocolError

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
