"""Files to plan with and to copy from: Hugging Face configs of models, a fabric (fabric.toml), a whole job (job.toml)."""

from pathlib import Path

FOLDER = Path(__file__).parent
MODELS = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))
"""Names that stand for a config in a description."""
