"""Prints the lines of the logger "xfer" in processes that have no handler for them. No other logger is touched.

A library leaves logging to its user. But a user cannot configure it in the processes that vLLM starts, where vLLM configures only
its own logger, and a trainer without any configuration would be silent for as long as `connect` waits. So `show` adds a handler
that does nothing as soon as "xfer" or the root logger has another one.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LEVEL = "XFER_LOG_LEVEL"
EVERY_S = 10.0
"""Seconds between two lines about one wait."""
logger = logging.getLogger("xfer")


class _Fallback(logging.StreamHandler):
    """Prints through vLLM's handlers where there are any, which name the process; else on standard error, with the time."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%m-%d %H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        if any(h is not self for h in logger.handlers) or logger.propagate and logging.getLogger().handlers:
            return
        theirs = logging.getLogger("vllm").handlers
        for handler in theirs:
            if record.levelno >= handler.level or os.environ.get(LEVEL):
                handler.handle(record)
        if not theirs:
            self.stream = sys.stderr  # as it is now
            super().emit(record)


_fallback = _Fallback()


def counted(n: int, noun: str) -> str:
    """ "1 replica", "2 replicas"."""
    return f"{n} {noun}{'s' * (n != 1)}"


def show() -> None:
    """Adds the handler once; never raises. The level is XFER_LOG_LEVEL, else the user's (of "xfer" or of the root logger), else INFO."""
    if _fallback in logger.handlers:
        return
    logger.addHandler(_fallback)
    if logger.level == logging.NOTSET and not logging.getLogger().handlers:
        logger.setLevel(logging.INFO)
    if asked := os.environ.get(LEVEL):
        try:
            logger.setLevel(asked.upper())
        except ValueError:
            logger.warning("xfer: %s=%s is no level: DEBUG, INFO, WARNING, ERROR or CRITICAL", LEVEL, asked)


@contextmanager
def while_waiting(text: Callable[[], str]) -> Iterator[None]:
    """Logs `text()` every EVERY_S for as long as the block runs."""
    over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(EVERY_S):
            logger.info("xfer: %s, for %.0f s", text(), time.monotonic() - began)

    threading.Thread(target=tell, name="xfer-waiting", daemon=True).start()
    try:
        yield
    finally:
        over.set()
