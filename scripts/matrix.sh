#!/usr/bin/env bash
# Runs scripts/test.sh once with each trainer of xfer/tested.py, and leaves the environment of the newest one.
#   scripts/matrix.sh [--slow] …      arguments go to scripts/test.sh
set -uo pipefail
case ${1:-} in -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
cells=$("${PYTHON:-python3}" xfer/tested.py trainers) || exit 1
failed=()
while read -r core _ <&3; do # oldest first
  echo "== megatron-core $core"
  TRAINER=$core scripts/test.sh "$@" || failed+=("TRAINER=$core scripts/test.sh $*")
done 3< <(tac <<<"$cells")
[ ${#failed[@]} -eq 0 ] || { printf 'failed: %s\n' "${failed[@]}"; exit 1; }
