"""AsyncLLMs that join and leave a job while they answer requests and training goes on. Real vLLM, bit for bit. Truth: what the first
engine computed from the checkpoint on disk before anything was refitted. Odd versions bring exactly these weights, even ones others."""

import os
import signal

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")

from examples.common.ports import free_port  # noqa: E402
from tests.support.refit_job import Job, good, until  # noqa: E402


class Fleet:
    """A job of two trainers with room for some engines, and those of them that are there, by number."""

    def __init__(self, work, size: int, tp: int):
        self.job, self.size = Job(work, "qwen3", world=2), size
        started, env = self.job.family.start, dict(XFER_TOKEN=self.job.token)
        self.engines = [started(f"engine{i}", "engine", "async_main", **env) for i in range(size)]
        for i, e in enumerate(self.engines):
            how = dict(model=str(self.job.model), tensor_parallel_size=tp)
            e.ask("start", **how, load_format="dummy" if i else "auto")  # one after the other: they share few cores
        self.there: list[int] = []
        self.sums: dict[bool, object] = {True: self.engines[0].ask("observe")["checksums"]}
        self.version = 0

    def connect(self) -> None:
        self.at = f"tcp://127.0.0.1:{free_port()}"
        self.job.trainers.build(self.job.config)
        good(self.job.trainers.connect(self.at, replicas=self.size, wait=False))

    def joins(self, i: int) -> None:
        self.engines[i].ask("serve", rendezvous=self.at, replica=i)
        self.engines[i].ask("ready")
        self.engines[i].ask("generate")
        self.there.append(i)

    def leaves(self, i: int) -> None:
        self.engines[i].ask("close")
        self.there.remove(i)

    def refits(self, times: int, **how) -> None:
        """While all engines answer requests. Each one that is there then holds the version, whole."""
        for _ in range(times):
            self.version += 1
            seed = 1 if self.version % 2 else 2
            how |= dict(verify=True, version=self.version, min_replicas=len(self.there))
            report = good(self.job.trainers.refit(seed, **how))
            assert [i for i, c in enumerate(report["committed"]) if c] == sorted(self.there), report["errors"]
            for i in self.there:
                self.holds(i, self.version)

    def holds(self, i: int, version: int) -> None:
        said = self.engines[i].ask("observe")
        expected = self.sums.setdefault(bool(version % 2), said["checksums"])
        assert (said["version"], said["checksums"]) == (str(version), expected), f"engine {i}"
        assert self.sums[True] != self.sums.get(False), "the versions differ"


@pytest.mark.parametrize(
    "size, tp", [(2, 1), pytest.param(3, 2, marks=pytest.mark.slow)], ids=["one to two", "one to three to two"]
)
def test_engines_join_and_leave_during_ten_refits_and_a_joiner_is_served_while_trainers_are_stopped(tmp_path, size, tp):
    fleet = Fleet(tmp_path, size, tp)
    with fleet.job:
        fleet.connect()
        fleet.joins(0)
        fleet.refits(3)
        trainer = fleet.job.trainers.ranks[1].proc.pid
        os.kill(trainer, signal.SIGSTOP)  # trainer 0 has the coordinator's process and calls nothing
        try:
            for i in range(1, size):
                fleet.joins(i)
                until(lambda i=i: fleet.engines[i].ask("state")["version"] == 3, 30, "another engine's weights come")
                fleet.holds(i, 3)
        finally:
            os.kill(trainer, signal.SIGCONT)
        fleet.refits(2)
        fleet.refits(2, at_once=1)
        fleet.leaves(1)
        fleet.refits(3)
        fleet.holds(1, 7)
        answers = [e.ask("generated") for e in fleet.engines]
        assert all(a["count"] > 5 and not a["broken"] for a in answers), answers
        (first, second) = (dict(a["paused"]) for a in answers[:2])
        for version in (6, 7):  # one at a time; 8 to 10 came without the second one
            (began, seconds), (then, _) = first[version], second[version]
            assert then - began > seconds / 2, "the second one is paused once the first one serves"
        assert 8 in first and 8 not in second
