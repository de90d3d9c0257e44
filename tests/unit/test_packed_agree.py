"""What trainer ranks of the packed route tell each other, when one of them cannot. Other ranks are made up: they say what this one says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from xfer.errors import LayoutError, XferError
from xfer.packed import agree


@pytest.fixture
def others(monkeypatch) -> list[int]:
    """Two ranks, this is the first; how long what was gathered was, each time."""
    gathered = []

    def all_gather(into: list[torch.Tensor], mine: torch.Tensor) -> None:
        gathered.append(mine.numel())
        for t in into:
            t.copy_(mine)

    monkeypatch.setattr(agree, "ranks", lambda: (0, 2))
    monkeypatch.setattr(agree, "carried", lambda device: device)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather", all_gather)
    return gathered


def refuse(why: str) -> list[int]:
    raise LayoutError(why)


@pytest.mark.parametrize(
    "make, kind, says",
    [
        (lambda: refuse("layers.9.w: has no mapping"), LayoutError, "layers.9.w: has no mapping"),
        (lambda: refuse("file \udc80"), LayoutError, "file ?"),
        (lambda: 1 / 0, XferError, "ZeroDivisionError: division by zero"),
        (lambda: [torch.Size([2]), object()], XferError, "TypeError: Encoding objects of type object"),
        (lambda: ["\ud800"], XferError, "UnicodeEncodeError"),
    ],
    ids=["refuses", "refuses in no text", "raises", "cannot be encoded", "is no text"],
)
def test_a_rank_that_cannot_tell_says_so_where_the_others_wait_for_it(others, make, kind, says):
    """It once raised before it came there, when what it had to tell could not be encoded."""
    with pytest.raises(kind, match="trainer 0 failed to describe its exports") as e:
        agree.of_all_ranks(make, list[int], torch.device("cpu"))
    assert says in str(e.value) and len(others) == 2


def test_what_all_ranks_tell_comes_in_their_order(others):
    assert agree.of_all_ranks(lambda: [1, 2, 3], list[int], torch.device("cpu")) == [[1, 2, 3]] * 2
