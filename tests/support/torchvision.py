"""A stand-in for torchvision, whose builds on the package index need CUDA: vLLM and transformers import it for every
vision-language class, and call it only to prepare images. It has any name that is asked for, and refuses to be called. For
layout tests alone; live engines run without it.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

NAME = "torchvision"


class Absent:
    """Something of torchvision by its name."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError(f"{self._name} was called: torchvision is a stand-in here, for layouts alone")


class _Module(types.ModuleType):
    __version__ = "0.28.0"

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == NAME else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Idempotent. Must come before transformers is imported, which looks once for what is installed."""
    if importlib.util.find_spec(NAME) is not None:
        return
    assert "transformers" not in sys.modules, "transformers has already found that there is no torchvision"
    sys.meta_path.append(_Finder())
