#!/usr/bin/env bash
# The whole loop on one machine: a vLLM on two ranks samples, four Megatron-Core ranks train, a refit after every step.
#   examples/grpo/run.sh [dense|moe] [options of train.py]      e.g. examples/grpo/run.sh moe --steps 60 --verify
# SERVE=2 takes that many `vllm serve` processes in place of the rollout, each a replica that trainer rank 0 controls by its URL.
# DTYPE=bfloat16 trains and samples in bf16. WORK is where the model, the curve and the rollout's log go.
set -euo pipefail
cd "$(dirname "$0")/../.."
kind=dense
case ${1:-} in dense | moe) kind=$1; shift ;; esac
trainer=${TRAINER_PYTHON:-.venvs/trainer/bin/python} engine=${ENGINE_PYTHON:-.venvs/engine/bin/python}
work=${WORK:-.grpo/$kind} dtype=${DTYPE:-float32}
mkdir -p "$work"
rm -f "$work/curve.jsonl"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TORCHDYNAMO_DISABLE=1 PYTHONPATH=$PWD PYTHONWARNINGS=ignore
export XFER_CPU_RESIDENT=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_CI_ENV=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_LOGGING_LEVEL=ERROR
export XFER_TOKEN=${XFER_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
port() { "$trainer" -c 'from xfer.testing.ports import free_port; print(free_port())'; }
rendezvous=tcp://127.0.0.1:$(port)
"$trainer" -m examples.grpo.model "$kind" "$work/model" "$dtype"

groups=() where=()
trap 'for g in "${groups[@]}"; do kill -TERM -- "-$g" 2>/dev/null; done; sleep 1
  for g in "${groups[@]}"; do kill -KILL -- "-$g" 2>/dev/null; done; true' EXIT # vLLM's workers, too
if [ -n "${SERVE:-}" ]; then
  for ((i = 0; i < SERVE; i++)); do
    at=$(port)
    setsid examples/grpo/serve.sh "$work/model" "$at" --dtype "$dtype" >"$work/serve$i.log" 2>&1 &
    groups+=($!) where+=(--serve "http://127.0.0.1:$at")
  done
else
  listen=127.0.0.1:$(port)
  setsid "$engine" -m examples.grpo.rollout --model "$work/model" --rendezvous "$rendezvous" --listen "$listen" --dtype "$dtype" \
    >"$work/rollout.log" 2>&1 &
  groups+=($!) where+=(--rollout "http://$listen")
fi
experts=()
[ "$kind" = moe ] && experts=(--ep 2)
"$trainer" -m torch.distributed.run --nproc-per-node 4 --master-port "$(port)" -m examples.grpo.train --model "$work/model" \
  --rendezvous "$rendezvous" "${where[@]}" --curve "$work/curve.jsonl" ${experts[@]+"${experts[@]}"} "$@"
