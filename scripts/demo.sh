#!/usr/bin/env bash
# From a bare clone to a live engine refitted bit for bit after every optimizer step, on a machine without a GPU.
# Makes the two virtual environments on first use. Options go to examples/demo/run.py (--steps N, --plan).
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh all
export CUDA_VISIBLE_DEVICES= # the same everywhere: both environments are those of a machine without a GPU
exec .venvs/engine/bin/python examples/demo/run.py "$@"
