#!/usr/bin/env bash
# One `vllm serve` that refits can reach: xfer's backend, vLLM's weight routes open, its route for tokens, no weights yet.
#   examples/grpo/serve.sh MODEL PORT [options of vllm serve]
# It binds 127.0.0.1: whoever reaches VLLM_SERVER_DEV_MODE's routes rules the server, so bind a network of trusted hosts only.
set -euo pipefail
usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0"; }
case ${1:-} in -h | --help) usage; exit ;; esac
[ $# -ge 2 ] || { usage >&2; exit 2; }
model=$1 port=$2
shift 2
export VLLM_SERVER_DEV_MODE=1 HF_HUB_OFFLINE=1
python=${ENGINE_PYTHON:-.venvs/engine/bin/python}
# vLLM 0.25 has the route for tokens always and knows no such option; newer ones have to be asked. Looked up without importing it.
asked=$("$python" -c 'import importlib.util as u, pathlib
root = pathlib.Path(u.find_spec("vllm").origin).parent / "entrypoints"
print("--enable-scale-out" if any("enable_scale_out" in p.read_text() for p in root.rglob("cli_args.py")) else "")')
exec "$python" -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name policy \
  $asked --skip-tokenizer-init --load-format dummy --weight-transfer-config '{"backend": "xfer"}' --host 127.0.0.1 --port "$port" \
  --enforce-eager --max-model-len 64 --block-size 32 --max-num-seqs 256 "$@"
