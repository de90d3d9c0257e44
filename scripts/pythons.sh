#!/usr/bin/env bash
# Runs what needs no torch under other Pythons than that of .venvs: everything compiles, `xfer --version` and `xfer plan --help` answer,
# descriptions and fabrics in TOML are read, plans and control connections work. Half a minute each, most of it for pip.
#   scripts/pythons.sh [PYTHON …]      default: python3.10, python3.12 and python3.13, as far as they are there
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH=$PWD PYTHONDONTWRITEBYTECODE=1 XFER_EXAMPLES=12
tests="tests/unit/test_errors.py tests/unit/test_cli_plan.py tests/unit/test_session_channel.py tests/unit/test_trace_catalog.py tests/unit/test_plan_fabric.py"
[ $# -gt 0 ] || set -- python3.10 python3.12 python3.13
ran=0
for python in "$@"; do
  "$python" --version >/dev/null 2>&1 || { echo "== $python: not there"; continue; }
  echo "== $("$python" --version), without torch"
  "$python" -m venv --clear "$work/venv"
  own="$work/venv/bin/python"
  # Of the dependencies in pyproject.toml all but torch, which has no CPU wheel on PyPI.
  mapfile -t needs < <(sed -n '/^dependencies = /,/\]/p' pyproject.toml | grep -o '"[^"]*"' | tr -d '"' | grep -v '^torch')
  "$own" -m pip --disable-pip-version-check -q install "${needs[@]}" 'pytest>=8' 'hypothesis>=6.100' 'scipy>=1.11'
  "$own" -W error -c 'import pathlib; [compile(p.read_text(), str(p), "exec") for p in pathlib.Path("xfer").rglob("*.py")]'
  "$own" -m xfer --version
  "$own" -m xfer plan --help >/dev/null
  # shellcheck disable=SC2086
  "$own" -m pytest -q -p no:cacheprovider $tests
  ran=$((ran + 1))
done
[ "$ran" -gt 0 ] || { echo "scripts/pythons.sh: none of $* is there" >&2; exit 1; }
