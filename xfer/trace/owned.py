"""The share of a computed tensor that one rank answers for, when every rank of the framework computes all of it.

A framework that merges adapters while exporting gathers the base weight and both factors, and then every rank has the
whole result. To hold all of it would cost each rank the full tensor, so a rank keeps only the elements whose base lies
in its own parameters: `own_parts` walks down through elementwise operators (an element of their result depends on the
same element of their arguments alone) until it meets a tensor that was put together from this rank's and other ranks'
data. What is above is computed for those elements only, with the same operators, so bit for bit the same; what is below
(a matrix product) is computed whole, since how it rounds may depend on its shape.

Keeping more than its share would be right as well, so where nothing tells shares apart a rank keeps all. That the
shares of all ranks make up the tensor is proven where the plan is made, as for any other tensor.
"""

from __future__ import annotations

import torch

from xfer.errors import Unsupported
from xfer.trace.compose import rewrite, trace_back
from xfer.trace.expr import Foreign, NamedTensor, Operand, OperatorResult, Piece, Undefined, join, peers_needed
from xfer.trace.view import Region, contiguous


def own_parts(piece: Piece) -> list[Piece]:
    """`piece`, computed with data of other ranks, cut to what this rank answers for. Its parts are disjoint."""
    assert isinstance(piece.origin, OperatorResult)
    base = _base(piece.origin)
    if base is None:
        return [piece]
    out = []
    for index in _mine(base, piece.src):  # counted in the row-major order of the piece
        whole = contiguous(piece.src.shape)
        src, dst = _same(index, whole, piece.src), _same(index, whole, piece.dst)
        cut = _restricted(piece.origin, src) if src is not None else None
        if cut is None or dst is None:
            return [piece]
        out.append(Piece(cut, contiguous(dst.shape), dst, piece.chain))
    return out


def missing_peers(node: object) -> bool:
    """Whether `node` needs data of other ranks that cannot be asked for again: it came by no gather, or what this rank
    gave in that gather came from others in turn."""
    return any(x.gathered is None or any(peers_needed(x.gathered.mine)) for x in peers_needed(node))


# ---- whose elements


def _base(call: OperatorResult) -> Operand | None:
    """The argument, seen through elementwise operators, that consists of this rank's and other ranks' data alone."""
    for x in _alike(call):
        if all(isinstance(p.origin, NamedTensor | Foreign) for p in x.pieces):
            return x
        inner = _only_call(x)
        if inner is not None and (found := _base(inner)) is not None:
            return found
    return None


def _alike(call: OperatorResult) -> list[Operand]:
    """Tensor arguments that have an element for each of the result's: those of the largest shape."""
    if torch.Tag.pointwise not in call.op.tags or call.mutates or call.output:
        return []
    operands = [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Operand)]
    shape = torch.broadcast_shapes(*(x.view.shape for x in operands)) if operands else ()
    return [x for x in operands if x.view.shape == tuple(shape)]


def _only_call(x: Operand) -> OperatorResult | None:
    """The call whose whole result `x` is, element for element."""
    if len(x.pieces) != 1:
        return None
    p = x.pieces[0]
    plain = p.chain == (x.dtype,) and p.src == p.dst == contiguous(p.dst.shape)
    return (
        p.origin
        if isinstance(p.origin, OperatorResult)
        and plain
        and x.view == contiguous(x.view.shape)
        and x.size == x.view.size == p.dst.size
        else None
    )


def _mine(base: Operand, src: Region) -> list[Region]:
    """The elements of `src` (row-major in the result, and so in `base`) that are this rank's, as regions of their own
    row-major order."""
    read = _same(src, contiguous(base.view.shape), base.view)
    if read is None:
        return [contiguous(src.shape)]
    parts = trace_back(read, contiguous(read.shape), tuple(p.geometry for p in base.pieces), False)
    if parts is None:
        return [contiguous(src.shape)]
    return [part.dst for part in parts if part.piece >= 0 and isinstance(base.pieces[part.piece].origin, NamedTensor)]


# ---- the same operators on fewer elements


def _restricted(call: OperatorResult, where: Region) -> OperatorResult | None:
    """`call` for the elements `where` of its row-major result only; None when it cannot be said for an argument."""
    alike = _alike(call)
    if not alike:
        return None
    memo: dict[int, Operand] = {}

    def cut(x: object) -> object:
        if not isinstance(x, Operand) or x.view.size == 1:
            return x
        if not any(x is a for a in alike):
            raise Unsupported("an argument that is broadcast")
        if id(x) not in memo:
            memo[id(x)] = _cut(x, where)
        return memo[id(x)]

    try:
        return OperatorResult(call.op, tuple(map(cut, call.args)), {k: cut(v) for k, v in call.kwargs.items()})
    except Unsupported:
        return None


def _cut(x: Operand, where: Region) -> Operand:
    """The elements `where` of `x`, as a tensor of their own."""
    inner = _only_call(x)
    if inner is not None and (fewer := _restricted(inner, where)) is not None:
        whole = contiguous(where.shape)
        return Operand((Piece(fewer, whole, whole, (x.dtype,)),), whole.size, whole, x.dtype)
    read = _same(where, contiguous(x.view.shape), x.view)
    parts = read and trace_back(read, contiguous(read.shape), tuple(p.geometry for p in x.pieces), False)
    if not parts:
        raise Unsupported("an argument that is too scattered")
    pieces = []
    for part in parts:
        p = x.pieces[part.piece] if part.piece >= 0 else None
        chain = join(p.chain, (x.dtype,)) if p is not None else None
        if p is None or chain is None:
            pieces.append(Piece(Undefined("never written"), part.src, part.dst, (x.dtype,)))
        else:
            pieces.append(Piece(p.origin, part.src.shifted(p.src.offset), part.dst, chain))
    return Operand(tuple(pieces), where.size, contiguous(where.shape), x.dtype)


def _same(inner: Region, outer: Region, mate: Region) -> Region | None:
    """The place in `mate` of the elements `inner` of `outer`, which has outer's shape; in inner's row-major order,
    perhaps with dims cut in two. None when that is no one region."""
    if outer == mate:
        return inner
    hit = rewrite(inner, contiguous(inner.shape), outer, mate)
    if hit is None or hit[0].offset or not hit[0].dense:
        return None
    return hit[1]
