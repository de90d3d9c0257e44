"""Shortens the warnings of a framework's code that xfer runs to one line per kind.

vLLM's loaders warn once per tensor, and a trace runs a loader that has run before.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterator

SHOWN = 3
"""Messages of a kind that are quoted."""
Kind = tuple[str, int]
"""The line of code that warns."""


class _HeldWarnings(logging.Filter):
    """Holds back the warnings of the thread that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[Kind] = Counter()
        self.first: dict[Kind, list[logging.LogRecord]] = {}
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread or record.levelno < logging.WARNING:
            return True
        kind = record.pathname, record.lineno
        self.count[kind] += 1
        first = self.first.setdefault(kind, [])
        if len(first) < SHOWN:
            first.append(record)
        return False


@contextlib.contextmanager
def one_line_per_kind(package: str) -> Iterator[None]:
    """Hold back this thread's warnings from the loggers of `package`. At the end each kind is logged once, with its count and its
    first messages."""
    names = [n for n in logging.root.manager.loggerDict if n == package or n.startswith(f"{package}.")]
    loggers, held = [logging.getLogger(n) for n in names], _HeldWarnings()
    for logger in loggers:
        logger.addFilter(held)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(held)
        for kind, records in held.first.items():
            record = records[0]
            if held.count[kind] > 1:
                quoted = "; ".join(r.getMessage() for r in records)
                record.msg, record.args = "%d times while xfer read the layout: %s", (held.count[kind], quoted)
            logging.getLogger(record.name).handle(record)
