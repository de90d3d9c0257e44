#!/usr/bin/env bash
# The whole loop on one machine: a vLLM samples, Megatron-Core ranks train, a refit after every step.
#   examples/grpo/run.sh [dense|moe|0.6b] [options of this script and of train.py]
#     examples/grpo/run.sh moe --steps 60 --verify                    on a laptop
#     DTYPE=bfloat16 examples/grpo/run.sh dense --delta --lr 2e-5     sends what changed; its share of all bytes is printed last
#     examples/grpo/run.sh 0.6b --device cuda --out result.json       on 4 GPUs of one host: vLLM TP2 beside Megatron-Core tp2
#     examples/grpo/run.sh 0.6b --device cuda --ranks 1 --tp 1 --engine-tp 1           on 2 GPUs
#   --device cpu|cuda   default: cuda where both sides' GPUs are there      --ranks N      trainer ranks (4; 0.6b: 2)
#   --engine-tp N       ranks of the vLLM (2)                               --out FILE     JSON of the run (examples/grpo/summary.py)
#   --in-flight POLICY  an AsyncLLM samples (rollout_async.py); POLICY of requests that a refit meets: drain, abort, continue, keep_cache
#   --set KEY=NUMBER    changes the model's config (examples/grpo/model.py), may come again
# SERVE=2 takes that many `vllm serve` processes in place of the rollout, each a replica of one rank (and GPU) that trainer rank 0
# controls by its URL.
# DTYPE=bfloat16 trains and samples in bf16. WORK is where the model, the curve and the rollout's log go.
# TRAINER_PYTHON, ENGINE_PYTHON: each side's Python. XFER_SITE_TRAINER, XFER_SITE_ENGINE: folders of packages that only that side
# gets, before PYTHONPATH, where both share one Python.
set -euo pipefail
for word in "$@"; do
  case $word in -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0"; exit ;; esac
done
cd "$(dirname "$0")/../.."
kind=dense device= ranks= engine_tp=2 out= policy=
changes=() more=() given=()
case ${1:-} in dense | moe | 0.6b) kind=$1; shift ;; esac
while [ $# -gt 0 ]; do
  case $1 in
    --device) device=$2 ;; --ranks) ranks=$2 ;; --engine-tp) engine_tp=$2 ;; --out) out=$2 ;; --in-flight) policy=$2 ;; --set) changes+=("$2") ;;
    *) given+=("$1"); shift; continue ;;
  esac
  shift 2
done
limits=()
case $kind in
  moe) more=(--ep 2) ;;
  # 1,024 answers of 128 tokens a step. In bf16 the gate's figures are rounding of 28 layers: printed, not judged. The rate is low, so
  # that answers stay various: at 2e-5 sampling ends at one digit after some steps, and the gate then has nothing to see.
  0.6b)
    : "${DTYPE:=bfloat16}" "${ranks:=2}"
    limits=(--max-samples 1024 --max-model-len 512)
    more=(--pp 1 --steps 20 --digits 128 --prompts 64 --answers 16 --micro-batches 16 --lr 5e-6 --gate inf) ;;
esac
: "${ranks:=4}"
python_of() { if [ -x "$1" ]; then echo "$1"; else command -v python3; fi; }
trainer=${TRAINER_PYTHON:-$(python_of .venvs/trainer/bin/python)} engine=${ENGINE_PYTHON:-$(python_of .venvs/engine/bin/python)}
export ENGINE_PYTHON=$engine # for serve.sh
trainer_path=$PWD:${XFER_SITE_TRAINER:+$XFER_SITE_TRAINER:}${PYTHONPATH:-} engine_path=$PWD:${XFER_SITE_ENGINE:+$XFER_SITE_ENGINE:}${PYTHONPATH:-}
work=${WORK:-.grpo/$kind} dtype=${DTYPE:-float32}
mkdir -p "$work"
rm -f "$work/curve.jsonl"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore PYTHONUNBUFFERED=1
# What both sides' torch can use: either may be a build without CUDA.
count='import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)'
here=$(PYTHONPATH=$trainer_path "$trainer" -c "$count")
theirs=0
if [ "$here" -gt 0 ]; then theirs=$(PYTHONPATH=$engine_path "$engine" -c "$count"); fi
if [ "$theirs" -lt "$here" ]; then here=$theirs; fi
engine_gpus=${SERVE:-$engine_tp} engines="a vLLM of $engine_tp"
[ -z "${SERVE:-}" ] || engines="$SERVE vLLMs of 1"
if [ -z "$device" ]; then
  if [ "$here" -ge $((ranks + engine_gpus)) ]; then device=cuda; else device=cpu; fi
fi
case $device in
  cpu)
    export TORCHDYNAMO_DISABLE=1 CUDA_VISIBLE_DEVICES= XFER_CPU_RESIDENT=1
    export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_CI_ENV=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_LOGGING_LEVEL=ERROR
    engine_env=() trainer_env=() ;;
  cuda)
    [ "$here" -ge $((ranks + engine_gpus)) ] || {
      echo "$ranks trainer ranks and $engines want as many GPUs; both sides' torch can use $here" >&2
      exit 2
    }
    # Every process sees all GPUs, its own side's first: to map another's memory it must see the GPU.
    IFS=, read -ra all <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((here - 1)))}"
    comma() { local IFS=,; echo "$*"; }
    engine_env=("CUDA_VISIBLE_DEVICES=$(comma "${all[@]}")")
    trainer_env=("CUDA_VISIBLE_DEVICES=$(comma "${all[@]:engine_gpus}" "${all[@]:0:engine_gpus}")")
    # FlashInfer's sampler compiles itself when it is first used; torch's does not.
    export VLLM_LOGGING_LEVEL=WARNING VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0} ;;
  *) echo "--device $device: cpu or cuda" >&2; exit 2 ;;
esac
on_trainer() { env PYTHONPATH="$trainer_path" "${trainer_env[@]}" "$@"; }
on_engine() { exec env PYTHONPATH="$engine_path" "${engine_env[@]}" "$@"; }
export XFER_TOKEN=${XFER_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
port() { on_trainer "$trainer" -c 'from examples.common.ports import free_port; print(free_port())'; }
rendezvous=tcp://127.0.0.1:$(port)
on_trainer "$trainer" -m examples.grpo.model "$kind" "$work/model" "$dtype" ${changes[@]+"${changes[@]}"}

groups=() where=() logs=()
ended() {
  status=$?
  set +e
  for g in "${groups[@]}"; do kill -TERM -- "-$g" 2>/dev/null; done
  sleep 1
  for g in "${groups[@]}"; do kill -KILL -- "-$g" 2>/dev/null; done # vLLM's workers, too
  if [ "$status" -ne 0 ]; then for log in "${logs[@]}"; do echo "---- $log" && tail -n 60 "$log"; done >&2; fi
  exit "$status"
}
trap ended EXIT
if [ -n "${SERVE:-}" ]; then
  for ((i = 0; i < SERVE; i++)); do
    at=$(port) log=$work/serve$i.log
    [ "$device" = cpu ] || engine_env=("CUDA_VISIBLE_DEVICES=$(comma "${all[@]:i}" "${all[@]:0:i}")")
    on_engine setsid examples/grpo/serve.sh "$work/model" "$at" --dtype "$dtype" >"$log" 2>&1 &
    groups+=($!) where+=(--serve "http://127.0.0.1:$at") logs+=("$log")
  done
else
  listen=127.0.0.1:$(port) log=$work/rollout.log
  rollout=(examples.grpo.rollout)
  [ -z "$policy" ] || rollout=(examples.grpo.rollout_async --policy "$policy")
  on_engine setsid "$engine" -m "${rollout[@]}" --model "$work/model" --rendezvous "$rendezvous" --listen "$listen" \
    --dtype "$dtype" --tp "$engine_tp" ${limits[@]+"${limits[@]}"} >"$log" 2>&1 &
  groups+=($!) where+=(--rollout "http://$listen") logs+=("$log")
fi
began=$(date +%s)
on_trainer "$trainer" -m torch.distributed.run --nproc-per-node "$ranks" --master-port "$(port)" -m examples.grpo.stand_ins examples.grpo.train \
  --model "$work/model" --rendezvous "$rendezvous" "${where[@]}" --curve "$work/curve.jsonl" \
  ${more[@]+"${more[@]}"} ${given[@]+"${given[@]}"}
if [ -n "$out" ]; then
  versions='import importlib.metadata as m, torch
print(torch.__version__, *(d.metadata["Name"] + "-" + d.version for d in m.distributions() if (d.metadata["Name"] or "") in NAMES))'
  on_trainer "$trainer" -m examples.grpo.summary "$work/curve.jsonl" --table --out "$out" \
    --note "model=$kind ${changes[*]-} $dtype" --note "device=$device" --note "ranks=$ranks engine-tp=$engine_tp" \
    --note "options=${more[*]-} ${given[*]-}" --note "seconds=$(($(date +%s) - began))" \
    --note "trainer=torch-$(on_trainer "$trainer" -c "NAMES=('megatron-core', 'megatron-bridge', 'transformer_engine')
$versions")" --note "engine=torch-$( (on_engine "$engine" -c "NAMES=('vllm', 'vllm-cpu')
$versions"))"
fi
