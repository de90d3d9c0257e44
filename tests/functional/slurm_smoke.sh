#!/usr/bin/env bash
# Submits the two-node smoke run and prints what came out. Wants a Slurm that answers (SLURM_CONF) and both environments.
#   tests/functional/slurm_smoke.sh WORK [options of train.py]
set -euo pipefail
work=$1
shift
cd "$(dirname "$0")/../.."
XFER_WORK=$work sbatch --wait --nodes=2 --output="$work/job.log" scripts/slurm/refit.sbatch --config smoke "$@"
cat "$work/result"
