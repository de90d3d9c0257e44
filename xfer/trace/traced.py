"""The result of a trace: fragments, fills and recipes over byte regions, and the names that took part.

Engine side (loader.py): fragments say which box of a checkpoint tensor lies where in a storage; recipes compute a
storage region from checkpoint tensors. Trainer side (export.py): fragments say which box lies where in a parameter;
recipes compute a region of a checkpoint tensor from parameters. Importing this module does not import torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from xfer.trace.fragment import Fill, Fragment, Ints, Root, TensorSpec
from xfer.trace.view import Region

if TYPE_CHECKING:
    import torch

    from xfer.trace.expr import Expr, Gathered, Peers


@dataclass(frozen=True, slots=True)
class Cast:
    """A conversion on the way of a fragment. `dtypes`: as the framework's code passed through them, checkpoint end
    first on the engine's side, parameter end first on the trainer's.
    """

    tensor: str
    root: str
    dtypes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Recipe:
    """A staged computation: `target`'s strided region (bytes) gets the value of an expression over `sources`.

    `target` is a root's name on the engine's side and a checkpoint tensor's on the trainer's; sources are the reverse.
    """

    target: str
    offset: int
    shape: Ints
    strides: Ints
    dtype: str
    expr: Expr
    part: Region
    chain: tuple[str, ...]

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Names that the expression reads, sorted."""
        from xfer.trace.expr import NamedTensor, walk

        return tuple(sorted({x.name for x in walk(self.expr) if isinstance(x, NamedTensor)}))

    @cached_property
    def foreign(self) -> bool:
        """Whether the expression also needs data that only other ranks hold and that cannot be gathered again."""
        from xfer.trace.owned import missing_peers

        return missing_peers(self.expr)

    @cached_property
    def peers(self) -> tuple[Gathered, ...]:
        """The gathers that the expression needs the results of, each once."""
        from xfer.trace.expr import peers_needed

        return tuple(dict.fromkeys(x.gathered for x in peers_needed(self.expr) if x.gathered is not None))

    @cached_property
    def ops(self) -> tuple[str, ...]:
        """Operators of the expression, sorted, each once."""
        from xfer.trace.expr import OperatorResult, walk

        return tuple(sorted({str(x.op) for x in walk(self.expr) if isinstance(x, OperatorResult)}))

    def evaluate(self, lookup: Callable[[str], torch.Tensor], peers: Peers | None = None) -> torch.Tensor:
        """The value for the region, of `shape` and `dtype`, from real full source tensors (with the traced strides) and
        what other ranks gave in `self.peers`."""
        import torch

        from xfer.trace.expr import converted, evaluate, reseen, strided

        device = lookup(self.sources[0]).device if self.sources else torch.device("cpu")
        x = strided(evaluate(self.expr, lookup, device, peers).contiguous().reshape(-1), self.part)
        x = converted(x, tuple(getattr(torch, name) for name in self.chain))
        return reseen(x.contiguous(), getattr(torch, self.dtype)).reshape(self.shape)

    def apply(self, lookup: Callable[[str], torch.Tensor], roots: Mapping[str, torch.Tensor]) -> None:
        """Evaluate and write. `roots`: target name -> tensor whose storage bytes begin where the traced one's did."""
        value = self.evaluate(lookup)
        byte_region(roots[self.target], self.offset, self.shape, self.strides, self.dtype).copy_(value)

    def digest(self) -> str:
        """Equal for equal work, on every rank and every run; 32 hex digits."""
        return hashlib.blake2b(self.describe().encode(), digest_size=16).hexdigest()

    def describe(self) -> str:
        """Deterministic text: equal texts mean equal work."""
        from xfer.trace.expr import describe

        part = f"{self.part.offset}:{list(self.part.shape)}:{list(self.part.strides)}"
        head = f"{self.target}+{self.offset}:{list(self.shape)}:{list(self.strides)} {self.dtype}"
        return f"{head} <- {part} {'>'.join(self.chain)} of\n{describe(self.expr)}"


@dataclass(frozen=True, slots=True)
class Traced:
    """One rank's half of the map between checkpoint tensors and storages.

    specs      full shapes and dtypes of the checkpoint tensors that occur, sorted by name
    fragments  ungrouped checkpoint names; storage offsets and strides in bytes; disjoint in what they write
    fills      regions that are set to a constant (engine side only)
    recipes    regions that are computed (staged), in the order in which they must be applied
    reads      given names that reached something: checkpoint tensors (engine side), parameters (trainer side); sorted
    unread     given names that did not; sorted
    casts      conversions that a fragment implies
    gathers    all gathers that an export ran, in order, if it computes anything; the same on all ranks of a group
    """

    specs: tuple[TensorSpec, ...]
    fragments: tuple[Fragment, ...]
    fills: tuple[Fill, ...] = ()
    recipes: tuple[Recipe, ...] = ()
    reads: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    casts: tuple[Cast, ...] = ()
    gathers: tuple[Gathered, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainerLayout:
    """The weights of one trainer rank, of any framework.

    traced   fragments are relocated: `root` is a storage (each named after the first tensor in it), offsets count from its
             first byte
    roots    those storages and their lengths
    tensors  a root's name -> flat uint8 view of the whole live storage
    trained  checkpoint tensors that are made from something that requires grad
    scales   of the tensors whose fragments are in FP8: where the scales of their blocks lie (derived.py). `tensor` is the tensor,
             the box is one of its block grid
    pow2     whether all of these scales are powers of two
    """

    traced: Traced
    roots: tuple[Root, ...]
    tensors: Mapping[str, torch.Tensor]
    trained: frozenset[str] = frozenset()
    scales: tuple[Fragment, ...] = ()
    pow2: bool = False


def byte_region(t: torch.Tensor, offset: int, shape: Ints, strides: Ints, dtype: str) -> torch.Tensor:
    """A strided region of the storage of `t`; offset and strides in bytes, whole elements of `dtype`. Strides >= 0."""
    import torch

    kind = getattr(torch, dtype)
    size = kind.itemsize
    if offset % size or any(s % size for n, s in zip(shape, strides) if n > 1):
        raise ValueError(f"region at byte {offset} with strides {strides} is not made of whole {dtype} elements")
    flat = torch.empty(0, dtype=kind, device=t.device).set_(t.untyped_storage())
    return flat.as_strided(shape, tuple(s // size for s in strides), offset // size)
