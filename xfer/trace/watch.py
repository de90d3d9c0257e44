"""The dispatch mode that watches a framework's own code run on meta tensors and remembers what each storage holds.

A meta tensor has storage identity, offset, sizes and strides, but no bytes. So views need no rule at all: whatever
was done to a view, the tensor that reaches a write still says which storage it is and where in it. Only operators
that make or change a storage are noted:
  moves      clone, cast, cat, stack, gather by a real index, copy_ …: pieces that reach back to named sources
  (rules.py) constants  zeros, full, fill_ … the rest   an expression that can be run again later (staged)
The mode never changes what the watched code does; what it cannot name becomes `Undefined`, and is an error only if
it is still there in the final state (settle.py). Nothing here knows a framework, a model family or a parameter
name. Only the thread that entered the mode is watched (modes are torch's, one stack a thread): code that computes or
writes in threads of its own cannot be traced. No loader of vLLM does, nor does Bridge's export; threads of theirs read
files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain as chained

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from xfer.trace.compose import covers, spans_disjoint, trace_back
from xfer.trace.expr import Call, Constant, Gathered, Literal, Operand, Origin, Piece, Source, Undefined, join
from xfer.trace.view import Region, constant, contiguous

aten = torch.ops.aten


unseen = torch._C.DisableTorchFunction
"""A context in which looking at tensors is not a call that the watched code's function modes see (a default device,
say): they are for that code, and each look would cost a round through Python."""


def storage_key(t: torch.Tensor) -> int:
    """Identity of a storage, also on meta, for as long as it lives."""
    return t.untyped_storage()._cdata


def region(t: torch.Tensor) -> Region:
    return Region(t.storage_offset(), tuple(t.shape), tuple(t.stride()))


def tensors_among(*arguments: Iterable[object]) -> Iterator[torch.Tensor]:
    """The tensors in an operator's arguments, where they lie alone or in lists: no operator nests them deeper."""
    for a in chained(*arguments):
        if isinstance(a, torch.Tensor):
            yield a
        elif isinstance(a, list | tuple):
            yield from (x for x in a if isinstance(x, torch.Tensor))


def _only_views(out: object, first: object) -> bool:
    """Whether an operator gave nothing but views of its first argument (split, unbind)."""
    if not (isinstance(out, list | tuple) and out and isinstance(first, torch.Tensor)):
        return False
    key = storage_key(first)
    return all(isinstance(t, torch.Tensor) and storage_key(t) == key for t in out)


@dataclass(slots=True)
class Store:
    """What is known of one storage. `pieces`: all writes in order, later ones win; a source begins as one piece of
    itself.

    `whole`: how many pieces there were when one operator had just filled it with disjoint parts. `itemsize`:
    offsets are counted in elements of this many bytes.
    """

    name: str
    itemsize: int
    keep: object  # the storage itself, so that its identity is not reused
    origin: Origin | None = None  # of an untouched source
    pieces: list[Piece] = field(default_factory=list)
    whole: int = -1

    def write(self, pieces: list[Piece]) -> None:
        self.origin = None
        self.pieces += pieces


class Watch(TorchDispatchMode):
    """`stores`: what each storage holds, by `storage_key`. `ops`: how often each noted operator ran. `gathers`: those
    that ran, in order (collectives.py)."""

    def __init__(self, sources: Mapping[str, torch.Tensor]):
        super().__init__()
        self.stores: dict[int, Store] = {}
        self.ops: Counter[str] = Counter()
        self.gathers: list[Gathered] = []
        for name, t in sources.items():
            self.add_source(Source(name), name, t)

    # ---- storages ---------------------------------------------------------------------------------------------------

    def add_source(self, origin: Origin, name: str, t: torch.Tensor) -> None:
        """From now on the whole storage of `t` holds `origin`, element for element."""
        n = t.untyped_storage().nbytes() // t.element_size()
        whole = contiguous((n,))
        piece = Piece(origin, whole, whole, (t.dtype,))
        self.stores[storage_key(t)] = Store(name, t.element_size(), t.untyped_storage(), origin, [piece], 1)

    def add_destination(self, name: str, t: torch.Tensor) -> None:
        """A storage that the watched code writes to; what it held before is not known."""
        self.stores.setdefault(storage_key(t), Store(name, t.element_size(), t.untyped_storage()))

    def new_store(self, t: torch.Tensor, name: str = "a temporary") -> Store:
        store = self.stores[storage_key(t)] = Store(name, t.element_size(), t.untyped_storage())
        return store

    def store(self, t: torch.Tensor) -> Store | None:
        return self.stores.get(storage_key(t))

    # ---- dispatch ---------------------------------------------------------------------------------------------------

    def dispatch(self, func, args: tuple, kwargs: dict) -> object:
        """Run one operator and note what it did."""
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor):
            first = args[0] if args else None
            same = isinstance(first, torch.Tensor) and storage_key(out) == storage_key(first)
        else:
            same = bool(args) and _only_views(out, args[0])
        if same and not func._schema.is_mutable:
            return out  # views: the tensors themselves say all there is to know
        try:
            self.observe(func, args, kwargs, out)
        except Exception as e:  # must never change what the watched code does
            self.give_up(args, kwargs, out, func, f"{func}: {type(e).__name__}: {e}")
        return out

    def observe(self, func, args: tuple, kwargs: dict, out: object) -> None:
        from xfer.trace import rules

        if func._schema.is_mutable:
            rules.change(self, func, args, kwargs)
            return
        given = {storage_key(a) for a in tensors_among(args, kwargs.values())}
        results = out if isinstance(out, tuple | list) else (out,)
        for i, t in enumerate(results):
            if isinstance(t, torch.Tensor) and t.device.type == "meta" and storage_key(t) not in given:
                rules.make(self, func, args, kwargs, t, i)

    def give_up(self, args: tuple, kwargs: dict, out: object, func, why: str) -> None:
        """Whatever `func` made or changed cannot be named any more."""
        from xfer.trace import rules

        for t in tree_leaves((rules.written_by(func, args, kwargs), out)):
            if isinstance(t, torch.Tensor) and t.device.type == "meta" and t.numel():
                store = self.store(t) or self.new_store(t)
                whole = contiguous((t.untyped_storage().nbytes() // store.itemsize,))
                where = region(t) if t.element_size() == store.itemsize else whole
                store.write([undefined(why, where, t.dtype)])

    # ---- pieces -----------------------------------------------------------------------------------------------------

    def region(self, t: torch.Tensor, store: Store) -> Region:
        if t.is_neg() or t.is_conj():
            raise TypeError(f"{store.name} is seen as the negative or the conjugate of what its bytes say")
        if t.element_size() != store.itemsize:
            raise TypeError(
                f"{store.name} is seen as {t.dtype}, elements of another size than its own {store.itemsize}"
            )
        return region(t)

    def flows(self, dst: Region, dtype: torch.dtype, t: torch.Tensor) -> list[Piece]:
        """The pieces that come to lie in `dst` (elements of `dtype`) when `t` is written there, broadcast if need
        be.
        """
        if not dst.size:
            return []
        store = self.store(t)
        if store is None:
            return [outside(t, dst, dtype)]
        read = self.region(t, store)
        if read.shape != dst.shape:
            read = read.expanded(dst.shape)
        outer = (t.dtype, dtype)
        if store.origin is not None:
            return [Piece(store.origin, read, dst, outer)]
        known = tuple(p.geometry for p in store.pieces)
        disjoint = store.whole == len(known) or (len(known) > 1 and spans_disjoint([r for r, _ in known]))
        parts = trace_back(read, Region(0, dst.shape, dst.strides), known, disjoint)
        if parts is None:  # too scattered to be moved directly: put it together where it is needed
            return [Piece(self.operand(t.expand(dst.shape)), contiguous(dst.shape), dst, outer)]
        out = []
        for part in parts:
            to = part.dst.shifted(dst.offset)
            if part.piece < 0:
                out.append(undefined(f"{store.name} is read where nothing was written", to, dtype))
                continue
            p = store.pieces[part.piece]
            chain = join(p.chain, outer)
            if chain is None:
                out.append(undefined(f"{store.name} is converted, seen as other bits, and converted again", to, dtype))
            else:
                out.append(Piece(p.origin, part.src.shifted(p.src.offset), to, chain))
        return out

    def operand(self, t: torch.Tensor) -> Operand | Literal:
        """A tensor argument of an operator that has to be run again."""
        if t.device.type != "meta":
            return Literal(t.detach().clone())
        store = self.store(t)
        if store is None:
            whole = contiguous(tuple(t.shape))
            return Operand((undefined("a tensor made elsewhere", whole, t.dtype),), t.numel(), whole, t.dtype)
        r = self.region(t, store)
        if store.origin is not None:  # an untouched source, seen where it lies: an operator may round by memory layout
            whole = store.pieces[0].dst
            return Operand((Piece(store.origin, whole, whole, (t.dtype,)),), whole.size, r, t.dtype)
        near = tuple(p for p in store.pieces if r.size and p.dst.meets(r))
        size = max([p.dst.last + 1 for p in near] + [r.last + 1 if r.size else 0])
        # Each run of what is computed would see other bytes where nothing was written, however little of it that is.
        whole = covers(tuple(p.dst for p in near), r) if near else False
        why = "read where nothing was written" if whole is False else "too scattered to say that all of it was written"
        unwritten = () if whole else (undefined(f"{store.name} is {why}", r, t.dtype),)
        return Operand(unwritten + near, size, r, t.dtype)

    def call(self, func, args: tuple, kwargs: dict, output: int = 0, mutates: bool = False) -> Call:
        def leaf(a: object) -> object:
            return self.operand(a) if isinstance(a, torch.Tensor) else a

        args, kwargs = tree_map(leaf, (tuple(args), dict(kwargs)))
        return Call(func, args, kwargs, output, mutates)


def _torch_dispatch(self: Watch, func, types, args=(), kwargs=None):
    with unseen():
        return self.dispatch(func, args, kwargs or {})


# Set afterwards, since what a class body calls by this name torch wraps, to keep Dynamo out: two more calls for each
# operator of a trace. Nothing is compiled here without it either: code that is compiled runs eagerly under such a mode.
Watch.__torch_dispatch__ = _torch_dispatch


def undefined(why: str, dst: Region, dtype: torch.dtype) -> Piece:
    return Piece(Undefined(why), constant(dst.shape), dst, (dtype,))


def outside(t: torch.Tensor, dst: Region, dtype: torch.dtype) -> Piece:
    """A write from a tensor that is not watched: a real single value is a constant, anything else has no name."""
    if t.device.type != "meta" and t.numel() == 1:
        return Piece(Constant(t.item(), t.dtype), constant(dst.shape), dst, (t.dtype, dtype))
    kind = "meta" if t.device.type == "meta" else "real"
    return undefined(f"written from a {kind} {t.dtype} tensor of shape {tuple(t.shape)} that was not given", dst, dtype)
