"""The packed route for trainers whose layout is known (FSDP2, HSDP, DTensors, plain modules, Megatron by its trace): messages are
assembled from the boxes that ranks hold, straight in the buffers that are sent.

A framework's `full_tensor()` works per parameter and on every rank. This module assembles a whole message: by one kernel if ranks
can map each other's storages (GPUs of one host), else by rounds of one message per rank, of a bounded size. Only ranks that
assemble (trainer 0; with colocated engines one rank per GPU) ever have whole tensors. It works for every source whose `read`
returns fragments. A box that several ranks hold comes from each of them in turn. places.py has the arithmetic, feed.py the buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch
import torch.distributed as dist

from xfer import kernels
from xfer.errors import LayoutError, PlanMismatch, Unsupported, XferError
from xfer.packed import agree, places
from xfer.packed.buffer import Buffers, Unpacker
from xfer.packed.places import Copy, HeldBox, Round
from xfer.packed.plan import BucketPlan, GatherGroup, TaskSize
from xfer.packed.source import Assembly
from xfer.packed.wire import PackedMessage, longest_of
from xfer.trace.fragment import Fragment, TensorSpec

if TYPE_CHECKING:
    from xfer.transport import peer


def on_gpu(device: torch.device) -> bool:
    """Return whether copies run in Triton, by one launch each."""
    return device.type == "cuda" and find_spec("triton") is not None


class FragmentSource(Protocol):
    """The part of `Source` (participants/trainer.py) that this module uses."""

    rank: int
    world: int

    @property
    def device(self) -> torch.device: ...

    def drain(self) -> None: ...
    def read(self): ...
    def check(self) -> str: ...
    def rebind(self) -> Mapping[str, torch.Tensor]: ...


class _Rank(msgspec.Struct, array_like=True):
    """One rank's description of its weights.

    Attributes:
        specs: The tensors that it exports.
        fragments: Where it holds parts of them.
        roots: Names of the storages, by number.
        assembles: Whether the rank assembles messages.
        offer: How to map the storages; empty if they cannot be mapped.
    """

    specs: tuple[TensorSpec, ...]
    fragments: tuple[Fragment, ...]
    roots: tuple[str, ...]
    assembles: bool
    offer: bytes


_ranks = msgspec.msgpack.Decoder(_Rank)


class TensorStream:
    """Implements `WritingStream` (source.py).

    Args:
        source: This trainer rank's weights.

    Attributes:
        pulls: After `build`: whether ranks read each other's storages.
        trained: Names of the tensors read that require grad.
        collectives: Number of messages from other ranks in the last assembled message.
    """

    writes = True

    def __init__(self, source: FragmentSource):
        self.source = source
        self.rank, self.world, self.device = source.rank, source.world, source.device
        self.assembly: Assembly  # set by `build`
        self.pulls = False
        self.trained: frozenset[str] = frozenset()
        self.collectives = 0
        self._specs: dict[str, TensorSpec] = {}
        self._mine: dict[str, list[Fragment]] = {}
        self._roots: Mapping[str, torch.Tensor] = {}
        self._held: dict[str, list[HeldBox]] = {}
        self._targets: tuple[int, ...] = ()
        self._numbers: dict[int, dict[str, int]] = {}  # [rank][name]: number of the storage on a rank that assembles
        self._sources: list[torch.Tensor] = []  # by that number
        self._ways: dict[int, _Way] = {}  # by a message's id
        self._slots: dict[str, list[torch.Tensor]] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._last = _Made()
        self._export: peer.Export | None = None
        self._mapping: peer.Mapping | None = None
        self._let_go = False

    def drain(self) -> None:
        self.source.drain()

    def read(self) -> tuple[TensorSpec, ...]:
        layout = self.source.read()
        self._specs = {s.name: TensorSpec(s.name, s.shape, s.dtype) for s in layout.traced.specs}
        self._mine = {}
        for f in layout.traced.fragments:
            self._mine.setdefault(f.tensor, []).append(f)
        self._forget()
        self._roots, self._let_go, self.trained = layout.tensors, False, layout.trained
        return tuple(self._specs.values())

    def expect(self, specs: Iterable[TensorSpec]) -> None:
        """Add tensors that all ranks together must hold, even if this rank holds no part. Called after `read`."""
        self._specs |= {s.name: s for s in specs}

    def check(self) -> str:
        state = self.source.check()
        # Addresses do not show new memory at an old address, and ranks that mapped the old memory would continue to read it.
        if state == "same" and (self._let_go or self._export is not None and self._export.stale()):
            state = "moved"
        if state == "moved":
            self._forget()
            self._roots, self._let_go = self.source.rebind(), False
        return state

    def forget(self) -> None:
        """Drop all storages, this rank's and the others', and the buffers. The next refit binds them again."""
        self._forget()
        if hasattr(self.source, "let_go"):
            self.source.let_go()

    def _forget(self) -> None:
        self._ways, self._slots, self._sources, self._last = {}, {}, [], _Made()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._roots, self._let_go, self._export = {}, True, None
        self._unmap()

    def _unmap(self) -> None:
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            torch.cuda.synchronize(self.device)
            mapping.close()

    # ---- with all ranks

    def build(self, assembly: Assembly) -> tuple[TaskSize, ...]:
        self.assembly = assembly
        self._ways, self._slots, self._sources = {}, {}, []
        said = agree.of_all_ranks(self._own, _ranks, self.device)
        bad: list[str] = []
        specs: dict[str, TensorSpec] = {}
        held: dict[str, dict[places.Box, dict[int, Fragment]]] = {}
        for rank, theirs in enumerate(said):
            for spec in theirs.specs:
                known = specs.setdefault(spec.name, spec)
                held.setdefault(spec.name, {})
                if spec != known:
                    here, there = (f"{x.dtype}{list(x.shape)}" for x in (spec, known))
                    bad.append(f"{spec.name}: trainer {rank} has {here}, another has {there}")
            for f in theirs.fragments:
                held[f.tensor].setdefault((f.origin, f.extent, f.steps), {})[rank] = f
        if bad:
            raise PlanMismatch("trainer ranks hold different tensors under the same name", bad)
        for name, spec in specs.items():
            if not places.held_wholly(spec.shape, held[name]):
                bad.append(f"{name}: all ranks together do not hold all of its elements")
        if bad:
            raise LayoutError("the trainer ranks together do not hold all elements of some tensors", bad)
        self._held = {name: [HeldBox(box, by) for box, by in known.items()] for name, known in held.items()}
        self._targets = tuple(r for r, x in enumerate(said) if x.assembles)
        self._bind(said)
        return tuple(TaskSize(i, (specs[name],)) for i, name in enumerate(sorted(specs)))

    def _own(self) -> _Rank:
        if self._let_go:  # another rank's `release()` may have come after the last check
            self._roots, self._let_go = self.source.rebind(), False
        roots = tuple(sorted({f.root for some in self._mine.values() for f in some}))
        fragments = tuple(f for some in self._mine.values() for f in some)
        return _Rank(tuple(self._specs.values()), fragments, roots, self.assembly.here, self._offer(roots))

    def _offer(self, roots: Sequence[str]) -> bytes:
        self._unmap()
        self._export = None
        if self.world == 1 or not on_gpu(self.device):
            return b""
        from xfer.transport.peer import MAX_OFFER_BYTES, Export

        try:
            self._export = export = Export(self.rank, [self._roots[name] for name in roots], self.device)
            offer = export.to_bytes()
        except (RuntimeError, XferError):
            return b""
        return offer if len(offer) <= MAX_OFFER_BYTES else b""

    def _bind(self, said: Sequence[_Rank]) -> None:
        """Number the storages that this rank reads: its own, and the others' if every rank that assembles can map them."""
        mapped: dict[int, dict[int, torch.Tensor]] = {}
        self.pulls = self.world == 1 or all(x.offer for x in said)
        if self.pulls and self.world > 1:
            here = not self.assembly.here
            if self.assembly.here:
                try:
                    mapped = self._mapped(said)
                    here = all(len(mapped.get(r, ())) == len(x.roots) for r, x in enumerate(said) if r != self.rank)
                except (RuntimeError, XferError):
                    mapped = {}
            self.pulls = not agree.any_rank(not here, b"", self.device)
        if not self.pulls:
            self._unmap()
            self._refuse_rounds(said)
        self._numbers, self._sources = {}, []
        for rank, x in enumerate(said):
            if rank != self.rank and not (self.pulls and self.assembly.here):
                continue
            there = mapped.get(rank, {})
            some = [self._roots[n] if rank == self.rank else there[i] for i, n in enumerate(x.roots)]
            self._numbers[rank] = {n: len(self._sources) + i for i, n in enumerate(x.roots)}
            self._sources += some

    def _refuse_rounds(self, said: Sequence[_Rank]) -> None:
        """Raise Unsupported, on all ranks, if their group cannot send from their devices: gloo would read a GPU address as a host
        address."""
        if self.device.type != "cuda" or self.world == 1 or dist.get_backend() != "gloo":
            return
        boxes = (box for some in self._held.values() for box in some)
        if all(t in box.by for box in boxes for t in self._targets):
            return  # replicated: no rank has to send
        ranks = [r for r, x in enumerate(said) if not x.offer]
        raise Unsupported(
            "trainers cannot map each other's storages, and their default group is gloo, which cannot send from GPUs",
            [
                *(f"trainer {r}: its allocator gives no handles (expandable segments?)" for r in ranks),
                'init_process_group("nccl"), or an allocator whose memory can be mapped on all trainers',
            ],
        )

    def _mapped(self, said: Sequence[_Rank]) -> dict[int, dict[int, torch.Tensor]]:
        from xfer.transport.peer import Mapping as Mapped

        self._mapping = mapping = Mapped(self.rank, self.device)
        for rank, x in enumerate(said):
            if rank != self.rank:
                mapping.open(x.offer, rank, range(len(x.roots)))
        return mapping.roots

    # ---- messages

    def prepare(self, plan: BucketPlan, buffers: Buffers | None) -> None:
        """Make all tables and load all kernels before the first message of a gather: loading a kernel beside NCCL's can hang the
        host.

        Args:
            plan: The buckets.
            buffers: On ranks that assemble: where messages are assembled.
        """
        for number, message in enumerate(plan.messages):
            self._way(message).bind(buffers.take(number, message.nbytes) if buffers is not None else None)

    def place(self, message: PackedMessage, data: torch.Tensor | None) -> None:
        """Assemble a message in `data`, on this thread's stream. Collective unless ranks pull. `data` is None on ranks that do not
        assemble, or that no longer need the message."""
        self.collectives = self._way(message).run(data)

    def tensors(self, group: GatherGroup) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield whole tensors with memory of their own, for callers that pack them. None on ranks that do not assemble."""
        unpacker, most, before = Unpacker(self.device), 0, self._last
        here, longest = self.assembly.here, longest_of(group.messages)
        if here and (self._scratch.device != self.device or self._scratch.numel() < longest):
            self._ways = {}  # they keep the old scratch alive
            self._scratch = torch.empty(longest, dtype=torch.uint8, device=self.device)
        for message in group.messages:
            data = self._scratch[: message.nbytes] if here else None
            before.follow(data)
            self.place(message, data)
            most = max(most, self.collectives)
            if data is None:
                continue
            copy = data.clone()
            before = _Made(copy)
            for spec, t in unpacker.take(message, copy):
                before.follow(copy)
                yield spec.name, t
        self.collectives, self._last = most, before
        if not here:
            yield from ((spec.name, None) for spec in group.tensors)

    def _way(self, message: PackedMessage) -> _Way:
        found = self._ways.get(id(message))
        if found is None or found.message is not message:
            found = self._ways[id(message)] = _Way(self, message)
        return found

    def slots(self, kind: str) -> list[torch.Tensor]:
        """Return the two buffers of rounds that are sent ("out") or arrive ("in"). No round is longer than a buffer."""
        if kind not in self._slots:
            room = -(-self.assembly.round_bytes // places.STEP) * places.STEP
            self._slots[kind] = [torch.empty(room, dtype=torch.uint8, device=self.device) for _ in range(2)]
        return self._slots[kind]

    def bound(self, copies: Sequence[Copy], sources: Sequence[torch.Tensor], into: torch.Tensor) -> kernels.BoundRows:
        rows = places.table(copies)
        if not on_gpu(self.device):
            return kernels.bind(rows, [into], "local", src_roots=sources)
        from xfer.kernels.tiles import Turns
        from xfer.kernels.triton_impl import TritonRows

        turns = None
        if sources is self._sources:
            # Read from one rank after the other, each assembling rank beginning with a different one, and copy from this rank's
            # own storages at the same time.
            count = len(self._numbers)
            first = self.rank + 1
            groups = tuple((i - first) % count for i, some in enumerate(self._numbers.values()) for _ in some)
            mine = (list(self._numbers).index(self.rank) - first) % count
            turns = Turns(groups, 1 << 30, frozenset((mine,)) if count > 1 else frozenset())
        return TritonRows(rows, [into], "local", sources, turns=turns, programs=self.assembly.programs)


class _Made:
    """Bytes that were made on this thread's stream. A caller may use them on several streams in turn."""

    def __init__(self, data: torch.Tensor | None = None):
        self.data, self._event, self._streams = data, None, set()
        if data is not None and data.device.type == "cuda":
            stream = torch.cuda.current_stream(data.device)
            self._event, self._streams = stream.record_event(), {stream.cuda_stream}

    def follow(self, data: torch.Tensor | None) -> None:
        """Make this thread's stream wait until the bytes are made, if it is another stream. The stream uses `data`."""
        if self._event is None or data is None:
            return
        stream = torch.cuda.current_stream(data.device)
        if stream.cuda_stream not in self._streams:
            self._streams.add(stream.cuda_stream)
            stream.wait_event(self._event)
            data.record_stream(stream)


def _posted(data: Sequence[torch.Tensor], peers: Sequence[int], sends: bool) -> list:
    """Begin the messages of one round together, over the trainers' group.

    torch's `batch_isend_irecv` is not used, because it registers its batch for the whole process: while the batch is open, and forever
    if a post raises, collectives over that group do nothing in any thread.
    """
    group = dist.group.WORLD
    backend = group._get_backend(data[0].device) if type(group) is dist.ProcessGroup else None
    if backend is None or not backend.supports_coalescing:
        return [(dist.isend if sends else dist.irecv)(t, peer) for t, peer in zip(data, peers, strict=True)]
    from xfer.transport.nccl import together

    begin = getattr(backend, "send" if sends else "recv")  # torch's type stubs lack both methods

    def post() -> None:
        for t, peer in zip(data, peers, strict=True):
            begin([t], peer, 0)

    return [together(backend, post)]


class _Leg:
    """This rank's part in one round: it is the round's target, or it sends."""

    def __init__(self, stream: TensorStream, round: Round, found: Sequence[Copy]):
        self._s, self._round, self._found = stream, round, found
        self.target = round.target == stream.rank
        self._bound: dict[tuple[int, int], kernels.BoundRows] = {}  # by the destination's address and the slot

    def bind(self, data: torch.Tensor | None, slot: int) -> None:
        """Bind this rank's copies ahead of their use."""
        if not self.target:
            self._packing(slot)
        elif data is not None:
            self._placing(data, slot)

    def _packing(self, slot: int) -> kernels.BoundRows:
        """Return the copies that run before sending."""
        if (0, slot) not in self._bound:
            self._bound[0, slot] = self._s.bound(self._found, self._s._sources, self._s.slots("out")[slot])
        return self._bound[0, slot]

    def _placing(self, data: torch.Tensor, slot: int) -> kernels.BoundRows:
        """Return the copies that run after receiving."""
        key = data.data_ptr(), slot
        if key not in self._bound:
            self._bound[key] = self._s.bound(self._found, self._s.slots("in")[slot : slot + 1], data)
        return self._bound[key]

    def begin(self, slot: int) -> list:
        """Begin the messages of this round."""
        s, sections = self._s, self._round.sections
        if not self.target:
            self._packing(slot).copy()
            return _posted([s.slots("out")[slot][: sections[s.rank][1]]], [self._round.target], sends=True)
        into = s.slots("in")[slot]
        return _posted([into[at : at + n] for at, n in sections.values()], list(sections), sends=False)

    def end(self, works: list, slot: int, data: torch.Tensor | None) -> int:
        """Wait for the messages (on GPUs: make the stream wait). Returns the number of messages that arrived."""
        for work in works:
            work.wait()
        if self.target and data is not None:
            self._placing(data, slot).copy()
        return len(self._round.sections) if self.target else 0


class _Way:
    """This rank's part in the assembly of one message."""

    def __init__(self, stream: TensorStream, message: PackedMessage):
        self.message, self._s = message, stream
        numbers, most = stream._numbers, stream.assembly.round_bytes
        self._legs: list[_Leg] = []
        self._own: list[Copy] = []
        self._bound: dict[int, kernels.BoundRows] = {}  # by the buffer's address; they keep the buffer alive
        for target in stream._targets:
            if stream.pulls and target != stream.rank:
                continue
            found = places.pieces(message, stream._held, target)
            if target == stream.rank:
                some = [p for p in found if stream.pulls or p.rank == target]
                self._own = [p.copy(numbers[p.rank][p.fragment.root]) for p in some]
            for r in () if stream.pulls else places.rounds(found, target, most):
                if target == stream.rank:
                    self._legs.append(_Leg(stream, r, places.landed(r, 0)))
                elif stream.rank in r.sections:
                    self._legs.append(_Leg(stream, r, places.sent(r, stream.rank, numbers[stream.rank])))

    def bind(self, data: torch.Tensor | None) -> None:
        """Bind this rank's copies for the message in `data`; None if this rank does not assemble it."""
        for i, leg in enumerate(self._legs):
            leg.bind(data, i % 2)
        if data is not None:
            self._bind_own(data)

    def _bind_own(self, data: torch.Tensor) -> kernels.BoundRows:
        if data.data_ptr() not in self._bound:
            self._bound[data.data_ptr()] = self._s.bound(self._own, self._s._sources, data)
        return self._bound[data.data_ptr()]

    def run(self, data: torch.Tensor | None) -> int:
        """Assemble the message in `data`. Round k + 1 is on its way while round k is copied to its places.

        Returns:
            Number of messages that arrived from other ranks.
        """
        if data is not None and data.numel():
            self.bind(data)
            self._bind_own(data).copy()
        going: deque[tuple[_Leg, list, int]] = deque()
        came = 0
        for i, leg in enumerate(self._legs):
            going.append((leg, leg.begin(i % 2), i % 2))
            if len(going) == 2:
                first, works, slot = going.popleft()
                came += first.end(works, slot, data)
        for leg, works, slot in going:
            came += leg.end(works, slot, data)
        return came
