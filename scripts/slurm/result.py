"""What a run's curve comes to, as three lines of `name value`: steps, the gate's largest error, reward of the last steps.

    python scripts/slurm/result.py CURVE      exit code 1 when there is no step in it
"""

import statistics
import sys
from pathlib import Path

from examples.grpo.gate import read_curve

path = Path(sys.argv[1])
rows = read_curve(path) if path.exists() else []
if not rows:
    sys.exit(f"{path}: no step was made")
print("steps", len(rows))
print("mean(exp|d|)-1", max(r.error for r in rows) - 1)
print("kl", max(r.kl for r in rows))
print("reward", statistics.mean(r.reward for r in rows[-5:]))
