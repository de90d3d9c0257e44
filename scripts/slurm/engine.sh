#!/usr/bin/env bash
# One node's part of one vLLM replica, the SLURM_PROCID-th such part of the job; run by refit.sbatch. Parts of a replica follow each other.
set -euo pipefail
IFS=, read -ra addresses <<<"$XFER_ENGINE_ADDRESSES"
replica=$((SLURM_PROCID / XFER_NODES_PER_REPLICA)) part=$((SLURM_PROCID % XFER_NODES_PER_REPLICA))
node=$((SLURM_PROCID / XFER_PER_NODE)) place=$((SLURM_PROCID % XFER_PER_NODE))
"$ENGINE_PYTHON" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' || {
  export XFER_CPU_RESIDENT=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_CI_ENV=1 VLLM_CPU_OMP_THREADS_BIND=nobind
}
over=()
if [ "$XFER_NODES_PER_REPLICA" -gt 1 ]; then
  over=(--nodes "$XFER_NODES_PER_REPLICA" --node-rank "$part" --master "${addresses[node - part]}:$((XFER_ENGINE_PORT + 64 + replica))")
  # Otherwise vLLM takes what the host's name resolves to, which need not be the address that the job goes by.
  export VLLM_HOST_IP=${addresses[node]}
fi
exec "$ENGINE_PYTHON" -m examples.grpo.rollout --model "$XFER_MODEL" --dtype "$XFER_DTYPE" --tp "$XFER_ENGINE_TP" \
  --replica "$replica" --rendezvous "$XFER_RENDEZVOUS" --listen "${addresses[node]}:$((XFER_ENGINE_PORT + place))" ${over[@]+"${over[@]}"}
