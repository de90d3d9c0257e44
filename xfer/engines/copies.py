"""Tensors that a live model keeps as plain attributes, where no layout shows them: what they were computed from weights, a
refit leaves as it was. Found by comparing with the fresh twin, and again, by a look that costs next to nothing, before
every refit, since some are made at the first forward. Plain torch; what of it is vLLM's is told by vllm_layout.py.

Not here: parameters and buffers (live.py, layout.py), what quantization methods made of weights (processed.py).
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
"""Of lists, tuples and dicts in one another in which tensors are looked for."""
_OWN = frozenset(vars(torch.nn.Module()))
_CONTAINERS = (list, tuple, dict)
Tree = tuple[str, torch.nn.Module]
"""What the names of a model's tensors begin with ("" or live.DRAFT), and the model."""


class Copies:
    """All floating-point tensors in attributes of modules, and of what computes their attention (`impl`), that lie in no
    storage of the model and were not there when the twin was built, or lay in the twin's own parameters.

    `twins`: what `attributes` gave for the same trees of the twin, before its loader ran. `keep`: globs over live names.
    `exempt`: further storages that are none of weights (KV caches), by `_cdata`, asked at every look.
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
        """Unsupported, naming all of them."""
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
        """Unsupported, as `look`, if there are any by now. Calls no Python function per module while nothing changed."""
        if self._watch is None or not self._watch.same():
            self.look()

    def constants(self) -> dict[str, torch.Tensor]:
        """The tensors that hold what a constructor put there (unit norms, scales), and those that `keep` names. As they are
        neither parameters nor buffers, no refit writes them and no call of vLLM's restores them.

        What the model writes as it runs is no constant. torch counts how often a tensor is written in place, so a constant
        has the count that it has in the twin.
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
                and not t.is_inference()  # made by a forward, and without such a count
                and (t._version == self._twins.get(names[0] + key) or self._asked(names, key))
            }

    def _asked(self, names: Sequence[str], key: str) -> bool:
        return any(fnmatchcase(name + key, p) for p in self._keep for name in names)


def attributes(trees: Sequence[Tree]) -> dict[str, int | None]:
    """The names of all tensors in attributes of these models, and how often torch has written each in place; None for those
    that lie in a storage of theirs."""
    own = storages(trees)
    found = ((names[0] + key, t) for names, table in _tables(trees) for key, t in _attributes(table))
    return {name: None if t.untyped_storage()._cdata in own else t._version for name, t in found}


def storages(trees: Sequence[Tree]) -> set[int]:
    """Of all parameters and buffers."""
    return {t.untyped_storage()._cdata for _, tree in trees for t in (*tree.parameters(), *tree.buffers())}


def tensors_in(name: str, value: Any, depth: int = DEPTH) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth and isinstance(value, _CONTAINERS):
        for key, x in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_in(f"{name}[{key!r}]", x, depth - 1)


def variants(module: torch.nn.Module) -> Iterator[Any]:
    """What computes an attention module's attention: no modules, so no layout shows what they hold."""
    impl = getattr(module, "impl", None)
    yield from getattr(impl, "get_impl_variants", lambda: (impl,))()


def _tables(
    trees: Sequence[Tree], wraps: Callable[[torch.nn.Module], str] = lambda module: ""
) -> list[tuple[list[str], dict[str, Any]]]:
    """What every module and attention implementation has as attributes, once, and all that stands before their names. A
    wrapper's own are its adapters."""
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
    """Attributes as they were, in flat lists: another one, one that is no longer None or empty, or one that no longer is
    the parameter that it was, is seen without a call of Python for each. Holds no tensor but those in the model's storages:
    a KV cache may be freed although this knows it."""

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
            if not isinstance(value, tuple):  # which another one would have to replace
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
    """Nothing, or a container without tensors that is empty, or in which something is nothing or empty."""
    if value is None:
        return True
    if not isinstance(value, _CONTAINERS) or not depth or any(True for _ in tensors_in("", value)):
        return False
    return not value or any(_has_room(x, depth - 1) for x in (value.values() if isinstance(value, dict) else value))
