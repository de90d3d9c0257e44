"""xfer's gather as the source of vLLM's own weight transfer backends, so that the trainer's side can be adopted alone: the
engine is an unmodified vLLM with `weight_transfer_config={"backend": "nccl"}` (or "ipc").

    source = xfer.trainers.weight_source.weight_source(xfer.MegatronTrainer(chunks, bridge))
    engine = WeightTransferTrainerFactory.trainer_init(NCCLTrainerInitInfo(...), client=client, source=source)
    engine.send_weights()                                     # on every trainer rank, after every optimizer step

What is gained over vLLM's own sources: buckets are gathered together, conversion tasks are checked on all ranks at every
sync, and what is declared is what comes. What is not: versions, commit, coverage and deadlines are xfer's session's and
vLLM's backends have none. Needs vLLM where the trainer runs, 0.26 or later: before that its trainers hand over bare
iterators, and there is no `WeightSource`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from xfer.errors import Unsupported
from xfer.packed.plan import BUCKET_BYTES
from xfer.packed.source import PackedSource, packed_source


def weight_source(trainer: object, bucket_bytes: int = BUCKET_BYTES):
    """A `WeightSource` of vLLM over `trainer` (MegatronTrainer, TensorTrainer or a packed.source.Stream).

    Every trainer rank makes one and iterates it in step; `metadata` is collective too. On ranks other than 0 a
    TensorTrainer's tensors are None, which the nccl backend never looks at; ipc, which needs them, is for Megatron only.
    Unsupported where the vLLM of this environment has no such sources.
    """
    try:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
    except ImportError as e:
        raise Unsupported(
            "weight_source() needs vLLM 0.26 or later in the trainer's environment",
            [f"{e}", "install it there, or connect(route=xfer.Packed()), which needs no vLLM beside the trainer"],
        ) from e

    class XferSource(WeightSource):
        def __init__(self, source: PackedSource):
            self.source = source
            self._read = False

        def metadata(self) -> list[ParamMeta]:
            specs = [t for g in self._begin().groups for t in g.tensors]
            return [ParamMeta(s.name, getattr(torch, s.dtype), s.shape) for s in specs]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            plan = self._begin()
            with torch.no_grad():
                for group in plan.groups:
                    yield from self.source.tensors(group)

        def _begin(self):
            """Parameters made whole, and what is stale rebuilt; twice in a row it costs two small collectives."""
            self.source.drain()
            if self.source.check() == "changed" or not self._read:
                self.source.read()
                self._read = True
            return self.source.begin()

    source = packed_source(trainer, bucket_bytes)
    if getattr(source.stream, "whole_everywhere", False):
        source.assemble(True)
    return XferSource(source)
