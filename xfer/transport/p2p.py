"""Runs one rank's program over a link: pack step k+1, wire step k, unpack step k-1, through a bounded double buffer.

All Python per row happens in the constructor. A run posts the messages of a step, packs the next one while they
travel and unpacks the one before; it allocates nothing. Long dense rows travel from or to storage without a buffer. That is
safe because a run that ends early aborts its link before it returns, and after an abort no byte arrives (group.py). Not here:
cutting programs into steps (steps.py), and the decision that a refit is over (participants/).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from xfer.errors import DeadlineExceeded, PlanMismatch, XferError
from xfer.kernels import bind
from xfer.plan.program import LAG, Program
from xfer.transport.bound import BESIDE_WIRE, BoundStep, PeerBytes, Tally, bound_step
from xfer.transport.changes import Changes, HeldBytes
from xfer.transport.group import Aborted, Link, Pending
from xfer.transport.scratch import Held, Scratch
from xfer.transport.steps import steps

DEPTH = 2
"""Buffers per direction: one travels while the other is packed or unpacked. More buffers are not faster."""

STEP_BYTES = {"cpu": 16 << 20, "cuda": 240 << 20}
"""Most wire bytes of a pair in a step. On CPUs shorter steps wait more often and longer ones gain nothing. On GPUs each
group of messages costs NCCL about 0.1 ms, so steps must be long. The plan bounds the bytes that a rank stages in a wave
(`WAVE_BYTES`)."""

WAVE_BYTES = {"cpu": 0, "cuda": 252 << 20}
"""For the plan: most wire bytes of a rank in a wave, so that its two buffers per direction stay under 512 MiB. 0: the planner's
default."""

DIRECT_BYTES = {"cpu": 128 << 10, "cuda": 240 << 20}
"""Shorter dense rows are packed: a message of its own costs more than their copy. On GPUs 32 MiB instead make a refit of Qwen3-30B
15 % slower."""


@dataclass(frozen=True, slots=True)
class TransferStats:
    """One run. Bytes are wire bytes; local rows and fills do not count. `extra_bytes`: buffers beside the model.

    `pack_s`, `unpack_s`: seconds in copies (CUDA: in launching them). `wire_s`: seconds blocked on messages. `seconds`: of the run.
    """

    bytes_in: int
    bytes_out: int
    peers: tuple[PeerBytes, ...]
    waves: int
    messages: int
    pack_s: float
    wire_s: float
    unpack_s: float
    seconds: float
    extra_bytes: int


class StepWatch(Protocol):
    """Calls of a run about the steps that this rank receives. Called in order, by the thread of the run."""

    def arrived(self, step: int, stream: torch.cuda.Stream | None) -> None:
        """The bytes of a step are in their storages; on CUDA, when `stream` has done its present work."""

    def poll(self) -> None:
        """Called repeatedly while the run waits for the device."""


class Unwatched(StepWatch):
    """A watch that does nothing."""

    def arrived(self, step: int, stream: torch.cuda.Stream | None) -> None:
        pass

    def poll(self) -> None:
        pass


class P2P:
    """A program bound to storages and a link. `run` may be called any number of times, by one thread at a time.

    Args:
        link: The link among the ranks of the plan.
        program: The program of this rank.
        roots: Flat uint8 tensors over the storages of this rank's inventory, in its order.
        src_roots: The storages from which this rank sends, if it is source and destination with two inventories.
        scratch: If given, `roots` are its storages, and the bytes of a run are applied to live storage later.
        step_bytes, direct_bytes: See `steps`; equal on all ranks. None: `STEP_BYTES` and `DIRECT_BYTES`.

    Raises:
        PlanMismatch: The program is that of another rank.
        LayoutError: The program does not fit the storages.
    """

    def __init__(
        self,
        link: Link,
        program: Program,
        roots: Sequence[torch.Tensor],
        *,
        src_roots: Sequence[torch.Tensor] | None = None,
        scratch: Scratch | None = None,
        step_bytes: int | None = None,
        direct_bytes: int | None = None,
    ):
        if program.rank != link.rank:
            raise PlanMismatch(
                f"the program of rank {program.rank} was given to rank {link.rank} ({link.labels[link.rank]})"
            )
        self.link, self.program = link, program
        kind = link.device.type
        plan = steps(program, step_bytes or STEP_BYTES[kind], direct_bytes or DIRECT_BYTES[kind])
        src_roots = roots if src_roots is None else src_roots
        self._out = _buffers(max((s.send_buffer for s in plan), default=0), link.device)
        self._in = _buffers(max((s.receive_buffer for s in plan), default=0), link.device)
        self._steps = [
            bound_step(
                s, src_roots, roots, self._out[k % DEPTH], self._in[k % DEPTH], first=k == 0, last=k == len(plan) - 1
            )
            for k, s in enumerate(plan)
        ]
        beside = BESIDE_WIRE if plan else None
        self._local = bind(program.local(), roots, "local", src_roots=src_roots, programs=beside)
        self._fills = bind(program.fills(), roots, "dst")
        # A rank whose storages are only read by others has nothing to do here, and a stream would cost it 70 MiB (measured).
        self.idle = not (plan or len(program.local()) or len(program.fills()))
        self._lanes = _Lanes(torch.device("cpu") if self.idle else link.device)
        bound = [self._local, self._fills, *(p.copy[0] for s in self._steps for p in (*s.sends, *s.receives) if p.copy)]
        self._buffer_bytes = sum(b.numel() for b in (*self._out, *self._in)) + sum(b.scratch_bytes for b in bound)
        self._needed = _needed(program, [s.wave for s in plan])
        self._tally = Tally.of(self._steps, link)
        written = roots if scratch is None else scratch.live
        self._changes = Changes(
            program, written, src_roots, link, step_bytes or STEP_BYTES[kind], kept=scratch is not None
        )
        link.warm(sorted({p.peer for s in plan for p in (*s.sends, *s.receives)}))

    @property
    def extra_bytes(self) -> int:
        """Bytes of buffers and of kernels' tables."""
        return self._buffer_bytes + self._changes.extra_bytes

    def run(
        self,
        deadline: float,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda wave, nbytes: None,
        watch: StepWatch | None = None,
        base: HeldBytes | None = None,
    ) -> TransferStats:
        """Moves every byte of the program once. Collective: all ranks of the link run their programs of the same plan.

        Args:
            deadline: A time.monotonic() value.
            cancelled: Called before anything is posted or written. To free a run that is blocked, call `link.abort()` as well.
            progress: Called after each step with (wave, bytes in and out so far).
            watch: Is told of each step when its bytes are in their storages.
            base: The version that all receivers hold; None: every byte is sent. With a base, sources first announce their messages, and
                send only the changes of messages in which little has changed (changes.py).

        Raises:
            DeadlineExceeded, PeerLost, Aborted: The link is aborted, and no more bytes arrive. On CUDA, kernels that unpack may
                still run (`drained`). The storages hold an unknown mix of old and new values.
        """
        run = _Run(self, deadline, cancelled, watch or Unwatched())
        try:
            if base is not None:
                run.announce(base)
            return run.all(progress)
        except BaseException as e:
            self.link.abort()
            self._lanes.left()
            if isinstance(e, XferError) and not isinstance(e, Aborted):
                blamed = self.link.blame(run.unfinished)
                e.violations = tuple(blamed) or e.violations
                e.message += f" (wave {run.wave} of {self.program.waves})"
            raise

    def held(self, scratch: Scratch, pulled: np.ndarray, marked: Callable[[], None] | None) -> Held:
        """Return the bytes that the last run, a delta, has brought into `scratch`. `pulled`: rows that came whole by another route.
        `marked`: see `Held`."""
        if marked is None and self._changes.all_whole:
            return Held(scratch)
        here = [self.program.local(), self.program.fills(), pulled]
        return Held(scratch, np.concatenate([*here, self._changes.whole]), self._changes.patches, marked)

    def drained(self) -> bool:
        """Whether all work that the last run launched has left the device. It may wait for an abort that has not ended."""
        return self._lanes.over()


class _Run:
    """The state of one run: the messages that are on their way, and its clocks."""

    def __init__(self, p2p: P2P, deadline: float, cancelled: Callable[[], bool], watch: StepWatch):
        self.p2p, self.deadline, self.cancelled, self.watch = p2p, deadline, cancelled, watch
        self.steps: Sequence[BoundStep] = p2p._steps
        self.tally = p2p._tally
        self.sends: list[list[Pending]] = [[]] * DEPTH
        self.receives: list[list[Pending]] = [[]] * DEPTH
        self.wave = 0
        self.pack_s = self.wire_s = self.unpack_s = 0.0
        self.done = 0

    @property
    def unfinished(self) -> list[Pending]:
        return [p for some in (*self.receives, *self.sends) for p in some]

    def announce(self, base: HeldBytes) -> None:
        """Exchange headers, which tell the messages that are compact, and use the steps that follow from them."""
        p2p = self.p2p
        self.steps, self.pack_s = p2p._changes.announced(base, p2p._steps, DEPTH, self.deadline, self._check)
        self.tally = Tally.of(self.steps, p2p.link)

    def all(self, progress: Callable[[int, int], None]) -> TransferStats:
        began = time.perf_counter()
        p2p, lanes = self.p2p, self.p2p._lanes
        count, taken = len(self.steps), 0
        self._check()
        lanes.begin()

        def take(until: int) -> int:
            for j in range(taken, until):
                self._take(j)
                progress(self.wave, self.done)
                self.watch.poll()
            return max(taken, until)

        for k in range(count):
            taken = take(p2p._needed[k])
            self._post(k)
            if k == 0:
                self._here()
            taken = take(k - DEPTH + 2)
        take(count)
        if not count:
            self._here()
        with lanes.pack:
            for pending in self.sends:
                self._wait(pending)
        self.sends = [[]] * DEPTH
        lanes.end()
        t0 = time.perf_counter()
        p2p.link.finish(self.deadline, self.watch.poll)
        self.watch.poll()
        self.wire_s += time.perf_counter() - t0
        peers, messages = self.tally.peers, self.tally.messages
        return TransferStats(
            sum(p.bytes_in for p in peers), sum(p.bytes_out for p in peers), peers, p2p.program.waves, messages,
            self.pack_s, self.wire_s, self.unpack_s, time.perf_counter() - began, p2p.extra_bytes,
        )  # fmt: skip

    def _post(self, k: int) -> None:
        """Posts the messages of step k. Receives come first, so that no source waits for this rank."""
        p2p, slot = self.p2p, k % DEPTH
        step = self.steps[k]
        sends = [message for part in step.sends for message in part.messages]
        with p2p._lanes.pack:
            self._wait(self.sends[slot])  # of step k - DEPTH; its receives were taken before
            self._check()
            p2p._lanes.reuse()
            receives = [message for part in step.receives for message in part.messages]
            if p2p.link.grouped:
                self._pack(step)
                self.receives[slot], self.sends[slot] = p2p.link.post(receives, sends)
            else:
                self.receives[slot], self.sends[slot] = p2p.link.post(receives, ())[0], []
                self._pack(step)
                self.sends[slot] = p2p.link.post((), sends)[1]

    def _pack(self, step: BoundStep) -> None:
        t0 = time.perf_counter()
        for part in step.sends:
            if part.copy is not None:
                part.copy[0].pack(part.copy[1])
        self.pack_s += time.perf_counter() - t0

    def _take(self, j: int) -> None:
        """Unpacks the messages of step j into storage, those of one peer after the other."""
        slot, step = j % DEPTH, self.steps[j]
        pending, at = self.receives[slot], 0
        with self.p2p._lanes.unpack:
            for part in step.receives:
                if self.p2p.link.grouped:
                    self._wait(pending if not at else ())
                else:
                    self._wait(pending[at : at + len(part.messages)])
                at += len(part.messages)
                self._check()
                if part.copy is not None:
                    t0 = time.perf_counter()
                    part.copy[0].unpack(part.copy[1])
                    self.unpack_s += time.perf_counter() - t0
            self.p2p._lanes.taken(slot)
            self.watch.arrived(j, self.p2p._lanes.current)
        self.receives[slot] = []
        self.wave, self.done = step.wave, self.done + step.nbytes

    def _here(self) -> None:
        """Runs the rows that need no wire, while the first step travels."""
        with self.p2p._lanes.unpack:
            self.p2p._fills.fill()
            self.p2p._local.copy()

    def _wait(self, pending: Sequence[Pending]) -> None:
        t0 = time.perf_counter()
        for p in pending:
            p.wait(self.deadline)
        self.wire_s += time.perf_counter() - t0

    def _check(self) -> None:
        who = self.p2p.link.labels[self.p2p.link.rank]
        if self.cancelled():
            raise Aborted("the transfer was cancelled", where=who)
        if time.monotonic() > self.deadline:
            raise DeadlineExceeded("the deadline passed during the transfer", where=who)


class _Lanes:
    """On CUDA, one stream that packs and posts and one that unpacks, ordered by events. On the CPU calls are in order anyway.

    torch hands out 32 streams of a device in turns, and a lane over NCCL takes five: these two, its own, its link's and NCCL's.
    So from the seventh replica on, or sooner if routes were opened again, lanes of a trainer share streams. A lane whose peer hangs
    then delays others as well.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._streams = [torch.cuda.Stream(device) for _ in range(2)]
            self._taken = [torch.cuda.Event() for _ in range(DEPTH)]
            self._left: list[torch.cuda.Event] = []
            self._device = device

    @property
    def current(self) -> torch.cuda.Stream | None:
        """The current stream; None on the CPU."""
        return torch.cuda.current_stream(self._device) if self._cuda else None

    @property
    def pack(self):
        return torch.cuda.stream(self._streams[0]) if self._cuda else nullcontext()

    @property
    def unpack(self):
        return torch.cuda.stream(self._streams[1]) if self._cuda else nullcontext()

    def begin(self) -> None:
        """Orders both streams behind the earlier work of the caller's stream."""
        if self._cuda:
            self._left = []
            for s in self._streams:
                s.wait_stream(torch.cuda.current_stream(self._device))

    def reuse(self) -> None:
        """Makes the current stream wait until the steps that were taken are unpacked: buffers are used again, bytes are handed on."""
        for event in self._taken if self._cuda else ():
            torch.cuda.current_stream(self._device).wait_event(event)

    def taken(self, slot: int) -> None:
        if self._cuda:
            self._taken[slot].record()

    def end(self) -> None:
        if self._cuda:
            for s in self._streams:
                torch.cuda.current_stream(self._device).wait_stream(s)

    def left(self) -> None:
        """Notes the work that was launched, without waiting for it. See `over`."""
        if self._cuda:
            self._left = [s.record_event() for s in self._streams]

    def over(self) -> bool:
        return not self._cuda or all(e.query() for e in self._left)


def _needed(program: Program, waves: Sequence[int]) -> list[int]:
    """For each step, by its wave, how many steps come before it whose bytes it may hand on."""
    rows = program.rows
    on = set(rows["wave"][(rows["common"] < 0) & (rows["src"] == program.rank)].tolist())
    return [int(np.searchsorted(waves, wave - LAG, "right")) if wave in on else 0 for wave in waves]


def _buffers(nbytes: int, device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(DEPTH)]
