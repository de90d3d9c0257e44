"""The dispatch mode that watches a framework's own code run on meta tensors and remembers what each storage holds.

A meta tensor has storage identity, offset, sizes and strides, but no bytes. So views need no rule at all: whatever
was done to a view, the tensor that reaches a write still says which storage it is and where in it. Only operators
that make or change a storage are noted:
  moves      clone, cast, cat, stack, gather by a real index, copy_ …: pieces that reach back to named sources (rules.py)
  constants  zeros, full, fill_ …
  the rest   an expression that can be run again later (staged)
The mode never changes what the watched code does; what it cannot name becomes `Undefined`, and is an error only if
it is still there in the final state (settle.py). Nothing here knows a framework, a model family or a parameter
name. Only the thread that entered the mode is watched, since torch has one stack of modes per thread: code that computes
or writes in threads of its own cannot be traced. vLLM's loaders and Bridge's export do not; their threads only read files.

Code that builds or loads a model also reads numbers: an expert map, a constant of an activation. A meta tensor has
none, but what was noted of it is enough to compute them, unless a source has a part in them. So an operator that
fails on meta (`item`, `nonzero`, a copy to the CPU) runs again on the values of its arguments, where these are
known.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain as chained
from types import MappingProxyType

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from xfer.trace.compose import covers, spans_disjoint, trace_back
from xfer.trace.expr import (
    Constant,
    Foreign,
    Gathered,
    Literal,
    NamedTensor,
    Operand,
    OperatorResult,
    Origin,
    Piece,
    Undefined,
    evaluate,
    join,
    reseen,
    strided,
    walk,
)
from xfer.trace.view import Region, constant, contiguous

aten = torch.ops.aten

SMALL = 1 << 16
"""Elements of a real tensor up to which a copy of it on meta keeps its values."""
COLLECTIVES = ("c10d", "_c10d_functional")
"""Namespaces of operators that other ranks take part in."""
_NO_NUMBERS = re.compile("meta tensor|register_meta|meta device type", re.IGNORECASE)


unseen = torch._C.DisableTorchFunction
"""A context in which looking at tensors is not a call that the watched code's function modes see (a default device,
say): they are for that code, and each look would cost a round through Python."""


def storage_key(t: torch.Tensor) -> int:
    """Identity of a storage, also on meta, for as long as it lives."""
    return t.untyped_storage()._cdata


def region(t: torch.Tensor) -> Region:
    return Region(int(t.storage_offset()), tuple(t.shape), tuple(t.stride()))


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
    """The known content of one storage. `pieces`: all writes in order, later ones win; a source begins as one piece of
    itself.

    `whole`: how many pieces there were when one operator had just filled it with disjoint parts. `itemsize`:
    offsets are counted in elements of this many bytes. `value`: all of it as a flat real tensor, if that was asked for
    since the last write. `built`: how many pieces the model's constructor wrote, before its loader ran.
    """

    name: str
    itemsize: int
    keep: object  # the storage itself, so that its identity is not reused
    origin: Origin | None = None  # of an untouched source
    pieces: list[Piece] = field(default_factory=list)
    whole: int = -1
    value: torch.Tensor | None = None
    built: int = 0

    def write(self, pieces: list[Piece]) -> None:
        self.origin = self.value = None
        self.pieces += pieces


class PythonData(TorchFunctionMode):
    """Enter it around a watch, so that numbers pass between Python and meta. Torch drops those of which it makes a
    tensor on meta before an operator runs; inside, they become a tensor on the CPU that is copied to meta, or an
    index of known values. A numpy array is made of a copy on the CPU."""

    _READ = frozenset(getattr(torch.Tensor, name) for name in ("numpy", "__array__"))
    _MAKE = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor})
    _INDEX = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in self._INDEX:
            args = (args[0], _real_lists(args[1]), *args[2:])
        elif func in self._READ and args[0].device.type == "meta":
            args = (args[0].cpu(), *args[1:])
        elif func in self._MAKE and args and not isinstance(args[-1], torch.Tensor):
            like = args[0].device if func is torch.Tensor.new_tensor else torch.get_default_device()
            device = torch.device(kwargs.get("device") or like)
            if device.type == "meta":
                return func(*args, **{**kwargs, "device": "cpu"}).to(device)
        return func(*args, **kwargs)


def _real_lists(index: object) -> object:
    if isinstance(index, tuple):
        return tuple(map(_real_lists, index))
    numbers = isinstance(index, list) and index and all(isinstance(x, int) for x in index)
    return torch.tensor(index, device="cpu") if numbers else index


class Watch(TorchDispatchMode):
    """`stores`: what each storage holds, by `storage_key`. `ops`: how often each noted operator ran. `gathers`: those
    that ran, in order (collectives.py).

    `built`: the watch under which the model was built whose loader runs now.
    """

    def __init__(self, sources: Mapping[str, torch.Tensor] = MappingProxyType({}), built: Watch | None = None):
        super().__init__()
        before = built.stores if built is not None else {}
        self.stores: dict[int, Store] = {
            k: replace(s, pieces=[*s.pieces], built=len(s.pieces)) for k, s in before.items()
        }
        self.ops: Counter[str] = Counter()
        self.gathers: list[Gathered] = []
        for name, t in sources.items():
            self.add_source(NamedTensor(name), name, t)

    # ---- storages ---------------------------------------------------------------------------------------------------

    def add_source(self, origin: Origin, name: str, t: torch.Tensor) -> None:
        """From now on the whole storage of `t` holds `origin`, element for element."""
        n = t.untyped_storage().nbytes() // t.element_size()
        whole = contiguous((n,))
        piece = Piece(origin, whole, whole, (t.dtype,))
        self.stores[storage_key(t)] = Store(name, t.element_size(), t.untyped_storage(), origin, [piece], 1)

    def add_destination(self, name: str, t: torch.Tensor) -> None:
        """A storage that the watched code writes to; what it held before is known if it was built under a watch."""
        store = self.store(t)
        if store is None or store.itemsize != t.element_size():
            store = self.new_store(t)
        store.name = name

    def new_store(self, t: torch.Tensor, name: str = "a temporary") -> Store:
        store = self.stores[storage_key(t)] = Store(name, t.element_size(), t.untyped_storage())
        return store

    def store(self, t: torch.Tensor) -> Store | None:
        return self.stores.get(storage_key(t))

    # ---- dispatch ---------------------------------------------------------------------------------------------------

    def dispatch(self, func, args: tuple, kwargs: dict) -> object:
        """Run one operator and note what it did."""
        try:
            out = func(*args, **kwargs)
        except RuntimeError as e:
            args, kwargs, out = self.by_value(func, args, kwargs, e)
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

    def by_value(self, func, args: tuple, kwargs: dict, error: RuntimeError) -> tuple[tuple, dict, object]:
        """An operator that needs numbers, run with real tensors for those that it only reads and whose values are
        known: its arguments then, and what it gives. Raises `error` where that is not enough."""
        from xfer.trace import rules

        if not needs_values(error) or func.namespace in COLLECTIVES:
            raise error
        written = {id(x) for x in tree_leaves(rules.written_by(func, args, kwargs))}

        def real(a: object) -> object:
            if not isinstance(a, torch.Tensor) or a.device.type != "meta" or id(a) in written:
                return a
            value = self.value(a)
            return a if value is None else value

        args, kwargs = tree_map(real, (args, kwargs))
        try:
            return args, kwargs, _back_on_meta(func(*args, **kwargs), args, kwargs)
        except RuntimeError:
            raise error from None

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
        """A tensor argument of an operator that has to be run again, as an operand of its expression."""
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
        written = covers(tuple(p.dst for p in near), r) if near else False
        why = (
            "read where nothing was written" if written is False else "too scattered to say that all of it was written"
        )
        unwritten = () if written else (undefined(f"{store.name} is {why}", r, t.dtype),)
        return Operand(unwritten + near, size, r, t.dtype)

    def value(self, t: torch.Tensor) -> torch.Tensor | None:
        """The values of a meta tensor, on the CPU, if no source has a part in it; else None."""
        store = self.store(t)
        if store is None or store.origin is not None or t.element_size() != store.itemsize:
            return None
        n = t.untyped_storage().nbytes() // store.itemsize
        if store.value is None and n <= SMALL:
            store.value = self._evaluated(t.as_strided((n,), (1,), 0))
        if store.value is not None:
            return strided(reseen(store.value, t.dtype), region(t))
        return self._evaluated(t)

    def _evaluated(self, t: torch.Tensor) -> torch.Tensor | None:
        try:
            expr = self.operand(t)
            if any(isinstance(x, NamedTensor | Foreign | Undefined) for x in walk(expr)):
                return None
            known: dict[str, torch.Tensor] = {}
            return evaluate(expr, known.__getitem__, torch.device("cpu"))
        except Exception:  # an operator that the CPU lacks, say: then its result is not known
            return None

    def call(self, func, args: tuple, kwargs: dict, output: int = 0, mutates: bool = False) -> OperatorResult:
        def leaf(a: object) -> object:
            return self.operand(a) if isinstance(a, torch.Tensor) else a

        args, kwargs = tree_map(leaf, (tuple(args), dict(kwargs)))
        return OperatorResult(func, args, kwargs, output, mutates)


def _torch_dispatch(self: Watch, func, types, args=(), kwargs=None):
    with unseen():
        return self.dispatch(func, args, kwargs or {})


# Set afterwards, since what a class body calls by this name torch wraps, to keep Dynamo out: two more calls for each
# operator of a trace. Nothing is compiled here without it either: code that is compiled runs eagerly under such a mode.
Watch.__torch_dispatch__ = _torch_dispatch  # type: ignore[assignment, method-assign]


def needs_values(error: BaseException) -> bool:
    """Whether torch refuses because a meta tensor has no numbers."""
    return isinstance(error, RuntimeError | TypeError) and _NO_NUMBERS.search(str(error)) is not None


def missing_values(error: BaseException | None) -> BaseException | None:
    """The first of `error` and its causes for which `needs_values` holds."""
    while error is not None and not needs_values(error):
        error = error.__cause__ or error.__context__
    return error


def framework_line(error: BaseException) -> str:
    """Class, module and line of the watched code in which an error came up: the last that is not Python's, torch's or
    ours."""
    passed = {"torch", "xfer", *sys.stdlib_module_names}
    frames = traceback.walk_tb(error.__traceback__)
    theirs = [(f, n) for f, n in frames if f.f_globals.get("__name__", "").partition(".")[0] not in passed]
    if not theirs:
        return "unknown code"
    frame, line = theirs[-1]
    owner = f"{type(frame.f_locals['self']).__name__}." if "self" in frame.f_locals else ""
    return f"{owner}{frame.f_code.co_name} ({frame.f_globals['__name__']}, line {line})"


def undefined(why: str, dst: Region, dtype: torch.dtype) -> Piece:
    return Piece(Undefined(why), constant(dst.shape), dst, (dtype,))


def outside(t: torch.Tensor, dst: Region, dtype: torch.dtype) -> Piece:
    """A write from a tensor that is not watched: a real single value is a constant, a small real tensor keeps its
    values, anything else has no name."""
    if t.device.type != "meta" and t.numel() == 1:
        return Piece(Constant(t.item(), t.dtype), constant(dst.shape), dst, (t.dtype, dtype))
    if t.device.type != "meta" and t.numel() <= SMALL:
        literal = Literal(t.detach().clone(memory_format=torch.contiguous_format))
        return Piece(literal, contiguous(tuple(t.shape)).expanded(dst.shape), dst, (t.dtype, dtype))
    return undefined(f"written from {not_given(t)}", dst, dtype)


def not_given(t: torch.Tensor) -> str:
    kind = "meta" if t.device.type == "meta" else "real"
    return f"a {kind} {t.dtype} tensor of shape {tuple(t.shape)} that was not given"


def _back_on_meta(out: object, args: tuple, kwargs: dict) -> object:
    """Results computed from the values of meta arguments, copied to meta unless another device was asked for."""
    device = kwargs.get("device")
    if device is not None and device.type != "meta":
        return out
    given = {id(a) for a in tensors_among(args, kwargs.values())}
    return tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) and id(x) not in given else x, out)
