"""What the gate sees and what it does not: wrong refits, made on purpose in a live MoE engine beside a real trainer.

In fp32, weights at wrong places must raise mean(exp|d|) - 1 ten times over the same run's clean median. A refit
that was left out and a layer that stayed old may hide below any limit, so other things must see them: the version that each
token carries, and the checksums of `verify=True`.
"""

import secrets
import statistics
from pathlib import Path

import pytest

from examples.common.ports import free_port
from examples.grpo import model
from tests.support.marks import BOTH
from tests.support.proc import Family

pytestmark = [pytest.mark.slow, BOTH]
WORLD = 2


class Loop:
    """`WORLD` trainer ranks and the rollout; every step of the optimizer is counted, so that versions can be wrong."""

    def __init__(self, work: Path, family: Family, layout: dict, dtype: str):
        token, self.version, self.number = secrets.token_hex(16), 0, 0
        model.write("moe", str(work / "model"), dtype)
        rendezvous, listen = f"tcp://127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        world = dict(WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), XFER_TOKEN=token)
        flags = ["--model", str(work / "model"), "--rendezvous", rendezvous, "--listen", listen, "--dtype", dtype]
        self.rollout = family.start("rollout", "engine", "grpo_rollout", *flags, XFER_TOKEN=token)
        self.ranks = [
            family.start(f"trainer{r}", "trainer", "grpo_trainer", RANK=str(r), LOCAL_RANK=str(r), **world)
            for r in range(WORLD)
        ]
        self.ask("build", "built", folder=str(work / "model"), layout=layout)
        self.ask("connect", "connected", rendezvous=rendezvous, url=f"http://{listen}")
        self.refit()

    def ask(self, do: str, *kinds: str, **more) -> dict:
        for r in self.ranks:
            r.say(do=do, **more)
        return [r.expect(*kinds, timeout=400) for r in self.ranks][0]

    def refit(self, **more) -> dict:
        return self.ask("refit", "refitted", "raised", version=self.version, **more)

    def step(self) -> dict:
        """Sample and train; the refit is the caller's."""
        seen = self.ask("step", "stepped", number=self.number, version=self.version)
        self.number, self.version = self.number + 1, self.version + 1
        return seen

    def clean(self) -> float:
        seen = self.step()
        assert seen["wrong"] == "" and seen["tokens"] == 16 * 8 * 3, seen
        assert self.refit()["kind"] == "refitted"
        return seen["error"] - 1

    def fault(self, name: str, *args) -> None:
        found = self.ask("fault", "faulty", name=name, args=list(args))["found"]
        assert len(found) == 2 and all(found), f"{name} found nothing to spoil: {found}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_the_gate_sees_and_what_versions_and_checksums_see(tmp_path, capsys, dtype):
    """In bf16 the figures are printed and only versions and checksums are judged."""
    with Family(tmp_path) as family:
        loop = Loop(tmp_path, family, dict(tp=1, pp=1, ep=2, etp=1), dtype)
        median = statistics.median(loop.clean() for _ in range(5))
        said = [f"clean median {median:.2e}"]

        def mended() -> bool:
            return loop.clean() < 10 * median or dtype == "bfloat16"

        for name in ("swap_gate_up", "swap_experts"):
            loop.fault(name)
            seen = loop.step()
            said.append(f"{name} {seen['error'] - 1:.2e}, {(seen['error'] - 1) / median:.0f} times")
            assert seen["error"] - 1 >= 10 * median or dtype == "bfloat16", said
            assert loop.refit()["kind"] == "refitted"
            assert mended(), "the refit after the fault did not mend it"

        loop.step()  # and no refit after it
        seen = loop.step()
        said.append(f"skipped refit {seen['error'] - 1:.2e}")
        assert f"is version '{loop.version - 1}'" in seen["wrong"], seen
        assert f"made by version '{loop.version - 2}'" in seen["wrong"], seen
        assert loop.refit()["kind"] == "refitted"
        assert mended()

        loop.fault("stale_layer", 2)
        loop.step()
        assert loop.refit()["kind"] == "refitted"  # nobody compared
        seen = loop.step()
        said.append(f"stale layer, not verified {seen['error'] - 1:.2e}")
        assert seen["wrong"] == ""
        refused = loop.refit(verify=True)
        assert refused["kind"] == "raised" and refused["type"] == "VerificationError", refused
        whole = loop.refit(verify=True)
        assert whole["kind"] == "refitted" and whole["verified"], whole
        assert mended()
        with capsys.disabled():
            print(f"\n{dtype}, mean(exp|d|) - 1: " + "; ".join(said))
