"""Layer-wise optimizers for Megatron-Core models. Nothing of Megatron is patched.

Megatron's DDP reduces gradients, and its schedules run forwards. Owners are ranks of its data-parallel groups (with context
parallel; experts have groups of their own). The hooks are on its modules, and `overlap_param_gather` of its DDP config turns on
the asynchronous gather. The distributed optimizer is not used and must be off.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Protocol, cast

import msgspec
import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from xfer.errors import Unsupported
from xfer.layerwise.checkpoint import ParameterBox
from xfer.layerwise.gather import Peers
from xfer.layerwise.groups import Owned, ParamGroup
from xfer.layerwise.muon import Muon
from xfer.layerwise.optimizer import LayerWise


class MegatronLayerWise(LayerWise):
    """Replaces Megatron's optimizer: `step()` returns (updated, norm of the gradients, None), and the schedule calls `scale_loss`.

    As Megatron's own optimizers it is no `torch.optim.Optimizer`, whose `step` returns the loss.

    Megatron's model-parallel groups must exist. Gradients must be complete when `step()` is called, as after Megatron's
    finalize_model_grads. Gradients are clipped only with `clip_grad=`, while Megatron's default is 1.0.

    Args:
        chunks: Model chunks under Megatron's DistributedDataParallel, one per virtual pipeline stage.
        groups: Parameter groups. Default: `muon_and_adam(chunks)`.
        overlap: Default: the chunks' ddp_config.overlap_param_gather.
        loss_scale: A constant factor of the loss, for fp16.
        options: Other options of LayerWiseOptimizer.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        groups: Sequence[ParamGroup] | None = None,
        *,
        overlap: bool | None = None,
        loss_scale: float = 1.0,
        **options,
    ):
        from megatron.core import parallel_state as mpu

        overlaps = _overlaps(chunks)
        self.loss_scale = loss_scale
        self._step_pre_hooks: OrderedDict[int, Callable[..., object]] = OrderedDict()
        self._cut = cut_parameters(chunks)
        dense = mpu.get_data_parallel_group(with_context_parallel=True)
        experts = mpu.get_expert_data_parallel_group(check_initialized=False)
        super().__init__(
            chunks,
            muon_and_adam(chunks) if groups is None else groups,
            process_group=dense,
            group_of=lambda name, p: dense if getattr(p, "allreduce", True) else experts,
            overlap=overlaps if overlap is None else overlap,
            reduce="done",
            **options,
        )
        for chunk in chunks:
            # Hooks of Megatron-Core 0.19, which gather for its own layer-wise optimizer. Older ones hook only the distributed one's.
            if getattr(chunk, "remove_forward_pre_hook_handles", None):
                cast(_Hooked, chunk).disable_forward_pre_hook(param_sync=False)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, multiplied by the loss scale."""
        return loss * self.loss_scale

    def get_loss_scale(self) -> torch.Tensor:
        """The loss scale, [1], on the parameters' device."""
        return torch.tensor([self.loss_scale], device=self._device)

    def step(self, closure: Callable[[], float] | None = None) -> tuple[bool, float | None, None]:
        """Steps the parameters that this rank owns, as `LayerWiseOptimizer.step`. Collective over all ranks.

        Returns:
            (whether parameters were updated, norm of the gradients before clipping, None), as Megatron's optimizers.
        """
        for hook in self._step_pre_hooks.values():
            hook(self, (closure,), {})
        self._take_step(closure, self.loss_scale)
        return not self.skipped, self.grad_norm, None

    def register_step_pre_hook(self, hook: Callable[..., object]) -> RemovableHandle:
        """Call `hook(optimizer, args, kwargs)` at the beginning of each step, as torch's optimizers do. Its result is ignored. If it
        raises, nothing has been stepped."""
        handle = RemovableHandle(self._step_pre_hooks)
        self._step_pre_hooks[handle.id] = hook
        return handle

    def _collect(self) -> None:
        for o in self.owned:
            o.target.grad = cast(_Marks, o.param).main_grad.to(o.target.dtype)

    def _after_step(self) -> None:
        for o in self.owned:
            o.target.grad = None

    def _total(self, mine: torch.Tensor) -> torch.Tensor:
        mine = mine.to(self._trained[0][1].device)
        work = dist.all_reduce(mine, async_op=True)
        if mine.is_cuda:
            work.wait()  # torch's watchdog applies the deadline of Megatron's groups
        else:
            work.wait(timedelta(seconds=self.gather.deadline_s))
        return mine

    def _counts(self, o: Owned) -> bool:
        from megatron.core import parallel_state as mpu
        from megatron.core.transformer.module import param_is_not_shared

        if not param_is_not_shared(o.param):
            return False
        expert = not getattr(o.param, "allreduce", True)
        return id(o.param) in self._cut or expert or mpu.get_tensor_model_parallel_rank() == 0

    def padding(self, pieces: Mapping[str, tuple[ParameterBox, ...]]) -> dict[str, ParameterBox]:
        """The last rows of embeddings and heads, which are cut over the tensor-parallel ranks together with the vocabulary's rows.
        Rank 0 always has rows of the vocabulary, so it knows the name and tells it the others, which may have padding only."""
        names = {id(p): name for name, p in self.named}
        found = {}
        for p in {id(p): p for chunk in self.modules for p in _vocabulary(chunk)}.values():
            name, device = names[id(p)], p.device
            group, dim = self._cut.get(id(p), (None, 0))
            rank, size = (0, 1) if group is None else (group.rank(), group.size())
            mine = [x for x in pieces[name] if x.origin[1:] == (0,) * (len(x.origin) - 1)]
            said = msgspec.json.encode(mine[0]) if mine and rank == 0 else b""
            if group is not None:
                said = _told(said, group, 0, device)
            if not said or dim:
                continue
            whole = msgspec.json.decode(said, type=ParameterBox)
            rows, width = p.shape[0], p[0].numel()
            own = min(max(whole.shape[0] - rank * rows, 0), rows)
            lie = sum(x.extent[0] for x in mine) == own and all(x.offset < own * width for x in mine)
            if own == rows or not lie or whole.shape[1:] != tuple(p.shape[1:]):
                continue  # nothing is padded, or not at its end
            found[name] = ParameterBox(
                whole.key,
                (rows * size - whole.shape[0], *p.shape[1:]),
                (rank * rows + own - whole.shape[0], *[0] * (p.dim() - 1)),
                (rows - own, *p.shape[1:]),
                own * width,
                tuple(torch.empty(p.shape, device="meta").stride()),
                padding=True,
            )
        return found

    def copied(self, pieces: Mapping[str, tuple[ParameterBox, ...]]) -> dict[str, tuple[ParameterBox, ...]]:
        """The boxes of a tied embedding on the last stage. It is trained there and on the first stage, equally, and lies in the same boxes
        as on the first stage, where an adapter finds it in the checkpoint."""
        from megatron.core import parallel_state as mpu

        mine = [name for name, p in self.named if _on_two_stages(p)]
        if not mine:
            return {}
        first = mpu.is_pipeline_first_stage(ignore_virtual=True)
        said = msgspec.json.encode(pieces[mine[0]]) if first else b""
        said = _told(said, mpu.get_embedding_group(), 0, self._trained[0][1].device)
        return {} if first else {mine[0]: msgspec.json.decode(said, type=tuple[ParameterBox, ...])}

    def _refuse_outside(self, dense: Peers, rest: Sequence[Peers]) -> None:
        """Accepts all groups of experts, since norms are summed over all ranks."""


def muon_and_adam(
    chunks: Sequence[torch.nn.Module],
    *,
    lr: float = 0.02,
    adam_lr: float = 1e-3,
    momentum: float = 0.95,
    min_lr: float = 0.0,
    adam_min_lr: float = 0.0,
    wd_mult: float = 1.0,
    adam_wd_mult: float = 0.0,
) -> list[ParamGroup]:
    """Muon for matrices inside the layers, and AdamW for embeddings, the head and vectors.

    The momentum of matrices that are cut over tensor-parallel ranks is gathered, so that the update does not depend on their number.

    Args:
        chunks: The model chunks.
        lr, momentum: Learning rate and momentum of Muon.
        adam_lr: Learning rate of AdamW.
        min_lr, adam_min_lr: Lowest rates to which Megatron's OptimizerParamScheduler goes. It has one highest and one lowest rate
            for all groups without their own, but these two groups need different ones.
        wd_mult, adam_wd_mult: Factors of the scheduler's weight decay. Without the scheduler there is no weight decay.
    """
    cut = cut_parameters(chunks)
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for chunk in chunks:
        outside = {id(p) for p in _vocabulary(chunk)}
        for p in chunk.parameters():
            if not p.requires_grad:
                continue
            (matrices if p.dim() == 2 and id(p) not in outside else rest).append(p)

    def adam(groups, **options):
        return torch.optim.AdamW(_scheduled(groups, adam_lr, adam_min_lr, adam_wd_mult), **options)

    muon = _MuonOfPieces(cut, lambda groups: _scheduled(groups, lr, min_lr, wd_mult))
    return [
        ParamGroup(matrices, muon, {"lr": lr, "momentum": momentum}, cost="newton_schulz"),
        ParamGroup(rest, adam, {"lr": adam_lr, "weight_decay": 0.0, "foreach": False}),
    ]


def _scheduled(groups: list[dict], most: float, least: float, decay: float) -> list[dict]:
    return [{**g, "max_lr": most, "min_lr": least, "wd_mult": decay} for g in groups]


class _MuonOfPieces:
    """Makes a Muon for parameters of which some are cut over tensor-parallel ranks; see `ParamGroup.optimizer`."""

    refuses = staticmethod(Muon.refuses)

    def __init__(self, cut: Mapping[int, tuple[dist.ProcessGroup, int]], scheduled: Callable[[list[dict]], list[dict]]):
        self._cut, self._scheduled = cut, scheduled
        self._masters: dict[int, int] = {}  # id(master) -> id(parameter)
        self.__qualname__ = "muon"  # ranks compare it

    def targets(self, target: torch.nn.Parameter, param: torch.nn.Parameter) -> None:
        """Notes the parameter of a master. The inner optimizer sees masters, which do not say how they are cut."""
        self._masters[id(target)] = id(param)

    def __call__(self, groups: list[dict], **options) -> Muon:
        pieces = lambda p: self._cut.get(self._masters.get(id(p), id(p)))  # noqa: E731
        return Muon(self._scheduled(groups), pieces=pieces, **options)


class _Marks(Protocol):
    """Attributes that Megatron gives to some parameters."""

    main_grad: torch.Tensor
    is_embedding_or_output_parameter: bool
    shared_embedding: bool
    partition_dim: int


class _Hooked(Protocol):
    """Megatron's DistributedDataParallel."""

    def disable_forward_pre_hook(self, *, param_sync: bool) -> None: ...


class _DdpConfig(Protocol):
    """The options of Megatron's DistributedDataParallelConfig that matter here."""

    use_distributed_optimizer: bool
    overlap_param_gather: bool


def _told(said: bytes, group: dist.ProcessGroup, rank: int, device: torch.device) -> bytes:
    """Broadcasts the bytes `said` of one rank of the group. Collective over the group."""
    source, speaks = dist.get_global_rank(group, rank), group.rank() == rank
    size = torch.tensor([len(said)], dtype=torch.int64, device=device)
    dist.broadcast(size, source, group=group)
    text = torch.zeros(int(size.item()), dtype=torch.uint8, device=device)
    if speaks and said:
        text.copy_(torch.frombuffer(bytearray(said), dtype=torch.uint8))
    if len(text):
        dist.broadcast(text, source, group=group)
    return bytes(text.tolist())


def _vocabulary(chunk: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Parameters of embeddings and of the head. Their modules' classes show them, and the mark that Megatron gives both."""
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

    for module in chunk.modules():
        embeds = isinstance(module, VocabParallelEmbedding | torch.nn.Embedding)
        yield from (p for p in module.parameters(recurse=False) if embeds or _marked(p))


def _marked(p: torch.nn.Parameter) -> bool:
    try:
        return cast(_Marks, p).is_embedding_or_output_parameter  # Megatron's mark, not a name
    except AttributeError:
        return False


def _on_two_stages(p: torch.nn.Parameter) -> bool:
    try:
        return cast(_Marks, p).shared_embedding  # Megatron's mark on both
    except AttributeError:
        return False


def cut_parameters(chunks: Sequence[torch.nn.Module]) -> dict[int, tuple[dist.ProcessGroup, int]]:
    """id(parameter) -> (tensor-parallel group, dim) of the parameters of which this rank holds a part.

    Megatron's own layers are found by their class. They mark their weights only when they initialize them, and Bridge switches
    that off before it loads a checkpoint. For other layers a mark only means that the layer may be cut: TransformerEngine marks
    every weight of a linear layer, also those that all ranks hold whole, and does not know how Megatron cuts experts. The cut
    dim is read from Megatron's description of the layer for its checkpoints.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

    found: dict[int, tuple[dist.ProcessGroup, int]] = {}
    for chunk in chunks:
        for module in chunk.modules():
            own = ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding
            said = None if isinstance(module, own) else _described(module)
            for name, p in module.named_parameters(recurse=False):
                if isinstance(module, own) and p.dim() == 2:  # its one matrix; its bias is always marked
                    found[id(p)] = module.tp_group, int(isinstance(module, RowParallelLinear))
                elif getattr(p, "tensor_model_parallel", False):
                    dim = said[name] if said is not None and name in said else cast(_Marks, p).partition_dim
                    group = getattr(module, "_tp_group", None)  # Megatron's over TransformerEngine's layers
                    if group is None:
                        expert = not getattr(p, "allreduce", True)
                        group = (
                            mpu.get_expert_tensor_parallel_group() if expert else mpu.get_tensor_model_parallel_group()
                        )
                    if dim is not None:
                        found.setdefault(id(p), (group, dim))
    return {key: (group, dim) for key, (group, dim) in found.items() if group.size() > 1}


def _described(module: torch.nn.Module) -> dict[str, int | None] | None:
    """name -> the dim along which a marked parameter of the layer is cut, or None if it is whole. From Megatron's description of the
    layer for its checkpoints. None for layers without marked parameters or without a description."""
    from megatron.core import parallel_state as mpu
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    marked = [n for n, p in module.named_parameters(recurse=False) if getattr(p, "tensor_model_parallel", False)]
    describe = getattr(module, "sharded_state_dict", None)
    if not marked or describe is None:
        return None
    described = describe(metadata={"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)})
    out = {}
    for name in marked:
        if isinstance(x := described.get(name), ShardedTensor):
            own = x.axis_fragmentations[x.prepend_axis_num :]  # dims before these number the expert and the layer
            out[name] = next((dim for dim, n in enumerate(own) if n > 1), None)
    return out


def _overlaps(chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether the chunks' DDP configs set overlap_param_gather. Raises Unsupported for chunks that cannot be stepped."""
    bad = []
    configs: list[_DdpConfig | None] = [getattr(chunk, "ddp_config", None) for chunk in chunks]
    overlaps = bool(configs) and configs[0] is not None and configs[0].overlap_param_gather
    for i, config in enumerate(configs):
        if config is None:
            bad.append(f"chunk {i}: not under Megatron's DistributedDataParallel, whose gradient buffers are read")
            continue
        if config.use_distributed_optimizer:
            bad.append(f"chunk {i}: use_distributed_optimizer cuts parameters into bytes; switch it off")
        if getattr(config, "use_megatron_fsdp", False):
            bad.append(f"chunk {i}: Megatron-FSDP keeps no whole parameter; use DistributedDataParallel")
        if configs[0] is not None and config.overlap_param_gather != overlaps:
            bad.append(f"chunk {i}: overlap_param_gather is not as on chunk 0; give all chunks one config")
    if bad:
        raise Unsupported("these chunks cannot have a layer-wise optimizer", bad)
    return overlaps
