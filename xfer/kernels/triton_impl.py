"""Bound rows as Triton kernels over tile tables: the implementation for CUDA storages.

One launch moves all plain rows of a call that share a unit (16 bytes nearly always), one more each pair of dtypes that
is converted. Programs take tiles from a counter, so a slow link or multiprocessor holds up nothing but its own tile.
Loads are ordinary coherent ones: another kernel may have written the memory a moment ago. What these kernels cannot do
(values that are not aligned to their size, conversions that Triton rounds or saturates differently) goes to the torch
twin. Not here: how rows become tiles (tiles.py), whose storages these are (transport/).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from xfer.kernels import long_runs
from xfer.kernels.checksum import Sums
from xfer.kernels.strided import StridedCopy, moves
from xfer.kernels.tiles import (
    COLUMNS,
    LARGE_FROM,
    LARGE_FROM_BESIDE_WIRE,
    End,
    Table,
    Turns,
    cast_tables,
    interleaved,
    plain_tables,
)
from xfer.kernels.torch_impl import TorchRows
from xfer.kernels.torch_impl import _check as check_rows
from xfer.plan.program import DTYPES, ITEMSIZE, Op, row_wire_bytes, wire_dtype

if TYPE_CHECKING:  # it needs what is here
    from xfer.kernels.checksum_triton import TritonSums
    from xfer.kernels.marks_triton import MarkedCopies
    from xfer.kernels.summed_copies import SummedCopies

CASTS = frozenset(
    (a, b) for a in ("float32", "bfloat16", "float16") for b in ("float32", "bfloat16", "float16") if a != b
) | {("float64", "float32"), ("float32", "float64")}
"""Conversions that Triton does with the same bits as torch (payloads of NaNs aside)."""

PROGRAMS_PER_SM = 4
BLOCK_BYTES, WARPS = 16 << 10, 8
"""What a program has in flight at once: 8 warps, four 16-byte loads a thread."""

_TL = {
    "float64": tl.float64, "float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16,
    "int64": tl.int64, "int32": tl.int32, "int16": tl.int16, "uint8": tl.int8,
}  # fmt: skip
_WORD = {16: (tl.int32, 4, 4), 8: (tl.int32, 4, 2), 4: (tl.int32, 4, 1), 2: (tl.int16, 2, 1), 1: (tl.int8, 1, 1)}
_BITS = {8: "int64", 4: "int32", 2: "int16", 1: "uint8"}


@triton.jit(do_not_specialize=["count"])
def _copy_tiles(
    src_bases, dst_bases, tiles, count, counter, abort,
    WORD: tl.constexpr, BYTES: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr, COLS: tl.constexpr,
    ABORTABLE: tl.constexpr,
):  # fmt: skip
    """Tiles of whole units: VEC words of BYTES bytes. BLOCK units at a time."""
    lane = tl.arange(0, BLOCK)
    word = tl.arange(0, VEC)
    i = tl.atomic_add(counter, 1)
    while i < count:
        t = tiles + i.to(tl.int64) * COLS
        roots = tl.load(t)
        src = tl.load(src_bases + (roots & 0xFFFFFFFF)) + tl.load(t + 1)
        dst = tl.load(dst_bases + (roots >> 32)) + tl.load(t + 2)
        shape = tl.load(t + 3)
        width = (shape & 0xFFFFFFFF).to(tl.int32)
        rows = (shape >> 32).to(tl.int32)
        src = tl.multiple_of(src.to(tl.pointer_type(WORD)), VEC * BYTES)
        dst = tl.multiple_of(dst.to(tl.pointer_type(WORD)), VEC * BYTES)
        if rows == 1:
            for at in range(0, width, BLOCK):
                u = at + lane
                w = (u * VEC)[:, None] + word[None, :]
                keep = (u < width)[:, None] & (word < VEC)[None, :]
                tl.store(dst + w, tl.load(src + w, mask=keep), mask=keep)
        else:
            src_row = tl.load(t + 4)
            dst_row = tl.load(t + 5)
            for at in range(0, rows * width, BLOCK):
                u = at + lane
                r = u // width
                c = (u - r * width).to(tl.int64)
                keep = (u < rows * width)[:, None] & (word < VEC)[None, :]
                a = ((r * src_row + c) * VEC)[:, None] + word[None, :]
                b = ((r * dst_row + c) * VEC)[:, None] + word[None, :]
                tl.store(dst + b, tl.load(src + a, mask=keep), mask=keep)
        i = tl.atomic_add(counter, 1)
        # Past the end, whatever `count` is. Threads that still see 0 move one tile more, of a pull that was stopped.
        if ABORTABLE:
            i += (tl.load(abort, volatile=True) != 0).to(tl.int32) * 0x40000000


@triton.jit
def _to_bfloat16(x):
    """Round to nearest, ties to even, on the bits: Triton's interpreter truncates."""
    b = x.to(tl.uint32, bitcast=True)
    nearest = (b + 0x7FFF + ((b >> 16) & 1)) >> 16
    nan = (b & 0x7FFFFFFF) > 0x7F800000
    return tl.where(nan, 0x7FC0, nearest).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit(do_not_specialize=["count"])
def _convert_tiles(
    src_bases, dst_bases, tiles, count, counter, abort,
    SRC: tl.constexpr, DST: tl.constexpr, BLOCK: tl.constexpr, COLS: tl.constexpr, ABORTABLE: tl.constexpr,
):  # fmt: skip
    """Tiles of single elements, any stride, converted in registers. Equal types: a fill (source strides are 0)."""
    lane = tl.arange(0, BLOCK)
    i = tl.atomic_add(counter, 1)
    while i < count:
        t = tiles + i.to(tl.int64) * COLS
        roots = tl.load(t)
        src = tl.load(src_bases + (roots & 0xFFFFFFFF)) + tl.load(t + 1)
        dst = tl.load(dst_bases + (roots >> 32)) + tl.load(t + 2)
        src = src.to(tl.pointer_type(SRC))
        dst = dst.to(tl.pointer_type(DST))
        shape = tl.load(t + 3)
        width = (shape & 0xFFFFFFFF).to(tl.int32)
        n = width * (shape >> 32).to(tl.int32)
        src_row = tl.load(t + 4)
        dst_row = tl.load(t + 5)
        src_one = tl.load(t + 6)
        dst_one = tl.load(t + 7)
        for at in range(0, n, BLOCK):
            u = at + lane
            r = u // width
            c = u - r * width
            keep = u < n
            x = tl.load(src + (r * src_row + c * src_one), mask=keep)
            if SRC == tl.bfloat16:
                x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
            if SRC == DST:
                y = x
            elif DST == tl.bfloat16:
                y = _to_bfloat16(x.to(tl.float32))
            else:
                y = x.to(tl.float64 if SRC == tl.float64 else tl.float32).to(DST)
            tl.store(dst + (r * dst_row + c * dst_one), y, mask=keep)
        i = tl.atomic_add(counter, 1)
        # Past the end, whatever `count` is. Threads that still see 0 move one tile more, of a pull that was stopped.
        if ABORTABLE:
            i += (tl.load(abort, volatile=True) != 0).to(tl.int32) * 0x40000000


@dataclass(slots=True)
class _Launch:
    """A table on the device."""

    unit: int
    dtypes: tuple[str, str] | None
    tiles: torch.Tensor  # int64 [n, COLUMNS]
    counter: torch.Tensor  # int32 [1]
    programs: int

    def load(self, abort: torch.Tensor | None) -> None:
        """Compiles the kernel and loads it to the device, without moving anything. Loading a module can wait for all work that runs
        on the device. So a first launch in a refit could wait for NCCL's kernel, which waits for a peer: for ever if the peer is gone
        (seen on H200).
        """
        self.run(self.tiles, self.tiles, abort, count=0)

    def run(self, src: torch.Tensor, dst: torch.Tensor, abort: torch.Tensor | None, count: int | None = None) -> None:
        self.counter.zero_()
        word = self.counter if abort is None else abort
        common = (src, dst, self.tiles, self.tiles.shape[0] if count is None else count, self.counter, word)
        if self.dtypes is None:
            dtype, size, vec = _WORD[self.unit]
            _copy_tiles[(self.programs,)](
                *common, dtype, size, vec, max(256, BLOCK_BYTES // self.unit if self.unit >= 8 else 2048), COLUMNS,
                abort is not None, num_warps=WARPS,
            )  # fmt: skip
        else:
            a, b = self.dtypes
            _convert_tiles[(self.programs,)](*common, _TL[a], _TL[b], 1024, COLUMNS, abort is not None, num_warps=4)


class TritonRows:
    """See `xfer.kernels.BoundRows`.

    Args:
        turns: For side "local", the order in which tiles are taken.
        abort: An int32 tensor of one word in the device's memory (reading host memory before every tile held kernels down to
            8 GB/s). Kernels look at it before every tile, and leave when it is not 0.
        copied: For side "local" on CUDA, what a copy engine brings beside the kernels (long_runs.py). Its copies do not look at
            the word.
        summed: For side "local", sums of storages that nothing else writes. The kernel that copies most takes over those that it
            can (summed_copies.py).
        bits: For side "local": the address of the marks of each source storage (marks.py), int64. `move_marked` then
            moves what is marked.
        live: With `bits`: storages of the sizes of `roots`, into which `apply_marked` copies what `move_marked` has brought.
    """

    def __init__(
        self,
        rows: np.ndarray,
        roots: Sequence[torch.Tensor],
        side: str,
        src_roots: Sequence[torch.Tensor],
        *,
        turns: Turns | None = None,
        abort: torch.Tensor | None = None,
        programs: int | None = None,
        copied: long_runs.Rule = long_runs.NOTHING,
        summed: Sums | TritonSums | None = None,
        bits: torch.Tensor | None = None,
        live: Sequence[torch.Tensor] = (),
    ):
        if side not in ("src", "dst", "local"):
            raise ValueError(f"side must be src, dst or local, not {side!r}")
        check_rows(rows, side, roots, src_roots)
        self.side, self._turns, self._abort = side, turns, abort
        some = roots if len(roots) else src_roots
        self._device = some[0].device if len(some) else torch.device("cpu")
        if abort is None and summed is not None:  # its kernel always looks at one
            self._abort = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._programs = programs or PROGRAMS_PER_SM * multiprocessors(self._device)
        left = src_roots if side == "local" else roots
        plain, odd = self._split(rows, side, left, roots)
        self._twin = TorchRows(rows[odd], roots, side, src_roots) if odd.any() else None
        wired = rows[rows["op"] != Op.FILL] if side != "local" else rows[:0]
        self.nbytes = int((wired["wire"] + row_wire_bytes(wired)).max(initial=0))
        self._moves = moves(rows[plain], side)
        every = self._moves
        boxes: list[list[long_runs.PitchedRuns]] = []
        if side == "local" and self._device.type == "cuda":
            self._moves, boxes = long_runs.divided(self._moves, copied, turns or Turns())
        self._engine = long_runs.CopyEngine(boxes, left, roots, self._device) if boxes else None
        self._left_end = End([_alignment(r) for r in left])
        self._left = self._bases(left)
        self._held = (*roots, *src_roots, *live)
        self._all = (rows, roots, side, src_roots)
        self._loose: TorchRows | None = None  # for wire buffers that are not aligned to 16 bytes
        self._launches: list[_Launch] = []
        self._summed: SummedCopies | None = None
        self._wires: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._fills, self._constants = self._bind_fills(rows[plain & (rows["op"] == Op.FILL)], roots)
        self._dst = self._bases(roots)
        self.marked: MarkedCopies | None = None
        self._live: torch.Tensor | None = None
        if side == "local":
            right = End([_alignment(r) for r in roots])
            self._launches = self._load(self._tables(self._moves, right))
            if bits is not None:
                self.marked = self._with_marks(every, right, bits, live)
            self._summed = self._with_sums(summed) if summed is not None else None
        elif self.nbytes:
            self._launches = self._load(self._tables(self._moves, End([16])))

    @property
    def copies(self) -> int:
        """How many strided moves one call makes."""
        return len(self._moves) + (self._twin.copies if self._twin else 0)

    @property
    def recordable(self) -> bool:
        """Whether `move` does nothing but launch these kernels, so that a CUDA graph may stand for it."""
        return self._twin is None

    @property
    def scratch_bytes(self) -> int:
        tables = sum(t.tiles.nbytes for t in (*self._launches, *self._fills)) + (
            self._summed.nbytes if self._summed else 0
        )
        tables += self.marked.nbytes if self.marked else 0
        return tables + (self._twin.scratch_bytes if self._twin else 0)

    def pack(self, buffer: torch.Tensor) -> None:
        wire = self._through("src", buffer)
        if wire is not None:
            self._run(self._launches, self._left, wire)
        if other := self._twin if wire is not None else self._loose:
            other.pack(buffer)

    def unpack(self, buffer: torch.Tensor) -> None:
        wire = self._through("dst", buffer)
        if wire is not None:
            self._run(self._launches, wire, self._left)
        if other := self._twin if wire is not None else self._loose:
            other.unpack(buffer)

    def copy(self, kernels: Callable[[], object] | None = None) -> None:
        """See `BoundRows.copy`. kernels: called in place of `move`, to launch its work in another way."""
        if self.side != "local":
            raise TypeError(f"copy() is for rows bound as local, these are bound as {self.side}")
        if self._engine:
            self._engine.begin()
        (kernels or self.move)()
        if self._engine:  # after the kernels: launching many copies takes time
            self._engine.end()

    def move(self) -> None:
        """Does `copy`, without the part of copy engines."""
        self._run(self._launches, self._left, self._dst)
        if self._twin:
            self._twin.copy()
        if self._summed:  # last: its sums read what the others have written, too
            self._run([self._summed], self._left, self._dst)

    def move_marked(self) -> None:
        """Do what `copy` does, for units that are marked. Conversions move whole."""
        if self.marked is None:
            raise TypeError("these rows are bound without marks")
        self._run([self.marked, *(x for x in self._launches if x.dtypes is not None)], self._left, self._dst)
        if self._twin:
            self._twin.copy()

    def apply_marked(self) -> None:
        """Copy what `move_marked` has brought, except conversions, from its places in `roots` to those in `live`."""
        if self.marked is not None and self._live is not None:
            self.marked.run(self._dst, self._live, None, here=True)

    def fill(self) -> None:
        self._run(self._fills, self._constants, self._dst)
        if self._twin:
            self._twin.fill()

    def _run(
        self, launches: Sequence[_Launch | SummedCopies | MarkedCopies], src: torch.Tensor, dst: torch.Tensor
    ) -> None:
        # Triton launches on the thread's current device, which in a fresh thread is device 0.
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            for launch in launches:
                launch.run(src, dst, self._abort)

    def prepare(self, buffer: torch.Tensor) -> None:
        key = (buffer.data_ptr(), buffer.numel())
        if key in self._wires:
            return
        if buffer.numel() < self.nbytes:
            raise ValueError(f"the wire buffer has {buffer.numel()} bytes, the rows need {self.nbytes}")
        if _alignment(buffer) < 16:
            self._loose = self._loose or TorchRows(*self._all)
            self._loose.prepare(buffer)
            return
        # The buffer is held, so its address cannot come to mean another one.
        self._wires[key] = (self._bases([buffer]), buffer)
        if self._twin:
            self._twin.prepare(buffer)

    def _through(self, side: str, buffer: torch.Tensor) -> torch.Tensor | None:
        """The tensor that holds the buffer's address, or None if the torch twin has to move all rows."""
        if self.side != side:
            raise TypeError(f"rows bound as {self.side} cannot be used as {side}")
        key = (buffer.data_ptr(), buffer.numel())
        if key not in self._wires:
            self.prepare(buffer)
        return self._wires[key][0] if key in self._wires else None

    def _tables(self, found_moves: Sequence[StridedCopy], right: End) -> list[Table]:
        backwards = self.side == "dst"
        plain: list[StridedCopy] = [m for m in found_moves if m.left_dtype == m.right_dtype]
        cast: list[StridedCopy] = [m for m in found_moves if m.left_dtype != m.right_dtype]
        large_from = LARGE_FROM if self.side == "local" else LARGE_FROM_BESIDE_WIRE
        found = plain_tables(plain, self._left_end, right, backwards=backwards, large_from=large_from)
        found += cast_tables(cast, ITEMSIZE, backwards=backwards, large_from=large_from)
        if self._turns is not None:
            found = [interleaved(t, self._turns) for t in found]
        return found

    def _load(self, tables: Sequence[Table]) -> list[_Launch]:
        found = [
            _Launch(
                t.unit,
                t.dtypes,
                torch.from_numpy(t.tiles).to(self._device),
                torch.zeros(1, dtype=torch.int32, device=self._device),
                max(1, min(self._programs, len(t.tiles))),
            )
            for t in tables
            if len(t.tiles)
        ]
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            for launch in found:
                launch.load(self._abort)
        return found

    def _with_marks(
        self, every: Sequence[StridedCopy], right: End, bits: torch.Tensor, live: Sequence[torch.Tensor]
    ) -> MarkedCopies:
        from xfer.kernels.marks_triton import MarkedCopies

        if live:
            right = End([min(a, _alignment(r)) for a, r in zip(right.aligned, live, strict=True)])
        plain = [t for t in self._tables(every, right) if t.dtypes is None]
        programs = PROGRAMS_PER_SM * multiprocessors(self._device)  # most of them wait for what they have asked for
        out = MarkedCopies(plain, bits, programs)
        out.run(self._left, self._dst, self._abort, count=0)
        if live:
            self._live = self._bases(live)
            out.run(self._dst, self._live, None, count=0, here=True)
        return out

    def _with_sums(self, summed: Sums | TritonSums) -> SummedCopies | None:
        """A launch of the copies in 16-byte units together with sums, which it takes out of `_launches`. None if either has none."""
        from xfer.kernels.summed_copies import UNIT, SummedCopies, ordered

        found = next((x for x in self._launches if x.unit == UNIT), None)
        if found is None:
            return None
        lending = summed.lend(lambda sums, group: ordered(found.tiles.cpu().numpy(), sums, group))
        if lending is None:
            return None
        lent, order = lending
        self._launches.remove(found)
        out = SummedCopies(found.tiles, order, lent, self._programs)
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            out.run(self._left, self._dst, self._abort, entries=0)
        return out

    def _bases(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.tensor([t.data_ptr() for t in tensors] or [0], dtype=torch.int64).to(self._device)

    def _split(self, rows: np.ndarray, side: str, left: Sequence[torch.Tensor], roots: Sequence[torch.Tensor]):
        """(rows for these kernels, rows for the torch twin), as bool arrays."""
        odd = np.zeros(len(rows), bool)
        ends = {"src": ["src"], "dst": ["dst"], "local": ["src", "dst"]}[side]
        storage = {"src": left, "dst": roots}
        for i in np.flatnonzero(rows["op"] != Op.COPY).tolist():
            r = rows[i]
            src, dst = DTYPES[r["src_dtype"]], DTYPES[r["dst_dtype"]]
            if r["op"] == Op.FILL:
                odd[i] = side != "src" and not _aligned(r, "dst", roots, ITEMSIZE[dst])
                continue
            travels = wire_dtype(src, dst)
            pair = {"src": (src, travels), "dst": (travels, dst), "local": (src, dst)}[side]
            if pair[0] == pair[1]:
                continue
            odd[i] = pair not in CASTS or not all(
                _aligned(r, e, storage[e], ITEMSIZE[DTYPES[r[f"{e}_dtype"]]]) for e in ends
            )
            if side != "local":
                odd[i] |= int(r["wire"]) % ITEMSIZE[travels] != 0
        return ~odd, odd

    def _bind_fills(self, rows: np.ndarray, roots: Sequence[torch.Tensor]) -> tuple[list[_Launch], torch.Tensor]:
        """A fill converts one element that lies in a small table to itself, with source strides of 0."""
        if self.side == "src" or not len(rows):
            return [], self._bases([])
        self._constant = torch.from_numpy(np.ascontiguousarray(rows["fill"]).view(np.int64).copy()).to(self._device)
        kinds: dict[int, list[StridedCopy]] = {}
        for k, r in enumerate(rows):
            item = ITEMSIZE[DTYPES[r["dst_dtype"]]]
            if 0 in r["extent"].tolist():
                continue
            dims = tuple((int(n), 0, int(s)) for n, s in zip(r["extent"], r["dst_strides"]) if n != 1)
            name = _BITS[item]
            kinds.setdefault(item, []).append(
                StridedCopy(0, 8 * k, name, int(r["dst_root"]), int(r["dst_offset"]), name, dims)
            )
        found = [t for _, some in sorted(kinds.items()) for t in cast_tables(some, ITEMSIZE, backwards=False)]
        return self._load(found), self._bases([self._constant])


def _aligned(row, end: str, roots: Sequence[torch.Tensor], item: int) -> bool:
    start = roots[int(row[f"{end}_root"])].data_ptr() + int(row[f"{end}_offset"])
    steps = [int(s) for n, s in zip(row["extent"], row[f"{end}_strides"]) if n != 1]
    return start % item == 0 and all(s % item == 0 for s in steps)


def _alignment(t: torch.Tensor) -> int:
    """Largest power of two up to 16 that divides the address."""
    return min(16, (t.data_ptr() | 16) & -(t.data_ptr() | 16))


def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
