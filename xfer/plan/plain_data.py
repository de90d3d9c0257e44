"""Checks of data that people write in TOML, JSON or on a command line: integers of 64 bits, text with a UTF-8 form, tables
nested to a limited depth. Other data cannot be sent in messages. The callers know what the fields mean (fabric_file.py,
cli/describe.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_DEEP = 64
TOO_DEEP = f"tables and lists in one another are {MOST_DEEP} deep at most"


def unfit(data: Any, where: str = "") -> str:
    """The first value that cannot be part of a message, and its place; empty when there is none."""
    left: list[tuple[str, Any, int]] = [(where, data, 0)]
    while left:
        at, value, depth = left.pop()
        if depth > MOST_DEEP:
            return f"{at[:80]}: {TOO_DEEP}"
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if isinstance(key, str) and not _has_form(key):
                    return f"{at}: the name {key!a} has no UTF-8 form"
                left.append((f"{at}.{key}" if at else str(key), inner, depth + 1))
        elif isinstance(value, list | tuple):
            left += [(f"{at}[{i}]", inner, depth + 1) for i, inner in enumerate(value)]
        elif isinstance(value, str) and not _has_form(value):
            return f"{at}: {value[:80]!a} has no UTF-8 form"
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            return f"{at}: an integer of {value.bit_length()} bits; 64 are the most"
    return ""


def _has_form(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
