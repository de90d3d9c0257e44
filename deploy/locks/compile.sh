#!/usr/bin/env bash
# Makes the lock files anew: deploy/locks/compile.sh [NAME ...]. Needs uv. Files name packages and versions, and no index.
set -euo pipefail
cd "$(dirname "$0")"
if [ $# -eq 0 ]; then set -- trainer-cpu trainer-gpu engine-cpu engine-gpu; fi
for name in "$@"; do
  python=3.12
  if [ "$name" = engine-cpu ]; then python=3.11; fi # as tested (xfer/tested.py)
  uv pip compile --quiet --no-config --python-version "$python" --python-platform x86_64-manylinux_2_28 --no-emit-index-url \
    --no-emit-find-links --no-header --no-annotate --output-file "$name.txt" "$name.in"
done
