"""A relay chain without a session, on the GPUs of one host, for benchmarks: part after part, ordered on the device.

The first destination pulls from the trainers, each other one from the destination before it. Everything is launched at once; no host
stands between two parts. A destination that has a part writes its number into a word in the next destination's memory; before it pulls
the part, the next one's stream waits for that word *in its own memory*, so that a stuck destination can be freed by writing it.
Numbers only grow, over all runs.

The caller makes sure that all destinations run together, and that none begins its next run, frees or sleeps before all have ended
this one, because their storages are being read. If one destination's run raises, no later one has a whole version, and all open
anew. Sessions relay by transport/relay_place.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise

import numpy as np
import torch

from xfer.errors import PlanMismatch, Unsupported
from xfer.kernels import cuda_driver as driver
from xfer.kernels.long_runs import READ_TOO
from xfer.plan.program import Op, Program
from xfer.plan.relay import handed_on, in_parts
from xfer.transport.group import Aborted
from xfer.transport.peer import Export, Mapping, Pull, PullStats
from xfer.transport.routes import Exchange, any_rank


def relay(rows: np.ndarray, destinations: Sequence[int], parts: int) -> list[Program]:
    """The programs by which `destinations` (joint ranks, one per replica, inventories equal) refit themselves in a row.

    rows: what one destination receives from ranks that are not among `destinations`, and its fills; `dst` is one number throughout.
    Each returned program has only rows of its own destination, in `parts + len(destinations) - 1` waves: number j's part p is its wave
    p + j. `wire` is 0, for all of it is pulled. ValueError for less than one part; PlanMismatch for rows that cannot be
    relayed.
    """
    if parts < 1:
        raise ValueError(f"a relay needs at least one part, not {parts}")
    if wrong := sorted({*rows["dst"][rows["dst"] != rows["dst"][:1]].tolist()}):
        raise PlanMismatch(
            "rows of one destination are relayed, these are of several", [f"also of rank {r}" for r in wrong]
        )
    if inner := sorted(set(rows["src"].tolist()) & set(destinations)):
        raise PlanMismatch(
            "relayed rows come from outside", [f"rank {r} is both sender and destination" for r in inner]
        )
    fills, moved = rows[rows["op"] == Op.FILL], rows[rows["op"] != Op.FILL]
    pieces = in_parts(moved, parts)
    out = []
    for j, destination in enumerate(destinations):
        mine, constant = handed_on(pieces, destinations[j - 1]) if j else pieces.copy(), fills.copy()
        mine["dst"], constant["dst"] = destination, destination
        mine["wave"] += j
        out.append(Program(destination, parts + len(destinations) - 1, np.concatenate([constant, mine])))
    return out


def stream_write(stream: torch.cuda.Stream, pointer: int, value: int) -> None:
    """The stream writes a 32-bit word, own or mapped, when all before it is done and to be seen by everybody."""
    driver._call("cuStreamWriteValue32_v2", ctypes.c_void_p(stream.cuda_stream), *_word(pointer, value))


def stream_wait_at_least(stream: torch.cuda.Stream, pointer: int, value: int) -> None:
    """The stream goes on once the 32-bit word is `value` or past it, counted around."""
    driver._call("cuStreamWaitValue32_v2", ctypes.c_void_p(stream.cuda_stream), *_word(pointer, value))


def _word(pointer: int, value: int) -> tuple:
    return ctypes.c_uint64(pointer), ctypes.c_uint32(value & 0xFFFFFFFF), ctypes.c_uint(0)  # 0: at least; with a fence


class Relay:
    """One destination's part. Made by `open_relay`. The gate of its own pull."""

    def __init__(
        self,
        program: Program,
        mapping: Mapping,
        export: Export,
        roots: Sequence[torch.Tensor],
        word: torch.Tensor,
        destinations: Sequence[int],
        **how,
    ):
        self.mapping, self.export, self.word = mapping, export, word
        self._place, self._parts, self._runs = (
            destinations.index(program.rank),
            program.waves - len(destinations) + 1,
            0,
        )
        self._next = None
        if self._place + 1 < len(destinations):  # its word lies behind its storages in its offer
            self._next = mapping.roots[destinations[self._place + 1]][len(roots)].data_ptr()
        self._free = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        moved = program.rows[program.rows["op"] != Op.FILL]
        self._pull = Pull(moved, mapping, roots, gate=self, **{"copied": READ_TOO, **how})

    @property
    def extra_bytes(self) -> int:
        return self._pull.extra_bytes + self.word.numel()

    def run(self, deadline: float, cancelled: Callable[[], bool] = lambda: False, where: str = "") -> PullStats:
        """As `Pull.finish`. The other destinations have to run too for this to end in time."""
        self._runs += 1
        self._free.fill_(self._number(self._parts))
        try:
            self._pull.begin()
        except BaseException:
            self._pull.stop()
            with suppress(Aborted):
                self._pull.finish(deadline, lambda: True, where)
            raise
        return self._pull.finish(deadline, cancelled, where)

    def stop(self) -> None:
        """From any thread, beside `run`."""
        self._pull.stop()

    def close(self) -> None:
        """Unmaps the others. When all have done so, storages may be freed."""
        self.mapping.close()

    # ---- the gate

    def before(self, wave: int, stream: torch.cuda.Stream) -> None:
        if self._place:
            stream_wait_at_least(stream, self.word.data_ptr(), self._number(wave - self._place))

    def after(self, wave: int, stream: torch.cuda.Stream) -> None:
        if self._next is not None:
            stream_write(stream, self._next, self._number(wave - self._place))

    def poll(self) -> None:
        pass

    def open(self) -> None:
        self.word.view(torch.int32).copy_(self._free, non_blocking=True)

    def _number(self, part: int) -> int:
        """The number that a destination writes when it has this part of this run."""
        return (self._runs - 1) * (self._parts + 1) + part + 1


class Sending:
    """A sender's part: to let itself be read."""

    extra_bytes = 0

    def __init__(self, export: Export):
        self.export = export

    def run(self, deadline: float, cancelled: Callable[[], bool] = lambda: False, where: str = "") -> PullStats:
        return PullStats(0, (), 0.0)

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


def open_relay(
    program: Program,
    roots: Sequence[torch.Tensor],
    destinations: Sequence[int],
    labels: Sequence[str],
    device: torch.device,
    exchange: Exchange,
    **how,
) -> Relay | Sending:
    """Collective over all ranks, `labels` naming them: destinations, and all others as senders.

    program: of `relay`; on a sender its rows do not matter. roots: as for `P2P`, equally many on all destinations. how: for
    `TritonRows`.
    Unsupported, on all ranks, where a destination cannot map something: then bytes have to go by the usual routes.
    """
    rank, size, receives = program.rank, len(labels), program.rank in destinations
    after = next((b for a, b in pairwise(destinations) if a == rank), None)
    word = torch.zeros(4, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    export = Export(rank, [*roots, word] if receives else roots, device)
    offers = exchange(export.to_bytes(), range(size) if receives else ())
    mapping, missing = Mapping(rank, device), []
    try:
        for other in sorted(set(offers) - {rank}):
            mine = (program.rows["src"] == other) & (program.rows["op"] != Op.FILL)
            wanted = sorted({*program.rows["src_root"][mine].tolist(), *([len(roots)] if other == after else [])})
            if wanted:
                mapping.open(offers[other], other, wanted)
                if len(mapping.roots[other]) < len(wanted):
                    missing.append(f"{labels[rank]} from {labels[other]}: {mapping.why(other)}")
        if any_rank(bool(missing), rank, size, exchange):
            raise Unsupported(
                "a relay needs every storage mapped by every destination",
                missing or ["another rank says which"],
                where=labels[rank],
            )
        return Relay(program, mapping, export, roots, word, destinations, **how) if receives else Sending(export)
    except BaseException:
        mapping.close()
        raise
