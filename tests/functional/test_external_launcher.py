"""vLLM engines in the processes that torchrun starts (distributed_executor_backend="external_launcher", as TRL and verl have them):
real vLLM, plain trainers. A process that holds a whole engine is a replica; one that holds a part of an engine is refused at once.
"""

import secrets

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")

from examples.common import toy  # noqa: E402
from examples.common.ports import free_port  # noqa: E402
from tests.support.proc import Family  # noqa: E402
from tests.support.refit_job import Trainers, good  # noqa: E402


class Launched:
    """Two processes of one launcher, and a trainer."""

    def __init__(self, work, tp: int):
        self.config = toy.config("qwen3")
        toy.write_checkpoint("qwen3", work / "model", seed=1)
        self.family, token = Family(work), secrets.token_hex(16)
        job = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), XFER_TOKEN=token)
        self.engines = [
            self.family.start(f"engine{r}", "engine", "external_main", RANK=str(r), LOCAL_RANK=str(r), **job)
            for r in range(2)
        ]
        self.trainers = Trainers(self.family, 1, token)
        self.on_all("started", do="start", model=str(work / "model"), tp=tp)
        self.trainers.build(self.config)
        self.rendezvous = f"tcp://127.0.0.1:{free_port()}"

    def on_all(self, *kinds: str, **command) -> list[dict]:
        for c in self.engines:
            c.say(**command)
        return [c.expect(*kinds, timeout=120) for c in self.engines]

    def refits_are_right(self, replicas: int) -> None:
        truth = self.on_all("observed", do="observe")
        good(self.trainers.connect(self.rendezvous, replicas=replicas))
        for seed in (2, 1):
            report = good(self.trainers.refit(seed, verify=True))
            assert report["verified"] and report["committed"] == [True] * replicas
            now = self.on_all("observed", do="observe")
            same = [
                (n["outputs"], n["checksums"]) == (t["outputs"], t["checksums"])
                for n, t in zip(now, truth, strict=True)
            ]
            assert same == [seed == 1] * 2


@pytest.fixture
def launched(tmp_path):
    some = []

    def make(tp: int) -> Launched:
        some.append(Launched(tmp_path, tp))
        return some[0]

    yield make
    for one in some:
        for child in (*one.engines, *one.trainers.ranks):
            child.kill()
        one.family.__exit__()


def test_each_process_of_a_launcher_that_holds_a_whole_engine_is_a_replica(launched):
    """The second process used to be "worker 1 of 1"."""
    job = launched(tp=1)
    for replica, engine in enumerate(job.engines):
        engine.say(do="serve", rendezvous=job.rendezvous, replica=replica)
        engine.expect("serving")
    job.refits_are_right(replicas=2)


def test_a_process_that_holds_a_part_of_an_engine_is_refused_at_once_and_a_forwarder_to_all_parts_is_served(launched):
    """It used to wait for its deadline, and to blame workers that nobody had called."""
    job = launched(tp=2)
    for refused in job.on_all("raised", "serving", do="serve", rendezvous=job.rendezvous):
        assert (
            refused["kind"] == "raised" and refused["type"] == "Unsupported" and "external_launcher" in refused["text"]
        ), refused
        assert "replica=RANK" in refused["text"] and "CallableEngine" in refused["text"], refused
        assert refused["seconds"] < 5.0
    port, (first, second) = free_port(), job.engines
    second.say(do="follow", port=port)
    second.expect("following")
    first.say(do="lead", port=port, rendezvous=job.rendezvous)
    first.expect("serving")
    job.refits_are_right(replicas=1)
