"""TRL 1.16: trainers with `use_vllm=True, vllm_mode="server"` refit their server by xfer.

    with xfer.integrations.trl.refits("tcp://10.0.0.1:29600"):
        trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, vllm_mode="server", ...))
    trainer.train()

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "xfer"}'

TRL gathers each parameter whole and sends it by NCCL from rank 0. Here every rank connects, and each byte goes from its shard to
the engine. All trainers of TRL that generate through `VLLMGeneration` work: GRPO, RLOO, distillation and others. TRL has no
registry for this class, so `refits` replaces one method of it, `_init_vllm`, until the block ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration, is_peft_model

import xfer
from xfer.errors import Unsupported
from xfer.integrations.common import LazySession

if TYPE_CHECKING:
    import torch


@contextmanager
def refits(
    rendezvous: str,
    token: str | None = None,
    *,
    tensors: Callable[[torch.nn.Module], Mapping[str, torch.Tensor]] | None = None,
    verify: bool = False,
    **options: Any,
) -> Iterator[None]:
    """Let trainers that are constructed in this block refit their vLLM server by xfer.

    Every rank enters it with equal arguments. The ranks connect in their first sync of weights.

    Args:
        rendezvous: As for `xfer.connect`: "tcp://HOST:PORT", where HOST is the address of trainer rank 0.
        token: As for `xfer.connect`. Default: $XFER_TOKEN.
        tensors: Maps the model to {checkpoint name: tensor or DTensor}. Default: its parameters, by TRL's own names. Needed
            where a parameter holds several checkpoint tensors, such as fused experts.
        verify: As for `Session.refit`.
        **options: Further arguments of `xfer.connect`. By default `route` allows every cast (`narrow=["*"]`), as TRL's own
            sync does: it often trains fp32 weights that the engine serves in bf16.

    Raises:
        Unsupported: A trainer in this block uses vllm_mode="colocate", DeepSpeed ZeRO-3 or FSDP1.
    """

    def init(generation: VLLMGeneration) -> None:
        _init(generation)
        of = partial(tensors, generation.model) if tensors else partial(named_tensors, generation)
        made = partial(xfer.TensorTrainer, of)
        link = LazySession(made, rendezvous, token, {**options, "engines": [_url(generation)]})
        generation.sync_weights = partial(_sync, generation, link, verify)
        generation.xfer = link

    with mock.patch.object(VLLMGeneration, "_init_vllm", init):
        yield


def named_tensors(generation: VLLMGeneration) -> dict[str, torch.Tensor]:
    """Return the model's parameters or their shards by checkpoint name, without those of adapters.

    TRL's own walk over an FSDP2 module names them. It gathers each parameter on the way, so it gets objects here that "gather" to
    the parameter itself.
    """
    model = generation.model
    named = [(name, _Ungathered(p)) for name, p in model.named_parameters()]
    with mock.patch.object(model, "named_parameters", lambda: named):
        return dict(generation._iter_fsdp2_params(model))


class _Ungathered:
    is_cpu = False

    def __init__(self, parameter: torch.Tensor):
        self._parameter = parameter

    def full_tensor(self) -> torch.Tensor:
        return self._parameter


def _init(generation: VLLMGeneration) -> None:
    """Replaces `VLLMGeneration._init_vllm`: the same for server mode, without an NCCL communicator."""
    wrong = []
    if generation.mode != "server":
        wrong.append(f'vllm_mode={generation.mode!r}: use "server"; TRL starts its colocated vLLM without xfer')
    if generation._dist.is_zero3:
        wrong.append("DeepSpeed ZeRO-3 keeps no shard that can be read in place: use FSDP2, or ZeRO-2")
    if generation._dist.fsdp_version == 1:
        wrong.append("FSDP1 flattens parameters before it cuts them: use FSDP2 (fsdp_version: 2)")
    if wrong:
        raise Unsupported("this trainer of TRL cannot refit by xfer", wrong)
    if generation.accelerator.is_main_process:
        generation.vllm_client = VLLMClient(
            base_url=_url(generation),
            group_port=generation.group_port,
            connection_timeout=generation.server_timeout,
        )
    generation.accelerator.wait_for_everyone()


def _url(generation: VLLMGeneration) -> str:
    return generation.server_base_url or f"http://{generation.server_host}:{generation.server_port}"


def _sync(generation: VLLMGeneration, link: LazySession, verify: bool) -> None:
    """Refit; every rank calls it in place of `sync_weights`. xfer resets the engine's caches by itself.

    With PEFT, adapters are merged in place for the time of the refit, as TRL does.
    """
    peft = is_peft_model(generation.model)
    if peft:
        generation.model.merge_adapter()
    try:
        link.session.refit(verify=verify)
    finally:
        if peft:
            generation.model.unmerge_adapter()
