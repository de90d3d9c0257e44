"""One rank of plain_main's trainer with the weights of a checkpoint on disk, for tests of engines of any family. A seed is a folder."""

from fnmatch import fnmatchcase

import torch
from safetensors import safe_open

from tests.support import plain_main
from tests.support.proc import methods, obey


class Weights(plain_main.Weights):
    """`leave`: globs of the tensors that this trainer lacks."""

    def __init__(self, folder: str, leave: list[str]):
        self.leave = leave
        self.hold(folder)

    def full(self, seed: str) -> dict[str, torch.Tensor]:
        with safe_open(f"{seed}/model.safetensors", "pt") as f:
            return {n: f.get_tensor(n) for n in f.keys() if not any(fnmatchcase(n, p) for p in self.leave)}


class Rank(plain_main.Rank):
    kind = Weights


if __name__ == "__main__":
    obey(*methods(Rank()))
