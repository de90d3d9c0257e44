"""Data-parallel ranks that share experts, and an owner who pauses and resumes their engine while refits do the same.

Real vLLM. Its ranks wait for one another in every step, so calls that reach them in different steps can make them wait for good.
"""

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")

from examples.common import toy  # noqa: E402
from examples.common.ports import free_port  # noqa: E402
from tests.support import checkpoints  # noqa: E402
from tests.support.proc import PATIENCE, Family  # noqa: E402
from xfer.engines.hf_spec import canonical_specs  # noqa: E402

TOKEN = "token of resumed engines"


@pytest.fixture
def family(tmp_path):
    with Family(tmp_path) as family:
        yield family


def folder(family: Family, name: str, seed: int) -> str:
    config = toy.config("qwen3_moe")
    return str(checkpoints.write(family.work / name, config, canonical_specs(config), seed, {}))


def engine(family: Family, model: str):
    child = family.start("engine", "engine", "resumed_main", XFER_TOKEN=TOKEN)
    child.expect("up", timeout=120)
    child.say(do="start", model=model)
    child.expect("started")
    return child


def test_an_engine_that_its_owner_resumed_during_a_refit_is_not_resumed_again(family):
    """By the refit, or by its owner: the request that has begun on one rank meanwhile would never be answered."""
    child = engine(family, folder(family, "model", 1))
    for who in ("refit", "owner"):
        child.say(do="twice", who=who)
        answered = child.expect("answered", timeout=60)
        assert (answered["tokens"], answered["paused"]) == (4, False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_refits_commit_whenever_the_owner_pauses_and_resumes(family, seed):
    folders = [folder(family, name, n) for n, name in enumerate("ab", 1)]
    trainer = family.start("trainer", "engine", "folder_main", XFER_TOKEN=TOKEN)
    child = engine(family, folders[0])
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    trainer.say(do="build", folder=folders[0], rank=0, world=1, port=free_port(), leave=[])
    trainer.expect("built")
    child.say(do="serve", rendezvous=rendezvous)
    child.expect("serving")
    trainer.say(do="connect", rendezvous=rendezvous, replicas=1)
    trainer.expect("connected")
    child.say(do="ready")
    child.expect("ready")
    child.say(do="disturb", seed=seed)
    child.expect("disturbing")
    for n in range(100):
        trainer.say(do="load", folder=folders[n % 2])
        trainer.expect("loaded")
        trainer.say(do="refit", verify=True, deadline_s=60.0 * PATIENCE)
        report = trainer.expect("refitted", timeout=90)
        assert report["verified"] and report["committed"] == [True], report
    child.say(do="disturbed")
    end = child.expect("disturbed")
    assert end["version"] == "100" and all(end["did"][kind] for kind in ("answers", "pauses", "resumes")), end
