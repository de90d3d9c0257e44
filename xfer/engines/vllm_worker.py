"""xfer inside a vLLM worker: the weight-transfer engine that vLLM creates and calls, one per worker.

It only translates vLLM's calls to those of a WorkerSession; vllm_layout.py reads layouts, and the session moves bytes
and receives decisions. For vLLM, one refit is start_weight_update, update_weights (which blocks until the session has a
decision) and finish_weight_update.

No call raises once the engine is connected. vLLM's executor reads the workers' replies in rank order and stops at the
first failure; the replies of later workers stay in their queues, and every later call gets the reply to the call before
it. Errors therefore use xfer's own channel, where each names its worker, and vLLM sees calls that succeed.
"""

from __future__ import annotations

import logging
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from xfer.engines.vllm_layout import EngineModel
from xfer.tested import untested_engine

if TYPE_CHECKING:
    from xfer.participants.worker import WorkerSession

logger = logging.getLogger("xfer")


@dataclass
class XferInitInfo(WeightTransferInitInfo):
    """Arguments of a controller's `init`. `token` authenticates the worker and is never logged."""

    rendezvous: str
    token: str = field(repr=False)
    replica: int = 0
    workers: int = 0  # number of workers of the replica, over all data-parallel ranks; 0: as vLLM's configuration says
    deadline_s: float = 300.0
    keep: list[str] = field(default_factory=list)  # globs over the engine's own tensor names
    drop: list[str] = field(default_factory=list)  # globs over checkpoint names that this engine need not take


@dataclass
class XferUpdateInfo(WeightTransferUpdateInfo):
    """Arguments of a controller's `update`: the number of the attempt, and its deadline in seconds."""

    attempt: int
    deadline_s: float


class XferWeightTransferEngine(WeightTransferEngine[XferInitInfo, XferUpdateInfo]):
    init_info_cls = XferInitInfo
    update_info_cls = XferUpdateInfo
    supports_draft_weight_update = True
    """The worker gets its drafter in one empty draft update, which a controller opens and finishes before it connects. Later
    refits write both models in ordinary updates."""

    def __init__(self, config, vllm_config, device, model):
        super().__init__(config, vllm_config, device, model)
        self.session: WorkerSession | None = None
        self.layout: EngineModel | None = None
        self.session_open = False  # vLLM's own update session; a new controller learns this when the worker joins
        self.draft: torch.nn.Module | None = None
        self.workers = 0  # number of workers of the replica, as its controller counts them

    def set_weight_update_target(self, model, model_config) -> None:
        super().set_weight_update_target(model, model_config)
        self.draft = model

    def init_transfer_engine(self, init_info: XferInitInfo) -> None:
        """Join the session. The layout is read later, when the session has the trainers' catalog."""
        self._quietly("join", self._join, init_info)

    def start_weight_update(self) -> None:
        self.session_open = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # Overridden because the base class raises on a malformed dict and synchronizes the device once more, which the
        # session has already done.
        self._quietly("update", lambda: self.receive_weights(self.parse_update_info(update_info)))

    def receive_weights(self, update_info: XferUpdateInfo) -> None:
        if self.session is None:
            logger.error("xfer: update before init; nothing was received")
            return
        self._quietly("receive", self.session.receive, update_info.attempt, update_info.deadline_s)

    def finish_weight_update(self) -> None:
        self.session_open = False

    def shutdown(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            self._quietly("close", session.close)

    @staticmethod
    def trainer_send_weights(iterator, trainer_args) -> None:
        """Raise: vLLM 0.25 requires a trainer's side of every engine, and xfer's is `xfer.connect`."""
        raise NotImplementedError("trainers call xfer.connect() and xfer.nccl_xfer_refit()")

    def worker_rank(self) -> int:
        """Return the rank in the replica: workers of data-parallel rank 0 first, in vLLM's own order within each rank.

        An `LLM` that is one of several data-parallel processes reaches only its own workers, which are then the replica. Under
        an external launcher, vLLM's rank is torchrun's, which counts the workers of all engines.
        """
        from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

        p = self.parallel_config
        within = getattr(p, "rank", None)
        if within is None:
            within = get_pp_group().rank_in_group * p.tensor_parallel_size + get_tensor_model_parallel_rank()
        within %= p.world_size
        return within if self.workers == p.world_size else p.data_parallel_index * p.world_size + within

    def _join(self, info: XferInitInfo) -> None:
        from xfer.participants.worker import WorkerSession
        from xfer.routes import worker_side

        self.shutdown()
        p = self.parallel_config
        self.workers = info.workers or p.world_size_across_dp
        if self.worker_rank() == 0 and (line := untested_engine(vllm.__version__)):
            logger.warning("xfer: %s", line)
        # One model for all connections: if one of them leaves the engine torn, only its lock can undo the NaN.
        if self.layout is None:
            self.layout = EngineModel(self.vllm_config, self.model, self.device)
        self.layout.draft, self.layout.workers = self.draft, info.workers
        self.layout.keep, self.layout.drop = tuple(info.keep), tuple(info.drop)
        self.session = WorkerSession(
            self.layout,
            worker_side,
            replica=info.replica,
            worker_rank=self.worker_rank(),
            workers=self.workers,
            rendezvous=info.rendezvous,
            token=info.token,
            deadline_s=info.deadline_s,
            session_open=self.session_open,
            in_step=p.data_parallel_size > 1,
        )
        self.session.join()

    def _quietly(self, what: str, call, *args: Any) -> None:
        """Run `call` and log its error. The session has told its peers of the error, or they see its connection close.

        This sets the thread's device to the worker's. If the worker is in the process of its `LLM`, the thread is one of xfer's,
        whose device was cuda:0, and vLLM's own calls follow in it.
        """
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            call(*args)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            logger.error(
                "xfer: %s failed on worker %d: %s", what, self.worker_rank(), "".join(traceback.format_exception(error))
            )
