"""NeMo-RL at commit 7ea279a (August 2026, between 0.6 and 0.8): a `WeightSynchronizer`, by which its policy refits its vLLM workers.

    policy, policy_generation, ... = setup(...)
    policy_generation.weight_synchronizer = XferWeightSynchronizer(policy, policy_generation)
    policy_generation.weight_synchronizer.init_communicator()
    grpo_train(policy, policy_generation, ...)

    ++policy.generation.vllm_kwargs.weight_transfer_config.backend=xfer

NeMo-RL's factory has a fixed set of synchronizers, but its loops use the one that `policy_generation` holds. This one runs small
functions in the actors of NeMo-RL's worker groups, by Ray's own `__ray_call__`: each policy worker connects as a trainer rank, and
the first worker of each vLLM puts its engine under xfer's control. No worker's class is changed, and no rank gathers. xfer must be
installed in the environments of both kinds of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from nemo_rl.weight_sync.interfaces import WeightSynchronizer

import xfer
from xfer.api import DEADLINE_S
from xfer.errors import Unsupported, XferError
from xfer.integrations.common import Invitation, LazySession, make_invitation

if TYPE_CHECKING:
    from xfer.participants.trainer import Source


class XferWeightSynchronizer(WeightSynchronizer):
    """The driver's side.

    Args:
        policy: NeMo-RL's `Policy`, on DTensor or Megatron workers.
        generation: NeMo-RL's `VllmGeneration`, on GPUs of its own.
        verify: As for `Session.refit`.
        keep: As for `xfer.serve`.
        deadline_s: Seconds for connecting, and for each refit.
        connect: Further arguments of `xfer.connect`. By default `route` allows every cast (`narrow=["*"]`), as NeMo-RL's own
            synchronizers do.

    Attributes:
        report: Trainer rank 0's report of the last refit; None before the first.

    Raises:
        Unsupported: xfer cannot refit a generation backend with this configuration.
    """

    def __init__(
        self,
        policy: Any,
        generation: Any,
        *,
        verify: bool = False,
        keep: Iterable[str] = (),
        deadline_s: float = DEADLINE_S,
        connect: Mapping[str, Any] | None = None,
    ):
        wrong = []
        if (backend := generation.cfg["backend"]) != "vllm":
            wrong.append(f'policy.generation.backend={backend!r}: use "vllm"')
        if generation.cfg["colocated"]["enabled"]:
            wrong.append("policy.generation.colocated.enabled=true: give generation GPUs of its own")
        if wrong:
            raise Unsupported("a generation of NeMo-RL that cannot be refitted by xfer", wrong)
        group = generation.worker_group
        self._trainers = list(policy.worker_group.workers)
        self._engines = [group.workers[group.get_dp_leader_worker_idx(i)] for i in range(group.dp_size)]
        self._verify, self._keep, self._deadline_s = verify, tuple(keep), deadline_s
        self._connect = {"deadline_s": deadline_s, **(connect or {}), "replicas": len(self._engines)}
        self._invitation: Invitation | None = None
        self._stale = True
        self.report: xfer.RefitReport | None = None

    def init_communicator(self) -> None:
        """Choose where to meet, and put each engine under xfer's control. Trainers connect in the first `sync_weights`."""
        invitation: Invitation = self._in(self._trainers[:1], _invite)[0]
        serves = [partial(_serve, invitation, i, self._keep, self._deadline_s) for i in range(len(self._engines))]
        ray.get([e.__ray_call__.remote(serve) for e, serve in zip(self._engines, serves, strict=True)])
        self._invitation = invitation

    def sync_weights(self, *, timer: Any = None, kv_scales: dict[str, float] | None = None) -> dict[str, float]:
        """Refit all engines.

        Args:
            timer: NeMo-RL's `Timer`. It times the refit as the phase that NeMo-RL's own synchronizers have.
            kv_scales: Must be None.

        Returns:
            xfer's metrics on trainer rank 0.

        Raises:
            XferError: The refit failed on all ranks. Engines serve the old version, or are locked.
        """
        if kv_scales is not None:
            raise Unsupported("kv_scales, scales of an FP8 KV cache", ["use another synchronizer of NeMo-RL"])
        if self._invitation is None:
            raise XferError("sync_weights() before init_communicator()", ["call init_communicator() once"])
        self._stale = True
        phase = timer.time("prepare_for_generation/transfer_and_update_weights") if timer is not None else nullcontext()
        with phase:
            self.report = self._in(self._trainers, partial(_refit, self._invitation, self._connect, self._verify))[0]
        self._stale = False
        return self.report.flatten()

    @property
    def is_stale(self) -> bool:
        """Whether the engines lack the weights of the last `sync_weights`: before the first one, and after one that failed."""
        return self._stale

    def shutdown(self) -> None:
        """Close all sessions. Engines go on with their weights."""
        self._in([*self._trainers, *self._engines], _close)

    @staticmethod
    def _in(actors: Iterable[Any], function: Callable[[Any], Any]) -> list[Any]:
        """Call the function in all actors at the same time, each with its own object. Returns the results in order."""
        return ray.get([a.__ray_call__.remote(function) for a in actors])


def trainer_of(worker: Any) -> Source:
    """Return the adapter of the weights of one of NeMo-RL's policy workers.

    Raises:
        Unsupported: It trains adapters on DTensors, or keeps its weights on the host.
    """
    if getattr(worker, "megatron_bridge", None) is not None:
        return xfer.MegatronTrainer(worker.model, worker.megatron_bridge)
    wrong = [
        f"{name}=true: {instead}"
        for name, attribute, instead in (
            ("dtensor_cfg.lora_cfg.enabled", "lora_enabled", "train all weights"),
            ("dtensor_cfg.cpu_offload", "cpu_offload", "keep the weights on the GPUs"),
        )
        if getattr(worker, attribute, False)
    ]
    if wrong:
        raise Unsupported("a DTensor policy worker of NeMo-RL that cannot refit by xfer", wrong)
    return xfer.TensorTrainer(worker.model)


_LINK = "_xfer_link"
"""Attribute of an actor's object that holds this actor's session or controller."""


def _invite(worker: Any) -> Invitation:
    return make_invitation(ray.util.get_node_ip_address())


def _serve(invitation: Invitation, replica: int, keep: tuple[str, ...], deadline_s: float, worker: Any) -> None:
    """Runs in a vLLM worker's actor. An `AsyncLLM` reads its outputs in a task of its event loop."""
    reads = getattr(worker.llm, "output_handler", None)
    loop = {} if reads is None else {"loop": reads.get_loop()}
    made = xfer.serve(
        worker.llm, invitation.rendezvous, invitation.token, replica=replica, keep=keep, deadline_s=deadline_s, **loop
    )
    setattr(worker, _LINK, made)


def _refit(invitation: Invitation, options: Mapping[str, Any], verify: bool, worker: Any) -> xfer.RefitReport:
    """Runs in a policy worker's actor."""
    link = getattr(worker, _LINK, None)
    if link is None:
        link = LazySession(partial(trainer_of, worker), invitation.rendezvous, invitation.token, options)
        setattr(worker, _LINK, link)
    return link.session.refit(verify=verify)


def _close(worker: Any) -> None:
    if (link := getattr(worker, _LINK, None)) is not None:
        link.close()
        setattr(worker, _LINK, None)
