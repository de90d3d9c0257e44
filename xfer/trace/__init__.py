"""Provenance of bytes: which box of which checkpoint tensor lies where in which storage, read from the frameworks'
own code.

Public names are loaded when first used; importing this package imports neither torch nor numpy.
"""

from __future__ import annotations

from importlib import import_module

_HOME = {
    "Catalog": "catalog",
    "Cast": "traced",
    "ExportWatch": "export",
    "Fill": "fragment",
    "Fragment": "fragment",
    "Recipe": "traced",
    "Root": "fragment",
    "Span": "fragment",
    "TensorSpec": "fragment",
    "Traced": "traced",
    "merge": "boxes",
    "named_storages": "loader",
    "objects_stay_home": "collectives",
    "relocate": "boxes",
    "trace_export": "export",
    "trace_loader": "loader",
    "twin": "export",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
