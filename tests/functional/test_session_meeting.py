"""`connect()` fails on all ranks, and all call it again at the same rendezvous."""

import threading

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.functional.test_session_connect import refuse
from tests.support.connect import flat_connect
from tests.support.examples import EXAMPLES, FIXED
from tests.support.simulation import Simulation
from tests.support.world import TOKEN, ToyEngine, ToySource
from xfer import errors as e

TROUBLE = {
    "none": "",
    "a layout": "this model cannot be read",
    "arguments": "bucket_bytes is ",
    "an engine": "no route /pause",
    "no engine": "object.pause_generation",
}
LATE = st.sampled_from([0.0, 0.0, 0.3, 1.0, 7.0])


@settings(max_examples=EXAMPLES, derandomize=FIXED, suppress_health_check=list(HealthCheck))
@given(
    trainers=st.integers(2, 3), trouble=st.sampled_from(sorted(TROUBLE)), by=st.integers(0, 2), other=st.booleans(),
    late=st.lists(st.tuples(LATE, LATE), min_size=3, max_size=3), seed=st.integers(0, 1 << 20),
)  # fmt: skip
def test_ranks_that_connect_at_any_time_hear_why_it_fails_and_meet_when_they_call_again(
    trainers, trouble, by, other, late, seed
):
    """However fast or late each is, in its first call and in the next. The second ones may ask for something else."""
    sources, engine, heard, done = [ToySource(i, trainers) for i in range(trainers)], ToyEngine(2), [], [0] * trainers

    def connect(rank: int, first: bool):
        engines, here = [engine], rank == by % trainers
        options = {} if first or not other else dict(bucket_bytes=1 << 16)
        if first and trouble == "a layout" and here:
            sources[rank].read = refuse
        elif first and trouble == "arguments" and here:
            options = dict(bucket_bytes=1 << 17)
        elif first and trouble == "an engine":
            engines = [ToyEngine(1)]
            engines[0].workers = lambda timeout: refuse("no route /pause")
        elif first and trouble == "no engine":
            engines = [ToyEngine(1), object()]  # the first one has to give its place back
        try:
            return flat_connect(
                trainer=sources[rank], rendezvous="tcp://h:1", token=TOKEN, deadline_s=60.0, engines=engines, **options
            )
        finally:
            vars(sources[rank]).pop("read", None)

    with Simulation(seed) as sim:

        def run(rank: int) -> None:
            sim.wait(late[rank][0])
            for again in range(4):
                try:
                    with connect(rank, not again) as session:
                        done[rank] = session.refit(verify=True).committed
                        return
                except e.XferError as error:
                    heard.append((rank, sim.now, str(error)))
                    sim.wait(late[rank][1])

        threads = []
        for i in range(trainers):
            with sim.process(f"trainer {i}"):
                threads.append(threading.Thread(target=run, args=(i,)))
                threads[-1].start()
        sim.block(lambda: not any(t.is_alive() for t in threads), sim.now + 200)
        assert done == [1] * trainers and not any(t.wrong(0) for t in engine.takers)
        assert all(TROUBLE[trouble] in text for *_, text in heard) and bool(heard) == (trouble != "none")
        assert sim.now < 1000.0 + 2 * 7.0 + 14.0
