"""When connect() has failed, all ranks call it again at the same rendezvous, and the calls meet, however fast or late each rank is.

Only xfer's public calls are used. Trainers are threads and engines are small stand-ins (tests/support/world.py); test_refit_errors.py has
processes and a real vLLM.
"""

import threading
import time

import pytest

import xfer
from examples.common.ports import free_port
from tests.support.connect import flat_connect
from tests.support.proc import PATIENCE
from tests.support.world import TOKEN, ToyEngine, ToySource, World
from xfer import errors as e

OTHER = {"bucket_bytes": 1 << 16}
"""Arguments that differ between the first and the second call. All ranks must agree on them, as on route="packed"."""


class Job:
    """Trainers and one engine that meet at one rendezvous, several times."""

    def __init__(self, trainers: int):
        self.trainers, self.rendezvous = trainers, f"tcp://127.0.0.1:{free_port()}"
        self.sources, self.engine = [ToySource(i, trainers) for i in range(trainers)], ToyEngine(2)
        self.refits: list[xfer.Session | None] = [None] * trainers

    def connect(self, rank: int, **how) -> None:
        options = dict(deadline_s=20.0 * PATIENCE, engines=[self.engine]) | how
        self.refits[rank] = flat_connect(trainer=self.sources[rank], rendezvous=self.rendezvous, token=TOKEN, **options)

    def on_all(self, call) -> list:
        return World(trainers=self.trainers).on_all(call)

    def refit_and_close(self, version: int) -> None:
        def run(rank: int):
            with self.refits[rank] as refit:
                self.sources[rank].set(version)
                return xfer.nccl_xfer_refit(refit, verify=True).committed

        assert self.on_all(run) == [1] * self.trainers
        assert not [t.wrong(version) for t in self.engine.takers if t.wrong(version)]


def refuse():
    raise e.Unsupported("this model cannot be read")


@pytest.mark.parametrize(
    "slow", [{}, {0: 0.5}, {1: 0.5, 2: 1.0}], ids=["at once", "trainer 0 later", "the others later"]
)
def test_the_second_calls_of_all_ranks_meet_however_fast_each_is(slow):
    """Three times in a row. A quick rank used to reach the first call's rendezvous and to hear its error again."""
    job = Job(3)

    def twice(rank: int):
        job.sources[rank].read = refuse
        with pytest.raises(e.Unsupported, match="cannot be read"):
            job.connect(rank)
        del job.sources[rank].read
        time.sleep(slow.get(rank, 0.0))
        job.connect(rank, **OTHER)

    for version in (1, 2, 3):
        began = time.monotonic()
        assert job.on_all(twice) == [None] * 3
        assert time.monotonic() - began < 12.0 * PATIENCE
        job.refit_and_close(version)


def test_a_rank_whose_first_call_comes_when_the_others_have_failed_and_called_again_hears_why_and_comes_again():
    """Its arguments differ from those of the others' second calls. It used to be refused for that, and the others with it."""
    job, waiting = Job(2), threading.Event()

    def run(rank: int):
        if rank == 0:
            job.sources[0].read = refuse
            with pytest.raises(e.Unsupported, match="cannot be read"):
                job.connect(0, deadline_s=0.5)
            del job.sources[0].read
            waiting.set()
        else:
            waiting.wait(20 * PATIENCE)
            with pytest.raises(e.Unsupported, match="cannot be read"):
                job.connect(1)
        job.connect(rank, **OTHER)

    assert job.on_all(run) == [None] * 2
    job.refit_and_close(1)


def test_a_rank_that_was_not_there_joins_the_second_call_of_the_others_where_it_asks_for_the_same():
    """For example a rank whose process was started anew in between."""
    job, failed = Job(2), threading.Event()

    def run(rank: int):
        if rank == 0:
            with pytest.raises(e.DeadlineExceeded, match="trainer 1: it has not called"):
                job.connect(0, deadline_s=0.5)
            failed.set()
        failed.wait(20 * PATIENCE)
        job.connect(rank)

    assert job.on_all(run) == [None] * 2
    job.refit_and_close(1)


def test_a_rank_that_has_left_waits_for_the_next_session_until_its_deadline_only():
    """The error says that trainer 0 has not called again, instead of repeating the error of the session before."""
    job = Job(2)
    assert job.on_all(job.connect) == [None] * 2
    job.refits[1].close()
    with pytest.raises(e.DeadlineExceeded, match=r"no new session began at (.|\n)*called xfer.connect\(\) again"):
        job.connect(1, deadline_s=1.0)
    job.refits[0].close()
    assert job.on_all(job.connect) == [None] * 2
    job.refit_and_close(1)


def test_an_engine_that_is_served_again_meets_the_next_session():
    """Its second controller used to be told the error of the first session again."""
    job = Job(2)
    common = dict(rendezvous=job.rendezvous, token=TOKEN, deadline_s=20.0 * PATIENCE)
    told, again = threading.Event(), []

    def serve(rank: int):
        while True:
            controller = xfer.serve(job.engine, **common)
            try:
                controller.wait_ready()
                return again.append(controller)
            except e.XferError:
                controller.close()
                told.set()

    def run(rank: int):
        if rank == 2:
            return serve(rank)
        source = job.sources[rank]
        read = source.read
        source.read = lambda: (read(), refuse())
        with pytest.raises(e.Unsupported):
            job.connect(rank, engines=())
        del source.read
        assert told.wait(20 * PATIENCE)
        job.connect(rank, engines=())

    assert World(trainers=3).on_all(run) == [None] * 3
    job.refit_and_close(1)
    again[0].close()


def test_a_controller_that_was_closed_before_trainers_came_does_not_come_any_more():
    """When trainers came it took the replica's place for a moment, in which the controller that was served after it was refused."""
    before = set(threading.enumerate())
    where = dict(rendezvous=f"tcp://127.0.0.1:{free_port()}", token=TOKEN)
    xfer.serve(ToyEngine(1), **where).close()
    until = time.monotonic() + 3.0 * PATIENCE
    while left := set(threading.enumerate()) - before:
        assert time.monotonic() < until, left
        time.sleep(0.05)
