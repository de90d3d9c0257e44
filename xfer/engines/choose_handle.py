"""Chooses the handle for an engine: a URL, an `LLM`, an `AsyncLLM`, an actor."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any

from xfer.engines.handles import AsyncEngine, Handle, OfflineLLM, running_loop
from xfer.engines.remote import CallableEngine, HttpEngine
from xfer.errors import Unsupported
from xfer.participants.engine import EngineHandle


def handle_for(engine: Any, *, loop: asyncio.AbstractEventLoop | None = None, **options: Any) -> EngineHandle:
    """Return the handle of an engine.

    Args:
        engine: A handle already, a URL, an `AsyncLLM`, an `LLM`, or an object that forwards vLLM's calls.
        loop: The event loop of an `AsyncLLM`. Default: the running one.
        **options: Options of that handle's class (`name`, `pause_mode`, `headers`, methods that a forwarder does not have).

    Raises:
        Unsupported: The object offers none of these interfaces; the violations say what it lacks.
    """
    kind = _handle_class(engine)
    if kind is None:
        return engine
    if kind is AsyncEngine:
        loop = loop or running_loop()
        if loop is None:
            raise Unsupported(
                "an AsyncLLM needs its event loop", ["pass loop=…, or call this from a coroutine of that loop"]
            )
        return AsyncEngine(engine, loop, **options)
    return kind(engine, **options)


def wrong_options(engine: object, options: Mapping[str, object]) -> list[str]:
    """Return one line per option that the handle of this engine does not take. `loop` fits any engine."""
    kind = _handle_class(engine)
    takes = {"loop", *list(inspect.signature(kind).parameters)[1:]} if kind else set()
    whose = f"of {kind.__name__}" if kind else f"here: {type(engine).__name__} is a handle, made with its own"
    return [
        f"{name}={value!r}: no option {whose}" + (f"; there are {', '.join(sorted(takes))}" if kind else "")
        for name, value in options.items()
        if name not in takes
    ]


def _handle_class(engine: object) -> type[Any] | None:
    """The class whose handle `engine` needs; None if it is a handle already."""
    if isinstance(engine, str):
        return HttpEngine
    if isinstance(engine, Handle):
        return None
    if inspect.iscoroutinefunction(getattr(engine, "pause_generation", None)):
        return AsyncEngine
    if hasattr(engine, "llm_engine"):
        return OfflineLLM
    return None if isinstance(engine, EngineHandle) else CallableEngine
