"""Provenance: pieces and their origins, and the expressions that remain when a loader computes instead of only moving.

A piece says that region `dst` of a tensor holds region `src` of an origin, after the conversions of `chain`. An
origin is a named source, a constant, an expression, something that lies on another rank, or nothing that can be
named. Expressions keep the operators that ran, so that they can be run again on real tensors; they are only ever
built from operators that torch itself dispatched. How pieces come about: watch.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch

from xfer.trace.view import Region

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Lookup = Callable[[str], torch.Tensor]
Peers = Callable[["Gathered"], "Sequence[torch.Tensor]"]
"""The slots of a gather, flat, each with the elements of its rank's `mine` in row-major order."""
Chain = tuple[torch.dtype, ...]


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor that was given by name: checkpoint tensor on the engine's side, parameter on the trainer's."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """One gather that the watched code ran, and what this rank gave. The others of `group` gave theirs at the same
    point of the same code, so that it can be run again."""

    mine: Operand
    group: ProcessGroup  # only its size is part of what is computed
    size: int

    def text(self) -> str:
        """Text of the gathered expression; the same on every rank of the group."""
        return f"{describe(self.mine)}\non {self.size} ranks"


@dataclass(frozen=True, slots=True)
class Foreign:
    """Data of another rank, which answers for it itself: slot number `slot` of a gather, where it came by one."""

    gathered: Gathered | None = None
    slot: int = -1


@dataclass(frozen=True, slots=True)
class Constant:
    """One value, of `dtype`: a piece's chain may begin by seeing its bits as another."""

    value: bool | int | float | complex
    dtype: torch.dtype

    def tensor(self, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        return torch.full(shape, self.value, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Undefined:
    """Bytes of unknown origin. They are an error only if they are still there in the final state."""

    why: str


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """A tensor put together from pieces: `view` of a buffer of `size` elements of `dtype`."""

    pieces: tuple[Piece, ...]
    size: int
    view: Region
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    """A real tensor that the watched code computed with or copied to meta: an index, a scalar, a small constant."""

    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class OperatorResult:
    """Result number `output` of one operator. `mutates`: argument 0 is changed in place and is the result."""

    op: torch._ops.OpOverload
    args: tuple
    kwargs: dict
    output: int = 0
    mutates: bool = False


Expr = Operand | OperatorResult
Origin = NamedTensor | Foreign | Constant | Undefined | Literal | Operand | OperatorResult


@dataclass(frozen=True, slots=True)
class Piece:
    """`dst` holds `src` of `origin`; the two regions have one shape, counted in elements.

    `src` lies in the storage of a source, in the row-major order of an expression's result or of a literal, or at
    address 0 of a constant. `chain`: dtypes passed from origin to here, both ends included. What the origin holds
    is seen as the first of them, bit for bit, if it is of another: it converts nothing.
    """

    origin: Origin
    src: Region
    dst: Region
    chain: Chain

    @property
    def geometry(self) -> tuple[Region, tuple[int, ...] | None]:
        return self.dst, None if isinstance(self.origin, Constant | Undefined) else self.src.strides


# ---- dtypes on the way ----------------------------------------------------------------------------------------------

_FLOATS = {  # exponent bits, mantissa bits
    "float8_e4m3fn": (4, 3), "float8_e5m2": (5, 2), "bfloat16": (8, 7), "float16": (5, 10), "float32": (8, 23),
    "float64": (11, 52),
}  # fmt: skip


@cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def holds_exactly(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of `narrow` is a value of `wide`."""
    if wide == narrow:
        return True
    a, b = _FLOATS.get(dtype_name(wide)), _FLOATS.get(dtype_name(narrow))
    if a and b:
        return a[0] >= b[0] and a[1] >= b[1]
    plain = not (wide.is_floating_point or narrow.is_floating_point or wide.is_complex or narrow.is_complex)
    return plain and wide.is_signed == narrow.is_signed and wide.itemsize > narrow.itemsize


@lru_cache(maxsize=1024)
def simplify(chain: Chain) -> Chain | None:
    """The chain without steps that lose nothing: (dtype,) if no value changes, (from, to), or None when two steps
    round.
    """
    out = [chain[0]]
    for i, dtype in enumerate(chain[1:], 1):
        if i + 1 < len(chain) and holds_exactly(dtype, out[-1]):
            continue
        if dtype != out[-1]:
            out.append(dtype)
    return tuple(out) if len(out) <= 2 else None


def join(inner: Chain, outer: Chain) -> Chain | None:
    """`inner` followed by `outer`. Where the second sees the bytes as another dtype, one of the two must only move
    bits.
    """
    if inner[-1] == outer[0]:
        return inner + outer[1:]
    if len(set(inner)) == 1:
        return outer
    return inner if len(set(outer)) == 1 else None


# ---- looking into expressions ---------------------------------------------------------------------------------------


def walk(node: object) -> Iterator[object]:
    """Every origin, expression and literal below `node`, itself included, in a fixed order, shared parts once.

    Data of other ranks is a leaf: what this rank gave them in exchange is not below it.
    """
    seen: set[int] = set()
    todo = [node]
    while todo:
        x = todo.pop()
        if isinstance(x, Piece):
            x = x.origin
        if isinstance(x, Operand | OperatorResult):
            if id(x) in seen:
                continue
            seen.add(id(x))
        if isinstance(x, NamedTensor | Foreign | Constant | Undefined | Operand | OperatorResult | Literal):
            yield x
        if isinstance(x, Operand):
            todo += reversed(x.pieces)
        elif isinstance(x, OperatorResult):
            todo += [*reversed(list(x.kwargs.values())), *reversed(x.args)]
        elif isinstance(x, tuple | list):
            todo += reversed(x)


def describe(node: object) -> str:
    """Deterministic text: equal texts mean equal computations. Literals enter by a hash of their bytes."""
    names: dict[int, str] = {}
    lines: list[str] = []

    def region(r: Region) -> str:
        return f"{r.offset}:{list(r.shape)}:{list(r.strides)}"

    def text(x: object) -> str:
        if isinstance(x, Operand | OperatorResult):
            if id(x) not in names:
                body = operand(x) if isinstance(x, Operand) else call(x)
                names[id(x)] = f"%{len(lines)}"
                lines.append(f"%{len(lines)} = {body}")
            return names[id(x)]
        if isinstance(x, Piece):
            chain = ">".join(map(dtype_name, x.chain))
            return f"{region(x.dst)} <- {text(x.origin)}[{region(x.src)}] {chain}"
        if isinstance(x, NamedTensor):
            return repr(x.name)
        if isinstance(x, Foreign) and x.gathered is not None:
            return f"slot {x.slot} of {x.gathered.size} of {text(x.gathered.mine)}"
        if isinstance(x, Literal):
            t = x.tensor.detach().cpu().contiguous()
            bits = blake2b(t.reshape(-1).view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
            return f"{dtype_name(t.dtype)}{list(t.shape)}#{bits}"
        if isinstance(x, tuple | list):
            return f"({', '.join(map(text, x))})"
        return repr(x)

    def operand(x: Operand) -> str:
        pieces = "; ".join(map(text, x.pieces))
        return f"{dtype_name(x.dtype)} {region(x.view)} of {x.size} {{{pieces}}}"

    def call(x: OperatorResult) -> str:
        kw = "".join(f", {k}={text(v)}" for k, v in sorted(x.kwargs.items()))
        return f"{x.op}({', '.join(map(text, x.args))}{kw})[{x.output}]"

    result = text(node)
    return "\n".join([*lines, result])


def peers_needed(node: object) -> Iterator[Foreign]:
    """The data of other ranks that `node` reads."""
    return (x for x in walk(node) if isinstance(x, Foreign))


# ---- running expressions --------------------------------------------------------------------------------------------


def strided(t: torch.Tensor, r: Region) -> torch.Tensor:
    """Region `r` of `t`, counted from where `t` begins in its storage."""
    return t.as_strided(r.shape, r.strides, t.storage_offset() + r.offset)


def evaluate(expr: Expr | Literal, lookup: Lookup, device: torch.device, peers: Peers | None = None) -> torch.Tensor:
    """Run `expr` on real tensors. `lookup`: source name -> full tensor laid out as the meta tensor that was traced;
    `peers`: what other ranks hold, needed where the expression reads `Foreign` data."""
    memo: dict[int, torch.Tensor] = {}

    def value(x: Any) -> Any:  # an operator's argument: an expression becomes a tensor, containers are searched
        if isinstance(x, Operand | OperatorResult):
            if id(x) not in memo:
                memo[id(x)] = assemble(x) if isinstance(x, Operand) else run(x)
            return memo[id(x)]
        if isinstance(x, Literal):
            return x.tensor.to(device) if x.tensor.dim() else x.tensor
        if isinstance(x, tuple | list):
            return type(x)(map(value, x))
        if isinstance(x, torch.device):
            return device
        return x

    def assemble(x: Operand) -> torch.Tensor:
        first = x.pieces[0]
        if (
            len(x.pieces) == 1
            and isinstance(first.origin, NamedTensor)
            and first.chain == (x.dtype,)
            and first.src == first.dst
        ):
            return strided(reseen(lookup(first.origin.name), x.dtype), x.view)
        buffer = torch.empty(x.size, dtype=x.dtype, device=device)
        for p in x.pieces:
            if isinstance(p.origin, Undefined):
                continue
            put(strided(buffer, p.dst), p.origin, p.src, p.chain)
        return strided(buffer, x.view)

    def put(into: torch.Tensor, origin: Origin, src: Region, chain: Chain) -> None:
        if isinstance(origin, Constant):
            x = origin.tensor(src.shape, device)
        elif isinstance(origin, NamedTensor):
            x = strided(reseen(lookup(origin.name), chain[0]), src)
        elif isinstance(origin, Operand | OperatorResult | Literal):
            x = strided(value(origin).contiguous().reshape(-1), src)
        elif isinstance(origin, Foreign) and origin.gathered is not None and peers is not None:
            x = strided(peers(origin.gathered)[origin.slot], src)
        else:
            raise RuntimeError(f"cannot evaluate data of {origin}")
        into.copy_(reseen(converted(x, chain), into.dtype))

    def run(x: OperatorResult) -> torch.Tensor:
        args, kwargs = value(x.args), {k: value(v) for k, v in x.kwargs.items()}
        if x.mutates:
            args = (args[0].clone(), *args[1:])
        out = x.op(*args, **kwargs)
        if x.mutates:
            return args[0]
        return out[x.output] if isinstance(out, tuple | list) else out

    with torch.no_grad():
        return value(expr)


def converted(t: torch.Tensor, chain: Chain) -> torch.Tensor:
    """The value of an origin after the conversions of `chain`."""
    t = reseen(t, chain[0])
    for dtype in chain[1:]:
        t = t.to(dtype)
    return t


def reseen(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same bits as another dtype of the same size."""
    return t if t.dtype == dtype else t.view(dtype)
