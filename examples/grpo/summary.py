"""What a run's curve comes to: lines of `name value` on standard output. No model, no framework.

    python -m examples.grpo.summary CURVE [--table] [--out FILE] [--note KEY=VALUE …]

--table puts a row for every step before them, --out writes all of it as JSON, with the notes (what the run was, and on
what). Exit code 1 when there is no step in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from examples.grpo.gate import Row, read_curve


def totals(rows: Sequence[Row]) -> dict[str, float]:
    """`refit-share`: seconds in all refits over seconds of all steps, the first step left out where there are others, since
    kernels are loaded and compiled in it. Reward: mean of up to five steps at either end."""
    warm = rows[1:] or rows
    return {
        "steps": len(rows),
        "mean(exp|d|)-1": max(r.error for r in rows) - 1,
        "mean(exp|d|)-1-median": statistics.median(r.error for r in rows) - 1,
        "kl": max(r.kl for r in rows),
        "kl-median": statistics.median(r.kl for r in rows),
        "reward-first": statistics.mean(r.reward for r in rows[:5]),
        "reward": statistics.mean(r.reward for r in rows[-5:]),
        "step-s": statistics.median(r.step_s for r in warm),
        "refit-ms": 1e3 * statistics.median(r.refit_s for r in warm),
        "refit-ms-worst": 1e3 * max(r.refit_s for r in warm),
        "transfer-ms": 1e3 * statistics.median(r.transfer_s for r in warm),
        "outage-ms": 1e3 * statistics.median(r.outage_s for r in warm),
        "refit-s-total": sum(r.refit_s for r in warm),
        "steps-s-total": sum(r.step_s for r in warm),
        "refit-share": sum(r.refit_s for r in warm) / sum(r.step_s for r in warm),
    }


def table(rows: Sequence[Row]) -> str:
    names = ["step", "reward", "mean(exp\\|d\\|) - 1", "KL", "worst \\|d\\|", "refit ms", "of it transfer", "step s"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for r in rows:
        lines.append(
            f"| {r.step} | {r.reward:.3f} | {r.error - 1:.2e} | {r.kl:.1e} | {r.worst:.1e} | {1e3 * r.refit_s:.1f} "
            f"| {1e3 * r.transfer_s:.2f} | {r.step_s:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("curve", type=Path)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--note", default=[], action="append", metavar="KEY=VALUE")
    args = parser.parse_args()
    rows = read_curve(args.curve) if args.curve.exists() else []
    if not rows:
        sys.exit(f"{args.curve}: no step was made")
    said, notes = totals(rows), dict(n.partition("=")[::2] for n in args.note)
    if args.out is not None:
        whole = {"notes": notes, "totals": said, "rows": [asdict(r) for r in rows]}
        args.out.write_text(json.dumps(whole, indent=1) + "\n")
    if args.table:
        print(table(rows) + "\n")
    for name, value in {**notes, **said}.items():
        print(name, f"{value:.6g}" if isinstance(value, float) else value)


if __name__ == "__main__":
    main()
