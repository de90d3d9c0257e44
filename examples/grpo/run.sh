#!/usr/bin/env bash
# The whole loop on one machine: a vLLM on two ranks samples, four Megatron-Core ranks train, a refit after every step.
#   examples/grpo/run.sh [dense|moe] [options of train.py]      e.g. examples/grpo/run.sh moe --steps 60 --verify
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
rendezvous=tcp://127.0.0.1:$(port) listen=127.0.0.1:$(port)
"$trainer" -m examples.grpo.model "$kind" "$work/model" "$dtype"

setsid "$engine" -m examples.grpo.rollout --model "$work/model" --rendezvous "$rendezvous" --listen "$listen" --dtype "$dtype" \
  >"$work/rollout.log" 2>&1 &
rollout=$!
trap 'kill -TERM -- -$rollout 2>/dev/null; sleep 1; kill -KILL -- -$rollout 2>/dev/null || true' EXIT # vLLM's workers, too
experts=()
[ "$kind" = moe ] && experts=(--ep 2)
"$trainer" -m torch.distributed.run --nproc-per-node 4 --master-port "$(port)" -m examples.grpo.train --model "$work/model" \
  --rendezvous "$rendezvous" --rollout "http://$listen" --curve "$work/curve.jsonl" ${experts[@]+"${experts[@]}"} "$@"
