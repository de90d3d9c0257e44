"""vLLM's trainer half with xfer behind it: vLLM's own calls `trainer_init(...)` and `send_weights()`. vLLM 0.26 and later have them.

    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource, WeightTransferTrainerFactory
    from xfer.integrations.vllm_trainer import XferTrainerInitInfo

    engine = WeightTransferTrainerFactory.trainer_init(
        XferTrainerInitInfo("tcp://10.0.0.1:29600", rank=rank),
        client=HTTPVLLMWeightSyncClient("http://10.0.0.2:8000"),
        source=ModuleSource(model),
    )
    engine.send_weights()  # once per sync

It is a session of one server, which trainer rank 0 controls. Importing this module registers it in processes that load no plug-ins of
vLLM, such as trainers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import (
    ModuleSource,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSource,
)
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

from xfer.api import DEADLINE_S, Session, connect
from xfer.engines.vllm_plugin import BACKEND, register_trainer
from xfer.errors import Unsupported, XferError
from xfer.report import RefitReport
from xfer.routes import Direct, Route
from xfer.trainers.dtensor import TensorTrainer

register_trainer()


@dataclass
class XferTrainerInitInfo(TrainerInitInfo):
    """The init info by which vLLM's factory chooses xfer. Fields other than `rank` are arguments of `xfer.connect`.

    Attributes:
        rank: This trainer rank, which `source` must have, too. Rank 0 listens and controls the server.
        rendezvous: "tcp://HOST:PORT" of trainer rank 0, as the server's workers reach it.
        token: The job's secret. Default: $XFER_TOKEN.
        route: `Direct(...)` or `Packed(...)`.
        drop: Globs of checkpoint tensors that the engine does not take.
        deadline_s: Seconds for connecting and for each `send_weights`.
    """

    backend: ClassVar[str] = BACKEND

    rendezvous: str
    token: str | None = None
    route: Route = Direct()
    drop: Sequence[str] = ()
    deadline_s: float = DEADLINE_S


class XferTrainerWeightTransferEngine(TrainerWeightTransferEngine):
    """A connected trainer rank, as vLLM's callers drive it.

    Attributes:
        session: The session, for all that vLLM's interface lacks: `refit(verify=True)`, `release()`, `explain()`.
        report: The report of the last `send_weights`; None before the first.
    """

    init_info_cls = XferTrainerInitInfo

    def __init__(self, session: Session, *, client: Any, source: Any, is_sender: bool):
        self.session, self.client, self.source, self.is_sender = session, client, source, is_sender
        self.report: RefitReport | None = None

    @classmethod
    def trainer_init(
        cls,
        init_info: XferTrainerInitInfo,
        *,
        client: Any,
        source: Any = None,
        config: object = None,
    ) -> XferTrainerWeightTransferEngine:
        """Connect this trainer rank, and on rank 0 the server. Every rank calls it.

        Args:
            init_info: This rank, and arguments of `xfer.connect`.
            client: vLLM's `HTTPVLLMWeightSyncClient`; xfer takes its URL and makes all calls itself.
            source: vLLM's `ModuleSource`, whose module is read as `xfer.TensorTrainer` reads it, shard by shard and without
                gathers; or a trainer of xfer, such as `xfer.MegatronTrainer(chunks, bridge)`.
            config: Not used; vLLM 0.26 passes one.

        Raises:
            Unsupported: xfer cannot read such a source, or reach an engine through such a client.
            XferError: As `xfer.connect`.
        """
        trainer = TensorTrainer(source._module) if type(source) is ModuleSource else source
        bad = []
        if not isinstance(client, HTTPVLLMWeightSyncClient):
            bad.append(
                f"client={type(client).__name__}: give an HTTPVLLMWeightSyncClient; for an engine in a process of yours, or an actor, "
                "call xfer.serve there and xfer.connect here"
            )
        if trainer is None or isinstance(trainer, WeightSource):
            bad.append(
                f"source={type(source).__name__}: gives whole tensors, for which ranks gather; give a ModuleSource, "
                "xfer.TensorTrainer(...) or xfer.MegatronTrainer(...)"
            )
        if bad:
            raise Unsupported("this call of trainer_init is not one that xfer can stand behind", bad)
        if trainer.rank != init_info.rank:
            raise XferError(
                "trainer_init() was called with arguments that cannot work",
                [f"rank={init_info.rank}, but the source is that of rank {trainer.rank}"],
            )
        session = connect(
            trainer,
            init_info.rendezvous,
            init_info.token,
            engines=[client.base_url],
            route=init_info.route,
            drop=init_info.drop,
            deadline_s=init_info.deadline_s,
        )
        return cls(session, client=client, source=source, is_sender=init_info.is_sender)

    def send_weights(self) -> None:
        """Refit the server. It returns when the server serves these weights; an engine that its owner paused stays paused."""
        self.report = self.session.refit()

    def shutdown(self) -> None:
        """Close the session. The server goes on with its weights."""
        self.session.close()
