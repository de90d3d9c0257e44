"""Runs of a delta: a message has all its bytes, or only the units that changed since a refit whose bytes the receivers hold.

A source packs each message twice, from its storages and from copies of them as they were in that refit, and compares. Before the
first message of a run it sends a *header* to each receiver: the number of that refit, the plan, and the length of each message.
Both ends then run the same steps as in other runs; a message in which much has changed is sent whole.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from xfer.errors import PlanMismatch
from xfer.kernels import BoundRows, bind
from xfer.kernels.changes import Patch, encode, unit_of
from xfer.kernels.marks import ByteRange
from xfer.plan.program import Program
from xfer.transport.bound import BoundPart, BoundStep, made_step
from xfer.transport.group import Link, Outgoing
from xfer.transport.steps import ALIGN, PairExchange, steps

PAYS = 4
"""A message is sent compact if that makes it at least so many times shorter: up to 12 % of 2-byte units may have changed. Comparing and
placing units cost memory traffic; above this share they gain little on slow wires and lose on fast ones."""

WHOLE = -1
"""Length in a header of a message that is sent whole."""

_FACTS = 2
_TAG = 0x7FFFFF02


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """The bytes that the receivers of a run hold already.

    Attributes:
        attempt: Number of the refit whose bytes they hold.
        plan: Number of the plan, equal on all ranks.
        before: Source: copies, from that refit, of the bytes that its messages read; flat uint8. None if it has none: it then sends
            whole messages.
        parts: The parts of its storages of which `before` are copies, in order.
    """

    attempt: int
    plan: int
    before: Sequence[torch.Tensor] | None = None
    parts: Sequence[ByteRange] = ()


class Changes:
    """The messages of a program, as a run by changes needs them. Binds at first use.

    Args:
        program: See P2P, for this and what follows.
        roots: The storages that changes are written to.
        src_roots: The storages that messages are sent from.
        link: Carries the messages.
        step_bytes: See `steps`.
        kept: Whether compact messages are kept. Otherwise they are written when they come.

    Attributes:
        patches: The compact messages of the last run that were kept, each with the rows by which it is written.
        whole: The rows of all messages of that run that came whole.
        all_whole: Whether all of them did.
    """

    def __init__(
        self,
        program: Program,
        roots: Sequence[torch.Tensor],
        src_roots: Sequence[torch.Tensor],
        link: Link,
        step_bytes: int,
        kept: bool = False,
    ):
        self._program, self._roots, self._src_roots, self._link = program, roots, src_roots, link
        self._step_bytes, self._kept = step_bytes, kept
        self.patches: list[tuple[Patch, torch.Tensor]] = []
        self.whole, self.all_whole = program.rows[:0], True
        self._sends: list[list[_Compared]] | None = None
        self._patches: list[list[tuple[Patch, np.ndarray]]] = []
        self._pair: tuple[torch.Tensor, ...] = ()

    @property
    def extra_bytes(self) -> int:
        """Bytes of buffers that stay between runs."""
        return sum(b.numel() for b in self._pair) + sum(c.scratch_bytes for some in self._sends or () for c in some)

    def _bound(self) -> list[list[_Compared]]:
        if self._sends is None:
            whole = steps(self._program, self._step_bytes, 1 << 62)  # the same steps, with all rows in the buffer
            self._sends = [[_Compared(p, self._src_roots) for p in s.sends] for s in whole]
            labels = self._link.labels
            self._patches = [[(Patch(p.rows, self._roots, labels[p.peer]), p.rows) for p in s.receives] for s in whole]
            most = max((c.nbytes for some in self._sends for c in some), default=0)
            self._pair = tuple(torch.empty(most, dtype=torch.uint8, device=self._link.device) for _ in range(2))
        return self._sends

    def announced(
        self, base: HeldBytes, usual: Sequence[BoundStep], depth: int, deadline: float, check: Callable[[], None]
    ) -> tuple[list[BoundStep], float]:
        """Exchange headers. Collective over the ranks of the link.

        Args:
            base: The bytes that receivers hold.
            usual: The steps in which all bytes are sent.
            depth: Buffers per direction.
            deadline: A time.monotonic() value.
            check: Raises if the run has to end.

        Returns:
            The steps of this run, and the seconds in which this rank compared.

        Raises:
            PlanMismatch: A source speaks of another refit or plan. Nothing was written.
        """
        began = time.perf_counter()
        bound = self._bound()
        sent: list[list[torch.Tensor | None]] = []
        for some in bound:
            check()
            sent.append([c.message(base, self._pair) for c in some])
        seconds = time.perf_counter() - began
        told = self._exchange(base, usual, sent, deadline)
        self.all_whole = all(n == WHOLE for sizes in told.values() for n in sizes)
        buffers = self._buffers(usual, told, 0 if self._kept else depth)
        out, came = [], [self._program.rows[:0]]
        self.patches = []
        for k, step in enumerate(usual):
            at, receives = 0, []
            for part, (patch, rows) in zip(step.receives, self._patches[k], strict=True):
                size = told[part.peer].pop(0)
                if size == WHOLE:
                    receives.append(part)
                    came.append(rows)
                    continue
                if self._kept:
                    buffer = torch.empty(size, dtype=torch.uint8, device=self._link.device)
                    receives.append(_compact(part, buffer))
                    self.patches += [(patch, buffer)] if size else []
                    continue
                buffer = buffers[k % depth][at : at + size]
                at += _up(size)
                receives.append(_compact(part, buffer, patch))
            sends = [p if m is None else _compact(p, m) for p, m in zip(step.sends, sent[k], strict=True)]
            out.append(made_step(step.wave, sends, receives))
        self.whole = np.concatenate(came)
        return out, seconds

    def _exchange(
        self,
        base: HeldBytes,
        usual: Sequence[BoundStep],
        sent: Sequence[Sequence[torch.Tensor | None]],
        deadline: float,
    ) -> dict[int, list[int]]:
        """Send and receive headers. Returns the length of each message by source, in the order of steps."""
        link, facts = self._link, [base.attempt, base.plan]
        sizes: dict[int, list[int]] = {}
        expected: dict[int, int] = {}
        for step, some in zip(usual, sent, strict=True):
            for part, message in zip(step.sends, some, strict=True):
                sizes.setdefault(part.peer, []).append(WHOLE if message is None else message.numel())
            for part in step.receives:
                expected[part.peer] = expected.get(part.peer, 0) + 1

        def header(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=link.device).view(torch.uint8)

        receives = {p: header([0] * (_FACTS + n)) for p, n in expected.items()}
        sends: list[Outgoing] = [(header([*facts, *n]), p, _TAG) for p, n in sizes.items()]
        under_way = link.post([(t, p, _TAG) for p, t in receives.items()], sends)
        for pending in (*under_way[0], *under_way[1]):
            pending.wait(deadline)
        link.finish(deadline)
        told = {p: t.view(torch.int64).tolist() for p, t in receives.items()}
        if wrong := [
            f"{link.labels[p]}: changes since refit {t[0]} by plan {t[1]:x}; here refit {base.attempt}, plan {base.plan:x}"
            for p, t in told.items()
            if t[:_FACTS] != facts
        ]:
            raise PlanMismatch("sources sent changes of other bytes than this rank holds", wrong)
        return {p: t[_FACTS:] for p, t in told.items()}

    def _buffers(self, usual: Sequence[BoundStep], told: dict[int, list[int]], depth: int) -> list[torch.Tensor]:
        """Return buffers for compact messages: each as long as those of the step with most of them."""
        turns, most = {p: iter(n) for p, n in told.items()}, 0
        for step in usual:
            sizes = [next(turns[part.peer]) for part in step.receives]
            most = max(most, sum(_up(n) for n in sizes if n != WHOLE))
        return [torch.empty(most, dtype=torch.uint8, device=self._link.device) for _ in range(depth)]


class _Compared:
    """The rows of one message on its source's side, bound to the storages and to copies of them."""

    def __init__(self, part: PairExchange, roots: Sequence[torch.Tensor]):
        rows = part.rows.copy()
        rows["wire"] -= rows["wire"].min() if len(rows) else 0
        self.nbytes, self._rows, self._roots = part.nbytes, rows, roots
        self._unit = unit_of(rows)
        self._now: BoundRows | None = None
        self._before: tuple[Sequence[torch.Tensor], BoundRows] | None = None

    @property
    def scratch_bytes(self) -> int:
        some = (self._now, self._before and self._before[1])
        return sum(rows.scratch_bytes for rows in some if rows is not None)

    def message(self, base: HeldBytes, pair: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the compact message; None if it is better sent whole."""
        before = base.before
        if before is None or not self._unit:
            return None
        if self._now is None:
            self._now = bind(self._rows, self._roots, "src")
        if self._before is None or self._before[0] is not before:
            self._before = before, bind(_moved_to(base.parts, self._rows), before, "src")
        for rows, buffer in zip((self._now, self._before[1]), pair, strict=True):
            rows.pack(buffer)
        now, was = (buffer[: self.nbytes] for buffer in pair)
        return encode(now, was, self._unit, self.nbytes // PAYS)


class _PatchRows:
    """A patch with the call of `BufferRows`."""

    scratch_bytes = 0

    def __init__(self, patch: Patch):
        self._patch = patch

    def pack(self, buffer: torch.Tensor) -> None:
        raise TypeError("changes are placed, not packed")

    def unpack(self, buffer: torch.Tensor) -> None:
        self._patch.apply(buffer)


def _compact(part: BoundPart, message: torch.Tensor, patch: Patch | None = None) -> BoundPart:
    """Return the part with its compact message in place of all its bytes. If nothing changed, nothing is sent."""
    if not message.numel():
        return BoundPart(part.peer, 0, ())
    copy = None if patch is None else (_PatchRows(patch), message)
    return BoundPart(part.peer, message.numel(), [(message, part.peer, part.messages[0][2])], copy)


def _moved_to(parts: Sequence[ByteRange], rows: np.ndarray) -> np.ndarray:
    """Return rows of a source as they read from copies of parts of its storages."""
    places = zip(rows["src_root"].tolist(), rows["src_offset"].tolist())
    at = [bisect_right(parts, place, key=lambda p: (p.root, p.start)) - 1 for place in places]
    rows = rows.copy()
    rows["src_root"], rows["src_offset"] = at, rows["src_offset"] - [parts[k].start for k in at]
    return rows


def _up(n: int) -> int:
    return -(-n // ALIGN) * ALIGN
