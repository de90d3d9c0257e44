"""The peer route: a destination maps the storages of its sources, and pulls every row to its final place. One kernel copies, and
copy engines beside it copy long runs and large boxes.

It works within one NVLink host. A source makes an `Offer` (typed bytes: handles of allocations, the places of storages in them, and
a probe with a nonce). A destination opens the storages that its rows need, and answers which ones it can read (`Taken`). Both then
cut the program alike with `split`, into the rows that the destination pulls and the rest, which goes by p2p.

Nothing is staged. The kernel reads an abort word before every tile; copies that were launched run to their end. A pull is waited for
with a deadline. When `finish` has returned or raised with `drained`, this process reads no memory of a source any more. A source
must not rewrite a storage before the pulls of its destinations end, and must not free or offload it before they close their
`Mapping`.
Not here: messages between sources and destinations (participants/), p2p (p2p.py), the mix of both (routes.py).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

import msgspec
import numpy as np
import torch

from xfer.errors import DeadlineExceeded, PeerLost, ProtocolError, RebindError
from xfer.kernels import cuda_driver as driver
from xfer.kernels.bits import GRANULE
from xfer.kernels.checksum import Sums
from xfer.kernels.marks import places
from xfer.kernels.tiles import Turns
from xfer.plan.program import Op, Program, in_turn, row_wire_bytes
from xfer.transport.group import Aborted

WIRE_VERSION = 5
NONCE_BYTES = 32
MAX_OFFER_BYTES = 64 << 20
DRAIN_S = 5.0
"""Seconds that an aborted pull may take to leave the device: each program of the kernel finishes its tile, and launched copies run to
their end."""
BURST_BYTES = 0
"""Bytes that the kernel pulls from one source before it turns to the next; 0 is one tile. Long turns gain 4 % if all destinations begin
at once and each with another source, and halve the rate if two begin with the same one (measured on H200s). With turns of one tile
no destination blocks another for long."""
_POLL_S = 20e-6
_EAGER_S = 0.5e-3
"""Seconds for which `finish` polls without a sleep and only yields to other threads: small pulls end within that time."""
_STOP_S = 2e-3
MARKED_COST, MARKED_LEAST, MARKED_MOST = 1.6, 0.15, 1.06
"""The cost of a pull of a storage's marked granules, in units of a pull of all its bytes: so many times the share of granules
that are marked, but at least and at most so much. `python -m benchmarks.gpu_session --staged --changed` has shown 0.15 and 0.23 where
1.6 and 15 % of the granules are marked."""
_TOKEN = secrets.token_bytes(16)


def this_process() -> tuple[int, bytes]:
    """(pid, token) of this process. Computed at each call, because a forked child has another pid."""
    return os.getpid(), _TOKEN


def uuid_of(device: torch.device) -> str:
    """The UUID of a GPU. Device numbers differ between processes."""
    return str(torch.cuda.get_device_properties(device).uuid)


class SharedAllocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One allocation and its IPC handle. `base` is its address, valid in the same process only. `identity`: the driver's number of it."""

    handle: bytes
    base: int
    nbytes: int
    identity: int


class StoragePlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Place of a storage: allocation number, byte offset and bytes. allocation -1: it cannot be mapped, for `reason`."""

    allocation: int
    offset: int
    nbytes: int
    reason: str = ""


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The storages of one rank that others may map. `probe` is the allocation of a tensor that holds `nonce`."""

    version: int
    rank: int
    pid: int
    process: bytes
    nonce: bytes
    probe: SharedAllocation | None
    allocations: tuple[SharedAllocation, ...]
    places: tuple[StoragePlace, ...]
    device: str = ""  # UUID of the GPU; host memory has none
    marked: bool = False  # the place before the probe's is that of the rank's marks (kernels/marks.py)

    @property
    def storages(self) -> int:
        """How many storages are offered."""
        return len(self.places) - 1 - self.marked

    @property
    def mark_places(self) -> np.ndarray:
        """See `kernels.marks.places`."""
        return places([p.nbytes for p in self.places[: self.storages]])


class Readable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The storages of one source that a destination reads by itself."""

    rank: int
    roots: tuple[int, ...]
    reason: str = ""  # why not all storages can be read


class Taken(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The storages, by source, that one destination reads by itself. It takes share `share` of `shares` from its sources, and the
    others from outside the sub-plan. Of 0 shares its sources have nothing to do for it."""

    version: int
    rank: int
    readable: tuple[Readable, ...]
    share: int = 0
    shares: int = 1


_T = TypeVar("_T", Offer, Taken)
Root = TypeVar("Root")
# Made once: see plan/inventory.py.
_decoders: dict[type, msgspec.msgpack.Decoder] = {kind: msgspec.msgpack.Decoder(kind) for kind in (Offer, Taken)}


def _decode(data: bytes, kind: type[_T], rank: int) -> _T:
    if len(data) > MAX_OFFER_BYTES:
        raise ProtocolError(f"{kind.__name__} of rank {rank} has {len(data)} bytes, at most {MAX_OFFER_BYTES} are read")
    try:
        found = _decoders[kind].decode(data)
    except msgspec.MsgspecError as e:
        raise ProtocolError(f"{kind.__name__} of rank {rank}: {e}") from e
    if found.version != WIRE_VERSION or found.rank != rank:
        raise ProtocolError(f"{kind.__name__} of rank {rank} says rank {found.rank}, version {found.version}")
    return found


class Export:
    """Offers the storages of a source, and their marks if it has some. Holds the probe; the caller holds the rest."""

    def __init__(
        self, rank: int, roots: Sequence[torch.Tensor], device: torch.device, marks: torch.Tensor | None = None
    ):
        self.rank = rank
        self._roots = roots = roots if marks is None else [*roots, marks]
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        # The copy is complete when the call returns, and waits for no stream: a kernel there may wait for another replica's peer.
        self._probe = torch.frombuffer(bytearray(self._nonce), dtype=torch.uint8).to(device)
        self._allocations: dict[int, int] = {}  # identity -> number
        self._shared: list[SharedAllocation] = []
        # torch's expandable segments, (begin, end); read where a handle is missing
        self._expandable: list[tuple[int, int]] | None = None
        self._places = tuple(self._place(t) for t in roots)
        probe = self._place(self._probe)
        # The probe's own offset in its allocation travels as the last place.
        self.offer = Offer(
            WIRE_VERSION, rank, *this_process(), self._nonce,
            self._shared[probe.allocation] if probe.allocation >= 0 else None,
            tuple(self._shared), (*self._places, probe), uuid_of(device), marks is not None,
        )  # fmt: skip

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self.offer)

    def cut_off(self) -> bool:
        """Makes others unable to read if that is possible. Returns whether no other rank can read any more."""
        return False

    def stale(self) -> list[str]:
        """One line for each storage that is no longer at the offered place. Cheap, because it is called at every refit."""
        out, asked = [], set()
        for i, (t, place) in enumerate(zip(self._roots, self._places)):
            if place.allocation < 0:
                continue
            shared, at = self._shared[place.allocation], t.data_ptr()
            if at != shared.base + place.offset:
                out.append(f"storage {i}: offered at {shared.base + place.offset:#x}, is now at {at:#x}")
            elif place.allocation not in asked:  # one storage stands for all storages of an allocation
                asked.add(place.allocation)
                try:
                    now = driver.identity(at)
                except driver.DriverError as e:
                    out.append(f"storage {i}: {e}")
                    continue
                if now != shared.identity:
                    out.append(f"storage {i}: offered as allocation {shared.identity}, is now {now}")
        return out

    def _place(self, t: torch.Tensor) -> StoragePlace:
        n = t.numel()
        if not n:
            return StoragePlace(-1, 0, 0, "empty")
        try:
            found = driver.allocation(t.data_ptr())
            if not found.exportable:
                return StoragePlace(-1, 0, n, self._why_no_handle(t.data_ptr()))
            number = self._allocations.get(found.identity)
            if number is None:
                shared = SharedAllocation(driver.export(found.base), found.base, found.nbytes, found.identity)
                number = self._allocations[found.identity] = len(self._shared)
                self._shared.append(shared)
        except driver.DriverError as e:
            return StoragePlace(-1, 0, n, str(e))
        if t.data_ptr() + n > found.base + found.nbytes:
            return StoragePlace(-1, 0, n, "it spans several allocations")
        return StoragePlace(number, t.data_ptr() - found.base, n)

    def _why_no_handle(self, address: int) -> str:
        """Tells expandable segments from other virtual memory. The driver cannot tell them apart; torch lists its own segments."""
        if self._expandable is None:
            try:
                known = torch.cuda.memory_snapshot()
            except RuntimeError:  # torch's other allocators (cudaMallocAsync, pluggable ones) have no snapshot
                known = []
            some = (s for s in known if s.get("is_expandable"))
            self._expandable = [(s["address"], s["address"] + s["total_size"]) for s in some]
        if any(begin <= address < end for begin, end in self._expandable):
            return "it lies in expandable segments, which give out no IPC handles"
        return "its allocator, not torch's usual one, gives out no IPC handles (virtual memory, as that of a pool that sleeps)"


class OpenedRoots(Generic[Root]):
    """The storages of sources that a destination has opened.

    Attributes:
        roots: roots[rank][i] is storage i of that source, in the form that the route reads.
        here: Ranks of the sources on the destination's own GPU.
        marks: By rank of the sources that have marks: these, in that form, and the place of each storage's bits (`kernels.marks.places`).
    """

    def __init__(self, rank: int, device: torch.device):
        self.rank, self.device = rank, device
        self.roots: dict[int, dict[int, Root]] = {}
        self.here: set[int] = set()
        self.marks: dict[int, tuple[Root, np.ndarray]] = {}
        self._why: dict[int, str] = {}

    def to_bytes(self, share: tuple[int, int] = (0, 1)) -> bytes:
        """This destination's answer, a `Taken`."""
        readable = tuple(
            Readable(r, tuple(sorted(some)), self._why.get(r, "")) for r, some in sorted(self.roots.items())
        )
        return msgspec.msgpack.encode(Taken(WIRE_VERSION, self.rank, readable, *share))

    def why(self, rank: int) -> str:
        """The reason why not all storages of a source could be opened, or ""."""
        return self._why.get(rank, "")


class Mapping(OpenedRoots[torch.Tensor]):
    """Mapped storages. `roots[rank][i]`: flat uint8 tensor over storage i of that source."""

    def __init__(self, rank: int, device: torch.device):
        super().__init__(rank, device)
        self._opened: dict[bytes, int] = {}

    def open(self, data: bytes, rank: int, wanted: Sequence[int]) -> None:
        """Opens some storages of a source. A storage that cannot be mapped is no error: `why` has the reason.

        Args:
            data: The source's offer.
            rank: The source.
            wanted: Numbers of the storages.

        Raises:
            ProtocolError: `data` is no offer of that rank.
        """
        offer = _decode(data, Offer, rank)
        found = self.roots.setdefault(rank, {})
        if offer.device == uuid_of(self.device):
            self.here.add(rank)
        try:
            if offer.probe is None or not offer.places:
                raise PeerLost(offer.places[-1].reason if offer.places else "no probe")
            seen = self._tensor(offer, offer.places[-1])
            if bytes(seen.cpu().numpy()) != offer.nonce:
                raise PeerLost("its probe does not hold its nonce: this is another process's memory")
        except (driver.DriverError, PeerLost, RuntimeError) as e:
            self._why[rank] = f"cannot be mapped from here: {e}"
            return
        for root in wanted:
            if not 0 <= root < offer.storages:
                raise ProtocolError(f"rank {rank} offers {offer.storages} storages, storage {root} is asked for")
            place = offer.places[root]
            if place.allocation < 0:
                self._why.setdefault(rank, f"storage {root}: {place.reason}")
                continue
            try:
                found[root] = self._tensor(offer, place)
            except driver.DriverError as e:
                self._why.setdefault(rank, f"storage {root}: {e}")
        if offer.marked and offer.places[-2].allocation >= 0:
            with contextlib.suppress(driver.DriverError):  # then all bytes are pulled
                self.marks[rank] = marks_of(rank, self._tensor(offer, offer.places[-2]), offer)

    def own(self, roots: Sequence[torch.Tensor], wanted: Sequence[int]) -> None:
        """Adds storages of this rank. As those of others, they are not held."""
        self.roots[self.rank] = {
            i: driver.tensor_at(roots[i].data_ptr(), roots[i].numel(), self.device) for i in wanted
        }
        self.here.add(self.rank)

    def read_into(self, rank: int, root: int, into: torch.Tensor) -> None:
        """Copies the first bytes of a storage, as many as `into` has (flat uint8), on the current stream."""
        into.copy_(self.roots[rank][root][: into.numel()], non_blocking=True)

    def close(self) -> None:
        """Unmaps all storages. Call it after the last pull was drained."""
        self.roots, self.marks = {}, {}
        opened, self._opened = self._opened, {}
        for pointer in opened.values():
            driver.close_handle(pointer, self.device)

    def _tensor(self, offer: Offer, place: StoragePlace) -> torch.Tensor:
        if not 0 <= place.allocation < len(offer.allocations):
            raise ProtocolError(f"rank {offer.rank} names allocation {place.allocation}, which it does not offer")
        shared = offer.allocations[place.allocation]
        if place.offset < 0 or place.nbytes < 0 or place.offset + place.nbytes > shared.nbytes:
            raise ProtocolError(f"rank {offer.rank} offers bytes outside allocation {place.allocation}")
        if (offer.pid, offer.process) == this_process():
            base = shared.base  # a process cannot open its own handles
            self._befriend(base)
        else:
            if shared.handle not in self._opened:
                self._opened[shared.handle] = driver.open_handle(shared.handle, self.device)
            base = self._opened[shared.handle]
        return driver.tensor_at(base + place.offset, place.nbytes, self.device)

    def _befriend(self, pointer: int) -> None:
        """Enables access to the memory of another device. Within one process torch does that at the first copy between two devices."""
        for k in range(torch.cuda.device_count()):
            other = torch.device("cuda", k)
            if other != self.device and torch.cuda.can_device_access_peer(self.device, other):
                torch.zeros(1, device=other).to(self.device)


def marks_of(rank: int, found: Root, offer: Offer) -> tuple[Root, np.ndarray]:
    """`found`, a source's marks, and the places in them. ProtocolError if they are not as long as its storages say."""
    at = offer.mark_places
    if offer.places[-2].nbytes != at[-1]:
        raise ProtocolError(f"rank {rank} offers {offer.places[-2].nbytes} bytes of marks, not {at[-1]}")
    return found, at


def taken_roots(answers: Sequence[bytes]) -> dict[int, dict[int, frozenset[int]]]:
    """destination -> source -> the storages that the destination pulls from. answers[r]: `Mapping.to_bytes` of rank r, or b""."""
    out: dict[int, dict[int, frozenset[int]]] = {}
    for rank, data in enumerate(answers):
        if data:
            taken = _decode(data, Taken, rank)
            out[rank] = {r.rank: frozenset(r.roots) for r in taken.readable}
    return out


def taken_shares(answers: Sequence[bytes]) -> dict[int, tuple[int, int]]:
    """destination -> (its share, number of shares), of those that do not take everything from ranks of the sub-plan."""
    said = [_decode(data, Taken, rank) for rank, data in enumerate(answers) if data]
    return {t.rank: (t.share, t.shares) for t in said if t.shares != 1}


def refusals(answers: Sequence[bytes], labels: Sequence[str], rank: int) -> list[str]:
    """One line for each pair of `rank` and another rank that cannot use this route for all rows. For the report."""
    return [
        f"{labels[taker]} from {labels[r.rank]}: {r.reason}"
        for taker, data in enumerate(answers)
        if data
        for r in _decode(data, Taken, taker).readable
        if r.reason and rank in (taker, r.rank)
    ]


def takes(rows: np.ndarray) -> np.ndarray:
    """The rows (bool array) that a destination can pull if it can read their storages: here all of them."""
    return np.ones(len(rows), bool)


def split(
    program: Program,
    taken: dict[int, dict[int, frozenset[int]]],
    takes: Callable[[np.ndarray], np.ndarray] = takes,
) -> tuple[np.ndarray, Program]:
    """Cuts a program into the rows that this rank pulls and a program of the rest. Common bytes are in the rest, since a worker hands on
    bytes that it receives.

    Every rank of the sub-plan calls it with the same `taken`.

    Args:
        program: The program of this rank.
        taken: See `taken_roots`.
        takes: Which rows can be pulled if their storages can be read.
    """
    rows = program.rows
    pulled = np.zeros(len(rows), bool)
    for taker, senders in taken.items():
        for sender, roots in senders.items():
            mine = (rows["dst"] == taker) & (rows["src"] == sender) & (rows["op"] != Op.FILL) & (rows["common"] == 0)
            pulled |= mine & np.isin(rows["src_root"], list(roots))
    pulled[pulled] = takes(rows[pulled])
    return rows[pulled & (rows["dst"] == program.rank)], Program(program.rank, program.waves, rows[~pulled])


@dataclass(frozen=True, slots=True)
class PullStats:
    """One pull. `seconds`: until the last byte had arrived."""

    bytes_in: int
    by_sender: tuple[tuple[int, int], ...]
    seconds: float


class WaveGate(Protocol):
    """Code that runs between the waves of a pull. Called in order, with the stream of the pull."""

    def before(self, wave: int, stream: torch.cuda.Stream | None) -> None: ...

    def after(self, wave: int, stream: torch.cuda.Stream | None) -> None: ...

    def poll(self) -> None:
        """Called repeatedly while a pull is waited for, and once when all of it has arrived. Not called for a pull that was stopped."""

    def open(self) -> None:
        """Called when the pull is stopped. On another stream, it ends the wait that `before` put on the pull's stream."""


class Pull:
    """Rows bound to mapped storages. Warm: `begin`/`finish` may be called any number of times by one thread."""

    def __init__(
        self,
        rows: np.ndarray,
        mapping: Mapping,
        roots: Sequence[torch.Tensor],
        *,
        gate: WaveGate | None = None,
        read_too: bool = False,
        summed: Sums | None = None,
        live: Sequence[torch.Tensor] = (),
        **how,
    ):
        """Binds the rows.

        Args:
            rows: Rows that this rank pulls (dtype ROW).
            mapping: The opened storages of the sources.
            roots: Flat uint8 tensors over the storages of this rank.
            gate: If given, the pull is one launch for each wave that has rows, and otherwise one launch.
            read_too: Whether other ranks read from this GPU during the pull.
            summed: See `TritonRows`, for the rows of the first wave.
            live: If given, `roots` are scratch for these storages. See `apply`.
            how: `burst`, bytes of a source's turn, and other options of `TritonRows`.
        """
        if unknown := {(int(r["src"]), int(r["src_root"])) for r in rows} - _known(mapping):
            raise RebindError(
                f"{len(unknown)} storages are not mapped", [f"rank {a}, storage {b}" for a, b in sorted(unknown)]
            )
        self.device = mapping.device
        # In device memory: a word in mapped host memory, read before every tile, held a pull down to 8 GB/s (measured).
        self._abort = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._one = torch.ones(1, dtype=torch.int32, pin_memory=True)
        self._stopped = False
        # Another priority is another channel to the device: behind a stream that waits for a word it would wait too.
        self._aside = torch.cuda.Stream(self.device, priority=-1)
        # The copy that stops a pull may land after its end, when this tensor was freed.
        self._abort.record_stream(self._aside)
        self._gate = gate
        self._waves = [0] if gate is None else sorted(set(rows["wave"].tolist()))
        parts = [rows] if gate is None else [rows[rows["wave"] == w] for w in self._waves]
        self._marks = _Marked(rows, mapping) if summed is None and _are_marked(rows, mapping) else None
        self._live = live
        self._bound = [
            self._bind(part, mapping, roots, read_too, summed if not k else None, **how) for k, part in enumerate(parts)
        ]
        nbytes = row_wire_bytes(rows)
        self.by_sender = tuple((a, int(nbytes[rows["src"] == a].sum())) for a in sorted(set(rows["src"].tolist())))
        self._stream, self._event = torch.cuda.Stream(self.device), torch.cuda.Event()
        self._launches = [self._recorded(k) for k in range(len(self._waves))]
        self._by_marks: list[Callable[[], object]] = []
        if self._marks is not None:
            self._by_marks = [self._recorded_marked(b) for b in self._bound]
        self.by_marks = False  # whether the next pull, or the last one, is one of what is marked

    def _recorded_marked(self, bound) -> Callable[[], object]:
        def kernels(abort=self._abort if self._gate is None else None) -> None:
            if abort is not None:
                abort.zero_()
            bound.move_marked()

        if not bound.recordable:
            return kernels
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            return partial(driver.Graph(self._stream, kernels).launch, self._stream)

    def _recorded(self, k: int) -> Callable[[], None]:
        """A function that launches part `k`. Its kernels are recorded as one graph where that is possible, since each launch from
        Python costs some 0.1 ms. torch's own kernels may allocate, so a part with such kernels is not recorded."""
        bound, cleared = self._bound[k], self._abort if self._gate is None else None

        def kernels() -> None:  # holds no reference to this pull, so that a dropped pull frees its memory at once
            if cleared is not None:
                cleared.zero_()
            bound.move()

        if bound.recordable:
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                kernels = partial(driver.Graph(self._stream, kernels).launch, self._stream)
        return partial(bound.copy, kernels)

    def _bind(
        self,
        rows: np.ndarray,
        mapping: Mapping,
        roots: Sequence[torch.Tensor],
        read_too: bool,
        summed: Sums | None,
        burst: int = BURST_BYTES,
        **how,
    ):
        from xfer.kernels.long_runs import PULLED, READ_TOO
        from xfer.kernels.triton_impl import TritonRows, multiprocessors

        known = sorted(_known(mapping))
        number = {pair: i for i, pair in enumerate(known)}
        senders = in_turn(rows, {a for a, _ in known})
        rows = rows.copy()
        rows["src_root"] = [number[a, b] for a, b in zip(rows["src"].tolist(), rows["src_root"].tolist())]
        here = frozenset(senders.index(a) for a in mapping.here if a in senders)
        if not mapping.here.issuperset(senders):
            # Reads from other GPUs queue up where they meet, and copy engines wait behind them: fewer at once are faster (H200).
            how = {"programs": multiprocessors(mapping.device) // (1 if here else 2), **how}
        rule = how.pop("copied", READ_TOO if here or read_too else PULLED)
        how["copied"] = replace(rule, most=rule.most // len(self._waves))  # all parts are launched at once
        turns = Turns(tuple(senders.index(a) for a, _ in known), burst, here)
        sources = [mapping.roots[a][b] for a, b in known]
        bits = self._marks.addresses(known) if self._marks is not None else None
        return TritonRows(
            rows, roots, "local", sources, turns=turns, abort=self._abort, summed=summed, bits=bits, live=self._live, **how
        )  # fmt: skip

    @property
    def extra_bytes(self) -> int:
        return sum(b.scratch_bytes for b in self._bound) + (self._marks.nbytes if self._marks else 0)

    def choose(self, base: int, deadline: float) -> None:
        """Decides whether the next pull brings only what is marked: if all sources have marks since refit `base`, which is not 0, and
        few granules are marked. Reads the heads of the marks. If they do not come before `deadline`, all bytes are pulled, which
        then fails by the deadline."""
        self.by_marks = False
        if self._marks is None or not base:
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._aside):
            self._marks.read_heads()
            event = self._aside.record_event()
        while not event.query():
            if time.monotonic() > deadline:
                return
            time.sleep(0)
        self.by_marks = self._marks.pay(base)

    def apply(self) -> None:
        """Copies what the last pull has brought into scratch, if it was `by_marks`, into live storages, on the current stream. It
        looks at this rank's copies of the marks. Conversions, which come whole, are left out."""
        for bound in self._bound:
            bound.apply_marked()

    def begin(self) -> None:
        """Launches the pull behind the earlier work of the caller's stream. If it raises, call `finish` all the same."""
        self._began = time.perf_counter()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        if self._stopped:  # a late stop of the last pull would end this one without its bytes and without an error
            self._stream.wait_stream(self._aside)
        self._stopped = False
        with torch.cuda.stream(self._stream):
            if self._gate is not None:  # before the first wait, or it would undo a stop
                self._abort.zero_()
            try:
                if self.by_marks and self._marks is not None:
                    self._marks.fetch()
                for wave, launch in zip(self._waves, self._by_marks if self.by_marks else self._launches):
                    if self._stopped:
                        break
                    if self._gate is not None:
                        self._gate.before(wave, self._stream)
                    launch()
                    if self._gate is not None:
                        self._gate.after(wave, self._stream)
                if self.by_marks and self._marks is not None:
                    self._marks.count([b.marked.moved for b in self._bound if b.marked is not None])
            finally:  # if one launch fails, `finish` waits for the others
                self._event.record()
                self._launched = time.perf_counter()

    def stop(self) -> None:
        """Stops the pull, from any thread. The kernels end after their current tiles."""
        self._stopped = True
        with torch.cuda.stream(self._aside):  # by a copy engine, which needs no room beside the running kernel
            self._abort.copy_(self._one, non_blocking=True)
            if self._gate is not None:
                self._gate.open()

    def over(self) -> bool:
        """Whether the pull has left the device, so that it reads no storage of a source any more."""
        return self._event.query()

    def finish(self, deadline: float, cancelled: Callable[[], bool] = lambda: False, where: str = "") -> PullStats:
        """Waits for the last byte.

        Args:
            deadline: A time.monotonic() value.
            cancelled: Called repeatedly; True ends the pull.
            where: Label of this rank in errors.

        Raises:
            DeadlineExceeded, Aborted: The pull was stopped, and is drained.
            PeerLost: With drained=False. The pull did not leave the device, and may still read the sources' storages.
        """
        while not self._event.query():
            if self._gate is not None and not self._stopped:
                self._gate.poll()
            late = time.monotonic() > deadline
            if late or cancelled():
                until = time.monotonic() + DRAIN_S
                while not self._event.query():
                    self.stop()  # repeatedly: a part that begins late clears the word
                    if time.monotonic() > until:
                        raise PeerLost("a pull does not leave the device", where=where, drained=False)
                    time.sleep(_STOP_S)
                if late:
                    raise DeadlineExceeded("the deadline passed while bytes were pulled", where=where)
                raise Aborted("the pull was cancelled", where=where)
            time.sleep(0 if time.perf_counter() - self._launched < _EAGER_S else _POLL_S)
        if self._stopped:
            raise Aborted("the pull was stopped here", where=where)
        if self._gate is not None:
            self._gate.poll()
        now = time.perf_counter()  # no stream has to wait: the pull has ended before the caller queues more
        by_sender = self._marks.moved() if self.by_marks and self._marks is not None else self.by_sender
        return PullStats(sum(n for _, n in by_sender), by_sender, now - self._began)


def cost(marked: np.ndarray, granules: np.ndarray, nbytes: np.ndarray) -> float:
    """Return the time of a pull of what is marked, in units of a pull of everything.

    Args:
        marked: Marked granules of each storage.
        granules: All granules of each.
        nbytes: Bytes that are pulled of each if all are.
    """
    each = np.clip(MARKED_COST * marked / np.maximum(1, granules), MARKED_LEAST, MARKED_MOST)
    return float((each * nbytes).sum() / max(1, nbytes.sum()))


def whole_bytes(rows: np.ndarray) -> np.ndarray:
    """The bytes of each row that are pulled whether they are marked or not: those of conversions."""
    return np.where(rows["src_dtype"] == rows["dst_dtype"], 0, row_wire_bytes(rows))


class _Marked:
    """The marks of the sources of a pull: the mapped ones, and copies of them on this GPU, since the kernel looks at them before it
    asks for a byte."""

    def __init__(self, rows: np.ndarray, mapping: Mapping):
        self._device, self._there = mapping.device, {a: mapping.marks[a] for a in sorted(set(rows["src"].tolist()))}
        self._here = {a: torch.empty_like(marks) for a, (marks, _) in self._there.items()}
        # A head, the base and then the counts, has as many numbers as there are places.
        ends = np.cumsum([0, *(len(at) for _, at in self._there.values())])
        self._heads, self._firsts = torch.empty(int(ends[-1]), dtype=torch.int64, pin_memory=True), ends[:-1]
        self._known = sorted(_known(mapping))
        self._moved = torch.empty(0, dtype=torch.int64, pin_memory=True)
        pairs = np.stack([rows["src"], rows["src_root"]], axis=1).astype(np.int64)
        pairs, which = np.unique(pairs, axis=0, return_inverse=True)
        self._nbytes = np.bincount(which.reshape(-1), row_wire_bytes(rows), len(pairs))
        self._whole = {a: int(whole_bytes(rows[rows["src"] == a]).sum()) for a in self._there}
        self._granules = np.array([mapping.roots[a][b].numel() / GRANULE for a, b in pairs.tolist()], np.float64)
        self._counts = 1 + pairs[:, 1] + ends[np.searchsorted(list(self._there), pairs[:, 0])]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() for t in self._here.values())

    def addresses(self, known: Sequence[tuple[int, int]]) -> torch.Tensor:
        """The address of each storage's bits; 0 for storages of which nothing is pulled."""
        some = [self._here[a].data_ptr() + int(self._there[a][1][b]) if a in self._here else 0 for a, b in known]
        return torch.tensor(some or [0], dtype=torch.int64).to(self._device)

    def read_heads(self) -> None:
        """Copies the heads into memory of the host, on the current stream."""
        for first, (marks, at) in zip(self._firsts.tolist(), self._there.values()):
            self._heads[first : first + len(at)].copy_(marks[: 8 * len(at)].view(torch.int64), non_blocking=True)

    def pay(self, base: int) -> bool:
        """Whether a pull of what is marked since refit `base` takes less time than one of everything, by the heads that were read."""
        told = self._heads.numpy()
        return bool((told[self._firsts] == base).all()) and cost(told[self._counts], self._granules, self._nbytes) < 1

    def fetch(self) -> None:
        """Copies the marks here, on the current stream."""
        for a, (marks, _) in self._there.items():
            self._here[a].copy_(marks, non_blocking=True)

    def count(self, moved: Sequence[torch.Tensor]) -> None:
        """Reads the counters of the kernels, on the current stream."""
        if len(self._moved) != sum(map(len, moved)):
            self._moved = torch.empty(sum(map(len, moved)), dtype=torch.int64, pin_memory=True)
        for here, there in zip(self._moved.split([len(m) for m in moved]), moved):
            here.copy_(there, non_blocking=True)

    def moved(self) -> tuple[tuple[int, int], ...]:
        """Bytes by source, when the device has done what `count` began."""
        each = self._moved.view(-1, max(1, len(self._known))).sum(0).tolist()
        return tuple(
            (a, self._whole[a] + sum(n for (b, _), n in zip(self._known, each) if a == b)) for a in self._there
        )


def _are_marked(rows: np.ndarray, mapping: Mapping) -> bool:
    return len(rows) > 0 and set(rows["src"].tolist()) <= mapping.marks.keys()


def _known(mapping: Mapping) -> set[tuple[int, int]]:
    return {(a, b) for a, some in mapping.roots.items() for b in some}
