"""Starts ranks of a layer-wise job and asks all of them the same thing."""

from __future__ import annotations

from tests.support.proc import Child, Family
from xfer.testing.ports import free_port


class Ranks:
    def __init__(self, family: Family, world: int, module: str = "layerwise_main", **env: str):
        port = str(free_port())
        self.ranks: list[Child] = [
            family.start(
                f"rank{r}", "trainer", module, RANK=str(r), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **env
            )
            for r in range(world)
        ]  # fmt: skip
        for c in self.ranks:
            c.expect("up", timeout=600)

    def ask(self, do: str, *kinds: str, timeout: float = 300, **command) -> list[dict]:
        """All ranks' answers, in rank order; "raised" fails unless it is among `kinds`."""
        for c in self.ranks:
            c.say(do=do, **command)
        said = [c.expect(*kinds, "raised", timeout=timeout) for c in self.ranks]
        bad = [f"rank {r}: {x['type']}: {x['text']}" for r, x in enumerate(said) if x["kind"] not in kinds]
        assert not bad, "\n".join(bad)
        return said
