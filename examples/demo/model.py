"""Writes the demo's model, with random weights: `python -m examples.demo.model FOLDER`."""

import json
import sys
from pathlib import Path

from examples.common import toy

HERE = Path(__file__).resolve().parent


def write_model(folder: Path) -> None:
    from safetensors.torch import save_file

    config = json.loads((HERE / "config.json").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(toy.tensors(config), str(folder / "model.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
