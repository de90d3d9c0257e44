"""How rounds of the packed route are posted over the trainers' own group: nobody else's collectives over it are touched, whatever a
post raises. The group is real, of one rank over gloo; the backend that posts in batches, as NCCL's does, is made up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from xfer.packed.tensors import _Leg


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

    def _post(self, what: str, tensors, peer: int, tag: int) -> None:
        assert self.open, "messages of a round are begun together, or each would wait for its own peer"
        reduces()
        self.posted.append((what, tensors[0].tolist(), peer))
        if len(self.posted) == self.fails:
            raise RuntimeError("NCCL error: remote process exited")

    def send(self, *args) -> None:
        self._post("to", *args)

    def recv(self, *args) -> None:
        self._post("from", *args)


def reduces() -> None:
    """As a training step beside a gather, or after one: torch runs it, and does not put it aside for somebody's batch."""
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert type(work) is not dist.distributed_c10d._IllegalWork, "was only noted down"
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
@pytest.mark.parametrize("target", [True, False], ids=["receives", "sends"])
def test_a_round_leaves_collectives_of_its_group_alone_whatever_a_post_raises(group, monkeypatch, target, fails):
    slot = torch.arange(8, dtype=torch.uint8)
    backend, kind = Batches(fails), dist.ProcessGroup
    stream = SimpleNamespace(rank=1, slots=lambda kind: [slot, slot])
    sections = {1: (0, 4)} if not target else {0: (0, 4), 2: (4, 4)}
    leg = _Leg(stream, SimpleNamespace(target=1 if target else 5, sections=sections), [])
    monkeypatch.setattr(_Leg, "_packing", lambda *_: SimpleNamespace(copy=lambda: None))
    wanted = [("from", [0, 1, 2, 3], 0), ("from", [4, 5, 6, 7], 2)] if target else [("to", [0, 1, 2, 3], 5)]
    raises = 0 < fails <= len(wanted)
    with monkeypatch.context() as patch:
        patch.setattr(kind, "_get_backend", lambda self, device: backend)
        for name in ("_start_coalescing", "_end_coalescing"):
            patch.setattr(kind, name, lambda self, device, name=name: getattr(backend, name)())
        for name in ("send", "recv"):
            patch.setattr(kind, name, lambda self, *args, name=name: getattr(backend, name)(*args))
        if raises:
            with pytest.raises(RuntimeError, match="remote process exited"):
                leg.begin(0)
        else:
            assert leg.begin(0) == [backend.ended]
    assert backend.posted == wanted[: fails if raises else None] and not backend.open
    reduces()
