"""SkyRL 0.3.0: the weight transfer strategy of xfer, by which SkyRL's policy workers refit its vLLM servers.

    class XferPolicyWorker(RefitByXfer, FSDPPolicyWorkerBase): ...

    class XferTrainer(RayPPOTrainer):
        def build_models(self, policy, critic, ref):
            super().build_models(ray.remote(num_gpus=1)(XferPolicyWorker), critic, ref)

    generator.inference_engine.engine_init_kwargs.weight_transfer_config.backend=xfer

SkyRL chooses a `WeightTransferStrategy` by a function with a fixed set of answers, so `RefitByXfer` replaces that function while the
worker's own `init_weight_sync_state` runs. All else is SkyRL's interface: `create_init_info` carries rank 0's invitation to all ranks, and
`send_chunks` refits in place of sending. It does not begin the iterator of whole tensors that it gets, so no rank gathers.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import msgspec
import ray
import torch
from skyrl.backends.skyrl_train import weight_sync
from skyrl.backends.skyrl_train.weight_sync import (
    WeightChunk,
    WeightSyncInitInfo,
    WeightTransferSender,
    WeightTransferStrategy,
)

import xfer
from xfer.errors import Unsupported, XferError
from xfer.integrations.common import Invitation, LazySession, make_invitation
from xfer.trainers.dtensor import checkpoint_name

if TYPE_CHECKING:
    from xfer.participants.trainer import Source


@dataclass
class SkyRLInitInfo(WeightSyncInitInfo):
    """The init info that SkyRL passes from `create_init_info` to `create_sender` and to its client of the servers.

    Attributes:
        invitation: Where the job's processes meet.
    """

    invitation: Invitation

    def for_servers(self, world_size_per_server: int, num_servers: int, dp_size: int = 1) -> list[SkyRLInitInfo]:
        """Return no payloads: xfer's own controllers initialise the servers when the session connects."""
        return []


_calls = itertools.count()
"""Numbers of calls, equal on all ranks."""


class XferTransferStrategy(WeightTransferStrategy):
    """SkyRL's factory of senders, with xfer behind it."""

    @staticmethod
    def create_init_info(ie_cfg: Any, inference_world_size: int | None = None, **_: Any) -> SkyRLInitInfo:
        """Return the same invitation on all ranks. Every rank calls it, as SkyRL does: others read rank 0's in the group's store.

        Raises:
            Unsupported: xfer cannot refit servers with this configuration.
            XferError: Rank 0 failed.
        """
        if ie_cfg.data_parallel_size > 1 or ie_cfg.enable_pd:
            raise Unsupported(
                "inference servers that SkyRL cannot refit by xfer",
                [
                    f"data_parallel_size={ie_cfg.data_parallel_size}, enable_pd={ie_cfg.enable_pd}: use more engines (num_engines) in "
                    "place of data-parallel ranks, without prefill/decode disaggregation"
                ],
            )
        store, key = torch.distributed.distributed_c10d._get_default_store(), f"xfer/skyrl/{next(_calls)}"
        if torch.distributed.get_rank() == 0:
            said = ""
            try:
                said = msgspec.json.encode(make_invitation(ray.util.get_node_ip_address())).decode()
            finally:
                store.set(key, said)
        if not (answer := store.get(key)):  # waits as long as the group's timeout
            raise XferError("rank 0 found no address and port for the rendezvous", ["its own error says why"])
        return SkyRLInitInfo(override_existing_receiver=False, invitation=msgspec.json.decode(answer, type=Invitation))

    @staticmethod
    def create_sender(init_info: WeightSyncInitInfo, inference_client: Any) -> XferWeightTransferSender:
        """Return the sender of this rank. It connects at its first use, when SkyRL has the weights in place."""
        if not isinstance(init_info, SkyRLInitInfo):
            raise Unsupported(f"init info of {type(init_info).__name__}", ["pass that of create_init_info()"])
        return XferWeightTransferSender(init_info.invitation, inference_client.server_urls)

    @staticmethod
    def get_vllm_transfer_engine() -> type:
        """Return the engine of vLLM's workers that receives."""
        from xfer.engines.vllm_worker import XferWeightTransferEngine

        return XferWeightTransferEngine


class XferWeightTransferSender(WeightTransferSender):
    """One policy rank's side.

    Args:
        invitation: Where the job's processes meet.
        servers: URLs of the servers, a replica each. Trainer rank 0 controls them.

    Attributes:
        report: The report of the last refit; None before the first.
    """

    def __init__(self, invitation: Invitation, servers: Iterable[str]):
        self.report: xfer.RefitReport | None = None
        self._invitation, self._servers = invitation, list(servers)
        self._link: LazySession | None = None
        self._verify = False

    def bind(self, trainer: Callable[[], Source], options: Mapping[str, Any], verify: bool) -> None:
        """Set the source of the weights. SkyRL passes a sender no model, so `RefitByXfer` calls this.

        Args:
            trainer: Makes the adapter of this rank's weights.
            options: Further arguments of `xfer.connect`.
            verify: As for `Session.refit`.
        """
        given = {**options, "engines": self._servers}
        self._link, self._verify = (
            LazySession(trainer, self._invitation.rendezvous, self._invitation.token, given),
            verify,
        )

    async def send_chunks(self, chunks: Iterable[WeightChunk], weight_metadata: dict[str, list] | None = None) -> None:
        """Refit the servers. Every rank calls it. Servers that SkyRL has paused stay paused.

        Args:
            chunks: SkyRL's iterator of whole tensors. It is not begun.
            weight_metadata: Not used.
        """
        if self._link is None:
            raise Unsupported("a sender of no policy worker", ["derive the worker's class from RefitByXfer, too"])
        link = self._link
        self.report = await asyncio.to_thread(lambda: link.session.refit(verify=self._verify))

    def teardown(self) -> None:
        """Close this rank's session. The servers go on with their weights."""
        if self._link is not None:
            self._link.close()


class RefitByXfer:
    """Makes one of SkyRL's policy workers refit by xfer. Name it before SkyRL's class among the bases.

    Attributes:
        xfer_verify: As for `Session.refit`.
        xfer_connect: Further arguments of `xfer.connect`. By default `route` allows every cast (`narrow=["*"]`), as SkyRL's own
            senders do: FSDP trains fp32 weights that vLLM serves in bf16.
    """

    xfer_verify: ClassVar[bool] = False
    xfer_connect: ClassVar[Mapping[str, Any]] = {}
    _weight_transfer_sender: Any

    async def init_weight_sync_state(self, inference_engine_client: Any, inference_engine_cfg: Any) -> None:
        """Do what SkyRL's worker does here, with xfer's strategy. Every rank calls it, once."""
        with mock.patch.object(weight_sync, "get_transfer_strategy_cls", _strategy):
            await super().init_weight_sync_state(inference_engine_client, inference_engine_cfg)  # type: ignore[misc]
        self._weight_transfer_sender.bind(partial(trainer_of, self), self.xfer_connect, self.xfer_verify)


def _strategy(weight_sync_backend: str, colocate_all: bool) -> type[WeightTransferStrategy]:
    if colocate_all:
        raise Unsupported(
            "trainer.placement.colocate_all=true with SkyRL's workers",
            ["set it to false; SkyRL puts servers to sleep around the sync, which this adapter does not follow"],
        )
    return XferTransferStrategy


def trainer_of(worker: Any) -> Source:
    """Return the adapter of the weights that a policy worker's own extractor would send.

    Args:
        worker: Has `weight_extractor`, an `FSDPWeightExtractor` or a `MegatronWeightExtractor` of SkyRL.
    """
    extractor = worker.weight_extractor
    if hasattr(extractor, "bridge"):
        return xfer.MegatronTrainer(extractor.actor_module, extractor.bridge)
    prefix = extractor.weight_prefix
    return xfer.TensorTrainer(extractor.model, rename=lambda name: prefix + checkpoint_name(name))
