"""xfer inside an SGLang scheduler process, which holds one worker: it only translates calls to those of a WorkerSession.

No call raises into SGLang: a scheduler whose call raises ends its engine. Errors travel on xfer's own connection.
"""

from __future__ import annotations

import logging
import traceback
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from xfer.sglang.layout import SGLangModel
from xfer.sglang.settings import refuse_settings

if TYPE_CHECKING:
    from xfer.participants.worker import WorkerSession

logger = logging.getLogger("xfer")
DUMMY_TOKENS = 16
"""Tokens of the forward that tests a lock."""
_workers: dict[int, Worker] = {}  # by the id of SGLang's weight updater, which lives as long as the process


def worker_of(manager: Any) -> Worker:
    """Return the worker of a scheduler process, made at the first call.

    Args:
        manager: SGLang's SchedulerWeightUpdaterManager.
    """
    return _workers.setdefault(id(manager), Worker(manager))


class Worker:
    """The calls of a controller, one at a time and on the scheduler's own thread."""

    def __init__(self, manager: Any):
        self._manager = manager
        self._session: WorkerSession | None = None
        self._model: SGLangModel | None = None

    def run(self, call: str, info: dict[str, Any]) -> list[float]:
        """Carry out one call.

        Args:
            call: "workers", "init" or "update".
            info: Its arguments: none, those of `join`, or `attempt` and `deadline_s`.

        Returns:
            For "workers": [number of workers of the replica]. Else an empty list.
        """
        try:
            if call == "workers":
                return [float(_workers_of_replica())]
            if call == "init":
                self._join(info)
            elif self._session is None:
                logger.error("xfer: %s before init; nothing was received", call)
            else:
                self._session.receive(info["attempt"], info["deadline_s"])
        except Exception as error:
            logger.error("xfer: %s failed: %s", call, "".join(traceback.format_exception(error)))
        return []

    def _join(self, info: dict[str, Any]) -> None:
        from sglang.srt.runtime_context import get_parallel

        from xfer.participants.worker import WorkerSession
        from xfer.routes import worker_side

        if self._session is not None:
            self._session.close()
        parallel = get_parallel()
        # One model for all connections: if one of them leaves the engine torn, only its lock can undo the NaN.
        if self._model is None:
            runner = self._manager.tp_worker.model_runner
            groups = [parallel.tp_group.cpu_group] if parallel.tp_size > 1 else []
            self._model = SGLangModel(
                runner.model_config,
                runner.load_config,
                runner.model,
                torch.device(runner.device if runner.device == "cpu" else f"{runner.device}:{runner.gpu_id}"),
                lambda: dummy_forward(runner),
                groups,
                lambda: refuse_settings(runner),
            )
        self._model.keep, self._model.drop = tuple(info.get("keep", ())), tuple(info.get("drop", ()))
        self._session = WorkerSession(
            self._model,
            worker_side,
            replica=info["replica"],
            worker_rank=(parallel.dp_rank or 0) * parallel.tp_size + parallel.tp_rank,
            workers=info.get("workers") or _workers_of_replica(),
            rendezvous=info["rendezvous"],
            token=info["token"],
            deadline_s=info["deadline_s"],
            session_open=self._manager._session is not None,
            in_step=_in_step(),
        )
        self._session.join()


def _workers_of_replica() -> int:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.tp_size * parallel.pp_size * parallel.dp_size


def _in_step() -> bool:
    """Whether data-parallel ranks wait for each other in every step (attention is data-parallel, the rest is not)."""
    from sglang.srt.runtime_context import get_parallel

    return bool(get_parallel().attn_dp_enabled)


def _with_length(backend: Any) -> AbstractContextManager[Any]:
    """Give an attention backend without CUDA graphs a sequence length for dummy forwards: it raises when asked."""
    name = "get_cuda_graph_seq_len_fill_value"
    try:
        getattr(backend, name)()
    except NotImplementedError:
        return mock.patch.object(backend, name, lambda: 1)
    return nullcontext()


def dummy_forward(runner: Any) -> list[torch.Tensor]:
    """Run SGLang's own dummy forward, with which it warms up. Collective over the ranks of the engine.

    It writes the KV slot that SGLang keeps for padded tokens, and no other.

    Returns:
        The logits [tokens, vocabulary].
    """
    seen: list[Any] = []
    forward = runner.model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(forward(*args, **kwargs))
        return seen[-1]

    # inference_mode: as SGLang's own forwards
    with torch.inference_mode(), mock.patch.object(runner.model, "forward", watched), _with_length(runner.attn_backend):
        buffers = runner.eager_runner._alloc_dummy_decode_buffers(DUMMY_TOKENS, allocate_logits_buffer=False)
        runner.eager_runner._dummy_run(DUMMY_TOKENS, buffers=buffers)
    return [seen[-1].next_token_logits]
