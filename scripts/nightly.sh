#!/usr/bin/env bash
# Everything that needs no GPU: what CI runs and the wide matrix, with each tested trainer; what CI runs with every process started
# anew; the other Pythons; a run of the demo; a long search for faults of the protocol. Hours on two cores.
#   scripts/nightly.sh          PYTHON=python3.11 to choose the interpreter of the environments
set -uo pipefail
case ${1:-} in
  "") ;;
  -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0"; exit ;;
  *) echo "scripts/nightly.sh $*: takes no options" >&2; exit 2 ;;
esac
cd "$(dirname "$0")/.."
export XFER_SEED=1 # fixed orders in the simulation leave something open: not what CI chooses
failed=()
steps=("scripts/matrix.sh --slow" "env XFER_TEST_FORGE=0 scripts/test.sh" scripts/demo.sh)
for python in python3.10 python3.12 python3.13; do
  ! command -v $python >/dev/null || steps+=("scripts/pythons.sh $python")
done
for step in "${steps[@]}"; do
  echo "== $step"
  # shellcheck disable=SC2086
  $step || failed+=("$step")
done
echo "== orders of events that CI does not try"
XFER_EXAMPLES=2000 .venvs/trainer/bin/python -m pytest -q -p no:cacheprovider tests/functional/test_session.py || failed+=("tests/functional/test_session.py")
[ ${#failed[@]} -eq 0 ] || { printf 'failed: %s\n' "${failed[@]}"; exit 1; }
