"""One trainer rank of the demo: a real Megatron-Core model, built by Megatron-Bridge, refits the engine after every step.

The ten lines that a training loop needs are between the two rulers; everything else is the demo's.
"""

import argparse
import os

from examples.demo.events import emit

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--export", required=True)
parser.add_argument("--rendezvous", required=True)
parser.add_argument("--steps", type=int, default=5)
args = parser.parse_args()

import torch.distributed as dist  # noqa: E402

from examples.common import megatron_cpu  # noqa: E402

megatron_cpu.install()  # Megatron without a GPU; on a cluster this line does not exist
dist.init_process_group("gloo")
from examples.common.train_loop import Task, Trainer  # noqa: E402

with Trainer(args.model, tp=2, pp=2, ep=2, etp=1, distopt=True, overlap=True, lr=5e-3) as trainer:
    trainer.task = Task(vocab=16, micro_batches=8)  # count upwards modulo 16: learned in a handful of steps
    emit("built", rank=dist.get_rank(), params=sum(p.numel() for c in trainer.chunks for p in c.parameters()))
    # ------------------------------------------------------------------------------------------------------------------
    import xfer

    session = xfer.connect(
        trainer=xfer.MegatronTrainer(trainer.chunks, trainer.bridge),
        rendezvous=args.rendezvous,
        token=os.environ["XFER_TOKEN"],
    )
    emit("connected", rank=dist.get_rank(), plan=session.explain() if dist.get_rank() == 0 else "")
    for step in range(1, args.steps + 1):
        loss = trainer.step()
        report = xfer.nccl_xfer_refit(session, verify=True)
        # --------------------------------------------------------------------------------------------------------------
        if dist.get_rank() == 0:
            emit(
                "refit",
                step=step,
                loss=loss,
                version=report.version,
                bytes=report.bytes,
                broadcast=report.broadcast_bytes,
                verified=report.verified,
                scalars=report.flatten(""),
            )
    trainer.export(args.export)
    emit("exported", rank=dist.get_rank())
    dist.barrier()
    session.close()
