"""How the demo's processes tell the one that draws: one JSON object a line on standard output, marked, nothing else."""

import json
import sys

MARK = "@xfer "


def emit(kind: str, **fields) -> None:
    sys.stdout.write(MARK + json.dumps({"kind": kind, **fields}) + "\n")
    sys.stdout.flush()


def parse(line: str) -> dict | None:
    return json.loads(line[len(MARK) :]) if line.startswith(MARK) else None
