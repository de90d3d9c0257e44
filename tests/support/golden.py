"""The oracle: every canonical tensor rebuilt in full on every rank, each taker slicing its share. Slow and obvious.

It judges the planner and the kernels, so it uses neither them nor anything that they use: fragments are read and
written by plain indexing of bytes, boxes are marked in a mask of the whole tensor, bytes travel by broadcast. It
writes into whatever storages it is given; a test gives copies, never the live ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import torch

from xfer.errors import CoverageError, LayoutError
from xfer.trace.fragment import Fill, Fragment, TensorSpec
from xfer.transport.group import Link

Storages = Mapping[str, torch.Tensor]
"""Root name -> flat uint8 tensor over the whole storage, of this rank."""

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROWS = 1 << 20
"""Elements indexed at once."""


def golden(
    link: Link,
    specs: Sequence[TensorSpec],
    holders: Sequence[Sequence[Fragment]],
    held: Storages,
    wanted: Sequence[Fragment],
    fills: Sequence[Fill],
    into: Storages,
    deadline: float,
) -> None:
    """Fills `wanted` and `fills` of this rank in `into`. Collective; every rank passes the same `specs` and `holders`.

    specs: the canonical tensors that fragments are of. holders[r]: what rank r of the link holds (empty for takers);
    `held`: this rank's storages behind holders[link.rank]. Of several holders of an element the lowest rank sends it.
    LayoutError when holders of one tensor differ in dtype. CoverageError, with every tensor, when a wanted element is
    held by nobody; nothing is written then to that tensor. deadline: a time.monotonic() value.
    """
    by_tensor: dict[str, list[tuple[int, Fragment]]] = {s.name: [] for s in specs}
    for rank, fragments in enumerate(holders):
        for f in fragments:
            by_tensor[f.tensor].append((rank, f))
    mine: dict[str, list[Fragment]] = {}
    for f in wanted:
        mine.setdefault(f.tensor, []).append(f)
    missing: list[str] = []
    for spec in specs:
        full, known = _rebuild(link, spec, by_tensor[spec.name], held, deadline)
        for f in mine.pop(spec.name, ()):
            box = tuple(slice(o, o + e) for o, e in zip(f.origin, f.extent))
            if not bool(known[box].all()):
                missing.append(
                    f"{spec.name}: elements of the box at {f.origin}, extent {f.extent}, are held by no rank"
                )
                continue
            _write(into[f.root], f, full[box].to(getattr(torch, f.dtype)))
    missing += [f"{name}: no canonical tensor of that name" for name in mine]
    for fill in fills:
        _fill(into[fill.root], fill)
    if missing:
        raise CoverageError("golden cannot rebuild what this rank wants", missing, where=link.labels[link.rank])


def _rebuild(link: Link, spec: TensorSpec, parts: list[tuple[int, Fragment]], held: Storages, deadline: float):
    """The whole tensor in the holders' dtype, and which of its elements somebody held."""
    dtypes = sorted({f.dtype for _, f in parts})
    if len(dtypes) > 1:
        raise LayoutError(f"{spec.name}: its holders have different dtypes: {dtypes}")
    full = torch.zeros(spec.shape, dtype=getattr(torch, dtypes[0] if dtypes else spec.dtype))
    known = torch.zeros(spec.shape, dtype=torch.bool)
    for rank, f in parts:
        box = tuple(slice(o, o + e) for o, e in zip(f.origin, f.extent))
        if bool(known[box].all()):
            continue  # a replica of what came already
        value = _read(held[f.root], f) if rank == link.rank else torch.empty(f.extent, dtype=full.dtype)
        link.broadcast(value.contiguous() if rank == link.rank else value, rank, deadline)
        # Of a box that came in part already, what came first stays: the lowest rank is the one that counts.
        full[box] = torch.where(known[box], full[box], value) if bool(known[box].any()) else value
        known[box] = True
    return full, known


def _addresses(offset: int, extent: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """Byte offset of each element, shape `extent`."""
    at = torch.full(tuple(extent), offset, dtype=torch.int64)
    for d, (n, stride) in enumerate(zip(extent, strides)):
        shape = [n if k == d else 1 for k in range(len(extent))]
        at += torch.arange(n, dtype=torch.int64).mul(stride).view(shape)
    return at


def _outer(extent: Sequence[int]) -> tuple[int, list[tuple[int, ...]]]:
    """How many leading dims are walked one index at a time, and these indices: the rest is not too much at once."""
    lead, inner = 0, 1
    for d in reversed(range(len(extent))):
        inner *= extent[d]
        if inner > _ROWS and d + 1 < len(extent):
            lead = d + 1
            break
    return lead, list(product(*(range(n) for n in extent[:lead])))


def _read(storage: torch.Tensor, f: Fragment) -> torch.Tensor:
    out = torch.empty(f.extent, dtype=getattr(torch, f.dtype))
    for i, elements, at in _places(storage, f):
        out[i] = elements[at].reshape(-1).view(out.dtype).view(out[i].shape)
    return out


def _write(storage: torch.Tensor, f: Fragment, value: torch.Tensor) -> None:
    for i, elements, at in _places(storage, f):
        elements[at] = value[i].contiguous().reshape(-1).view(elements.dtype).view(at.shape)


def _places(storage: torch.Tensor, f: Fragment):
    """(leading indices, storage as integers, index in it of every element below them).

    The integers are as wide as an element where all elements lie at multiples of their size, else bytes: then `at`
    has one more dim, the bytes of an element.
    """
    item = getattr(torch, f.dtype).itemsize
    whole = storage.storage_offset() % item == 0 and f.offset % item == 0 and all(s % item == 0 for s in f.strides)
    if whole:
        elements = storage[: storage.numel() // item * item].view(_INTEGER[item])
    lead, outer = _outer(f.extent)
    for i in outer:
        offset = f.offset + sum(k * s for k, s in zip(i, f.strides))
        at = _addresses(offset, f.extent[lead:], f.strides[lead:])
        yield (i, elements, at // item) if whole else (i, storage, at.unsqueeze(-1) + torch.arange(item))


def _fill(storage: torch.Tensor, fill: Fill) -> None:
    at = _addresses(fill.offset, fill.extent, fill.strides).reshape(-1)
    for k, byte in enumerate(fill.bits):
        storage[at + k] = byte
