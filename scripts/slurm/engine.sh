#!/usr/bin/env bash
# One vLLM replica, the SLURM_PROCID-th of the job; run by refit.sbatch.
set -euo pipefail
IFS=, read -ra addresses <<<"$XFER_ENGINE_ADDRESSES"
node=$((SLURM_PROCID / XFER_PER_NODE)) place=$((SLURM_PROCID % XFER_PER_NODE))
"$ENGINE_PYTHON" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' || {
  export XFER_CPU_RESIDENT=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_CI_ENV=1 VLLM_CPU_OMP_THREADS_BIND=nobind
}
exec "$ENGINE_PYTHON" -m examples.grpo.rollout --model "$XFER_MODEL" --dtype "$XFER_DTYPE" --tp "$XFER_ENGINE_TP" \
  --replica "$SLURM_PROCID" --rendezvous "$XFER_RENDEZVOUS" --listen "${addresses[node]}:$((XFER_ENGINE_PORT + place))"
