"""The model that learns: Megatron-Core chunks that Bridge builds from a Hugging Face checkpoint, and Megatron's Adam.

Put your own in its place: the loop needs `chunks`, `bridge`, `optimizer` and, to save, `export`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

FUSED = (
    "gradient_accumulation_fusion", "bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion",
    "persist_layer_norm", "cross_entropy_loss_fusion", "moe_permute_fusion", "moe_router_fusion", "moe_shared_expert_overlap",
    "async_tensor_model_parallel_allreduce", "batch_p2p_comm", "overlap_p2p_comm",
)  # fmt: skip
"""Off, so that the loop runs wherever Megatron-Core does. Yours may be on: xfer reads what is there."""


class Policy:
    """`chunks`: this rank's, wrapped in Megatron's DDP; `bridge`: the AutoBridge that built them; `optimizer`: of the chunks.

    Parallel sizes as Megatron names them. bucket_size: parameters in one bucket of gradients. `provider`: more fields of Bridge's
    model provider, such as num_layers_in_last_pipeline_stage.
    """

    def __init__(
        self, folder: str | Path, *, tp: int, pp: int, ep: int = 1, etp: int | None = None, lr: float, bucket_size: int,
        **provider: int,
    ):  # fmt: skip
        from megatron.bridge import AutoBridge
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.utils import get_model_config

        self.folder = Path(folder)
        sizes = dict(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
        )
        parallel_state.initialize_model_parallel(**sizes)
        model_parallel_cuda_manual_seed(1234)

        self.bridge = AutoBridge.from_hf_pretrained(str(folder))
        p = self.bridge.to_megatron_provider(load_weights=True)
        for name, value in (sizes | {f: False for f in FUSED if hasattr(p, f)} | provider).items():
            setattr(p, name, value)
        p.sequence_parallel = bool(p.num_moe_experts) and tp > 1  # Megatron demands it
        p.pipeline_dtype = p.params_dtype
        p.cross_entropy_fusion_impl = "native"
        p.moe_token_dispatcher_type, p.moe_grouped_gemm = "alltoall", bool(p.num_moe_experts)
        p.finalize()
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True,
            bucket_size=bucket_size,
        )  # fmt: skip
        self.chunks: list[torch.nn.Module] = p.provide_distributed_model(
            ddp_config=ddp,
            use_cpu_initialization=not torch.cuda.is_available(),
            data_parallel_random_init=False,
            bf16=p.params_dtype == torch.bfloat16,
        )
        config = OptimizerConfig(
            optimizer="adam", lr=lr, weight_decay=0.0, clip_grad=1.0, bf16=p.params_dtype == torch.bfloat16,
            params_dtype=p.params_dtype, use_distributed_optimizer=True, overlap_param_gather=True,
        )  # fmt: skip
        self.optimizer = get_megatron_optimizer(config, self.chunks)
        model = get_model_config(self.chunks[0])
        model.finalize_model_grads_func, model.grad_scale_func = finalize_model_grads, self.optimizer.scale_loss
        no_sync = [chunk.no_sync for chunk in self.chunks]
        model.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def __enter__(self) -> Policy:
        return self

    def __exit__(self, *_) -> None:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()

    def export(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint from rank 0. Every rank calls it, and waits."""
        for chunk in self.chunks:  # gathers of the last step may not be finished
            chunk.disable_forward_pre_hook(param_sync=True)
            chunk.enable_forward_pre_hook()
        chief = dist.get_rank() == 0
        stream = self.bridge.export_hf_weights(self.chunks, cpu=True, show_progress=False)
        with torch.no_grad():
            tensors = {name: tensor.detach().clone().contiguous() for name, tensor in stream if chief}
        if chief:
            from safetensors.torch import save_file

            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.folder / "config.json", folder / "config.json")
            rows = json.loads((folder / "config.json").read_text())["vocab_size"]
            for name in {
                "model.embed_tokens.weight",
                "lm_head.weight",
            } & tensors.keys():  # padded for tensor parallelism
                tensors[name] = tensors[name][:rows].contiguous()
            save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
        dist.barrier()
