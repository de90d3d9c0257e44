#!/usr/bin/env bash
# Runs every family and layout of docs/architectures.md, both sides, and writes its tables anew.
set -uo pipefail
cd "$(dirname "$0")/.."
XFER_WRITE_DOCS=1 exec scripts/test.sh --slow -k "test_engine_families or test_trainer_families"
