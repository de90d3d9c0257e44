"""Rules for what operators do to storages: the moves, the constants, and the general rule for all others.

Each move is said in terms of regions: out's region and the argument's. An operator without a rule, or whose
arguments a rule does not understand, is kept as an expression; that is always right and only slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import torch

from xfer.trace.compose import MAX_PARTS, fold
from xfer.trace.expr import Constant, Piece
from xfer.trace.view import Region, constant, contiguous
from xfer.trace.watch import Store, Watch, aten, outside, region, storage_key, undefined


class NoRule(Exception):
    """The arguments go beyond what a move rule understands."""


EMPTY = {
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
    aten.new_empty_strided.default, aten.empty_permuted.default,
}  # fmt: skip
ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}
ONES = {aten.ones.default, aten.ones_like.default, aten.new_ones.default}
FULL = {
    aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2, aten.scalar_tensor.default: 0
}  # fmt: skip
SAME = {aten.clone.default, aten._to_copy.default, aten._unsafe_view.default, aten.lift_fresh_copy.default,
        aten.lift_fresh.default, aten.contiguous.default}  # fmt: skip


# ---- operators that make a storage ----------------------------------------------------------------------------------


def make(watch: Watch, func, args: tuple, kwargs: dict, out: torch.Tensor, index: int) -> None:
    """Note what the fresh tensor `out` (result number `index` of `func`) holds."""
    store = watch.new_store(out)
    if func in EMPTY or not out.numel():
        return
    whole = region(out)
    value = _constant(func, args, kwargs)
    if value is not None:
        store.pieces = [Piece(Constant(value, out.dtype), constant(whole.shape), whole, (out.dtype,))]
        return
    watch.ops[str(func)] += 1
    if torch.Tag.nondeterministic_seeded in func.tags:
        store.pieces = [undefined(f"random numbers of {func}", whole, out.dtype)]
        return
    rule = MOVES.get(func)
    if rule is not None:
        try:
            store.pieces = list(rule(watch, args, kwargs, out))
            store.whole = -1 if func in OVERLAPPING else len(store.pieces)
            return
        except NoRule:
            pass
    expr = watch.call(func, args, kwargs, index)
    store.pieces = [Piece(expr, contiguous(whole.shape), whole, (out.dtype,))]
    store.whole = 1


def _constant(func, args: tuple, kwargs: dict) -> bool | int | float | complex | None:
    if func in ZEROS:
        return 0
    if func in ONES:
        return 1
    return args[FULL[func]] if func in FULL else None


def _same(watch: Watch, args: tuple, kwargs: dict, out: torch.Tensor) -> Iterator[Piece]:
    yield from watch.flows(region(out), out.dtype, args[0])


def _cat(watch: Watch, args: tuple, kwargs: dict, out: torch.Tensor) -> Iterator[Piece]:
    dim, at, r = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.dim(), 0, region(out)
    for part in args[0]:
        if part.dim() == 1 and not part.numel() and out.dim() != 1:
            continue  # torch lets an empty 1-D tensor take part in any cat
        yield from watch.flows(Region(r.offset + at * r.strides[dim], tuple(part.shape), r.strides), out.dtype, part)
        at += part.shape[dim]


def _stack(watch: Watch, args: tuple, kwargs: dict, out: torch.Tensor) -> Iterator[Piece]:
    dim, r = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.dim(), region(out)
    for i, part in enumerate(args[0]):
        strides = r.strides[:dim] + r.strides[dim + 1 :]
        yield from watch.flows(Region(r.offset + i * r.strides[dim], tuple(part.shape), strides), out.dtype, part)


def _index(watch: Watch, args: tuple, kwargs: dict, out: torch.Tensor) -> Iterator[Piece]:
    x, dim, index = _one_index(watch, args[0], args[1])
    yield from _gather(watch, x, dim, index, out)


def _index_select(watch: Watch, args: tuple, kwargs: dict, out: torch.Tensor) -> Iterator[Piece]:
    x, dim, index = args[0], args[1] % max(args[0].dim(), 1), args[2]
    yield from _gather(watch, x, dim, _rows(watch, index, x, dim), out)


def _gather(watch: Watch, x: torch.Tensor, dim: int, index: np.ndarray, out: torch.Tensor) -> Iterator[Piece]:
    """out = x[..., index, ...]: rows in runs, each run strided on both sides."""
    for to, of in _runs(index):
        src = along(region(x), dim, of)
        view = x.as_strided(src.shape, src.strides, src.offset)
        yield from watch.flows(along(region(out), dim, to), out.dtype, view)


def _repeat(watch: Watch, args: tuple, kwargs: dict, out: torch.Tensor) -> Iterator[Piece]:
    """Each dim of `out` is (repeat, size): the repeats read the same elements."""
    x, times, r = args[0], args[1], region(out)
    lead = len(times) - x.dim()
    sizes, of = (1,) * lead + tuple(x.shape), (0,) * lead + tuple(x.stride())
    shape = tuple(k for pair in zip(times, sizes) for k in pair)
    to = tuple(k for s, n in zip(r.strides, sizes) for k in (s * n, s))
    src = tuple(k for s in of for k in (0, s))
    yield from watch.flows(Region(r.offset, shape, to), out.dtype, x.as_strided(shape, src, x.storage_offset()))


def _flip(watch: Watch, args: tuple, kwargs: dict, out: torch.Tensor) -> Iterator[Piece]:
    x = args[0]
    dims = [d for d in args[1] if x.shape[d] > 1]
    if len(dims) > 1:
        raise NoRule
    if not dims:
        yield from _same(watch, args, kwargs, out)
        return
    yield from _gather(watch, x, dims[0] % x.dim(), np.arange(x.shape[dims[0]])[::-1], out)


def _pad(watch: Watch, args: tuple, kwargs: dict, out: torch.Tensor) -> Iterator[Piece]:
    x, pads, value = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("value", 0)
    if min(pads) < 0:
        raise NoRule
    r = region(out)
    yield Piece(Constant(value, out.dtype), constant(r.shape), r, (out.dtype,))
    offset = r.offset + sum(pads[2 * i] * r.strides[-1 - i] for i in range(len(pads) // 2))
    yield from watch.flows(Region(offset, tuple(x.shape), r.strides), out.dtype, x)


MOVES: dict[object, Callable[..., Iterator[Piece]]] = {
    **dict.fromkeys(SAME, _same),
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.repeat.default: _repeat,
    aten.flip.default: _flip,
    aten.constant_pad_nd.default: _pad,
}
OVERLAPPING = {aten.constant_pad_nd.default}
"""Moves whose pieces lie over each other; the pieces of all others fill the result exactly once."""


# ---- operators that change a storage --------------------------------------------------------------------------------


def change(watch: Watch, func, args: tuple, kwargs: dict) -> None:
    """Note a write into an existing storage."""
    if torch.Tag.inplace_view in func.tags or func is aten.requires_grad_.default:
        _seen_anew(watch, args[0])
        return
    if func is aten.copy_.default and _same_place(args[0], args[1]):
        return
    written = written_by(func, args, kwargs)
    if len(written) != 1 or not isinstance(written[0], torch.Tensor) or (args and written[0] is not args[0]):
        raise NoRule("several arguments are written at once")
    x = written[0]
    store = watch.store(x)
    if not x.numel() or (store is None and x.device.type != "meta"):
        return  # nothing, or index arithmetic on real numbers
    if store is None:
        store = watch.new_store(x, "a tensor made elsewhere")
        store.pieces = [undefined("a tensor made elsewhere", contiguous((_elements(x, store.itemsize),)), x.dtype)]
    where = watch.region(x, store)
    if func is not aten.copy_.default and func not in FILLS:
        watch.ops[str(func)] += 1
    store.write(list(_changed(watch, func, args, kwargs, x, where, store)))


def _same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both are the same elements, as where a tensor is copied to itself."""
    return storage_key(a) == storage_key(b) and a.dtype == b.dtype and region(a) == region(b)


def _seen_anew(watch: Watch, x: torch.Tensor) -> None:
    """`x.t_()`, `x.resize_(…)`, `x.set_(…)`: no element was written, and the tensor itself says which storage it sees
    now and how. A storage that grew holds nothing in what is new of it."""
    store = watch.store(x)
    if store is not None and store.origin is not None and _elements(x, store.itemsize) > store.pieces[0].dst.size:
        store.origin = None


def written_by(func, args: tuple, kwargs: dict) -> list[object]:
    """The arguments, by place or by keyword, that an operator writes: tensors and lists of tensors."""
    places = _written(func)
    return [args[i] for i, _ in places if i < len(args)] + [kwargs[name] for _, name in places if name in kwargs]


@cache
def _written(func) -> tuple[tuple[int, str], ...]:
    """Place and name of the arguments that an operator writes."""
    args = enumerate(func._schema.arguments)
    return tuple((i, s.name) for i, s in args if s.alias_info is not None and s.alias_info.is_write)


def _elements(x: torch.Tensor, itemsize: int) -> int:
    return x.untyped_storage().nbytes() // itemsize


FILLS = {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}


def _changed(watch: Watch, func, args, kwargs, x: torch.Tensor, where: Region, store: Store) -> Iterator[Piece]:
    if func is aten.copy_.default:
        yield from watch.flows(where, x.dtype, args[1])
    elif func is aten.zero_.default:
        yield Piece(Constant(0, x.dtype), constant(where.shape), where, (x.dtype,))
    elif func is aten.fill_.Scalar:
        yield Piece(Constant(args[1], x.dtype), constant(where.shape), where, (x.dtype,))
    elif func is aten.fill_.Tensor:
        fill = args[1]
        yield from (watch.flows(where, x.dtype, fill) if watch.store(fill) else [outside(fill, where, x.dtype)])
    elif torch.Tag.nondeterministic_seeded in func.tags:
        yield undefined(f"random numbers of {func}", where, x.dtype)
    else:
        try:
            yield from list(_put(watch, func, args, x))
        except NoRule:
            yield Piece(watch.call(func, args, kwargs, mutates=True), contiguous(where.shape), where, (x.dtype,))


def _put(watch: Watch, func, args: tuple, x: torch.Tensor) -> Iterator[Piece]:
    """x[..., index, ...] = value, row runs in the order of the index."""
    if func is aten.index_put_.default and not (len(args) > 3 and args[3]):
        _, dim, index = _one_index(watch, x, args[1])
        value = args[2]
    elif func is aten.index_copy_.default:
        dim, index, value = args[1] % max(x.dim(), 1), args[2], args[3]
        index = _rows(watch, index, x, dim)
    else:
        raise NoRule
    if len(set(index.tolist())) != len(index):
        raise NoRule  # which of two writes wins is the operator's business
    rows = region(x)
    value = value.expand(*rows.shape[:dim], len(index), *rows.shape[dim + 1 :])
    for of, to in _runs(index):
        src = along(region(value), dim, of)
        yield from watch.flows(along(rows, dim, to), x.dtype, value.as_strided(src.shape, src.strides, src.offset))


# ---- index tensors of known values ---------------------------------------------------------------------------------------------


def _one_index(watch: Watch, x: torch.Tensor, indices: list) -> tuple[torch.Tensor, int, np.ndarray]:
    used = [(d, i) for d, i in enumerate(indices) if i is not None]
    if len(used) != 1:
        raise NoRule
    dim, index = used[0]
    return x, dim, _rows(watch, index, x, dim)


def _rows(watch: Watch, index: torch.Tensor, x: torch.Tensor, dim: int) -> np.ndarray:
    """A 1-D index of known values as row numbers >= 0. IndexError for rows that the dim does not have."""
    known = watch.value(index) if index.device.type == "meta" else index
    if known is None or known.dim() > 1 or not x.dim():
        raise NoRule
    index = known
    if index.dtype in (torch.bool, torch.uint8):
        if index.dtype == torch.uint8 or index.dim() != 1 or len(index) != x.shape[dim]:
            raise NoRule
        return np.flatnonzero(index.cpu().numpy())
    if index.dim() != 1:
        raise NoRule
    rows, n = index.cpu().to(torch.int64).numpy(), x.shape[dim]
    if ((rows < -n) | (rows >= n)).any():
        raise IndexError(f"an index of {rows.min()}..{rows.max()} into a dim of size {n}")
    return np.where(rows < 0, rows + n, rows)


def _runs(index: np.ndarray) -> list[tuple[Region, Region]]:
    """(place in the index, row number) as strided runs."""
    out = []
    for run in fold(np.arange(len(index), dtype=np.int64), index):
        out.append(run)
        if len(out) > MAX_PARTS:
            raise NoRule
    return out


def along(r: Region, dim: int, run: Region) -> Region:
    """`r` with `dim` replaced by the dims of a run of its rows."""
    step = r.strides[dim]
    return Region(
        r.offset + run.offset * step,
        r.shape[:dim] + run.shape + r.shape[dim + 1 :],
        r.strides[:dim] + tuple(s * step for s in run.strides) + r.strides[dim + 1 :],
    )
