"""A worker's half of the broadcast: receives message k + 1 while the engine's loader takes in message k.

On GPUs messages arrive on a stream of their own, which waits for the loader's copies out of a buffer before that buffer is
written again. Not here: buffers that are mapped instead (shared.py), what the messages mean (lane.py).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Sequence

import torch

from xfer.errors import DeadlineExceeded
from xfer.packed.ahead import OneAhead
from xfer.packed.buffer import Buffers, wire_sum
from xfer.packed.wire import PackedMessage
from xfer.plan.checksum import added
from xfer.transport.group import Link

GRACE_S = 5.0
"""Seconds beyond the deadline in which a wait that the link should have ended must have ended."""


_streams: dict[tuple[str, torch.device], torch.cuda.Stream] = {}


def own_stream(device: torch.device, role: str) -> contextlib.AbstractContextManager:
    """What this thread enqueues runs beside other threads' work, after all that the device was given before. Without it
    all threads share one stream, and gathering, sending and loading wait for one another.

    One stream per `role` and device, for good: torch keeps freed memory for the stream on which it was first used.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    torch.cuda.set_device(device)  # the current device is a property of the thread
    stream = _streams.setdefault((role, device), torch.cuda.Stream(device))
    stream.wait_stream(torch.cuda.default_stream(device))
    return torch.cuda.stream(stream)


def recorded(device: torch.device) -> torch.cuda.Event | None:
    """An event after all that this thread's stream was given; None on CPUs."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class Arrivals:
    """Receives messages one after the other on a thread of its own, as far ahead as there are buffers.

    until: time.monotonic() value; nothing here waits longer than GRACE_S beyond it.
    """

    def __init__(
        self,
        link: Link,
        messages: Sequence[PackedMessage],
        buffers: Buffers,
        until: float,
        device: torch.device,
        verify: bool,
    ):
        self.total = 0
        self._messages, self._buffers, self._until = messages, buffers, until
        self._wire = OneAhead(link, until, self._arrived)
        self._device, self._verify = device, verify
        self._free: queue.Queue[torch.cuda.Event | None] = queue.Queue()
        for _ in range(buffers.count):
            self._free.put(None)
        self._here: queue.Queue[torch.Tensor | BaseException] = queue.Queue()
        self._stop = False
        self._thread = threading.Thread(target=self._receive, name="xfer-receive", daemon=True)
        self._thread.start()

    @property
    def seconds(self) -> float:
        """On the wire."""
        return self._wire.seconds

    def take(self) -> torch.Tensor:
        """The next message; raises what the link raised."""
        found = self._within(self._here, "a bucket")
        if isinstance(found, BaseException):
            raise found
        return found

    def free(self) -> None:
        """What `take` gave is not needed any more, once this thread's stream has done what it was given."""
        self._free.put(recorded(self._device))

    def close(self) -> bool:
        """False: the receiving thread did not end, and may still write to the buffers; they are not to be used again."""
        self._stop = True
        self._free.put(None)
        self._thread.join(max(0.0, self._until - time.monotonic()) + GRACE_S)
        return not self._thread.is_alive()

    def _within(self, things: queue.Queue, what: str):
        try:
            return things.get(timeout=max(0.0, self._until - time.monotonic()) + GRACE_S)
        except queue.Empty:
            raise DeadlineExceeded(f"the deadline passed while this worker waited for {what}") from None

    def _receive(self) -> None:
        longest = max((x.nbytes for x in self._messages), default=0)
        try:
            with own_stream(self._device, "receive"):
                for number, message in enumerate(self._messages):
                    event = self._within(self._free, "its loader to take a bucket in")
                    if self._stop:
                        return
                    if event is not None:
                        torch.cuda.current_stream(self._device).wait_event(event)
                    self._wire.give(number, self._buffers.take(number, message.nbytes, longest))
                self._wire.close()
        except BaseException as e:
            self._here.put(e)

    def _arrived(self, number: int, data: torch.Tensor) -> None:
        if self._verify:
            self.total = added(self.total, wire_sum(data, number))
        self._here.put(data)
