#!/usr/bin/env bash
# Runs every family and layout of docs/architectures.md, both sides, and writes its tables anew. Takes no options.
set -uo pipefail
usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0"; }
case ${1:-} in
  '') ;;
  -h | --help) usage; exit ;;
  *) usage >&2; exit 2 ;;
esac
cd "$(dirname "$0")/.."
XFER_WRITE_DOCS=1 exec scripts/test.sh --slow -k "test_engine_families or test_trainer_families"
