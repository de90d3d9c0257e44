#!/usr/bin/env bash
# One trainer node: torchrun starts its ranks. Usage: trainer.sh NODES RANKS_PER_NODE [options of train.py]; run by refit.sbatch.
set -euo pipefail
nodes=$1 ranks=$2
shift 2
exec "$TRAINER_PYTHON" -m torch.distributed.run --nnodes "$nodes" --node-rank "$SLURM_PROCID" --nproc-per-node "$ranks" \
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" -m examples.grpo.stand_ins examples.grpo.train "$@"
