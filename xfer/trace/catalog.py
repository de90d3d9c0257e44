"""The checkpoint as both sides name it, and the grouped view of it that plans are made of.

Per-expert tensors are grouped into one tensor with a leading expert dim, so that a thousand experts are
one box. Grouping goes by the *structure* of names and never by words: names that differ only in their last integer
component, below an earlier integer component (the layer), with one shape and dtype and indices exactly 0..E-1. It
is lossless, so a group that is no expert is harmless. No torch here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import msgspec

from xfer.errors import LayoutError, ProtocolError
from xfer.trace.boxes import merge, refined
from xfer.trace.derived import SCALES, quantized
from xfer.trace.fragment import Fragment, Ints, TensorSpec

MAX_BYTES = 64 << 20
"""Largest encoded catalog that is decoded: fifty times that of a model with 45,000 tensors."""
_INTEGER = re.compile(r"0|[1-9]\d*")
_Row = tuple[str, tuple[int, ...], str, tuple[int, ...], str, str]
"""A spec on the wire: its fields."""


@dataclass(frozen=True)
class Catalog:
    """`specs`: checkpoint tensors under their own names, sorted by name, each once. The rest follows from them."""

    specs: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        names = [s.name for s in self.specs]
        if names != sorted(set(names)):
            raise LayoutError("a catalog's names must be sorted and different", _repeated(names))

    @staticmethod
    def union(parts: Iterable[tuple[str, Iterable[TensorSpec]]]) -> Catalog:
        """One catalog of all tensors that several ranks (`who`, specs) name. LayoutError lists every tensor on which two
        ranks disagree. If members of a group have different splits, all get the one that refines the others; without such
        a one, none has a split.
        """
        seen: dict[str, tuple[TensorSpec, str]] = {}
        bad: dict[str, list[str]] = {}
        splits: dict[str, set[Ints]] = {}
        for who, specs in parts:
            for s in specs:
                if s.split:
                    splits.setdefault(_group_name(s.name), set()).add(s.split)
                    s = replace(s, split=())
                first, by = seen.setdefault(s.name, (s, who))
                if first != s:
                    said = bad.setdefault(s.name, [f"{by} has {first.dtype}{list(first.shape)}"])
                    said.append(f"{who} has {s.dtype}{list(s.shape)}")
        if bad:
            lines = (f"{n}: {', '.join(said)}" for n, said in sorted(bad.items()))
            raise LayoutError("ranks disagree on the checkpoint's tensors", lines)
        return Catalog(
            tuple(
                replace(s, split=_finest(s.shape, splits.get(_group_name(name), ())))
                for name, (s, _) in sorted(seen.items())
            )
        )

    def deriving(self, wanted: Iterable[tuple[str, str]]) -> Catalog:
        """This catalog and the quantized form of some of its matrices.

        Args:
            wanted: Pairs of a matrix and a rule (derived.py). One expert's matrix stands for those of its group. Names that
                are not in this catalog are left out.
        """
        members = {
            (n, rule) for name, rule in wanted if name in self._named for n in self.members(self.grouped(name)[0])
        }
        more = {spec for name, rule in members for spec in quantized(self._named[name], rule)}
        return Catalog(tuple(sorted({*self.specs, *more}, key=lambda s: s.name)))

    @cached_property
    def exported(self) -> tuple[TensorSpec, ...]:
        """The checkpoint's own tensors, without derived ones."""
        return tuple(s for s in self.specs if not s.of)

    @cached_property
    def blocks(self) -> tuple[dict[tuple[str, str], int], int]:
        """Number the blocks of all matrices that are derived, in the order of the specs and row by row in a matrix.

        Returns:
            (name of the matrix, rule) -> number of its first block, and how many blocks there are.
        """
        first, count = dict[tuple[str, str], int](), 0
        for s in self.specs:
            if s.of and s.dtype == SCALES:
                first[s.of, s.rule], count = count, count + prod(s.shape)
        return first, count

    @cached_property
    def _groups(self) -> dict[str, list[TensorSpec]]:
        """Group name -> its members in index order; only real groups."""
        found: dict[str, dict[int, TensorSpec]] = {}
        for s in self.specs:
            split = _split(s.name)
            if split is not None:
                found.setdefault(split[0], {})[split[1]] = s
        taken = {s.name for s in self.specs}
        return {
            group: [members[i] for i in range(len(members))]
            for group, members in found.items()
            if len(members) >= 2
            and max(members) == len(members) - 1
            and len({(s.shape, s.dtype, s.split) for s in members.values()}) == 1
            and group not in taken
        }

    @cached_property
    def _place(self) -> dict[str, tuple[str, int | None]]:
        out: dict[str, tuple[str, int | None]] = {s.name: (s.name, None) for s in self.specs}
        for group, members in self._groups.items():
            for i, s in enumerate(members):
                out[s.name] = (group, i)
        return out

    @cached_property
    def _named(self) -> dict[str, TensorSpec]:
        return {s.name: s for s in self.specs}

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Grouped tensors, with a leading expert dim, and all tensors that are in no group; sorted by name. Their shapes
        are those that plans use: `dims` of the specs."""
        alone = [replace(s, shape=s.dims, split=()) for s in self.specs if self._place[s.name][1] is None]
        groups = [
            replace(m[0], name=g, shape=(len(m), *m[0].dims), split=(), of=m[0].of and _group_name(m[0].of))
            for g, m in self._groups.items()
        ]
        return tuple(sorted(alone + groups))

    @cached_property
    def index(self) -> dict[str, int]:
        """Name of a grouped tensor -> its position in `tensors`, the `tensor` column of a program."""
        return {s.name: i for i, s in enumerate(self.tensors)}

    def grouped(self, name: str) -> tuple[str, int | None]:
        """The grouped tensor of a checkpoint name, and its index in the leading dim or None. KeyError for a name that is not
        here.
        """
        return self._place[name]

    def members(self, name: str) -> tuple[str, ...]:
        """Checkpoint names in a grouped tensor, in index order: the inverse of `grouped`."""
        group = self._groups.get(name)
        return tuple(s.name for s in group) if group is not None else (name,)

    def lift(self, fragments: Iterable[Fragment]) -> tuple[Fragment, ...]:
        """Fragments of checkpoint tensors as fragments of grouped ones, neighbours merged (experts of one storage).

        LayoutError lists every fragment whose tensor is unknown or whose box leaves it.
        """
        specs = self._named
        bad: list[str] = []
        out: list[Fragment] = []
        for f in fragments:
            spec = specs.get(f.tensor)
            if spec is None:
                bad.append(f"{f.tensor}: not in the catalog")
            elif not _inside(f, spec.shape):
                bad.append(f"{f.tensor}: box {list(f.origin)}+{list(f.extent)} is not in shape {list(spec.shape)}")
            else:
                out += self._lifted(f, spec)
        if bad:
            raise LayoutError("fragments do not fit the catalog", sorted(set(bad)))
        return tuple(sorted(merge(out), key=lambda f: (f.tensor, f.origin, f.root, f.offset)))

    def _lifted(self, f: Fragment, spec: TensorSpec) -> list[Fragment]:
        group, i = self._place[f.tensor]
        own = refined(f, spec.shape, spec.dims) if f.steps or spec.split else [f]
        if i is None:
            return own
        return [
            Fragment(group, (i, *x.origin), (1, *x.extent), x.root, x.offset, (0, *x.strides), x.dtype) for x in own
        ]

    def digest(self) -> str:
        """The same for the same checkpoint tensors, on every rank and every run."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return hashlib.blake2b(self.to_bytes(), digest_size=16).hexdigest()

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode([(s.name, s.shape, s.dtype, s.split, s.of, s.rule) for s in self.specs])

    @staticmethod
    def from_bytes(data: bytes) -> Catalog:
        """ProtocolError for anything that `to_bytes` does not write."""
        if len(data) > MAX_BYTES:
            raise ProtocolError(f"a catalog of {len(data)} bytes; at most {MAX_BYTES} are read")
        try:
            rows = msgspec.msgpack.decode(data, type=list[_Row])
            specs = tuple(TensorSpec(*r) for r in rows)
            if any(n < 0 for s in specs for n in s.shape):
                raise ValueError("a negative size")
            if any(s.split and not _refines(s.split, s.shape) for s in specs):
                raise ValueError("a split that is not of its shape")
            return Catalog(specs)
        except (msgspec.MsgspecError, LayoutError, ValueError) as e:
            raise ProtocolError(f"not a catalog: {e}") from e


def _split(name: str) -> tuple[str, int] | None:
    """(name with its last integer component replaced by `*`, that integer), if an earlier component is an integer
    too.
    """
    parts = name.split(".")
    at = [i for i, p in enumerate(parts) if p[:1].isdigit() and _INTEGER.fullmatch(p)]
    if len(at) < 2:
        return None
    number = int(parts[at[-1]])
    parts[at[-1]] = "*"
    return ".".join(parts), number


def _inside(f: Fragment, shape: Ints) -> bool:
    if len(shape) != len(f.origin):
        return False
    if f.steps:
        return all(0 <= i.start < i.stop <= n for i, n, e in zip(f.index, shape, f.extent) if e)
    return all(0 <= o < o + e <= n for o, e, n in zip(f.origin, f.extent, shape) if e)


def _group_name(name: str) -> str:
    split = _split(name)
    return name if split is None else split[0]


def _refines(split: Ints, shape: Ints) -> bool:
    """Whether `split` is `shape` with some dims cut into several."""
    left = list(split)
    for n in shape:
        product = left.pop(0) if left else 0
        while product < n and left:
            product *= left.pop(0)
        if product != n:
            return False
    return not left


def _finest(shape: Ints, splits: Iterable[Ints]) -> Ints:
    """The one of `splits` that refines all the others; () when none does."""
    splits = set(splits)
    return next((a for a in sorted(splits) if all(_refines(a, b) for b in (*splits, shape))), ())


def _repeated(names: Sequence[str]) -> list[str]:
    return [f"{b}: after {a}" for a, b in zip(names, names[1:]) if a >= b]
