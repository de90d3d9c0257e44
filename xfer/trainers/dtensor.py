"""Trainers whose parameters carry checkpoint names: plain modules (replicated, DDP) and DTensor modules (FSDP2, TP).

Layouts are declared, not traced: a DTensor says by its mesh and placements which box of the global tensor it holds; a plain
tensor holds all of it. `rename` turns a parameter's name into the checkpoint's where they differ; a tensor that the
checkpoint cuts or fuses differently needs a traced adapter instead (see megatron.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from xfer.errors import RebindError, Unsupported
from xfer.mesh.placement import from_dtensor
from xfer.trace.declared import declared_fragments
from xfer.trace.fragment import Fragment, Root, TensorSpec
from xfer.trace.traced import Traced


@dataclass(frozen=True, slots=True)
class DTensorLayout:
    traced: Traced
    roots: tuple[Root, ...]
    tensors: Mapping[str, torch.Tensor]


def _dtype(t: torch.Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


class DTensorTrainer:
    """Source adapter for `xfer.connect`.

    parameters: a module, or a callable that returns {checkpoint name: tensor or DTensor} afresh at every call, so that
    replaced parameters are seen. rank, world: default torch.distributed's, 0 and 1 without it.
    """

    def __init__(
        self,
        parameters: torch.nn.Module | Callable[[], Mapping[str, torch.Tensor]],
        *,
        rename: Callable[[str], str] = lambda name: name,
        rank: int | None = None,
        world: int | None = None,
    ):
        if isinstance(parameters, torch.nn.Module):
            module = parameters
            self._get = lambda: dict(module.named_parameters())
        else:
            self._get = parameters
        d = torch.distributed
        live = d.is_available() and d.is_initialized()
        self.rank = rank if rank is not None else d.get_rank() if live else 0
        self.world = world if world is not None else d.get_world_size() if live else 1
        self._rename = rename
        self._seen: list[tuple] = []
        self.device = next((_local(t).device for t in self._get().values()), torch.device("cpu"))

    def drain(self) -> None:
        """FSDP2 writes its shards in the optimizer's own step; only the device may still be behind."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def read(self) -> DTensorLayout:
        """Raises Unsupported for partial placements and tensor subclasses, LayoutError for meshes without this rank."""
        specs, fragments, roots, tensors, bad = [], [], {}, {}, []
        for key, t in self._get().items():
            name = self._rename(key)
            local = _local(t)
            if type(local) not in (torch.Tensor, torch.nn.Parameter):
                bad.append(
                    f"{name} (trainer {self.rank}): {type(local).__name__} hides its bytes; dequantize or export it as plain tensors"
                )
                continue
            storage = local.untyped_storage()
            root = roots.setdefault(storage._cdata, Root(name, storage.nbytes()))
            tensors[root.name] = torch.empty(0, dtype=torch.uint8, device=local.device).set_(storage)
            size = local.element_size()
            strides, offset = tuple(s * size for s in local.stride()), local.storage_offset() * size
            specs.append(TensorSpec(name, tuple(t.shape), _dtype(local)))
            if local is not t and hasattr(t, "placements"):
                mesh, placements = from_dtensor(t)
                me = torch.distributed.get_rank()
                fragments += declared_fragments(
                    name, tuple(t.shape), _dtype(local), mesh, placements, me, root.name, strides, offset
                )
            elif local.numel():
                flat = tuple(0 if n == 1 else s for n, s in zip(local.shape, strides))
                fragments.append(
                    Fragment(name, (0,) * local.dim(), tuple(local.shape), root.name, offset, flat, _dtype(local))
                )
        if bad:
            raise Unsupported("parameters whose bytes cannot be read", bad)
        self._seen = self._snapshot()
        return DTensorLayout(Traced(tuple(sorted(specs)), tuple(fragments)), tuple(roots.values()), tensors)

    def _snapshot(self) -> list[tuple]:
        out = []
        for key, t in self._get().items():
            local = _local(t)
            if local.numel() and not local.untyped_storage().nbytes():
                raise RebindError(
                    f"{key} (trainer {self.rank}) has no bytes", ["bring offloaded parameters back before the refit"]
                )
            out.append(
                (
                    key,
                    local.dtype,
                    tuple(local.shape),
                    local.stride(),
                    local.storage_offset(),
                    local.untyped_storage().nbytes(),
                    local.untyped_storage().data_ptr(),
                )
            )
        return out

    def check(self) -> str:
        """ "same", "moved" or "changed"; see session.trainer.Source."""
        now = self._snapshot()
        if now == self._seen:
            return "same"
        # Storages may have been merged or split with equal shapes, so only equal sharing counts as the same layout.
        same = [r[:6] for r in now] == [r[:6] for r in self._seen] and _sharing(now) == _sharing(self._seen)
        return "moved" if same else "changed"

    def rebind(self) -> Mapping[str, torch.Tensor]:
        return self.read().tensors


def _sharing(rows: list[tuple]) -> list[int]:
    """For each row, the number of the storage it lies in, in order of appearance."""
    number: dict[int, int] = {}
    return [number.setdefault(r[6], len(number)) for r in rows]


def _local(t: torch.Tensor) -> torch.Tensor:
    local = t.to_local() if hasattr(t, "to_local") else t
    return local.detach() if type(local) is torch.nn.Parameter else local
