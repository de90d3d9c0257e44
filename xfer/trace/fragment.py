"""The words that both tracers end in and the planner starts from: checkpoint tensors, storages, fragments, fills.

All offsets and strides of *storage* are in bytes; origins and extents of *checkpoint tensors* are in elements. Names of
dtypes are torch's without the module ("bfloat16"), so that they can be sent and compared between torch versions.
"""

from __future__ import annotations

from dataclasses import dataclass

from xfer.mesh.box import Ints


@dataclass(frozen=True, slots=True, order=True)
class TensorSpec:
    """One tensor of the Hugging Face checkpoint: the common language of both sides.

    `split`: the same tensor with some dims cut into several, row-major, or () for `shape` as it is. Trainers give it
    where they hold interleaved parts of a dim (every other column of a gate and up tensor), which in `shape` would be
    a box per element, and in `split` is one. Plans are made in `dims`.

    `of`, `rule`: empty, but for a tensor that trainers derive from checkpoint tensor `of` (derived.py).
    """

    name: str
    shape: Ints
    dtype: str
    split: Ints = ()
    of: str = ""
    rule: str = ""

    @property
    def dims(self) -> Ints:
        """The shape that plans use."""
        return self.split or self.shape


@dataclass(frozen=True, slots=True)
class Root:
    """One storage of one rank. `name` is stable from refit to refit: the first parameter or buffer found in it."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Fragment:
    """The box `origin`/`extent` of checkpoint tensor `tensor` lies in storage `root`.

    Element i (counted inside the box) is at byte `offset + sum(i[d] * strides[d])` and has `dtype`. One stride per dim
    of the box. Strides may be negative, because Megatron's distributed optimizer lays experts out in reverse. A dim of
    extent 1 has stride 0.

    `steps`: distance in the tensor from one element of the box to the next, per dim; () where all are 1. Only traces have
    others; a catalog lifts such fragments to dims in which they are ordinary boxes.
    """

    tensor: str
    origin: Ints
    extent: Ints
    root: str
    offset: int
    strides: Ints
    dtype: str
    steps: Ints = ()

    @property
    def index(self) -> tuple[slice, ...]:
        """The box as an index into its tensor."""
        steps = self.steps or (1,) * len(self.extent)
        return tuple(slice(o, o + (e - 1) * q + 1, q) for o, e, q in zip(self.origin, self.extent, steps))


@dataclass(frozen=True, slots=True)
class Fill:
    """A strided region of an engine storage that the loader sets to one constant (vocabulary padding).

    `bits`: the little-endian bytes of one element of `dtype`.
    """

    root: str
    offset: int
    extent: Ints
    strides: Ints
    dtype: str
    bits: bytes


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `start <= b < stop` of a storage."""

    root: str
    start: int
    stop: int
