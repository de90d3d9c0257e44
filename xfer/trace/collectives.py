"""c10d operators answered symbolically: what I send lies in my slot, every other slot is foreign data of the same
shape.

So one rank alone can run code that gathers and broadcasts, with nothing sent: whoever holds the other slots answers
for them. Needs process groups that know their rank and size, and nothing of their backend. Not here: which tensors
are exported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist

from xfer.errors import Unsupported
from xfer.trace.expr import Foreign, Gathered, Operand, Piece
from xfer.trace.view import Region, constant, contiguous
from xfer.trace.watch import Watch

NAMELESS = Foreign()
"""Data of another rank of which nothing more is known."""


def receive(watch: Watch, slot: torch.Tensor, mine: torch.Tensor | None, origin: Foreign = NAMELESS) -> None:
    """`slot` now holds `mine`, or what another rank sent (None), of which `origin` says more where more is known.

    Unsupported for a real slot, unless I send real values to myself: the code would go on with numbers (indices, sizes)
    that are not those of a real run.
    """
    if not slot.numel():
        return
    if slot.device.type != "meta":
        if mine is None or mine.device.type == "meta":
            raise Unsupported(
                f"values of another rank decide what is exported: a collective fills a real {slot.dtype} tensor of "
                f"shape {tuple(slot.shape)}, and nothing is sent while an export is followed"
            )
        slot.copy_(mine)
        return
    store = watch.store(slot)
    whole = slot.is_contiguous() and slot.numel() * slot.element_size() == slot.untyped_storage().nbytes()
    if mine is None and whole:
        watch.add_source(origin, "data of another rank", slot)
        return
    if store is None:
        store = watch.new_store(slot, "a receive buffer")
    r = watch.region(slot, store)
    pieces = [foreign(r, slot.dtype, origin)] if mine is None else watch.flows(r, slot.dtype, mine)
    if whole:  # the buffer is filled anew by disjoint parts
        store.pieces, store.origin, store.whole = [], None, len(pieces)
    store.write(pieces)


def foreign(r: Region, dtype: torch.dtype, origin: Foreign) -> Piece:
    return Piece(origin, constant(r.shape) if origin.gathered is None else contiguous(r.shape), r, (dtype,))


def gathered(watch: Watch, mine: torch.Tensor, group: dist.ProcessGroup) -> Gathered | None:
    """The gather to which this rank gives `mine`, noted so that it can be run again."""
    operand = watch.operand(mine)
    if not isinstance(operand, Operand):
        return None
    watch.gathers.append(Gathered(operand, group, group.size()))
    return watch.gathers[-1]


def answer(watch: Watch, func, args: tuple, kwargs: dict) -> object:
    """The result of a c10d operator, nothing sent. Unsupported for one that mixes the data of ranks, unless I am
    alone.
    """
    name = func._schema.name.split("::")[1]
    watch.ops[f"c10d.{name}"] += 1
    rule = _RULES.get(name)
    if rule is None:
        raise Unsupported(f"collective {name} has no symbolic answer: it mixes the data of several ranks")
    given = {s.name: a for s, a in zip(func._schema.arguments, args)} | kwargs
    return rule(watch, given)


def _work() -> object:
    from torch._C._distributed_c10d import FakeWork

    return FakeWork().boxed()


def _group(given: dict) -> dist.ProcessGroup:
    boxed = given["process_group"]
    return boxed if isinstance(boxed, dist.ProcessGroup) else dist.ProcessGroup.unbox(boxed)


def _slots(watch: Watch, slots: list[torch.Tensor], mine: torch.Tensor, group: dist.ProcessGroup) -> None:
    given = gathered(watch, mine, group)
    for i, slot in enumerate(slots):
        receive(watch, slot, mine if i == group.rank() else None, Foreign(given, i))


def _allgather(watch: Watch, given: dict) -> object:
    for slots, mine in zip(given["output_tensors"], given["input_tensors"]):
        _slots(watch, slots, mine, _group(given))
    return given["output_tensors"], _work()


def _allgather_base(watch: Watch, given: dict) -> object:
    group = _group(given)
    _one_buffer(watch, given["output_tensor"], given["input_tensor"], group)
    return given["output_tensor"], _work()


def _allgather_coalesced(watch: Watch, given: dict) -> object:
    group = _group(given)
    for out, mine in zip(given["outputs"], given["inputs"]):
        _one_buffer(watch, out, mine, group)
    return _work()


def _one_buffer(watch: Watch, out: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All ranks' tensors one after another in `out`."""
    n = mine.numel()
    flat = out.view(-1)
    _slots(watch, [flat[i * n : (i + 1) * n].view(mine.shape) for i in range(group.size())], mine, group)


def _broadcast(watch: Watch, given: dict) -> object:
    if _group(given).rank() != given["root_rank"]:
        for t in given["tensors"]:
            receive(watch, t, None)
    return given["tensors"], _work()


def _scatter(watch: Watch, given: dict) -> object:
    group = _group(given)
    for i, out in enumerate(given["output_tensors"]):
        at_root = group.rank() == given["root_rank"]
        receive(watch, out, given["input_tensors"][i][group.rank()] if at_root else None)
    return given["output_tensors"], _work()


def _gather(watch: Watch, given: dict) -> object:
    group = _group(given)
    if group.rank() == given["root_rank"]:
        for slots, mine in zip(given["output_tensors"], given["input_tensors"]):
            for i, slot in enumerate(slots):
                receive(watch, slot, mine if i == group.rank() else None)
    return _work()


def _alltoall(watch: Watch, given: dict) -> object:
    group = _group(given)
    for i, out in enumerate(given["output_tensors"]):
        receive(watch, out, given["input_tensors"][i] if i == group.rank() else None)
    return given["output_tensors"], _work()


def _alltoall_base(watch: Watch, given: dict) -> object:
    group, out, mine = _group(given), given["output"], given["input"]
    me, size = group.rank(), group.size()
    put = given["output_split_sizes"] or [out.shape[0] // size] * size
    take = given["input_split_sizes"] or [mine.shape[0] // size] * size
    if size > 1:
        receive(watch, out, None)
    receive(watch, out[sum(put[:me]) : sum(put[: me + 1])], mine[sum(take[:me]) : sum(take[: me + 1])])
    return _work()


def _alone(watch: Watch, given: dict) -> object:
    """A reduction: the sum over one rank is what that rank holds."""
    group = _group(given)
    if group.size() > 1:
        raise Unsupported(f"a reduction over {group.size()} ranks has no symbolic answer: it mixes their data")
    return given["tensors"], _work()


def _nothing(watch: Watch, given: dict) -> object:
    return _work()


def _receive(watch: Watch, given: dict) -> object:
    for t in given["tensors"]:
        receive(watch, t, None)
    return _work()


_RULES: dict[str, Callable[[Watch, dict], object]] = {
    "allgather_": _allgather,
    "_allgather_base_": _allgather_base,
    "allgather_into_tensor_coalesced_": _allgather_coalesced,
    "broadcast_": _broadcast,
    "scatter_": _scatter,
    "gather_": _gather,
    "alltoall_": _alltoall,
    "alltoall_base_": _alltoall_base,
    "allreduce_": _alone,
    "recv_": _receive,
    "recv_any_source_": _receive,
    "send": _nothing,
    "barrier": _nothing,
}


def answer_functional(watch: Watch, func, args: tuple, kwargs: dict) -> object:
    """The functional collectives, which return new tensors (DTensor's redistribution uses them)."""
    name = func._schema.name.split("::")[1]
    watch.ops[f"_c10d_functional.{name}"] += 1
    if name == "wait_tensor":
        return args[0]
    mine = args[0]
    if name == "all_gather_into_tensor":
        group = dist.distributed_c10d._resolve_process_group(args[2])
        out = torch.empty((mine.shape[0] * args[1], *mine.shape[1:]), dtype=mine.dtype, device="meta")
        _one_buffer(watch, out, mine, group)
        return out
    if name == "broadcast":
        group = dist.distributed_c10d._resolve_process_group(args[2])
        out = torch.empty_like(mine)
        receive(watch, out, mine if args[1] == group.rank() else None)
        return out
    raise Unsupported(f"functional collective {name} has no symbolic answer")


@contextlib.contextmanager
def objects_stay_home() -> Iterator[None]:
    """Object collectives answered with what this rank knows, nothing sent: my slot is mine, the others are empty.

    An empty slot is `[]` where lists are gathered, else None, which is what a rank without the object would send.
    An object broadcast by another rank raises: it is not something this rank owns.
    """

    def all_gather_object(object_list, obj, group=None):
        empty = [] if isinstance(obj, list) else None
        object_list[:] = [empty] * len(object_list)
        object_list[dist.get_rank(group)] = obj

    def broadcast_object_list(object_list, src=None, group=None, device=None, group_src=None):
        root = src if group_src is None else dist.get_global_rank(group or dist.group.WORLD, group_src)
        if (0 if root is None else root) != dist.get_rank():
            raise Unsupported(f"an object broadcast from rank {root}: not something that rank {dist.get_rank()} owns")

    with mock.patch.multiple(dist, all_gather_object=all_gather_object, broadcast_object_list=broadcast_object_list):
        yield
