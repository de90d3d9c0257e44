"""Finds tensors that a live model keeps as plain attributes, outside its parameters and buffers.

If such a tensor was computed from weights, a refit would leave it stale. The live model is compared with its fresh twin,
and again before every refit, since the first forward may make tensors; that check is cheap. This module uses plain
torch; vllm_layout.py has the part for vLLM. Parameters and buffers are in live.py and layout.py, the work of
quantization methods in processed.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from operator import is_
from typing import Any

import torch

from xfer.engines.live import modules
from xfer.errors import Unsupported

DEPTH = 3
"""Depth of nested lists, tuples and dicts in which tensors are searched."""
_OWN = frozenset(vars(torch.nn.Module()))
_CONTAINERS = (list, tuple, dict)
Tree = tuple[str, torch.nn.Module]
"""The prefix of a model's tensor names ("" or live.DRAFT), and the model."""


class Copies:
    """Floating-point tensors in attributes of modules and of their attention implementations (`impl`).

    Left out are tensors in a storage of the model, and tensors that the twin has too, unless the twin's lies in one of its
    parameters or buffers.

    Args:
        trees: The live models.
        twins: Result of `attributes` for the twins, before their loaders ran.
        wraps: See LiveStorages.
        keep: Globs over live names.
        exempt: Returns further storages without weights (KV caches), by `_cdata`. Called at every `look`.
    """

    def __init__(
        self,
        trees: Sequence[Tree],
        twins: Mapping[str, int | None],
        *,
        wraps: Callable[[torch.nn.Module], str] = lambda module: "",
        keep: Sequence[str] = (),
        exempt: Callable[[], Iterable[int]] = tuple,
    ):
        self._trees, self._twins, self._wraps, self._keep, self._exempt = trees, twins, wraps, tuple(keep), exempt
        self._watch: _AttributeWatch | None = None

    def look(self) -> None:
        """Raise Unsupported if there are such tensors. The error names all of them."""
        with torch._C.DisableTorchFunctionSubclass():
            own = storages(self._trees)
            theirs = own.union(self._exempt())
            tables = _tables(self._trees, self._wraps)
            found = ((names, key, t) for names, table in tables for key, t in _attributes(table))
            bad = [
                f"{names[0]}{key}: {list(t.shape)} {str(t.dtype).removeprefix('torch.')}"
                for names, key, t in found
                if t.is_floating_point()
                and t.numel()
                and self._twins.get(names[0] + key) is None
                and t.untyped_storage()._cdata not in theirs
                and not self._asked(names, key)
            ]
            if bad:
                raise Unsupported(
                    "this engine keeps tensors outside its parameters and buffers, made after the model was built; were they "
                    "computed from weights, it would go on with the old ones",
                    [*bad, "no refit reaches these; name them in keep= only if they do not depend on weights"],
                )
            self._watch = _AttributeWatch([table for _, table in tables], own)

    def check(self) -> None:
        """Do the same as `look`, but only if an attribute has changed. It calls no Python function per module."""
        if self._watch is None or not self._watch.same():
            self.look()

    def constants(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a constructor filled (unit norms, scales), and those that `keep` names.

        They are neither parameters nor buffers, so no refit writes them and no call of vLLM restores them. A tensor that the
        model writes while it runs is no constant: torch counts in-place writes, and a constant has the same count as in the
        twin.
        """
        with torch._C.DisableTorchFunctionSubclass():
            exempt = storages(self._trees).union(self._exempt())
            tables = _tables(self._trees, self._wraps)
            found = ((names, key, t) for names, table in tables for key, t in _attributes(table))
            return {
                names[0] + key: t
                for names, key, t in found
                if t.numel()
                and t.untyped_storage()._cdata not in exempt
                and not t.is_inference()  # a forward made it, and torch counts no writes to it
                and (t._version == self._twins.get(names[0] + key) or self._asked(names, key))
            }

    def _asked(self, names: Sequence[str], key: str) -> bool:
        return any(fnmatchcase(name + key, p) for p in self._keep for name in names)


def attributes(trees: Sequence[Tree]) -> dict[str, int | None]:
    """Return the in-place write counts of all tensors in attributes of these models, by name; None for a tensor that lies in a
    storage of the models."""
    own = storages(trees)
    found = ((names[0] + key, t) for names, table in _tables(trees) for key, t in _attributes(table))
    return {name: None if t.untyped_storage()._cdata in own else t._version for name, t in found}


def storages(trees: Sequence[Tree]) -> set[int]:
    """Return the storages of all parameters and buffers, by `_cdata`."""
    return {t.untyped_storage()._cdata for _, tree in trees for t in (*tree.parameters(), *tree.buffers())}


def tensors_in(name: str, value: Any, depth: int = DEPTH) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth and isinstance(value, _CONTAINERS):
        for key, x in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_in(f"{name}[{key!r}]", x, depth - 1)


def variants(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the attention implementations of a module. They are not modules, so no layout contains their tensors."""
    impl = getattr(module, "impl", None)
    yield from getattr(impl, "get_impl_variants", lambda: (impl,))()


def _tables(
    trees: Sequence[Tree], wraps: Callable[[torch.nn.Module], str] = lambda module: ""
) -> list[tuple[list[str], dict[str, Any]]]:
    """The attributes of every module and attention implementation, once each, with all prefixes of their names. Wrappers are
    left out: their own tensors are adapters."""
    out: dict[int, tuple[list[str], dict[str, Any]]] = {}
    for prefix, tree in trees:
        for path, module, wrapper in modules(tree, wraps):
            if wrapper:
                continue
            name = prefix + (f"{path}." if path else "")
            out.setdefault(id(module), ([], vars(module)))[0].append(name)
            for i, part in enumerate(variants(module)):
                if hasattr(part, "__dict__") and not isinstance(part, torch.nn.Module):
                    out.setdefault(id(part), ([], vars(part)))[0].append(f"{name}impl[{i}]." if i else f"{name}impl.")
    return [*out.values()]


def _attributes(table: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in table.items():
        if key not in _OWN:
            yield from tensors_in(key, value)


class _AttributeWatch:
    """A snapshot of attributes in flat lists, which compares without a Python call per attribute.

    It detects a new attribute, one that is no longer None or empty, and one that is no longer the same parameter. It keeps no
    tensors alive except those in the model's storages, so a KV cache can be freed.
    """

    def __init__(self, tables: Sequence[dict[str, Any]], own: set[int]):
        self._tables, self._counts = tables, [*map(len, tables)]
        self._where: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._values: list[Any] = []
        self._lists: list[list] = []
        self._dicts: list[dict] = []
        for table in tables:
            for key, value in table.items():
                shared = isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in own
                if key not in _OWN and (shared or _has_room(value)):
                    self._where.append(table)
                    self._keys.append(key)
                    self._values.append(value)
                    self._contain(value)
        self._sizes = [*map(len, self._lists)], [*map(len, self._dicts)]
        self._inside = [*self._items()]

    def _contain(self, value: Any, depth: int = DEPTH) -> None:
        if depth and isinstance(value, _CONTAINERS):
            if not isinstance(value, tuple):  # a tuple cannot change
                self._dicts.append(value) if isinstance(value, dict) else self._lists.append(value)
            for x in value.values() if isinstance(value, dict) else value:
                if _has_room(x, depth - 1):
                    self._contain(x, depth - 1)

    def _items(self) -> Iterator[Any]:
        return chain(chain.from_iterable(self._lists), chain.from_iterable(map(dict.values, self._dicts)))

    def same(self) -> bool:
        return (
            [*map(len, self._tables)] == self._counts
            and all(map(is_, map(dict.get, self._where, self._keys), self._values))
            and ([*map(len, self._lists)], [*map(len, self._dicts)]) == self._sizes
            and all(map(is_, self._items(), self._inside))
        )


def _has_room(value: Any, depth: int = DEPTH) -> bool:
    """Whether a tensor may be put here later: the value is None, an empty container, or a container of no tensors with such a value."""
    if value is None:
        return True
    if not isinstance(value, _CONTAINERS) or not depth or any(True for _ in tensors_in("", value)):
        return False
    return not value or any(_has_room(x, depth - 1) for x in (value.values() if isinstance(value, dict) else value))
