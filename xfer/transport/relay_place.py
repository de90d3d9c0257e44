"""A worker's place in a relay chain, a sequence of replicas of one layout on one host. The first worker takes its bytes from the
trainers: it pulls what it can map and receives the rest over its link. Each other one pulls all of its bytes from the worker before
it, part by part, as soon as it hears that a part is ready. So each byte leaves the trainers once, and enters the host once.

Here are the storages that a worker lets the next one read, its mapping of the worker before it, and the gate at which its pull waits
for parts. A part is a slice of what is pulled together with one step of the link, in whose order the other bytes arrive. The
coordinator passes the news of parts on (coordinator/relays.py), and plan/relay.py decides which pulled row is in which part.
The news goes over hosts and not through words in GPU memory, so nothing on a device waits for another process. It takes some
0.3 ms, but delays a refit only once, since a worker still pulls the previous part meanwhile.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from xfer.errors import DeadlineExceeded, ProtocolError
from xfer.plan.program import row_wire_bytes
from xfer.plan.relay import handed_on, in_parts
from xfer.transport import peer
from xfer.transport.group import Aborted

PART_BYTES, MOST_PARTS = 256 << 20, 64
"""Bytes of a part, and most parts of a pull. With p parts the last of k replicas takes (p + k - 1) / p times as long as the first. A
part should take longer than its news."""
_POLL_S, _WAIT_S = 100e-6, 5e-3
"""Seconds between two looks, if parts are on their way to the device, and if none is. News of a part ends the wait at once."""


class Handover(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The storages that a worker lets the next one read. `rows`: digest of its rows and their parts; `offer`: a `peer.Offer`."""

    rows: bytes
    offer: bytes


_decoder = msgspec.msgpack.Decoder(Handover)


class Arriving:
    """The parts that one route (the pull, or the link) brings here, in order.

    Args:
        last: Number of its last part; -1 if it brings none.

    Attributes:
        ready: All its parts up to this one are here.
    """

    def __init__(self, last: int):
        self.last, self.ready = last, -1
        self.coming: deque[tuple[int, torch.cuda.Event]] = deque()  # those that are on their way to the device
        self.events: dict[int, torch.cuda.Event] = {}

    def begin(self) -> None:
        self.ready = -1
        self.coming.clear()

    def note(self, part: int, stream: torch.cuda.Stream | None) -> None:
        """A part is here: now if `stream` is None, and otherwise when the stream has done its present work."""
        if stream is None:
            self.ready = part
        else:
            event = self.events.setdefault(part, torch.cuda.Event())
            event.record(stream)
            self.coming.append((part, event))

    def poll(self) -> None:
        while self.coming and self.coming[0][1].query():
            self.ready = self.coming.popleft()[0]


class Steps:
    """The gate (`peer.WaveGate`) of a worker's pull, and the `StepWatch` of its link, in a relay chain.

    Args:
        follows: Whether the parts come from the worker before this one.
        say: Called with (run, part) when all parts up to this one are ready here.
        pulled: Number of the last part of which something is pulled; -1 without any.
        received: Number of the last step of the link; -1 without any.
    """

    def __init__(self, follows: bool, say: Callable[[int, int], None], pulled: int, received: int = -1):
        self.follows, self._say = follows, say
        self._news = threading.Condition()
        self._there = (0, -1)  # the last news of the worker before this one: run, part
        self._pulled, self._received = Arriving(pulled), Arriving(received)
        self._said = -1
        self._run, self._until, self._tells, self._over = 0, 0.0, False, False
        self.beside: peer.WaveGate | None = None  # another gate whose `after` is called, too
        self._cancelled: Callable[[], bool] = lambda: False

    def there(self, run: int, part: int) -> None:
        """Takes the news that the worker before this one has all parts up to `part`. From any thread."""
        with self._news:
            self._there = max(self._there, (run, part))
            self._news.notify_all()

    def begin(self, run: int, until: float, cancelled: Callable[[], bool], tells: bool) -> None:
        """Call it before each pull. until: a time.monotonic() value. tells: whether to call `say`."""
        self._run, self._until, self._cancelled, self._tells, self._over = run, until, cancelled, tells, False
        self._said = -1
        for route in (self._pulled, self._received):
            route.begin()

    # ---- of the link

    def arrived(self, step: int, stream: torch.cuda.Stream | None) -> None:
        self._note(self._received, step, stream)

    # ---- the gate of the pull

    def before(self, wave: int, stream: Any) -> None:
        """Waits until the worker before this one has part `wave`. Raises Aborted or DeadlineExceeded."""
        while self.follows:
            with self._news:
                run, part = self._there
                if run == self._run and part >= wave:
                    return
                if run > self._run:
                    raise Aborted("the replica from which this one takes its weights is at a later refit")
                self._news.wait(_POLL_S if self._pulled.coming else _WAIT_S)
            self.poll()
            if self._over or self._cancelled():
                raise Aborted("the pull was cancelled")
            if time.monotonic() > self._until:
                raise DeadlineExceeded(f"part {wave + 1} did not come from the replica before this one")

    def after(self, wave: int, stream: Any) -> None:
        self._note(self._pulled, wave, stream)
        if self.beside is not None:  # last, because it takes time and others wait for the news
            self.beside.after(wave, stream)

    def poll(self) -> None:
        """Says which parts are ready. One that both routes bring is ready when both have brought it."""
        routes = self._pulled, self._received
        for route in routes:
            route.poll()
        unfinished = [route.ready for route in routes if route.ready < route.last]
        ready = min(unfinished, default=max(route.last for route in routes))
        stopped = self._over or self._cancelled()  # then parts end without their bytes
        if ready > self._said and not stopped:
            self._said = ready
            self._say(self._run, ready)

    def _note(self, route: Arriving, part: int, stream: Any) -> None:
        if self._tells:
            route.note(part, stream)
            if stream is None:
                self.poll()

    def open(self) -> None:
        with self._news:
            self._over = True
            self._news.notify_all()


class RelayPlace:
    """A worker's place. Made each time that routes are opened, and closed with them.

    Args:
        kind: The peer route, a `PeerKind`.
        pulled: Rows that this worker can pull from trainers (dtype ROW).
        received: Those that it would receive from them otherwise. A row's wave is the step in which it arrives (`steps.arrivals`).
        outside: A rank number that no rank has, the same in all replicas of the chain.
        before: `hand()` of the worker before this one; empty for the first.
        say: See `Steps`.

    Attributes:
        follows: Whether this worker takes its bytes from the worker before it. If not, it takes them from the trainers.
        rows: What it pulls: all rows from the worker before it if it follows, else `pulled`. A row's wave is its part.
        why: The reason why it cannot follow.
    """

    def __init__(
        self,
        kind: Any,
        pulled: np.ndarray,
        received: np.ndarray,
        roots: Sequence[torch.Tensor],
        rank: int,
        outside: int,
        device: torch.device,
        before: bytes,
        say: Callable[[int, int], None],
    ):
        self._kind, self._roots = kind, roots
        parts = in_parts(pulled, max(1, min(MOST_PARTS, int(row_wire_bytes(pulled).sum()) // PART_BYTES)))
        rows = np.concatenate([parts, received])
        alike = rows.copy()
        alike["turn"] = 0  # replicas of a chain begin with different sources
        self._digest = hashlib.blake2b(alike.tobytes(), digest_size=16).digest()
        written = set(rows["dst_root"].tolist())
        none = torch.empty(0, dtype=torch.uint8, device=device)
        self._export = kind.Export(outside, [t if i in written else none for i, t in enumerate(roots)], device)
        self.mapping, self.why = kind.Mapping(rank, device), ""
        if before and len(rows):
            try:
                self._map(before, outside, sorted(written))
            except BaseException:
                self.close()
                raise
        self.follows = bool(before and len(rows) and not self.why)
        self.rows = handed_on(rows, outside) if self.follows else parts
        last = (int(some["wave"].max(initial=-1)) for some in (self.rows, rows[:0] if self.follows else received))
        self.steps = Steps(self.follows, say, *last)

    def hand(self) -> bytes:
        """The `Handover` for the next worker."""
        return msgspec.msgpack.encode(Handover(self._digest, self._export.to_bytes()))

    def pull(self, mapping: Any) -> Any:
        """The bound pull: from the worker before this one if it follows, otherwise through `mapping` from the trainers. None if
        everything is received."""
        if not len(self.rows):
            return None
        return self._kind.Pull(
            self.rows, self.mapping if self.follows else mapping, self._roots, gate=self.steps, read_too=True
        )

    def stale(self) -> list[str]:
        """As `peer.Export.stale`."""
        return self._export.stale()

    def close(self) -> None:
        """Unmaps the worker before this one."""
        self.mapping.close()

    def _map(self, before: bytes, outside: int, wanted: Sequence[int]) -> None:
        try:
            hand = _decoder.decode(before)
        except msgspec.MsgspecError as e:
            raise ProtocolError(f"the offer of the worker before this one cannot be decoded: {e}") from None
        if hand.rows != self._digest:
            self.why = "it pulls other rows from the trainers than the worker before it, and receives other ones"
            return
        try:
            self.mapping.open(hand.offer, outside, wanted)
        except peer.driver.DriverError as e:
            self.why = str(e)
            return
        if len(self.mapping.roots.get(outside, ())) < len(wanted):
            self.why = self.mapping.why(outside) or "not all of its storages can be mapped"
            self.mapping.close()
