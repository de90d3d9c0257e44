#!/usr/bin/env bash
# Sets up the environments if needed, checks style, types and the site, and runs the tests that need no GPU. One environment cannot
# hold both frameworks, so
# tests are run where their marker says: `engine` in .venvs/engine, `rl` in .venvs/rl, everything else in .venvs/trainer. Triton, whose
# interpreter runs the kernels, comes with vLLM.
#   scripts/test.sh              all but the wide matrix
#   scripts/test.sh --slow       the wide matrix too, and four times as many examples of each property
#   scripts/test.sh --unit       unit tests only
# Further arguments go to pytest: -k EXPRESSION, -x, -n 0, files. Its options that begin with -- go behind a --, as in
#   scripts/test.sh --unit -- --lf
# Each file's tests are run by one of up to five processes, those with engines by one of two; -n 0: all by one.
# Most ranks and engines are forked from one that has imported its framework (tests/support/forge.py), and that all processes of a
# stage share. XFER_TEST_FORGE=0 in the environment starts every one anew, as users do.
set -uo pipefail
usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0"; }
slow="not slow" where="tests"
args=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit ;;
    --slow) slow="" && export XFER_EXAMPLES=${XFER_EXAMPLES:-200} ;;
    --unit) where="tests/unit" ;;
    --) shift; args+=("$@"); break ;;
    --*) echo "scripts/test.sh: no option $1; options of pytest go behind a --" >&2; usage >&2; exit 2 ;;
    *) args+=("$1") ;;
  esac
  shift
done
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # some containers set it; each process would then compile its framework anew, which takes 2 to 10 s
scripts/setup.sh all || exit 1
export CUDA_VISIBLE_DEVICES= # also where there are some: tests for GPUs are run by their own commands
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_CI_ENV=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-ERROR}
jobs=$(($(env -u OMP_NUM_THREADS nproc) + 1)) # nproc would answer with the variable; one more, since tests wait for a third of their time
[ "$jobs" -le 5 ] || jobs=5
export XFER_TEST_PATIENCE=${XFER_TEST_PATIENCE:-2} # of tests with their processes, which share the processors
and_slow=${slow:+ and $slow}
status=0
versions() { # of an environment, for the log
  ".venvs/$1/bin/python" -m xfer version | paste -sd , | sed 's/,/, /g'
}
kernels="tests/unit/test_kernels_marks.py tests/unit/test_kernels_rows.py tests/unit/test_kernels_quantize.py tests/unit/test_packed_placing.py"
run() { # environment, processes, marker expression, files or folders
  # Files in their order, not those with most tests first: the longest are of functional tests, which come before the others.
  local python=".venvs/$1/bin/python" processes=$2 marker=$3 rc
  shift 3
  "$python" -m pytest -p no:cacheprovider -q --durations=25 --durations-min=5 -n "$processes" --dist loadfile \
    --no-loadscope-reorder -m "$marker" "$@" ${args[@]+"${args[@]}"}
  rc=$?
  [ $rc -eq 5 ] && rc=0 # no test of this marker under this path
  [ $rc -eq 0 ] || status=1
}
run_marked() { # environment, which has its marker's name, and processes: files without the marker are not read, or that takes half a minute
  local files
  files=$(grep -rl --include='test_*.py' "mark\.$1\b" $where | sort) || return 0 # none under this path
  run "$1" "$2" "$1 and not gpu$and_slow" $files
}
timed() { # a check, with its seconds
  local began=$SECONDS
  "$@" || status=1
  echo "$1: $((SECONDS - began)) s"
}
style() { .venvs/trainer/bin/ruff check . && .venvs/trainer/bin/ruff format --check .; }
types() { .venvs/trainer/bin/python -m mypy; }
site() { NO_MKDOCS_2_WARNING=1 .venvs/docs/bin/mkdocs build --strict -q; }
layout() { .venvs/trainer/bin/python -m tests.support.house; }
rl() {
  .venvs/rl/bin/pip list 2>/dev/null | grep -E '^(verl|trl|skyrl) ' | paste -sd , | tr -s ' '
  run_marked rl 0
}
echo "== kernels for GPUs, in Triton's interpreter, and beside them style, types, site, layout, RL frameworks"
checked=$(mktemp)
(for check in style types site layout rl; do timed $check; done; exit $status) >"$checked" 2>&1 & # one process each: two processors
TRITON_INTERPRET=1 XFER_EXAMPLES=12 run engine 0 "not gpu$and_slow" $kernels
wait $! || status=1
cat "$checked" && rm "$checked"
echo "== trainer environment: $(versions trainer)"
run trainer "$jobs" "not engine and not rl and not gpu$and_slow" $where
echo "== engine environment: $(versions engine)"
run_marked engine 2
echo "scripts/test.sh: $((SECONDS / 60)) min $((SECONDS % 60)) s, status $status"
exit $status
