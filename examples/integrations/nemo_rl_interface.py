"""Stands in for `nemo_rl.weight_sync.interfaces`, which is on no package index: NeMo-RL's `WeightSynchronizer` and nothing else.

The names and arguments are those of NVIDIA-NeMo/RL at commit 7ea279a; a test compares them with a checkout.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from types import ModuleType
from typing import Any


class WeightSynchronizer(ABC):
    @abstractmethod
    def sync_weights(
        self, *, timer: Any = None, kv_scales: dict[str, float] | None = None
    ) -> dict[str, float] | None: ...

    @property
    @abstractmethod
    def is_stale(self) -> bool: ...

    @abstractmethod
    def init_communicator(self) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...


def install() -> None:
    """Make `nemo_rl.weight_sync.interfaces` importable with this class, unless NeMo-RL is installed."""
    if "nemo_rl" in sys.modules or importlib.util.find_spec("nemo_rl"):
        return
    for name in ("nemo_rl", "nemo_rl.weight_sync", "nemo_rl.weight_sync.interfaces"):
        sys.modules[name] = ModuleType(name)
    vars(sys.modules["nemo_rl.weight_sync.interfaces"])["WeightSynchronizer"] = WeightSynchronizer


def abstract_methods(source: Path) -> dict[str, list[str]]:
    """Return the arguments of each abstract method of the file's `WeightSynchronizer`."""
    classes = [n for n in ast.parse(source.read_text()).body if isinstance(n, ast.ClassDef)]
    body = next(c.body for c in classes if c.name == "WeightSynchronizer")
    return {
        f.name: [a.arg for a in (*f.args.args, *f.args.kwonlyargs)]
        for f in body
        if isinstance(f, ast.FunctionDef) and any("abstractmethod" in ast.unparse(d) for d in f.decorator_list)
    }
