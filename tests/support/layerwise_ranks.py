"""Starts ranks of a layer-wise job and asks all of them the same thing; and reads their checkpoints."""

from __future__ import annotations

import time

import torch
from torch.distributed import checkpoint as dcp

from tests.support.proc import PATIENCE, Child, Family

GRACE_S = 5.0
"""Seconds that other ranks have left for their answers once a rank has failed. Most of them wait for it for ever."""


class Ranks:
    def __init__(self, family: Family, world: int, module: str = "layerwise_main", **env: str):
        self.ranks: list[Child] = family.ranks(module, world, "rank", **env)
        for c in self.ranks:
            c.expect("up", timeout=600)

    def ask(self, do: str, *kinds: str, timeout: float = 300, **command) -> list[dict]:
        """All ranks' answers, in rank order.

        Raises:
            AssertionError: A rank failed or the time is up, with the answers of all. The others are aborted by `Child.expect`, and
                their stacks are in their logs.
        """
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
            for r in late:
                try:
                    self.ranks[r].expect(*kinds, timeout=0.1)
                except AssertionError as e:
                    bad.append(f"rank {r}: {e}")
        assert not bad, "\n".join(bad)
        return [said[r] for r in range(len(self.ranks))]


def content(folder) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, read by torch alone."""
    known = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    out = {k: torch.empty(md.size, dtype=md.properties.dtype) for k, md in known.items()}
    dcp.load(out, checkpoint_id=str(folder), no_dist=True)
    return out
