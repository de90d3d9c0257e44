"""xfer's gather as the source of vLLM's own weight transfer backends, so that the trainer's side can be adopted alone: the
engine is an unmodified vLLM with `weight_transfer_config={"backend": "nccl"}` (or "ipc").

    source = xfer.trainers.weight_source.weight_source(xfer.MegatronTrainer(chunks, bridge))
    engine = WeightTransferTrainerFactory.trainer_init(NCCLTrainerInitInfo(...), client=client, source=source)
    engine.send_weights()                                     # on every trainer rank, after every optimizer step

Over vLLM's own sources this adds: buckets are gathered together, conversion tasks are checked on all ranks at every sync,
and the tensors match their declaration. Versions, commit, coverage and deadlines belong to xfer's session; vLLM's
backends have none. vLLM 0.26 or later must be installed where the trainer runs: earlier versions have no `WeightSource`. vLLM 0.33
changed the methods of a source: `metadata` is a property and is read once, and `iter_full` replaces iteration.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch

from xfer.errors import Unsupported
from xfer.packed.plan import BUCKET_BYTES
from xfer.packed.source import PackedSource, packed_source


def weight_source(trainer: object, bucket_bytes: int = BUCKET_BYTES):
    """Return a `WeightSource` of vLLM.

    Every trainer rank makes one, and all iterate it together; `metadata` is collective too. On ranks other than 0 a
    TensorTrainer's tensors are None. The nccl backend never reads them; the ipc backend does, so it works with Megatron only.

    Args:
        trainer: A MegatronTrainer, a TensorTrainer or a packed.source.WeightStream.
        bucket_bytes: Bytes of a bucket.

    Raises:
        Unsupported: The installed vLLM has no such sources.
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

        def _metadata(self) -> list[ParamMeta]:
            specs = [t for g in self._begin().groups for t in g.tensors]
            return [ParamMeta(s.name, getattr(torch, s.dtype), s.shape) for s in specs]

        metadata = cached_property(_metadata) if hasattr(WeightSource, "iter_full") else _metadata

        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            plan = self._begin()
            with torch.no_grad():
                for group in plan.groups:
                    yield from self.source.tensors(group)

        __iter__ = iter_full  # before vLLM 0.33

        def _begin(self):
            """Finish gathers and rebuild stale tasks. A second call in a row costs two small collectives."""
            self.source.drain()
            if self.source.check() == "changed" or not self._read:
                self.source.read()
                self._read = True
            return self.source.begin()

    source = packed_source(trainer, bucket_bytes)
    if getattr(source.stream, "whole_everywhere", False):
        source.assemble(True)
    return XferSource(source)
