"""verl 0.9.1: the checkpoint engine `xfer`, by which verl's trainers refit its vLLM servers.

    actor_rollout_ref.rollout.checkpoint_engine.backend=xfer
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=xfer.integrations.verl
    +actor_rollout_ref.rollout.engine_kwargs.vllm.weight_transfer_config.backend=xfer

verl imports this module in the driver, the trainers and the rollout workers. A checkpoint engine there is a pipe for whole tensors:
`send_weights` on the trainers, `receive_weights` beside each GPU of a server. Here nothing goes through the pipe. Each trainer connects
as a rank of xfer, and the first worker of each server calls vLLM's weight-transfer methods through the server's Ray actor. Trainers:
FSDP2 (`actor.strategy=fsdp2`), and Megatron with Megatron-Bridge (`vanilla_mbridge=False`) or mbridge.

The rendezvous and a token made for the job travel in verl's own `prepare` and `init_process_group` calls. When replicas are added or
removed, all sides connect anew.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Iterable
from dataclasses import asdict, dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import ray
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.utils.device import get_device_name
from verl.utils.model import convert_weight_keys

import xfer
from xfer.api import DEADLINE_S
from xfer.errors import Unsupported, XferError
from xfer.integrations.common import ANY_CAST, Invitation, make_invitation
from xfer.trainers.dtensor import checkpoint_name

if TYPE_CHECKING:
    import torch

    from xfer.api import Session
    from xfer.participants.trainer import Source


@dataclass(frozen=True)
class VerlJob(Invitation):
    """Where the ranks of one job meet, and which replicas take part, by verl's numbers."""

    replicas: tuple[int, ...]


@CheckpointEngineRegistry.register("xfer")
class XferCheckpointEngine(CheckpointEngine):
    """One worker's side. Keyword arguments come from `checkpoint_engine.engine_kwargs.xfer`.

    Args:
        bucket_size: Not used: tensors are not bucketed.
        is_master: Whether this is trainer rank 0, at whose address the others meet.
        verify: As for `Session.refit`.
        keep: As for `xfer.serve`.
        deadline_s: Seconds for connecting, and for each refit.
        connect: Further arguments of `xfer.connect`. By default `route` allows every cast (`narrow=["*"]`), as verl's own engines
            do: FSDP trains fp32 weights that vLLM serves in bf16.
    """

    wire_format = "delta_flush"
    """verl's name for updates that may have nothing to load. verl's adapter then only notes the step."""

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        verify: bool = False,
        keep: Iterable[str] = (),
        deadline_s: float = DEADLINE_S,
        connect: dict[str, Any] | None = None,
    ):
        self.worker = _constructing_worker()
        self.is_master, self.verify, self.keep, self.deadline_s = is_master, verify, tuple(keep), deadline_s
        self.connect = {"route": ANY_CAST, **(connect or {})}
        self.job: VerlJob | None = None
        self.session: Session | None = None
        self.controller: xfer.Controller | None = None
        self._invitation: dict[str, str] | None = None

    def prepare(self) -> dict[str, Any]:
        """Return trainer rank 0's address and token on that rank, nothing on other trainers. On a rollout worker return `replica`: the
        replica's number on its first worker, else None."""
        adapter = getattr(self.worker, "server_adapter", None)
        if adapter is not None:
            return {"replica": adapter.replica_rank if adapter.rollout_rank == 0 else None}
        if self.is_master and self._invitation is None:
            self._invitation = asdict(make_invitation(ray.util.get_node_ip_address()))
        return self._invitation or {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Tell every worker where to meet, and the first worker of each replica which one it serves."""
        invitation = next(m for m in metadata[:actor_wg_world_size] if m)
        firsts = [m["replica"] for m in metadata[actor_wg_world_size:]]
        job = VerlJob(**invitation, replicas=tuple(sorted(r for r in firsts if r is not None)))
        trainers: dict[str, list[Any]] = {
            "job": [job] * actor_wg_world_size,
            "serves": [None] * actor_wg_world_size,
        }
        return trainers, {"job": [job] * rollout_world_size, "serves": firsts}

    def init_process_group(self, job: VerlJob, serves: int | None) -> None:
        """Join the job, unless this worker is in it already. Trainers connect in `send_weights`, when weights are in place."""
        if job == self.job:
            return
        for link in (self.session, self.controller):
            if link is not None:
                link.close()
        self.job, self.session, self.controller = job, None, None
        if serves is not None:
            self.controller = xfer.serve(
                VerlServer(self.worker.server_adapter),
                job.rendezvous,
                job.token,
                replica=job.replicas.index(serves),
                keep=self.keep,
                deadline_s=self.deadline_s,
            )

    def finalize(self) -> None:
        """Do nothing: sessions stay open between refits."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Refit the servers. `weights`, verl's generator of whole tensors, is not begun.

        Args:
            weights: Ignored.
            global_steps: Label of the version, if it is higher than the last one.

        Returns:
            xfer's metrics on trainer rank 0.
        """
        report = await asyncio.to_thread(self._refit, global_steps)
        return report.flatten() if self.is_master else {}

    def _refit(self, step: int | None) -> xfer.RefitReport:
        engine = getattr(self.worker, "actor", self.worker).engine
        offloaded = engine.is_param_offload_enabled
        if offloaded:
            engine.to(get_device_name(), model=True, optimizer=False, grad=False)
        try:
            session = self._connected(engine)
            last = session.version
            label = step if step is not None and (last is None or step > int(last)) else None
            return session.refit(version=label, verify=self.verify)
        finally:
            if offloaded:
                if self.session is not None:
                    self.session.release()
                engine.to("cpu", model=True, optimizer=False, grad=False)

    def _connected(self, engine: Any) -> Session:
        if self.job is None:
            raise XferError("send_weights() before init_process_group()", ["verl's manager calls both"])
        if self.session is None:
            options = {"deadline_s": self.deadline_s, **self.connect, "replicas": len(self.job.replicas)}
            self.session = xfer.connect(trainer_of(engine), self.job.rendezvous, self.job.token, **options)
        return self.session

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[Any, None]:
        """Yield nothing: the trainers' refits write the workers' memory, and they return when the servers serve the version."""
        return
        yield


def trainer_of(engine: Any) -> Source:
    """Return the adapter of one of verl's training engines.

    Raises:
        Unsupported: It trains adapters (LoRA), which verl would send apart.
    """
    if isinstance(engine.module, list):
        return xfer.MegatronTrainer(engine.module, engine.bridge)
    inner: torch.nn.Module = getattr(engine.module, "_fsdp_wrapped_module", engine.module)
    if hasattr(inner, "peft_config"):
        raise Unsupported("verl's FSDP engine with LoRA", ["use another checkpoint engine, or train all weights"])
    return xfer.TensorTrainer(
        engine.module, rename=lambda name: next(iter(convert_weight_keys({checkpoint_name(name): None}, inner)))
    )


class VerlServer:
    """vLLM's weight-transfer calls, by names that `xfer.serve` knows, through the Ray actor of a server of verl.

    verl's manager pauses all servers before a sync of weights and resumes them afterwards; so the engine always counts as paused by
    somebody else.

    Args:
        adapter: The `ServerAdapter` of the replica's first worker.

    Raises:
        Unsupported: A call that the server forwards would not reach all workers, or the server is not a vLLM.
    """

    def __init__(self, adapter: Any):
        config = adapter.config
        if config.name != "vllm" or config.data_parallel_size > 1 or config.disaggregation.enabled:
            raise Unsupported(
                "a rollout server that verl cannot refit by xfer",
                [
                    f"rollout.name={config.name}, data_parallel_size={config.data_parallel_size}, disaggregation "
                    f"{config.disaggregation.enabled}: use vllm, with more replicas in place of data-parallel ranks"
                ],
            )
        self._workers = config.tensor_model_parallel_size * config.pipeline_model_parallel_size
        adapter._ensure_server_handle()
        self._actor = adapter.server_handle

    def _rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> None:
        ray.get(self._actor.collective_rpc.remote(method, kwargs=kwargs or {}))

    def get_world_size(self) -> int:
        return self._workers

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        self._rpc("init_weight_transfer_engine", request)

    def start_weight_update(self) -> None:
        self._rpc("start_weight_update")

    def update_weights(self, request: dict[str, Any]) -> None:
        self._rpc("update_weights", request)

    def finish_weight_update(self) -> None:
        self._rpc("finish_weight_update")

    def is_paused(self) -> bool:
        return True

    def pause_generation(self) -> None:
        ray.get(self._actor.abort_all_requests.remote())

    def resume_generation(self) -> None:
        ray.get(self._actor.resume_generation.remote())

    def reset_prefix_cache(self) -> None:
        ray.get(self._actor.clear_kv_cache.remote())


def _constructing_worker() -> Any:
    """Return verl's worker whose method is constructing a checkpoint engine.

    verl passes a checkpoint engine neither the worker nor its model. Its constructor runs in a method of the worker, so the worker is
    the first object of that class up the stack.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if isinstance(me := frame.f_locals.get("self"), Worker):
            return me
        frame = frame.f_back
    raise Unsupported("a checkpoint engine that no worker of verl constructs", ["xfer reads the worker's model"])
