"""What all control messages are made of: bounded types, their common base, and errors as plain strings.

Messages themselves are messages.py's and plan_messages.py's.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from xfer.errors import XferError, from_wire

MAX_FRAME = 1 << 30
"""Bytes of one control frame; all layouts of a thousand ranks take well below 1 MB."""
MAX_STORE_VALUE = 1 << 16

Name = Annotated[str, Meta(max_length=256)]
Label = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)] | Name | None
"""A version as its caller named it: a number stays a number. None: no version."""
Text = Annotated[str, Meta(max_length=1 << 16)]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
Bytes64 = Annotated[int, Meta(ge=0, le=(1 << 62))]
Seconds = Annotated[float, Meta(ge=0.0, lt=1e9)]
Blob = Annotated[bytes, Meta(max_length=MAX_FRAME)]
StoreKey = Annotated[str, Meta(max_length=256)]
Route = Annotated[str, Meta(pattern="^(direct|packed)$")]
"""How weights travel: each byte from where it lies to where it belongs, or whole tensors in buckets."""
Digest = Annotated[bytes, Meta(max_length=32)]
"""Of an inventory or a roll: 32 hexadecimal digits; empty for none."""
StoreValue = Annotated[bytes, Meta(max_length=MAX_STORE_VALUE)]


def _plain(text: str) -> str:
    """Any text as one that can be encoded: file names and foreign errors may hold lone surrogates."""
    return text.encode("utf-8", "replace").decode()


class WireMessage(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag is the class name."""


class WireError(Struct, frozen=True, forbid_unknown_fields=True):
    """An `XferError` as plain strings."""

    kind: Name
    message: Text
    violations: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()
    where: Name = ""

    @classmethod
    def of(cls, error: BaseException, where: str) -> WireError:
        """Foreign exceptions travel as XferError with their class name; texts are cut to what a frame may hold."""
        if isinstance(error, XferError):
            kind, message, violations, at = error.to_wire()
        else:
            kind, message, violations, at = "XferError", f"{type(error).__name__}: {error}", (), ""
        kind, message, at, *violations = (_plain(t) for t in (kind, message, at or where, *violations))
        return cls(kind[:256], message[:60000], tuple(v[:8000] for v in violations), at[:256])

    def error(self) -> XferError:
        return from_wire(self.kind, self.message, self.violations, self.where)
