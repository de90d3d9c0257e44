"""Checkpoints by parameter: each owner writes its whole parameters and their optimizer state under the checkpoint's names, and any
other layout reads the boxes that it needs. No flat buffer is ever written.

    save(optimizer, folder)                                  plain torch: every parameter under its own name
    save(optimizer, folder, MegatronTrainer(chunks, bridge)) Megatron: under the names of the Hugging Face checkpoint

The second form needs no code per layout. The trainer's adapter reads the boxes of a rank's parameters for refits anyway, and state
of a parameter's shape is cut like the parameter. Tensors without an owner (frozen parameters, persistent buffers) are stored too.
Files are those of torch.distributed.checkpoint. It writes `.metadata` last, so a folder without it is no checkpoint.
Hyperparameters are in `layerwise.json` beside them. The owners are not stored.

Rows that pad a vocabulary have no checkpoint name, and their number depends on the layout. They are written beside the tensor that
they pad, as `<name>/padding/<field>`, and read as far as both layouts have them. Rows that only the new layout has become zeros.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from xfer.errors import LayoutError, Unsupported, XferError
from xfer.layerwise.together import Together
from xfer.trace.slots import bare, tensors_of

if TYPE_CHECKING:
    from xfer.layerwise.optimizer import LayerWise
    from xfer.participants.trainer import Source

logger = logging.getLogger("xfer")
FORMAT = 1
PARAM = "param"
"""Field of the parameter itself, or of its fp32 master if it has one."""

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterBox:
    """A box of a checkpoint tensor, and its place in a parameter.

    Attributes:
        key: Name of the checkpoint tensor.
        shape: Its shape.
        origin, extent: The box in it.
        offset: First element of the box in the parameter.
        strides: Strides of the box in the parameter, in elements.
        padding: If True, the box is one of the rows that pad `key`, and `shape` is the shape of all these rows.
    """

    key: str
    shape: Ints
    origin: Ints
    extent: Ints
    offset: int
    strides: Ints
    padding: bool = False

    def stored(self, field: str) -> str:
        """The name of a field of it in the checkpoint."""
        return f"{self.key}/padding/{field}" if self.padding else f"{self.key}/{field}"


def save(optimizer: LayerWise, folder: str | Path, source: Source | None = None) -> None:
    """Writes parameters, persistent buffers and optimizer state into `folder`. Collective over all ranks.

    Right after `step()` nothing has to be gathered, since owners write their own parameters. A checkpoint in `folder` is lost as soon
    as the first byte is written; use another folder to keep it. Hyperparameters that are no numbers, strings or lists of them
    are not saved, with a warning. If one rank raises an error, the others raise it too.

    Args:
        optimizer: The optimizer to save.
        folder: A folder that all ranks can write to.
        source: The trainer's adapter, which finds the checkpoint tensors in this rank's parameters. None: each parameter is whole
            on its owner, under its own name, which needs all ranks to hold the same parameters.

    Raises:
        Unsupported: Lists parameters that not all ranks hold although `source` is None, parameters that `source` names only in
            part, optimizer state that has neither its parameter's shape nor a single number, and hyperparameters that are tensors of
            several numbers.
        XferError: Files cannot be written, on all ranks. After a step or a gather that failed: its error.
    """
    ranks = Together.over_all("checkpoint.save", optimizer.label, optimizer.gather.deadline_s)
    with ranks.telling():
        _save(optimizer, folder, source, ranks)


def _save(optimizer: LayerWise, folder: str | Path, source: Source | None, ranks: Together) -> None:
    optimizer.gather.check()  # a step that failed may have written some parameters
    ranks.meet()
    tensors: dict[str, Boxes] = {}
    wrong: list[str] = []
    refuse = partial(ranks.refuse, wrong, "parameters cannot be saved under the checkpoint's names", Unsupported)
    pieces = _pieces(optimizer, source, wrong, refuse)
    refuse()
    for name, values, scalars in _held(optimizer, wrong):
        for field, tensor in values.items():
            for p in pieces[name]:
                _add(tensors, p, field, _view(tensor, p))
        for field, tensor in scalars.items():
            for p in pieces[name]:
                if p.padding and len(pieces[name]) == 1:
                    continue  # this rank has only padding; other ranks write the number
                tensors[f"{p.key}/{field}"] = Boxes((), tensor.dtype, [((), tensor.detach())])
    live = dist.is_initialized()
    first = not live or dist.get_rank() == 0
    groups = [_written(g, f"group {i}", wrong, first) for i, g in enumerate(optimizer.param_groups)]
    tensors_of_groups = [sorted(some) for some in _grouped(optimizer, pieces)]
    ranks.refuse(wrong, "optimizer state that cannot be saved by parameter", Unsupported)
    if first:
        stored = {"format": FORMAT, "groups": groups, "tensors": tensors_of_groups}
        _begin(Path(folder), json.dumps(stored, indent=1), wrong)
    ranks.refuse(wrong, f"{folder} cannot be written", XferError)
    with _typed(f"{folder} could not be written", optimizer.label):
        # The lowest rank writes a tensor that several ranks hold: buffers may differ, and DDP takes those of its first rank, too.
        planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        dcp.save(dict(tensors), checkpoint_id=str(folder), planner=planner, no_dist=not live)


def load(optimizer: LayerWise, folder: str | Path, source: Source | None = None) -> None:
    """Reads what `save` wrote, from any layout, and updates the parameters of all ranks. Collective over all ranks.

    If one rank raises an error, the others raise it too.

    Args:
        optimizer: The optimizer to load into.
        folder: The folder that was given to `save`.
        source: See `save`.

    Raises:
        LayoutError: Lists parameters that the checkpoint lacks or has in another shape, or the files that `folder` lacks.
        XferError: Files cannot be read, on all ranks.
    """
    ranks = Together.over_all("checkpoint.load", optimizer.label, optimizer.gather.deadline_s)
    with ranks.telling():
        _load(optimizer, folder, source, ranks)


def _load(optimizer: LayerWise, folder: str | Path, source: Source | None, ranks: Together) -> None:
    optimizer.gather.check()
    ranks.meet()
    optimizer.drain()
    reader = dcp.FileSystemReader(str(folder))
    wrong: list[str] = []
    known, groups, grouped = _opened(reader, Path(folder), wrong)
    if not wrong and len(groups) != len(optimizer.param_groups):
        wrong.append(f"{len(groups)} parameter groups were saved, and this optimizer has {len(optimizer.param_groups)}")
    refuse = partial(ranks.refuse, wrong, f"{folder} cannot be loaded into this model", LayoutError)
    pieces = _pieces(optimizer, source, wrong, refuse)
    refuse()
    wrong += _moved(grouped, _grouped(optimizer, pieces))
    wanted = _Wanted(known, wrong)
    targets = {o.name: o for o in optimizer.owned}
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name, t in _tensors(optimizer).items():
        if name in optimizer.owner and name not in targets:
            continue
        target = targets[name].target if name in targets else t
        wanted.whole(pieces[name], PARAM, target.detach())
        if name in targets:
            states[name] = wanted.state(pieces[name], target)
    ranks.refuse(wrong, f"{folder} does not fit this model", LayoutError)
    with torch.no_grad():
        for view in wanted.blank:
            view.zero_()
        with _typed(
            f"{folder} could not be read, and what was read is in the model: load another one", optimizer.label
        ):
            dcp.load(dict(wanted.tensors), storage_reader=reader, no_dist=not dist.is_initialized())
        for group, was in zip(optimizer.param_groups, groups):
            # with the values that a scheduler sets, because it may be built later
            group.update({k: _restored(group.get(k), v) for k, v in was.items()})
        for o in optimizer.owned:  # after the groups, which determine the device of numbers
            inner = optimizer.inner[o.group]
            inner.state[o.target] = placed(inner, o.target, states[o.name])
            if o.target is not o.param:
                o.param.copy_(o.target)
    ranks.meet()
    optimizer.synchronize(masters=False)


def placed(
    inner: torch.optim.Optimizer, target: torch.nn.Parameter, state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """A parameter's state, with single numbers on the device where torch's own `load_state_dict` would put them: fused and capturable
    kernels read `step` on the parameter's device, all others on the host."""
    mine = [group for group in inner.param_groups if any(p is target for p in group["params"])]
    groups = [{**group, "params": [id(target)]} for group in mine]
    out = dict(state)
    for key, value in state.items():
        if value.dim() == 0:
            there = type(inner)._process_value_according_to_param_policy(target, value, id(target), groups, key)
            out[key] = there if key == "step" else value.to(there.device)  # not rounded to a 16-bit parameter
    return out


# ---- the folder


def _begin(folder: Path, text: str, wrong: list[str]) -> None:
    """Begins a checkpoint. An older one in the folder becomes invalid, since it would be loaded with some of the new bytes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".metadata").unlink(missing_ok=True)
        (folder / "layerwise.json").write_text(text)
    except OSError as e:
        wrong.append(f"{e}: give a folder that rank 0 may write to")


def _opened(
    reader: dcp.FileSystemReader, folder: Path, wrong: list[str]
) -> tuple[Mapping[str, object], list[dict], list[set[str]]]:
    """The stored tensors, by name, and the options and tensors of the parameter groups. Adds an error to `wrong` if there is no
    checkpoint."""
    try:
        known = reader.read_metadata().state_dict_metadata
        stored = json.loads((folder / "layerwise.json").read_text())
        form, groups = stored.get("format"), stored.get("groups", [])
        grouped = [set(some) for some in stored.get("tensors", [])]
    except Exception as e:  # torch's reader raises many types over a damaged file
        wrong.append(
            f"no checkpoint, or one that was not saved to its end ({type(e).__name__}: {e}); load another folder"
        )
        return {}, [], []
    if form != FORMAT:
        wrong.append(f"layerwise.json: format {form}, not {FORMAT}")
        return {}, [], []
    return known, groups, grouped


@contextmanager
def _typed(message: str, where: str) -> Iterator[None]:
    """Raises an XferError for torch's CheckpointException, which has the errors of all ranks and is no Exception."""
    try:
        yield
    except CheckpointException as e:
        why = [f"rank {r}: {type(x).__name__}: {x}" for r, (x, _) in sorted(e.failures.items())]
        raise XferError(message, why, where=where) from e


# ---- what a rank holds


def _tensors(optimizer: LayerWise) -> dict[str, torch.Tensor]:
    """All parameters, and the persistent buffers that have memory of their own, by name."""
    out: dict[str, torch.Tensor] = dict(optimizer.named)
    memory, seen = {p.untyped_storage().data_ptr() for p in out.values()}, {id(p) for p in out.values()}
    for i, module in enumerate(optimizer.modules):
        for path, table, key in tensors_of(module, seen):
            name, t = bare(f"{path}.{key}" if path else key), table[key]
            if t is not None and t.untyped_storage().data_ptr() not in memory:
                out[name if len(optimizer.modules) == 1 else f"{i}:{name}"] = t
    return out


def _held(
    optimizer: LayerWise, wrong: list[str]
) -> Iterator[tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """(name, tensors of the parameter's shape, single numbers) of all that this rank saves."""
    for name, t in _tensors(optimizer).items():
        if name not in optimizer.owner:
            yield name, {PARAM: t.detach()}, {}
    for o in optimizer.owned:
        values, scalars = {PARAM: o.target.detach()}, {}
        for field, v in optimizer.inner[o.group].state.get(o.target, {}).items():
            if v is None:
                continue
            if isinstance(v, torch.Tensor) and v.shape == o.target.shape and v.dim():
                values[field] = v.detach()
            elif isinstance(v, torch.Tensor) and v.dim() == 0:
                scalars[field] = v
            else:
                what = tuple(v.shape) if isinstance(v, torch.Tensor) else type(v).__name__
                wrong.append(f"{o.name}: {field} is {what}, neither {tuple(o.target.shape)} nor one number in a tensor")
        yield o.name, values, scalars


def _written(group: Mapping[str, object], name: str, wrong: list[str], warn: bool) -> dict[str, object]:
    """The hyperparameters of a parameter group that are stored. Adds tensors that cannot be stored to `wrong`."""
    out = {}
    for key, given in group.items():
        value = _number(given)
        if key == "params":
            continue
        if _plain(value):
            out[key] = value
        elif any(isinstance(x, torch.Tensor) for x in (value if isinstance(value, list | tuple) else [value])):
            wrong.append(f"{name}: {key} has a tensor that is not one number; keep it in the state of parameters")
        elif warn:
            logger.warning(
                "xfer: %s: %s is a %s, which is not saved; after a load it has the value with which the optimizer was built",
                name, key, type(given).__name__,
            )  # fmt: skip
    return out


def _grouped(optimizer: LayerWise, pieces: Mapping[str, tuple[ParameterBox, ...]]) -> list[set[str]]:
    """The checkpoint tensors of each ParamGroup, as far as this rank holds parts of them."""
    out: list[set[str]] = [set() for _ in optimizer.inner]
    for name, group in optimizer.grouped():
        out[group] |= {p.key for p in pieces[name]}
    return out


def _moved(were: list[set[str]], are: list[set[str]]) -> list[str]:
    """One line for each tensor that was saved in another group. It would get the state and the options of that group."""
    before = {key: i for i, some in enumerate(were) for key in some}
    return [
        f"{key}: in parameter group {i} here, saved in group {before[key]}; give the groups as they were saved"
        for i, some in enumerate(are)
        for key in sorted(some & before.keys())
        if i >= len(were) or key not in were[i]
    ]


def _number(value: object) -> object:
    """Converts numbers that are tensors or NumPy's into Python's, also in lists. Returns other values unchanged."""
    if isinstance(value, list | tuple):
        return [_number(v) for v in value]
    if isinstance(value, np.generic) or isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return value


def _restored(now: object, was: object) -> object:
    """The saved value `was`. If `now` is a tensor, the value is written into it, since captured graphs read learning rates there."""
    if isinstance(was, list):
        into = now if isinstance(now, list | tuple) and len(now) == len(was) else [None] * len(was)
        return tuple(map(_restored, into, was))
    return now.fill_(was) if isinstance(now, torch.Tensor) and isinstance(was, int | float) else was


def _plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


# ---- names and boxes


def _pieces(
    optimizer: LayerWise, source: Source | None, wrong: list[str], refuse: Callable[[], None]
) -> dict[str, tuple[ParameterBox, ...]]:
    """The boxes of all parameters and buffers, by name. Adds errors to `wrong`; `refuse` raises those so far, on all ranks."""
    tensors = _tensors(optimizer)
    odd = [n for n, t in tensors.items() if not t.is_contiguous()]
    wrong += [f"{n}: not contiguous; make it so before the optimizer is built" for n in odd]
    if source is None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        wrong += [
            f"{n}: only ranks {list(peers.ranks)} of {world} are known to hold the same; others would write theirs under this name. "
            "Pass `source`: MegatronTrainer, or TensorTrainer with what is `declared` of it"
            for n, (peers, _) in optimizer.owner.items()
            if peers.size != world
        ]
        return {
            n: (ParameterBox(n, tuple(t.shape), (0,) * t.dim(), tuple(t.shape), 0, _rowwise(t)),)
            for n, t in tensors.items()
        }
    found: dict[str, list[ParameterBox]] = {n: [] for n in tensors}
    try:
        _read_pieces(source, tensors, found, wrong)
    except XferError as e:  # all ranks raise it at their next meeting
        wrong += [e.message, *e.violations]
    refuse()  # before ranks exchange boxes that only some of them know
    for name, piece in optimizer.padding({n: tuple(x) for n, x in found.items()}).items():
        found[name].append(piece)
    for name, pieces in optimizer.copied({n: tuple(x) for n, x in found.items()}).items():
        found[name] = list(pieces)
    for name, t in tensors.items():
        named = sum(prod(x.extent) for x in found[name])
        if named != t.numel():
            wrong.append(
                f"{name}: the checkpoint names {named} of its {t.numel()} elements, and the rest is not the padding of a "
                "vocabulary: train it whole, or freeze it and leave it out of the model; a buffer need not be persistent"
            )
    return {n: tuple(x) for n, x in found.items()}


def _read_pieces(
    source: Source, tensors: Mapping[str, torch.Tensor], found: dict[str, list[ParameterBox]], wrong: list[str]
) -> None:
    """Adds to `found` the boxes of the checkpoint tensors that the trainer's adapter finds in these tensors of this rank."""
    layout = source.read()
    if layout.traced.recipes or layout.traced.gathers:
        wrong.append("tensors that the export computes (adapters) have no optimizer state: train merged weights")
    shapes = {s.name: tuple(s.shape) for s in layout.traced.specs}
    base = {name: t.data_ptr() for name, t in layout.tensors.items()}
    at = sorted(((t.data_ptr(), n, t) for n, t in tensors.items() if t.numel()), key=lambda x: x[:2])
    starts = [a for a, _, _ in at]
    for f in layout.traced.fragments:
        address = base[f.root] + f.offset
        i = bisect_right(starts, address) - 1
        if i < 0 or address >= at[i][0] + at[i][2].numel() * at[i][2].element_size():
            continue  # not in a tensor of the module
        start, name, p = at[i]
        size = p.element_size()
        if f.steps or min((*f.strides, 0)) < 0:
            wrong.append(f"{f.tensor}: lies in {name} with steps or in reverse; a checkpoint has only dense boxes")
            continue
        strides = tuple(s // size for s in f.strides)
        found[name].append(
            ParameterBox(f.tensor, shapes[f.tensor], f.origin, f.extent, (address - start) // size, strides)
        )


def _rowwise(p: torch.Tensor) -> Ints:
    return tuple(torch.empty(p.shape, device="meta").stride())


def _view(tensor: torch.Tensor, p: ParameterBox) -> torch.Tensor:
    """The box `p` of a contiguous tensor of the parameter's shape."""
    return tensor.as_strided(p.extent, p.strides, tensor.storage_offset() + p.offset)


def _add(tensors: dict[str, Boxes], p: ParameterBox, field: str, view: torch.Tensor) -> None:
    key = p.stored(field)
    have = tensors[key].boxes if key in tensors else []
    tensors[key] = Boxes(p.shape, view.dtype, [*have, (p.origin, view)])


class _Wanted:
    """The tensors that this rank reads. blank: views that are zeroed before."""

    def __init__(self, known: Mapping[str, object], wrong: list[str]):
        self.known, self.wrong = known, wrong
        self.tensors: dict[str, Boxes] = {}
        self.blank: list[torch.Tensor] = []
        self._fields: dict[str, list[str]] = {}
        for key in known:
            name, _, field = key.rpartition("/")
            if name.endswith("/padding"):
                continue
            self._fields.setdefault(name, []).append(field)

    def whole(self, pieces: tuple[ParameterBox, ...], field: str, tensor: torch.Tensor) -> None:
        for p in pieces:
            md = self.known.get(p.stored(field))
            if p.padding:
                self._padding(p, field, md, _view(tensor, p))
            elif not isinstance(md, TensorStorageMetadata):
                self.wrong.append(f"{p.key}: the checkpoint has no {field} of it")
            elif tuple(md.size) != p.shape:
                self.wrong.append(f"{p.key}: {tuple(md.size)} in the checkpoint, {p.shape} here")
            else:
                _add(self.tensors, p, field, _view(tensor, p))

    def _padding(self, p: ParameterBox, field: str, md: object, view: torch.Tensor) -> None:
        self.blank.append(view)
        if not isinstance(md, TensorStorageMetadata) or tuple(md.size[1:]) != p.shape[1:]:
            return  # nothing was padded where it was saved
        rows = min(p.extent[0], md.size[0] - p.origin[0])
        if rows > 0:
            have = replace(p, shape=tuple(md.size), extent=(rows, *p.extent[1:]))
            _add(self.tensors, have, field, view[:rows])

    def state(self, pieces: tuple[ParameterBox, ...], target: torch.Tensor) -> dict[str, torch.Tensor]:
        """Allocates the optimizer state of one parameter, and adds it to the tensors to read."""
        out = {}
        for field in sorted({f for p in pieces for f in self._fields.get(p.key, ()) if f != PARAM}):
            md = self.known.get(f"{pieces[0].key}/{field}")
            if not isinstance(md, TensorStorageMetadata):
                self.wrong.append(
                    f"{pieces[0].key}: the checkpoint has no {field} of it, and has one of its neighbours"
                )
                continue
            if len(md.size):
                # One of the two layouts may have a master, and the other may step the parameter itself.
                stepped = self.known.get(f"{pieces[0].key}/{PARAM}")
                like = isinstance(stepped, TensorStorageMetadata) and md.properties.dtype == stepped.properties.dtype
                dtype = target.dtype if like else md.properties.dtype
                out[field] = torch.zeros(target.shape, dtype=dtype, device=target.device)
                self.whole(pieces, field, out[field])
            else:  # all boxes of a fused parameter have the same number
                out[field] = torch.zeros((), dtype=md.properties.dtype)
                self.tensors[f"{pieces[0].key}/{field}"] = Boxes((), md.properties.dtype, [((), out[field])])
        return out


class Boxes(torch.Tensor):
    """The boxes of one tensor on one rank, in the form that torch.distributed.checkpoint writes and reads.

    It is a tensor by type only: it has no memory and no operations.

    Args:
        shape: Shape of the whole tensor.
        dtype: Its dtype.
        boxes: (origin, view of the live memory) of each box.
    """

    boxes: list[tuple[Ints, torch.Tensor]]

    @staticmethod
    def __new__(cls, shape: Ints, dtype: torch.dtype, boxes: list[tuple[Ints, torch.Tensor]]):
        out = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=boxes[0][1].device)
        out.boxes = boxes
        return out

    def __init__(self, shape: Ints, dtype: torch.dtype, boxes: list[tuple[Ints, torch.Tensor]]):
        pass

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{func}: a list of boxes is only saved and loaded")

    def __repr__(self, *, tensor_contents=None):  # torch's signature
        return f"Boxes({tuple(self.shape)}, {[(o, tuple(v.shape)) for o, v in self.boxes]})"

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(o), v.shape) for o, v in self.boxes]

    def __create_write_items__(self, fqn: str, object: Boxes) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(self.shape)),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for origin, view in self.boxes:
            if index.offset == torch.Size(origin):
                return view
        raise ValueError(f"{index}: not among {self!r}")
