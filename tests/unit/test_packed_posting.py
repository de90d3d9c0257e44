"""How rounds of the packed route are posted over the trainers' own group: other collectives over it run as before, whatever a post
raises. The group is real, of one rank over gloo; the backend that posts in batches, as NCCL's does, is made up.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from xfer.packed.tensors import _posted


class Batches:
    """A backend. `fails`: at which post; 0: at none."""

    supports_coalescing = True

    def __init__(self, fails: int):
        self.fails, self.open, self.posted, self.ended = fails, False, [], object()

    def _start_coalescing(self) -> None:
        self.open = True

    def _end_coalescing(self):
        self.open = False
        return self.ended

    def post(self, verb: str, tensors, peer: int, tag: int) -> None:
        assert self.open, "messages of a round are begun together, or each would wait for its own peer"
        reduces()
        self.posted.append((verb, tensors[0].tolist(), peer))
        if len(self.posted) == self.fails:
            raise RuntimeError("NCCL error: remote process exited")


def reduces() -> None:
    """A training step's collective: torch runs it, and does not add it to a batch."""
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert type(work) is not dist.distributed_c10d._IllegalWork
    work.wait()


@pytest.mark.parametrize("fails", [0, 1, 2])
@pytest.mark.parametrize("verb", ["send", "recv"])
def test_a_round_leaves_collectives_of_its_group_alone_whatever_a_post_raises(monkeypatch, verb, fails):
    backend, parts = Batches(fails), torch.arange(8, dtype=torch.uint8).split(4)
    backend.send, backend.recv = (partial(backend.post, v) for v in ("send", "recv"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(dist.ProcessGroup, "_get_backend", lambda self, device: backend)
            if fails:
                with pytest.raises(RuntimeError, match="remote process exited"):
                    _posted(parts, [0, 2], verb == "send")
            else:
                assert _posted(parts, [0, 2], verb == "send") == [backend.ended]
        wanted = [(verb, part.tolist(), peer) for part, peer in zip(parts, (0, 2))]
        assert backend.posted == wanted[: fails or None] and not backend.open
        reduces()
    finally:
        dist.distributed_c10d._world.pg_coalesce_state.clear()
        dist.destroy_process_group()
