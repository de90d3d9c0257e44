"""One rank of a real Megatron-Core trainer for functional tests; does what the test says on standard input.

{"do": "build", "folder", "layout": {tp, pp, …}}     {"do": "connect", "rendezvous", "replicas"}
{"do": "step"}   {"do": "refit", …}   {"do": "export", "folder"}   {"do": "close"}
"""

import os
import traceback

import torch.distributed as dist

from tests.support.proc import commands, emit
from xfer.testing import megatron_cpu

megatron_cpu.install()
dist.init_process_group("gloo")

import xfer  # noqa: E402
from xfer.testing.train_loop import Trainer  # noqa: E402

TOKEN = os.environ["XFER_TOKEN"]


def main() -> None:
    trainer = refit = None
    emit("up")
    for c in commands():
        do = c.pop("do")
        try:
            if do == "build":
                if trainer is not None:
                    trainer.close()
                trainer = Trainer(c["folder"], **c["layout"])
                emit("built")
            elif do == "connect":
                refit = xfer.connect(trainer=xfer.MegatronTrainer(trainer.chunks, trainer.bridge), token=TOKEN, **c)
                emit("connected", plan=refit.explain() if dist.get_rank() == 0 else "")
            elif do == "step":
                emit("stepped", loss=trainer.step())
            elif do == "refit":
                r = xfer.nccl_xfer_refit(refit, **c)
                emit(
                    "refitted",
                    version=r.version,
                    committed=r.committed,
                    verified=r.verified,
                    bytes=r.bytes,
                    seconds=r.seconds,
                    per_worker=[list(o.bytes_per_worker) for o in r.outcomes],
                    scalars=r.flatten(""),
                )
            elif do == "export":
                trainer.export(c["folder"])
                emit("exported")
            elif do == "close":
                if refit is not None:
                    refit.close()
                refit = None
                emit("closed")
        except Exception as e:
            traceback.print_exc()
            emit("raised", type=type(e).__name__, text=str(e))


main()
