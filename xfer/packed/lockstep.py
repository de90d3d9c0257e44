"""Runs many calls so that their small collectives become a few large ones.

A framework's export runs the same small collectives for every parameter: an exchange of its owner, a broadcast over pipeline
stages, gathers over tensor and expert parallel ranks. Here each parameter's export runs on its own thread, one at a time. At a
collective it pauses until all others have reached one. Then the waiting collectives are done by one collective per kind,
process group and source. The framework's code is unchanged and receives the same results.

All ranks must run the same calls in the same order, as they must without this module.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from xfer.errors import DeadlineExceeded, PeerLost
from xfer.kernels.bits import copy_bits
from xfer.packed.buffer import flat_bytes

T = TypeVar("T")
_here = threading.local()
SECONDS = 600.0
"""Deadline of all calls of one `run`."""


@dataclass(eq=False)
class _Wish:
    """One collective that a call waits for.

    Attributes:
        key: Wishes with equal keys are done by one collective.
        do: Does a list of wishes.
        arguments: Tensors or objects of this wish.
        error: Raised in the call that waits.
    """

    key: tuple
    do: Callable[[list[_Wish]], None]
    arguments: tuple
    error: BaseException | None = None


@dataclass(eq=False)
class _Walker(Generic[T]):
    """One call on its thread. `result` holds its value after it has returned."""

    call: Callable[[], T]
    go: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    wish: _Wish | None = None
    over: bool = False
    result: list[T] = field(default_factory=list)
    error: BaseException | None = None


class _JobThread:
    """A thread that runs jobs, one at a time. A model has thousands of calls, and starting a thread for each would cost more than
    the call. A thread that hangs in a job is not reused."""

    _idle: list[_JobThread] = []
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._work, name="xfer-lockstep", daemon=True).start()

    @classmethod
    def do(cls, job: Callable[[], None]) -> None:
        with cls._lock:
            idle = cls._idle.pop() if cls._idle else None
        (idle or cls())._jobs.put(job)

    def _work(self) -> None:
        while True:
            self._jobs.get()()
            with self._lock:
                self._idle.append(self)


class Lockstep:
    """Merges the collectives of several calls. One object serves one `run`.

    Args:
        device: Device of the trainer rank.
        seconds: Time limit of all calls together.

    Attributes:
        collectives: Number of collectives that were run.
    """

    def __init__(self, device: torch.device, seconds: float = SECONDS):
        self._device, self.collectives, self._seconds = device, 0, seconds
        self._until = 0.0
        self._back: queue.SimpleQueue = queue.SimpleQueue()  # one item when a walker pauses or ends
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._real = {name: getattr(dist, name) for name in _REPLACED}

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Run the calls. The first error of a call is raised after all others have ended.

        Returns:
            Results of the calls, in their order.

        Raises:
            DeadlineExceeded: a call neither ended nor reached a collective in time. Its thread is abandoned; the others end.
        """
        walkers = [_Walker[T](c) for c in calls]
        self._until = time.monotonic() + self._seconds
        try:
            for name in _REPLACED:
                setattr(dist, name, self._replacement(name))
            for w in walkers:
                _JobThread.do(partial(self._walk, w))
                self._advance(w)
            while any(not w.over for w in walkers):
                self._meet([w.wish for w in walkers if w.wish is not None])
                for w in walkers:
                    if not w.over:
                        self._advance(w)
        finally:
            for name, real in self._real.items():
                setattr(dist, name, real)
            for w in walkers:  # after an error, end the calls that still pause
                if not w.over and w.wish is not None:
                    w.wish.error = w.wish.error or PeerLost("the gather of this export was abandoned")
                    w.go.put(None)
        for w in walkers:
            if w.error is not None:
                raise w.error
        return [r for w in walkers for r in w.result]

    def _advance(self, w: _Walker) -> None:
        """Let one walker run to its next collective or its end. No other walker runs meanwhile."""
        w.wish = None
        w.go.put(None)
        try:
            self._back.get(timeout=max(0.0, self._until - time.monotonic()))
        except queue.Empty:
            raise DeadlineExceeded(
                f"the framework's export neither ended nor came to a collective within {self._seconds:g} s",
                ["it waits in a call that is not one of " + ", ".join(f"torch.distributed.{n}" for n in _REPLACED)],
            ) from None

    def _walk(self, w: _Walker[T]) -> None:
        w.go.get()
        _here.walker, _here.lockstep = w, self
        try:
            if self._stream is not None:
                torch.cuda.set_stream(self._stream)  # also sets the device; only this module uses the thread
            with torch.no_grad():
                w.result.append(w.call())
        except BaseException as e:
            w.error = e
        _here.walker = _here.lockstep = None
        w.over = True
        self._back.put(None)

    def _stand(self, wish: _Wish) -> None:
        """Pause the walker of this thread until its wish is done."""
        w = _here.walker
        w.wish = wish
        self._back.put(None)
        w.go.get()
        if wish.error is not None:
            raise wish.error

    def _meet(self, wishes: list[_Wish]) -> None:
        by_key: dict[tuple, list[_Wish]] = {}
        for wish in wishes:
            by_key.setdefault(wish.key, []).append(wish)
        for together in by_key.values():
            try:
                self.collectives += 1
                together[0].do(together)
            except BaseException as e:
                for wish in together:
                    wish.error = e

    # ---- replacements of torch.distributed's functions on walkers' threads

    def _replacement(self, name: str):
        real, make = self._real[name], getattr(self, f"_wish_{name}")

        def call(*args, **kwargs):
            if getattr(_here, "lockstep", None) is not self or kwargs.get("async_op"):
                return real(*args, **kwargs)
            return self._stand(make(*args, **kwargs))

        return call

    def _wish_broadcast(self, tensor, src=None, group=None, async_op=False, group_src=None):
        root = src if group_src is None else dist.get_global_rank(group or dist.group.WORLD, group_src)

        def do(wishes: list[_Wish]) -> None:
            tensors = [w.arguments[0] for w in wishes]
            flat = _joined(tensors)
            self._real["broadcast"](flat, src=root, group=group)
            if dist.get_rank() != root:
                _apart(flat, tensors)

        return _Wish(("broadcast", group, root), do, (tensor,))

    def _wish_all_gather(self, tensor_list, tensor, group=None, async_op=False):
        if any(t.numel() != tensor.numel() or t.dtype != tensor.dtype for t in tensor_list):
            return _Wish(
                ("all_gather", group, object()),
                lambda _: self._real["all_gather"](tensor_list, tensor, group=group),
                (),
            )

        def do(wishes: list[_Wish]) -> None:
            mine = _joined([w.arguments[1] for w in wishes])
            slots = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            self._real["all_gather"](slots, mine, group=group)
            for i, slot in enumerate(slots):
                _apart(slot, [w.arguments[0][i] for w in wishes])

        return _Wish(("all_gather", group), do, (tensor_list, tensor))

    def _wish_all_gather_object(self, object_list, obj, group=None):
        def do(wishes: list[_Wish]) -> None:
            slots: list = [None] * dist.get_world_size(group)
            self._real["all_gather_object"](slots, [w.arguments[1] for w in wishes], group=group)
            for i, said in enumerate(slots):
                for w, one in zip(wishes, said, strict=True):
                    w.arguments[0][i] = one

        return _Wish(("all_gather_object", group), do, (object_list, obj))

    def _wish_broadcast_object_list(self, object_list, src=None, group=None, device=None, group_src=None):
        root = src if group_src is None else dist.get_global_rank(group or dist.group.WORLD, group_src)

        def do(wishes: list[_Wish]) -> None:
            said = [x for w in wishes for x in w.arguments[0]]
            self._real["broadcast_object_list"](said, src=root, group=group, device=device)
            for w in wishes:
                n = len(w.arguments[0])
                w.arguments[0][:], said = said[:n], said[n:]

        return _Wish(("broadcast_object_list", group, root), do, (object_list,))


_REPLACED = ("broadcast", "all_gather", "all_gather_object", "broadcast_object_list")


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the tensors' bytes. Even a single tensor is copied, because its memory may be read meanwhile."""
    return torch.cat([flat_bytes(t) for t in tensors])


def _apart(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy concatenated bytes back into the tensors."""
    kinds = {t.dtype for t in tensors}
    if len(kinds) == 1 and all(t.is_contiguous() for t in tensors):
        pieces = flat.view(*kinds).split([t.numel() for t in tensors])
        copy_bits([t.view(-1) for t in tensors], pieces)
        return
    at = 0
    for t in tensors:
        n = t.numel() * t.element_size()
        piece = flat[at : at + n]
        if at % t.element_size():
            piece = piece.clone()
        t.copy_(piece.view(t.dtype).view(t.shape))
        at += n
