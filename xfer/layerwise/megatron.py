"""Layer-wise optimizers for Megatron-Core models, as Megatron builds them: nothing of it is patched.

Megatron's DDP reduces gradients and its schedules run forwards; owners are over its data-parallel groups (with context
parallel; experts over theirs), hooks sit on its modules, and `overlap_param_gather` of its DDP config turns the
asynchronous gather on. The distributed optimizer is not used and has to be off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from xfer.errors import Unsupported
from xfer.layerwise.checkpoint import ParameterBox
from xfer.layerwise.gather import Peers
from xfer.layerwise.groups import Owned, ParamGroup
from xfer.layerwise.muon import Muon
from xfer.layerwise.optimizer import LayerWiseOptimizer


class MegatronLayerWise(LayerWiseOptimizer):
    """In place of Megatron's optimizer: `step()` gives (updated, norm of the gradients, None), and `scale_loss` is what
    the schedule multiplies the loss with.

    chunks: model chunks under Megatron's DistributedDataParallel, one per virtual pipeline stage. groups: default
    `muon_and_adam(chunks)`. overlap: default their ddp_config.overlap_param_gather. loss_scale: a constant one, for fp16.
    Other options as for LayerWiseOptimizer; so gradients are clipped only with `clip_grad=`, where Megatron's default is 1.0.
    Needs the model-parallel groups to exist. Gradients must be complete when `step()` is called, as after Megatron's
    finalize_model_grads.
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

        _refuse(chunks)
        self.loss_scale = loss_scale
        self._cut = cut_parameters(chunks)
        dense = mpu.get_data_parallel_group(with_context_parallel=True)
        experts = mpu.get_expert_data_parallel_group(check_initialized=False)
        super().__init__(
            chunks,
            muon_and_adam(chunks) if groups is None else groups,
            process_group=dense,
            group_of=lambda name, p: dense if getattr(p, "allreduce", True) else experts,
            overlap=chunks[0].ddp_config.overlap_param_gather if overlap is None else overlap,
            reduce="done",
            **options,
        )

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.loss_scale

    def get_loss_scale(self) -> torch.Tensor:
        return torch.tensor([self.loss_scale], device=self._device)

    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> tuple[bool, float, None]:
        """Collective over all ranks. See LayerWiseOptimizer.step."""
        super().step(closure, grad_scale=self.loss_scale)
        return not self.skipped, self.grad_norm, None

    def _collect(self) -> None:
        for o in self.owned:
            o.target.grad = o.param.main_grad.to(o.target.dtype)

    def _after_step(self) -> None:
        for o in self.owned:
            o.target.grad = None

    def _total(self, mine: torch.Tensor) -> torch.Tensor:
        mine = mine.to(self._trained[0][1].device)
        work = dist.all_reduce(mine, async_op=True)
        if mine.is_cuda:
            work.wait()  # torch's own watchdog has the deadline of Megatron's groups
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
        """Last rows of embeddings and heads, cut over the tensor-parallel ranks together with the vocabulary's own. Rank 0 of
        them has some of those always, so it knows the name; others may have padding only."""
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
        """A tied embedding is trained on the first stage, where the checkpoint knows it, and on the last one, equally; there it
        lies in the same boxes."""
        from megatron.core import parallel_state as mpu

        mine = [name for name, p in self.named if _on_two_stages(p)]
        if not mine:
            return {}
        first = mpu.is_pipeline_first_stage(ignore_virtual=True)
        said = msgspec.json.encode(pieces[mine[0]]) if first else b""
        said = _told(said, mpu.get_embedding_group(), 0, self._trained[0][1].device)
        return {} if first else {mine[0]: msgspec.json.decode(said, type=tuple[ParameterBox, ...])}

    def _refuse_outside(self, dense: Peers, rest: Sequence[Peers]) -> None:
        """Norms are summed over all ranks, so groups of experts may lie as they like."""


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
    """Muon for matrices inside the layers, Adam for all else: embeddings, the head, vectors. Momentum of matrices that tensor
    parallel ranks share is gathered, so that the update does not depend on their number.

    min_lr, adam_min_lr: how far Megatron's OptimizerParamScheduler takes the rates down; it has one greatest and one least rate for
    all groups that say nothing, and these two must differ. wd_mult, adam_wd_mult: of its weight decay. Without it there is none.
    """
    matrices, rest, cut = [], [], cut_parameters(chunks)
    for chunk in chunks:
        outside = {id(p) for p in _vocabulary(chunk)}
        for p in chunk.parameters():
            if not p.requires_grad:
                continue
            (matrices if p.dim() == 2 and id(p) not in outside else rest).append(p)
    masters: dict[int, int] = {}

    def muon(groups, **options):
        own = scheduled(groups, lr, min_lr, wd_mult)
        return Muon(own, pieces=lambda p: cut.get(masters.get(id(p), id(p))), **options)

    def adam(groups, **options):
        return torch.optim.AdamW(scheduled(groups, adam_lr, adam_min_lr, adam_wd_mult), **options)

    def scheduled(groups: list[dict], most: float, least: float, decay: float) -> list[dict]:
        return [{**g, "max_lr": most, "min_lr": least, "wd_mult": decay} for g in groups]

    # The inner optimizer sees masters, which carry no attributes: it is told whose they are.
    muon.targets = lambda target, param: masters.__setitem__(id(target), id(param))
    muon.refuses = Muon.refuses
    return [
        ParamGroup(matrices, muon, {"lr": lr, "momentum": momentum}, cost="newton_schulz"),
        ParamGroup(rest, adam, {"lr": adam_lr, "weight_decay": 0.0, "foreach": False}),
    ]


def _told(said: bytes, group: dist.ProcessGroup, rank: int, device: torch.device) -> bytes:
    """What that rank of the group says. Collective over it."""
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
    """Parameters of embeddings and of the head: told by their modules, and by the mark that Megatron gives both."""
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

    for module in chunk.modules():
        embeds = isinstance(module, VocabParallelEmbedding | torch.nn.Embedding)
        yield from (p for p in module.parameters(recurse=False) if embeds or _marked(p))


def _marked(p: torch.nn.Parameter) -> bool:
    try:
        return p.is_embedding_or_output_parameter  # Megatron's mark, not a name
    except AttributeError:
        return False


def _on_two_stages(p: torch.nn.Parameter) -> bool:
    try:
        return p.shared_embedding  # Megatron's mark on both
    except AttributeError:
        return False


def cut_parameters(chunks: Sequence[torch.nn.Module]) -> dict[int, tuple[dist.ProcessGroup, int]]:
    """id(parameter) -> (tensor-parallel group, dim) of those of which this rank holds a part.

    Megatron's own layers are told by their class: they mark their weights only when they initialize them, which Bridge,
    about to load a checkpoint, tells them not to do. Of other layers' marks only that there are some is believed:
    TransformerEngine marks every weight of a linear layer, also those that all ranks hold whole, and knows nothing of
    experts' cuts, which Megatron makes. Megatron says what is cut where when it describes the layer for a checkpoint.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

    found: dict[int, tuple[dist.ProcessGroup, int]] = {}
    for chunk in chunks:
        for module in chunk.modules():
            own = isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding)
            said = None if own else _described(module)
            for name, p in module.named_parameters(recurse=False):
                if own and p.dim() == 2:  # its one matrix; a bias of it is marked in any case
                    found[id(p)] = module.tp_group, int(isinstance(module, RowParallelLinear))
                elif getattr(p, "tensor_model_parallel", False):
                    dim = said[name] if said is not None and name in said else p.partition_dim
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
    """Of a layer with marked parameters: along which dim each is cut, None for not at all, as Megatron describes the layer for
    its own checkpoints. None for layers that it does not describe."""
    from megatron.core import parallel_state as mpu
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    marked = [n for n, p in module.named_parameters(recurse=False) if getattr(p, "tensor_model_parallel", False)]
    if not marked or not hasattr(module, "sharded_state_dict"):
        return None
    described = module.sharded_state_dict(
        metadata={"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    )
    out = {}
    for name in marked:
        if isinstance(x := described.get(name), ShardedTensor):
            own = x.axis_fragmentations[x.prepend_axis_num :]  # before these: which expert, which layer
            out[name] = next((dim for dim, n in enumerate(own) if n > 1), None)
    return out


def _refuse(chunks: Sequence[torch.nn.Module]) -> None:
    bad = []
    for i, chunk in enumerate(chunks):
        config = getattr(chunk, "ddp_config", None)
        if config is None:
            bad.append(f"chunk {i}: not under Megatron's DistributedDataParallel, whose gradient buffers are read")
            continue
        if config.use_distributed_optimizer:
            bad.append(f"chunk {i}: use_distributed_optimizer cuts parameters into bytes; switch it off")
        if getattr(config, "use_megatron_fsdp", False):
            bad.append(f"chunk {i}: Megatron-FSDP keeps no whole parameter; use DistributedDataParallel")
        if config.overlap_param_gather != chunks[0].ddp_config.overlap_param_gather:
            bad.append(f"chunk {i}: overlap_param_gather is not as on chunk 0; give all chunks one config")
    if bad:
        raise Unsupported("these chunks cannot have a layer-wise optimizer", bad)
