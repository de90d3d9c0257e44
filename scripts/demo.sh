#!/usr/bin/env bash
# From a bare clone to a live engine refitted bit for bit after every optimizer step, on a machine without a GPU.
# Makes the two virtual environments on first use (scripts/setup.sh: 9.4 GB, a few minutes).
#   scripts/demo.sh [--steps N] [--plan] [--work FOLDER] [--svg FILE]
#     --steps N        training steps, each with a refit (5)         --work FOLDER    model, export and logs (.demo)
#     --plan           print what moves where                        --svg FILE       also write the final table as a picture
set -euo pipefail
usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0"; }
refuse() { echo "scripts/demo.sh: $1" >&2; usage >&2; exit 2; }
options=("$@")
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit ;;
    --plan) shift ;;
    --steps | --work | --svg)
      [ $# -ge 2 ] || refuse "$1 needs a value"
      [ "$1" != --steps ] || [[ $2 =~ ^[1-9][0-9]*$ ]] || refuse "--steps $2: a whole number, at least 1"
      shift 2 ;;
    *) refuse "no option $1" ;;
  esac
done
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # some containers set it; each process would then compile its framework anew
scripts/setup.sh trainer engine
export CUDA_VISIBLE_DEVICES= # the same everywhere: both environments are those of a machine without a GPU
exec .venvs/engine/bin/python -m examples.demo.run ${options[@]+"${options[@]}"}
