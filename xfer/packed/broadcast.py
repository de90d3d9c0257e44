"""Messages that one rank broadcasts over a link: the next one begins before the one before it is waited for.

A worker receives message k + 1 while the engine's loader reads message k. On GPUs messages arrive on their own stream. Before a
buffer is written again, the stream waits until the loader has copied out of it. shared.py has the counterpart for mapped buffers.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch

from xfer.errors import DeadlineExceeded
from xfer.packed.buffer import Buffers, wire_sum
from xfer.packed.wire import PackedMessage
from xfer.plan.checksum import added
from xfer.transport.group import Link, Pending

GRACE_S = 5.0
"""Seconds beyond the deadline after which a worker gives up waiting. The link's own deadline should end it first."""
_streams: dict[tuple[str, torch.device], torch.cuda.Stream] = {}


def own_stream(device: torch.device, role: str) -> contextlib.AbstractContextManager:
    """Return a context in which this thread enqueues its work on a stream of its own, after all earlier work of the device.

    Without it all threads share one stream, so that gathering, sending and loading wait for one another. There is one stream
    per `role` and device, and it is reused, because torch keeps freed memory for the stream on which it was first used.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    torch.cuda.set_device(device)  # the current device is a property of the thread
    stream = _streams.setdefault((role, device), torch.cuda.Stream(device))
    stream.wait_stream(torch.cuda.default_stream(device))
    return torch.cuda.stream(stream)


def recorded(device: torch.device) -> torch.cuda.Event | None:
    """Return an event after all work of this thread's stream; None on CPUs."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class OneAhead:
    """Broadcasts messages from rank 0 of `link`, in order. Used on both ends. `give` and `close` raise the link's errors.

    Args:
        link: The link.
        until: Deadline of every wait, a time.monotonic() value.
        arrived: Called with (number, data) when a message is complete on this rank.

    Attributes:
        seconds: Time during which a message was on the wire, up to the last complete one.
    """

    def __init__(self, link: Link, until: float, arrived: Callable[[int, torch.Tensor], object]):
        self.seconds = 0.0
        self._link, self._until, self._arrived = link, until, arrived
        self._before: tuple[int, torch.Tensor, Pending, float] | None = None
        self._ended = 0.0

    def give(self, number: int, data: torch.Tensor) -> None:
        """Begin this message, then wait for the previous one."""
        now = number, data, self._link.begin_broadcast(data, 0, self._until), time.perf_counter()
        self.close()
        self._before = now

    def close(self) -> None:
        """Wait for the message that is under way."""
        before, self._before = self._before, None
        if before is None:
            return
        number, data, pending, began = before
        pending.wait(self._until)
        now = time.perf_counter()
        self.seconds += now - max(began, self._ended)
        self._ended = now
        self._arrived(number, data)


class Arrivals:
    """Receives messages in order on a thread of its own, as far ahead as the number of buffers allows.

    Args:
        link: Link of the replica; rank 0 sends.
        messages: The messages that will arrive.
        buffers: Where they arrive. They grow here if they must.
        until: Deadline, a time.monotonic() value. No wait lasts longer than GRACE_S beyond it.
        device: The worker's device.
        verify: Sum the messages.

    Attributes:
        total: Sum of all messages, if `verify`.
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
        buffers.begin(messages)
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
        """Seconds on the wire."""
        return self._wire.seconds

    def take(self) -> torch.Tensor:
        """Return the next message. Raises the link's error, if there is one."""
        found = self._within(self._here, "a bucket")
        if isinstance(found, BaseException):
            raise found
        return found

    def free(self) -> None:
        """Release the message of `take`. Its buffer is reused once this thread's stream has done its present work."""
        self._free.put(recorded(self._device))

    def close(self) -> bool:
        """Stop receiving. Returns False if the thread did not end: it may still write to the buffers, which must not be reused."""
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
        try:
            with own_stream(self._device, "receive"):
                for number, message in enumerate(self._messages):
                    event = self._within(self._free, "its loader to load a bucket")
                    if self._stop:
                        return
                    if event is not None:
                        torch.cuda.current_stream(self._device).wait_event(event)
                    self._wire.give(number, self._buffers.take(number, message.nbytes))
                self._wire.close()
        except BaseException as e:
            self._here.put(e)

    def _arrived(self, number: int, data: torch.Tensor) -> None:
        if self._verify:
            self.total = added(self.total, wire_sum(data, number))
        self._here.put(data)
