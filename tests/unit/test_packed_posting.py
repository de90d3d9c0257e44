"""How rounds of the packed route are posted over the trainers' own group: other collectives over it run as before, whatever a post
raises. The group is real, of one rank over gloo; the backend that posts in batches, as NCCL's does, is made up.
"""

from __future__ import annotations

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

    def _post(self, verb: str, tensors, peer: int, tag: int) -> None:
        assert self.open, "messages of a round are begun together, or each would wait for its own peer"
        reduces()
        self.posted.append((verb, tensors[0].tolist(), peer))
        if len(self.posted) == self.fails:
            raise RuntimeError("NCCL error: remote process exited")

    def send(self, *args) -> None:
        self._post("send", *args)

    def recv(self, *args) -> None:
        self._post("recv", *args)


def reduces() -> None:
    """A training step's collective: torch runs it, and does not add it to a batch."""
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert type(work) is not dist.distributed_c10d._IllegalWork
    work.wait()


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.distributed_c10d._world.pg_coalesce_state.clear()
        dist.destroy_process_group()


@pytest.mark.parametrize("fails", [0, 1, 2])
@pytest.mark.parametrize("sends", [True, False], ids=["sends", "receives"])
def test_a_round_leaves_collectives_of_its_group_alone_whatever_a_post_raises(group, monkeypatch, sends, fails):
    backend, slot = Batches(fails), torch.arange(8, dtype=torch.uint8)
    wanted = [("send" if sends else "recv", part.tolist(), peer) for part, peer in zip(slot.split(4), (0, 2))]
    with monkeypatch.context() as patch:
        patch.setattr(dist.ProcessGroup, "_get_backend", lambda self, device: backend)
        for name in ("_start_coalescing", "_end_coalescing"):
            patch.setattr(dist.ProcessGroup, name, lambda self, device, name=name: getattr(backend, name)())
        for name in ("send", "recv"):
            patch.setattr(dist.ProcessGroup, name, lambda self, *args, name=name: getattr(backend, name)(*args))
        if fails:
            with pytest.raises(RuntimeError, match="remote process exited"):
                _posted(slot.split(4), [0, 2], sends)
        else:
            assert _posted(slot.split(4), [0, 2], sends) == [backend.ended]
    assert backend.posted == wanted[: fails or None] and not backend.open
    reduces()
