#!/usr/bin/env bash
# One `vllm serve` that refits can reach: xfer's backend, vLLM's weight routes open, its route for tokens (--enable-scale-out), no weights yet.
#   examples/grpo/serve.sh MODEL PORT [options of vllm serve]
# It binds 127.0.0.1: whoever reaches VLLM_SERVER_DEV_MODE's routes rules the server, so bind a network of trusted hosts only.
set -euo pipefail
model=$1 port=$2
shift 2
export VLLM_SERVER_DEV_MODE=1 HF_HUB_OFFLINE=1
exec "${ENGINE_PYTHON:-.venvs/engine/bin/python}" -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name policy \
  --enable-scale-out --skip-tokenizer-init --load-format dummy --weight-transfer-config '{"backend": "xfer"}' --host 127.0.0.1 --port "$port" \
  --enforce-eager --max-model-len 64 --block-size 32 --max-num-seqs 256 "$@"
