"""Starts ranks of a layer-wise job and asks all of them the same thing; and reads their checkpoints."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch.distributed import checkpoint as dcp

from tests.support.proc import PATIENCE, Child, Family

GRACE_S = 5.0
"""What others have left for their answer once a rank has failed: they mostly wait for it for ever."""


class Ranks:
    def __init__(self, family: Family, world: int, module: str = "layerwise_main", **env: str):
        self.ranks: list[Child] = family.ranks(module, world, "rank", **env)
        self.broken = False
        for c in self.ranks:
            c.expect("up", timeout=600)

    def ask(self, do: str, *kinds: str, timeout: float = 300, **command) -> list[dict]:
        """All ranks' answers, in rank order. AssertionError with what every rank said once one has failed or the time is up:
        the others are then aborted by `Child.expect`, and their stacks are in their logs."""
        for c in self.ranks:
            c.say(do=do, **command)
        until = time.monotonic() + timeout * PATIENCE
        said: dict[int, dict] = {}
        while len(said) < len(self.ranks) and time.monotonic() < until:
            for r, c in enumerate(self.ranks):
                if r not in said and not c.events.empty():
                    event = c.events.get()
                    if event["kind"] in (*kinds, "raised", "ended"):
                        said[r] = event
            if any(x["kind"] not in kinds for x in said.values()):
                until = min(until, time.monotonic() + GRACE_S * PATIENCE)
            time.sleep(0.01)
        bad = [f"rank {r}: {x}" for r, x in sorted(said.items()) if x["kind"] not in kinds]
        late = [r for r in range(len(self.ranks)) if r not in said]
        if bad or late:
            self.broken = True
            for r in late:
                try:
                    self.ranks[r].expect(*kinds, timeout=0.1)
                except AssertionError as e:
                    bad.append(f"rank {r}: {e}")
        assert not bad, "\n".join(bad)
        return [said[r] for r in range(len(self.ranks))]


class Standing:
    """Ranks for many tests; started again after one that broke them."""

    def __init__(self, work: Path, world: int, module: str):
        self._work, self._world, self._module, self._number = Path(work), world, module, 0
        self._family: Family | None = None
        self._ranks: Ranks | None = None

    def get(self) -> Ranks:
        if self._ranks is None or self._ranks.broken:
            self.stop()
            self._number += 1
            folder = self._work / f"{self._world} ranks, {self._number}"
            folder.mkdir(parents=True)
            self._family = Family(folder)
            self._ranks = Ranks(self._family, self._world, self._module)
        return self._ranks

    def stop(self) -> None:
        if self._family is not None:
            self._family.__exit__(None, None, None)
        self._family = self._ranks = None


def content(folder) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, read by torch alone."""
    known = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    out = {k: torch.empty(md.size, dtype=md.properties.dtype) for k, md in known.items()}
    dcp.load(out, checkpoint_id=str(folder), no_dist=True)
    return out
