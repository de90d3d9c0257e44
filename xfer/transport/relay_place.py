"""A worker's place among replicas of one layout on one host that hand bytes on. What a worker takes is cut into shares. It takes one
share, or none, from the trainers: it pulls what it can map and receives the rest over its link. It pulls each other share from the
worker that brings it, part by part, as soon as it hears that a part is ready. So each byte leaves the trainers once, and enters the
host once.

In a relay chain there is one share, which the first worker brings; each other one pulls it from the worker before it, and brings it to
the next. In a relay ring there is a share for each worker: all receive at once, and each pulls from all others.

Here are the storages that a worker lets others read, its mapping of those others, and the gate at which its pull waits for parts. A
part is a slice of what is pulled together with one step of the link, in whose order the other bytes arrive. The coordinator passes
the news of parts on (coordinator/relays.py), and plan/relay.py decides which row is in which share and part.
The news goes over hosts and not through words in GPU memory, so nothing on a device waits for another process. It takes some
0.3 ms, but delays a refit only once, since a worker still pulls the previous part meanwhile.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from xfer.errors import DeadlineExceeded, ProtocolError
from xfer.plan.program import Op, Program, row_wire_bytes
from xfer.plan.relay import ALL_PARTS, handed_on, in_parts, shares
from xfer.transport import peer
from xfer.transport.group import Aborted
from xfer.transport.steps import arrivals

PART_BYTES, MOST_PARTS = 256 << 20, 64
"""Bytes of a part, and most parts of a pull. With p parts the last of k replicas takes (p + k - 1) / p times as long as the first. A
part should take longer than its news."""
_POLL_S, _WAIT_S = 100e-6, 5e-3
"""Seconds between two looks, if parts are on their way to the device, and if none is. News of a part ends the wait at once."""


class Handover(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The storages that a worker lets others read, unchanged when routes are opened again. `rows`: digest of the rows that the worker
    pulls or receives if it takes all shares. `offer`: a `peer.Offer` of rank `rank`, a number that no rank of the sub-plan has."""

    rank: int
    rows: bytes
    offer: bytes


_decoder = msgspec.msgpack.Decoder(Handover)


def offer_of(kind: Any, program: Program, roots: Sequence[torch.Tensor], rank: int, device: torch.device) -> Any:
    """A `kind.Export` of the storages into which the program's bytes go, as those of rank `rank`."""
    mine = program.rows[(program.rows["dst"] == program.rank) & (program.rows["op"] != Op.FILL)]
    written, none = set(mine["dst_root"].tolist()), torch.empty(0, dtype=torch.uint8, device=device)
    return kind.Export(rank, [t if i in written else none for i, t in enumerate(roots)], device)


@dataclass(frozen=True, slots=True)
class Relay:
    """A rank's data for routes on which replicas hand bytes on.

    `hands`, on a worker: for each share of its bytes, the `Handover` of the worker that brings the share; empty for the share that this
    worker brings. `say`: see `Steps`. `offer`: a `kind.Export` of its storages; None on trainers.
    """

    hands: tuple[bytes, ...]
    say: Callable[[int, int], None]
    offer: Any = None


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
        follows: Whether the parts that are pulled come from other workers.
        say: Called with (run, part) when all parts up to `part` are ready for others to read; ALL_PARTS after the last one.
        pulled: Number of the last part of which something is pulled; -1 without any.
        received: Number of the last step of the link; -1 without any.
    """

    def __init__(self, follows: bool, say: Callable[[int, int], None], pulled: int, received: int = -1):
        self.follows, self._say = follows, say
        self._news = threading.Condition()
        self._there = (0, -1)  # the last news: run, and the last part that all workers have from which this one reads
        self._pulled, self._received = Arriving(pulled), Arriving(received)
        self._said = -1
        self._run, self._until, self._tells, self._over = 0, 0.0, False, False
        self.beside: peer.WaveGate | None = None  # another gate whose `after` is called, too
        self._cancelled: Callable[[], bool] = lambda: False

    def there(self, run: int, part: int) -> None:
        """Takes the news that the workers from which this one reads have all parts up to `part`. From any thread."""
        with self._news:
            self._there = max(self._there, (run, part))
            self._news.notify_all()

    def begin(self, run: int, until: float, cancelled: Callable[[], bool], tells: bool) -> None:
        """Call it before each pull. until: a time.monotonic() value. tells: whether to call `say`."""
        self._run, self._until, self._cancelled, self._tells, self._over = run, until, cancelled, tells, False
        self._said = -1
        for route in (self._pulled, self._received):
            route.begin()
        self.poll()  # a share can be empty

    # ---- of the link

    def arrived(self, step: int, stream: torch.cuda.Stream | None) -> None:
        self._note(self._received, step, stream)

    # ---- the gate of the pull

    def before(self, wave: int, stream: Any) -> None:
        """Waits until the workers from which this one reads have part `wave`. Raises Aborted or DeadlineExceeded."""
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
                raise DeadlineExceeded(f"part {wave + 1} did not come from the replicas that bring it")

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
        ready = min(unfinished, default=ALL_PARTS)
        stopped = self._over or self._cancelled()  # then parts end without their bytes
        if self._tells and ready > self._said and not stopped:
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
        program: The program of this worker if it takes all shares from the trainers.
        pulled: The program's rows (dtype ROW) that this worker can pull. It would receive the others.
        step_bytes: See `steps`.
        relay: The workers that bring the shares. If this one cannot read the others, it takes all shares from the trainers.
        roots: Flat uint8 tensors over the storages of this rank.

    Attributes:
        share: (the share that it takes from the trainers, number of shares); of 0 shares it takes none.
        follows: Whether it reads from other workers.
        receives: Whether it can take a part in a ring: it receives everything over its link, and pulls nothing from trainers.
        rows: The rows that it pulls, from trainers or from other workers. A row's wave is its part.
        why: The reason why it cannot follow.
    """

    def __init__(
        self,
        kind: Any,
        program: Program,
        pulled: np.ndarray,
        step_bytes: int,
        relay: Relay,
        roots: Sequence[torch.Tensor],
        device: torch.device,
    ):
        rank, hands = program.rank, relay.hands
        self._kind, self._roots, self._offer = kind, roots, relay.offer
        self._parts = in_parts(pulled, max(1, min(MOST_PARTS, int(row_wire_bytes(pulled).sum()) // PART_BYTES)))
        alike = np.concatenate([self._parts, arrivals(program, step_bytes)])
        alike["turn"] = 0  # replicas begin with different sources
        self._digest = hashlib.blake2b(alike.tobytes(), digest_size=16).digest()
        self.mapping, self.why, self.receives = kind.Mapping(rank, device), "", not len(pulled)
        others = []
        try:
            if len(hands) > 1 and not self.receives:
                raise _Unreadable("it pulls bytes from trainers, which are not cut into shares")
            others = [(k, self._map(hand, alike["dst_root"])) for k, hand in enumerate(hands) if hand]
        except _Unreadable as e:
            self.why, hands, others = str(e), (b"",), []
            self.mapping.close()
        except BaseException:
            self.close()
            raise
        self.follows, count = bool(others), len(hands)
        self.share = (hands.index(b""), count) if b"" in hands else (0, 0)

        def arriving(share: int) -> np.ndarray:
            """The rows of a share that come to its worker over the link. A row's wave is the step in which they come."""
            takes = dict.fromkeys(np.unique(program.rows["dst"]).tolist(), (share, count)) if count > 1 else {}
            return arrivals(shares(program, takes), step_bytes)

        received = arriving(self.share[0]) if self.share[1] else program.rows[:0]
        self.rows, pulled_last = self._parts, -1
        if self.follows:
            parts = [self._parts] if count == 1 else []  # nothing of a ring is pulled from trainers
            self.rows = np.concatenate([handed_on(np.concatenate([*parts, arriving(k)]), at) for k, at in others])
        if count == 1:  # in a ring others read only what is received here
            pulled_last = int(self.rows["wave"].max(initial=-1))
        self.steps = Steps(self.follows, relay.say, pulled_last, int(received["wave"].max(initial=-1)))

    def hand(self) -> bytes:
        """The `Handover` for other workers."""
        return msgspec.msgpack.encode(Handover(self._offer.rank, self._digest, self._offer.to_bytes()))

    def pull(self, mapping: Any) -> Any:
        """The bound pull: from other workers if `follows`, otherwise through `mapping` from the trainers. None if all rows come over the
        link."""
        if not len(self.rows):
            return None
        return self._kind.Pull(
            self.rows, self.mapping if self.follows else mapping, self._roots, gate=self.steps, read_too=True
        )

    def stale(self) -> list[str]:
        """As `peer.Export.stale`."""
        return self._offer.stale()

    def close(self) -> None:
        """Unmaps the other workers."""
        self.mapping.close()

    def _map(self, data: bytes, written: np.ndarray) -> int:
        """Opens another worker's storages, and returns its rank number.

        Raises:
            _Unreadable: It cannot be read, or takes other rows than this one.
        """
        try:
            hand = _decoder.decode(data)
        except msgspec.MsgspecError as e:
            raise ProtocolError(f"the offer of another worker cannot be decoded: {e}") from None
        if hand.rows != self._digest:
            raise _Unreadable("it pulls other rows from the trainers than that worker, or receives other ones")
        wanted = np.unique(written).tolist()
        try:
            self.mapping.open(hand.offer, hand.rank, wanted)
        except peer.driver.DriverError as e:
            raise _Unreadable(str(e)) from None
        if len(self.mapping.roots.get(hand.rank, ())) < len(wanted):
            raise _Unreadable(self.mapping.why(hand.rank) or "not all of its storages can be mapped")
        return hand.rank


class _Unreadable(Exception):
    """Why another worker cannot be read."""
