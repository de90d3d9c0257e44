"""A small real trainer: Bridge builds Megatron-Core chunks from a toy checkpoint, Megatron's own DDP, optimizer and
pipeline schedule train them on a synthetic task. Used by functional tests and the demo.

    with Trainer(folder, tp=2, pp=2, ep=2, etp=1) as trainer:      # on every rank of a world that exists
        for _ in range(10):
            loss = trainer.step()
        trainer.export(out)                                        # the ground truth: Bridge's own HF export

Parameters are bf16 with fp32 masters. With `distopt` and `overlap` (the defaults) `step()` returns while the parameters
of this rank are still stale: Megatron gathers them in the next forward's pre-hooks. That is the state a refit finds in
real jobs, so nothing here hides it. Nothing in this file knows xfer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path

import torch
import torch.distributed as dist

from examples.common import megatron_cpu


@dataclass(frozen=True)
class Task:
    """Count upwards modulo the vocabulary, from random starts: learned by any model in a few steps."""

    vocab: int
    seq: int = 16
    micro_batch: int = 4
    micro_batches: int = 4

    def batches(self, step: int, dp_rank: int) -> torch.Tensor:
        """int64 [micro_batches, micro_batch, seq + 1]: the same for all ranks of one data-parallel rank."""
        g = torch.Generator().manual_seed(100_003 * step + dp_rank)
        start = torch.randint(0, self.vocab, (self.micro_batches, self.micro_batch, 1), generator=g)
        return (start + torch.arange(self.seq + 1)) % self.vocab


class Trainer:
    """`chunks`: list of DDP-wrapped model chunks (one per virtual stage); `bridge`: the AutoBridge they came from.

    Parallel sizes as Megatron names them. `distopt`: distributed optimizer. `overlap`: overlap_grad_reduce and, with `distopt`,
    overlap_param_gather. `provider` keywords are set on Bridge's model provider before it is finalized (uneven
    stages: num_layers_in_first_pipeline_stage=1; padded vocabulary: should_pad_vocab=True, load=False).
    `lora`: fields of Bridge's own LoRA, which freezes the model and trains adapters (dim, alpha, target_modules, …), or
    a function that makes another of Bridge's PEFT methods. `ddp`: more fields of Megatron's DistributedDataParallelConfig.
    `optimizer`: makes the optimizer of the chunks; Megatron's Adam if it is None.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        tp: int = 1,
        pp: int = 1,
        vpp: int | None = None,
        ep: int = 1,
        etp: int | None = None,
        cp: int = 1,
        distopt: bool = True,
        overlap: bool = True,
        lr: float = 1e-2,
        load: bool = True,
        align_param_gather: bool = False,
        bucket_size: int = 50_000,
        lora: dict | Callable | None = None,
        ddp: dict | None = None,
        optimizer: Callable[[list[torch.nn.Module]], object] | None = None,
        **provider: object,
    ):
        self.folder = Path(folder)
        self._layout = dict(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, cp=cp)
        self._groups = megatron_cpu.parallel(**self._layout)
        self._groups.__enter__()
        try:
            fields = dict(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=distopt,
                overlap_grad_reduce=overlap,
                overlap_param_gather=overlap and distopt,
                align_param_gather=align_param_gather,
                bucket_size=bucket_size,  # several buckets even in a toy, or nothing would overlap
            )
            self.bridge, self.chunks = self.build(
                str(folder),
                load=load,
                lora=lora,
                ddp=fields | (ddp or {}),
                **megatron_names(self._layout),
                **provider,
            )
            self.optimizer = optimizer(self.chunks) if optimizer else _adam(self.chunks, lr)
            if provider.get("fp8_param"):  # masters are of the values before Bridge has loaded the checkpoint
                self.optimizer.reload_model_params()
            _wire(self.chunks, self.optimizer)
        except BaseException:
            self.close()
            raise
        self.task = Task(vocab=json.loads((self.folder / "config.json").read_text())["vocab_size"])
        self.steps = 0

    @staticmethod
    def build(folder: str, **how: object) -> tuple[object, list[torch.nn.Module]]:
        """The bridge of a checkpoint and this rank's chunks. `how`: of `build_chunks`."""
        bridge = megatron_cpu.import_bridge().from_hf_pretrained(folder)
        return bridge, build_chunks(bridge, **how)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Forget Megatron's process groups, so that another layout can follow in the same world."""
        if self._groups is not None:
            groups, self._groups = self._groups, None
            groups.__exit__(None, None, None)

    def ungroup(self) -> None:
        """Destroys Megatron's process groups, as frameworks do to free what NCCL holds while engines generate."""
        from megatron.core import parallel_state

        old = [parallel_state.get_pipeline_model_parallel_group(), parallel_state.get_tensor_model_parallel_group()]
        self.close()
        for group in old:
            dist.destroy_process_group(group)

    def regroup(self) -> None:
        """Makes them again, and gives them to the models, which Bridge 0.6 asks for them. Layers keep those that they were built with,
        so they do not train any more."""
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.utils import unwrap_model

        self._groups = megatron_cpu.parallel(**self._layout)
        self._groups.__enter__()
        for model in map(unwrap_model, self.chunks):
            if getattr(model, "pg_collection", None) is not None:
                model.pg_collection = ProcessGroupCollection.use_mpu_process_groups()

    # -- training ---------------------------------------------------------------------------------------------------

    def step(self) -> float:
        """One optimizer step. Returns the mean loss before it, the same on all ranks."""
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        batches = self.task.batches(self.steps, parallel_state.get_data_parallel_rank())
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        virtual = len(self.chunks) > 1
        losses = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=[iter(batches) for _ in self.chunks] if virtual else iter(batches),
            model=self.chunks if virtual else self.chunks[0],
            num_microbatches=self.task.micro_batches,
            seq_length=self.task.seq,
            micro_batch_size=self.task.micro_batch,
            forward_only=False,
        )
        updated, _, _ = self.optimizer.step()
        if not updated:
            raise RuntimeError("the optimizer skipped a step: gradients were not finite")
        self.steps += 1
        total = torch.tensor([sum(x["loss"] for x in losses), len(losses)], dtype=torch.float64)
        total = total.to(torch.cuda.current_device())
        dist.all_reduce(total)  # TP ranks hold equal losses, stages other than the last none: the mean is right
        return (total[0] / total[1]).item()

    # -- ground truth -----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """What Megatron's own training loop does before it saves or evaluates: gather the parameters for sure."""
        for chunk in self.chunks:
            if getattr(chunk, "use_forward_hook", False):
                chunk.disable_forward_pre_hook(param_sync=True)
                chunk.enable_forward_pre_hook()

    def exported(self) -> dict[str, torch.Tensor]:
        """Bridge's own export of what is trained now, on every rank: new conversion tasks, cloned CPU tensors."""
        return self._exported(True)

    def _exported(self, keep: bool) -> dict[str, torch.Tensor]:
        """keep: False for a rank that only takes part, and has no host memory for a whole model."""
        self.settle()
        tasks = self.bridge.get_conversion_tasks(self.chunks)
        stream = self.bridge.export_hf_weights(self.chunks, cpu=True, show_progress=False, conversion_tasks=tasks)
        with torch.no_grad():
            return {name: tensor.detach().clone().contiguous() for name, tensor in stream if keep}

    def export(self, folder: str | Path) -> None:
        """Write `exported()` as a checkpoint (config.json, model.safetensors) from rank 0; all ranks wait for it."""
        from safetensors.torch import save_file

        tensors, folder = self._exported(dist.get_rank() == 0), Path(folder)
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.folder / "config.json", folder / "config.json")
            rows = json.loads((folder / "config.json").read_text())["vocab_size"]
            for name in ("model.embed_tokens.weight", "lm_head.weight"):  # a padded vocabulary is exported padded
                if name in tensors:
                    tensors[name] = tensors[name][:rows].contiguous()
            save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
        dist.barrier()


def megatron_names(layout: dict) -> dict:
    """Parallel sizes under the names of Megatron's model configuration."""
    long = dict(
        tp="tensor_model", pp="pipeline_model", vpp="virtual_pipeline_model", ep="expert_model", etp="expert_tensor", cp="context"
    )  # fmt: skip
    return {f"{long[size]}_parallel_size": n for size, n in layout.items()}


def build_chunks(
    bridge, *, load: bool = True, ddp: dict | None = None, lora: dict | Callable | None = None, **provider: object
) -> list[torch.nn.Module]:
    """Model chunks of this rank, every feature that needs a GPU off. `ddp`: DistributedDataParallelConfig fields, or
    None for unwrapped chunks. `lora`: as in Trainer. Needs Megatron's process groups of the same sizes."""
    from megatron.core.distributed import DistributedDataParallelConfig

    if not megatron_cpu.has_transformer_engine():
        from examples.common import te_twin

        te_twin.install()
    in_fp8 = bool(provider.get("fp8_param"))
    p = bridge.to_megatron_provider(load_weights=load and not in_fp8)
    for off in _GPU_ONLY:
        if hasattr(p, off):
            setattr(p, off, False)
    for name, value in provider.items():
        setattr(p, name, value)
    # Megatron demands sequence parallel of MoE with tp > 1.
    p.sequence_parallel = bool(p.num_moe_experts) and p.tensor_model_parallel_size > 1
    p.pipeline_dtype = p.params_dtype
    p.cross_entropy_fusion_impl = "native"
    p.moe_token_dispatcher_type = "alltoall"
    if p.num_moe_experts and "moe_grouped_gemm" not in provider:
        p.moe_grouped_gemm = True
    p.finalize()
    if load and in_fp8:  # Bridge 0.3 writes to parameters in place, of which TransformerEngine's tell autograd
        p.register_pre_wrap_hook(torch.no_grad()(lambda chunks: bridge.load_hf_weights(chunks) or chunks))
    if lora is not None:
        from megatron.bridge.peft.lora import LoRA

        peft = lora() if callable(lora) else LoRA(**lora)
        p.register_pre_wrap_hook(lambda chunks: peft(chunks, training=True))  # after the checkpoint is loaded
    return p.provide_distributed_model(
        ddp_config=DistributedDataParallelConfig(**ddp) if ddp else None,
        wrap_with_ddp=bool(ddp),
        use_cpu_initialization=not torch.cuda.is_available(),
        data_parallel_random_init=False,
        bf16=p.params_dtype == torch.bfloat16,
    )


_GPU_ONLY = (
    "gradient_accumulation_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "apply_rope_fusion",
    "persist_layer_norm",
    "cross_entropy_loss_fusion",
    "moe_permute_fusion",
    "moe_shared_expert_overlap",
    "moe_router_fusion",
    "async_tensor_model_parallel_allreduce",
    "batch_p2p_comm",
    "overlap_p2p_comm",
)


def _adam(chunks: list[torch.nn.Module], lr: float):
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.utils import get_model_config

    cfg, ddp = get_model_config(chunks[0]), chunks[0].ddp_config
    config = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        weight_decay=0.0,
        clip_grad=1.0,
        bf16=cfg.bf16,
        params_dtype=cfg.params_dtype,
        use_distributed_optimizer=ddp.use_distributed_optimizer,
        overlap_param_gather=ddp.overlap_param_gather,
    )
    return get_megatron_optimizer(config, chunks)


def _wire(chunks: list[torch.nn.Module], optimizer) -> None:
    """Connects them as Megatron's own training loop does."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.utils import get_model_config

    cfg, ddp = get_model_config(chunks[0]), chunks[0].ddp_config
    cfg.finalize_model_grads_func = finalize_model_grads
    cfg.grad_scale_func = optimizer.scale_loss
    each = lambda functions: functions if len(functions) > 1 else functions[0]  # noqa: E731
    if ddp.overlap_grad_reduce:
        cfg.no_sync_func = each([chunk.no_sync for chunk in chunks])
    if ddp.overlap_param_gather and ddp.align_param_gather:
        cfg.param_sync_func = each([chunk.start_param_sync for chunk in chunks])


def _forward(batches, model):
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    tokens = next(batches).to(torch.cuda.current_device())
    seq = tokens.shape[1] - 1
    batch = dict(
        tokens=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        positions=torch.arange(seq, device=tokens.device).repeat(tokens.shape[0], 1),
        attention_mask=torch.ones(seq, seq, device=tokens.device).tril()[None, None] < 0.5,
    )
    newer = "is_hybrid_cp" in signature(get_batch_on_this_cp_rank).parameters  # Megatron-Core 0.19
    group = parallel_state.get_context_parallel_group()
    mine = get_batch_on_this_cp_rank(batch, cp_group=group, **(dict(is_hybrid_cp=False) if newer else {}))
    out = model(mine["tokens"], mine["positions"], mine["attention_mask"], labels=mine["labels"])
    ranks = (
        parallel_state.get_context_parallel_world_size()
    )  # the schedule multiplies by it: it wants this rank's share
    return out, lambda losses: (losses.mean() / ranks, {"loss": losses.detach().float().mean()})
