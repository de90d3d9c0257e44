"""Both routes on real GPUs: bytes, faults, identity. Where ranks share a GPU, each is a host of its own to NCCL, which refuses two
ranks of one host there.
"""

from __future__ import annotations

import gc
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.examples import EXAMPLES
from tests.support.gpu_job import BESIDE, NO_HANDLES, nccl_host
from tests.support.gpu_ranks import spawn
from tests.support.row_worlds import row
from xfer.background import BackgroundCall
from xfer.errors import DeadlineExceeded, XferError
from xfer.kernels.cuda_driver import Graph
from xfer.plan.program import Program
from xfer.transport.nccl import NcclLink, quiet
from xfer.transport.scratch import Held, Scratch

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU")]
SEEDS = list(range(EXAMPLES // 3))
LINKED = min(4, GPUS) if GPUS > 1 else 3
"""Ranks of a link. On one GPU they take turns, so a wave takes the sum of their times."""
SENT = SEEDS if GPUS > 1 else SEEDS[:8]


def hosts(ranks: int, *more: dict[str, str]) -> dict[int, dict[str, str]]:
    """Environment by rank: a host of its own to NCCL where ranks share a GPU, and `more`, of the first ranks."""
    alone = ranks <= GPUS
    return {r: {**({} if alone else nccl_host(f"rank{r}")), **(more[r] if r < len(more) else {})} for r in range(ranks)}


def test_random_programs_over_nccl():
    """Both ways at once, any rank to any rank, casts, fills, odd alignments; twice with new sources."""
    got = spawn("worlds", LINKED, route="p2p", seeds=SENT, env=hosts(LINKED))
    assert all(sent > 0 for _, sent, *_ in got)


@pytest.mark.parametrize(
    "how",
    [{}, {"long_bytes": 24}, {"long_bytes": 24, "batches": False}],
    ids=["kernel", "both", "both, an older driver"],
)
def test_random_programs_are_pulled(how):
    """Four processes, whatever the number of GPUs, each both offers and maps; nothing goes by p2p."""
    got = spawn("worlds", 4, route="peer", seeds=SEEDS, **how)
    assert all(pulled > 0 and sent == 0 for pulled, sent, *_ in got)
    copied = [sum(x[k] for x in got) for k in (2, 3)]  # none from a destination's own GPU
    assert all(copied) if how and GPUS > 1 else not any(copied)


def test_trainer_and_engine_in_one_process_read_each_other():
    """Nothing is opened or unmapped there; on two GPUs torch is made to let each read the other."""
    (got,) = spawn("one_process", 1, ranks=2, seeds=SEEDS)
    assert all(pulled > 0 and sent == 0 for pulled, sent, *_ in got)


def test_storages_that_cannot_be_exported_go_by_p2p():
    """Rank 0 allocates with expandable segments, which give out no legacy handles: its rows are sent, others pulled."""
    got = spawn("worlds", LINKED, route="mixed", seeds=SENT, env=hosts(LINKED, NO_HANDLES))
    assert sum(x[0] for x in got) > 0 and sum(x[1] for x in got) > 0
    assert got[0][0] > 0  # rank 0 itself pulls from the others


@pytest.mark.parametrize("connections", ["1", ""])
def test_an_absent_peer_is_a_typed_error_in_time(connections):
    more = {"CUDA_DEVICE_MAX_CONNECTIONS": connections} if connections else {}
    (outcome, took, good), (_, _, other) = spawn("absent_peer", 2, env=hosts(2, more, more))
    assert outcome == "DeadlineExceeded" and took < 8 and good and other


def test_a_copy_out_of_scratch_is_waited_for_by_the_deadline():
    live, rows = [torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")], row((1 << 20,), src_dtype="uint8", dst=1)
    scratch = Scratch(Program(1, 1, rows), live, 1 << 20, "a worker", None)
    scratch.roots[0].fill_(7)
    held = Held(scratch)
    torch.cuda._sleep(1 << 31)  # about a second
    with pytest.raises(DeadlineExceeded):
        held.apply(time.monotonic() + 0.05, "a worker")
    assert not held.drained
    torch.cuda.synchronize()
    assert held.drained and bool((live[0] == 7).all())


def test_a_stopped_pull_is_drained_and_the_next_is_whole():
    name, took, partial, same = spawn("stopped_pull", 2)[1]
    assert name == "Aborted" and took < 1 and partial and same


def test_a_graph_is_recorded_while_garbage_is_collected():
    """A query of an event by a destructor in the recording thread has made recording fail."""

    class Garbage:
        def __init__(self):
            self.me, self.event, self.memory = self, torch.cuda.Event(), torch.zeros(16, pin_memory=True)
            self.event.record()

        def __del__(self):
            seen.append(self.event.query())

    seen, stream, number = [], torch.cuda.Stream(), torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    gc.disable()
    try:
        Garbage()
        with torch.cuda.stream(stream):
            graph = Graph(stream, lambda: (number.add_(1), gc.collect()))
    finally:
        gc.enable()
    graph.launch(stream)
    torch.cuda.synchronize()
    assert seen and number.item() == 1


def test_an_abort_inside_a_group_of_messages_takes_nothing_from_the_next_communicator():
    """NCCL's groups belong to a thread: one left open by an error has silently swallowed all later messages of that thread."""
    device, until = torch.device("cuda", 0), time.monotonic() + 30

    def link() -> NcclLink:
        new, options = NcclLink(None, 0, 1, 20.0, device, ("alone",)), dist.ProcessGroupNCCL.Options()
        options.config.blocking = 0

        def connect() -> None:
            torch.cuda.set_device(device)
            with quiet():
                new._pg = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, options)
            new._pg.eager_connect_single_device(device)
            new._pg.broadcast([torch.zeros(1, device=device)]).wait()

        assert BackgroundCall(connect).wait(time.monotonic() + 20)
        return new

    def moves(link: NcclLink, value: int) -> bool:
        sent = torch.full((1 << 20,), value, dtype=torch.uint8, device=device)
        got = torch.zeros_like(sent)
        for pending in link.post([(got, 0, 0)], [(sent, 0, 0)])[0]:
            pending.wait(until)
        link.finish(until)
        return torch.equal(got, sent)

    first = link()
    assert moves(first, 1)
    pg = first._pg

    class Racing:
        def _start_coalescing(self):
            pg._start_coalescing()
            pg.abort()

        def __getattr__(self, name):
            return getattr(pg, name)

    first._pg = Racing()
    with pytest.raises(XferError):
        moves(first, 2)
    second = link()
    assert moves(second, 3)
    first.close()
    second.close()


def test_a_new_allocation_is_noticed_and_memory_comes_back():
    noticed, _, back = spawn("moved_storage", 2)[0]
    assert noticed and (back or BESIDE)


@pytest.mark.parametrize("expandable", ["True", "False"])
def test_memory_that_was_given_back_behind_its_address_is_noticed(expandable):
    """As in an engine that sleeps: a refit into it must be an error, not an illegal access."""
    conf = f"expandable_segments:{expandable}"
    env = {0: {"PYTORCH_CUDA_ALLOC_CONF": conf, "PYTORCH_ALLOC_CONF": conf}}
    assert spawn("given_back", 1, env=env) == [(True, True, False)]
