"""Lets SkyRL 0.3.0 be imported where it otherwise is not: before Python 3.12, and without flash-attn."""

from __future__ import annotations

import importlib.util
import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType

import typing_extensions


@contextmanager
def importable() -> Iterator[None]:
    """Let SkyRL be imported in this block for the first time.

    SkyRL takes `typing.TypedDict` for pydantic's models, which pydantic accepts from Python 3.12 on. Its FSDP worker imports two
    functions of flash-attn, which is built for CUDA only; nothing here calls them. transformers must not find them afterwards.
    """
    made, ours = typing.TypedDict, {}
    if sys.version_info < (3, 12):
        typing.TypedDict = typing_extensions.TypedDict
    if importlib.util.find_spec("flash_attn") is None:
        ours = {"flash_attn": {}, "flash_attn.bert_padding": {"pad_input": None, "unpad_input": None}}
        for name, functions in ours.items():
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(functions, __spec__=ModuleSpec(name, None))
    try:
        yield
    finally:
        typing.TypedDict = made
        for name in ours:
            del sys.modules[name]
