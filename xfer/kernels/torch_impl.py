"""Bound rows as torch strided copies: the CPU's implementation, and the twin that others are tested against.

Binding turns each move into two typed views; a warm call is one `torch._foreach_copy_` per phase, whatever the number
of rows. Bytes that are only moved travel as the widest integers that fit, so no NaN payload and no exotic dtype is
ever touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from xfer.errors import LayoutError
from xfer.kernels.bits import INTEGERS
from xfer.kernels.strided import WIRE, StridedCopy, bounds, moves
from xfer.plan.program import DTYPES, ITEMSIZE, Op, row_wire_bytes

Copies = tuple[list[torch.Tensor], list[torch.Tensor]]


@cache
def torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise LayoutError(f"this torch ({torch.__version__}) has no dtype {name}")
    return found


class Space:
    """One storage or buffer as typed strided views. Views share its memory and may start at any byte."""

    def __init__(self, flat: torch.Tensor):
        if flat.dtype != torch.uint8 or flat.dim() != 1 or not flat.is_contiguous():
            raise TypeError(
                f"a storage is bound as a flat contiguous uint8 tensor, not {flat.dtype} {tuple(flat.shape)}"
            )
        self.flat, self.start = flat, flat.storage_offset()
        self._typed: dict[torch.dtype, torch.Tensor] = {torch.uint8: flat}

    def aligned(self, offset: int, strides: Sequence[int], item: int) -> bool:
        return (self.start + offset) % item == 0 and all(s % item == 0 for s in strides)

    def view(self, dtype: torch.dtype, offset: int, extent: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        """A view of one box. `offset` and `strides` in bytes, multiples of the item size; as_strided checks the bounds."""
        item = dtype.itemsize
        typed = self._typed.get(dtype)
        if typed is None:
            # Not Tensor.view(dtype): that refuses a storage offset or a length which is no multiple of the item size.
            storage = self.flat.untyped_storage()
            typed = torch.empty(0, dtype=dtype, device=self.flat.device).set_(
                storage, 0, (storage.nbytes() // item,), (1,)
            )
            self._typed[dtype] = typed
        return torch.as_strided(typed, tuple(extent), tuple(s // item for s in strides), (self.start + offset) // item)


class TorchRows:
    """See `xfer.kernels.BoundRows`."""

    def __init__(self, rows: np.ndarray, roots: Sequence[torch.Tensor], side: str, src_roots: Sequence[torch.Tensor]):
        if side not in ("src", "dst", "local"):
            raise ValueError(f"side must be src, dst or local, not {side!r}")
        _check(rows, side, roots, src_roots)
        self.side = side
        self._roots = {i: Space(r) for i, r in enumerate(roots)}
        self._left = (
            self._roots if side != "local" or src_roots is roots else {i: Space(r) for i, r in enumerate(src_roots)}
        )
        self.scratch_bytes = 0
        self._moves = moves(rows, side)
        ends = (rows["wire"] + row_wire_bytes(rows))[rows["op"] != Op.FILL] if side != "local" else ()
        self.nbytes = int(max(ends, default=0))
        self._bound: dict[tuple[int, int], _Phases] = {}
        self._local = self._phases(None) if side == "local" else None
        self._fills = self._bind_fills(rows[rows["op"] == Op.FILL]) if side != "src" else ([], [])

    @property
    def copies(self) -> int:
        """How many strided copies one call makes."""
        return len(self._moves)

    def pack(self, buffer: torch.Tensor) -> None:
        self._through("src", buffer)

    def unpack(self, buffer: torch.Tensor) -> None:
        self._through("dst", buffer)

    def copy(self) -> None:
        if self._local is None:
            raise TypeError(f"copy() is for rows bound as local, these are bound as {self.side}")
        self._local.run()

    def fill(self) -> None:
        if self._fills[0]:
            torch._foreach_copy_(*self._fills)

    def wrong_fills(self) -> int:
        """How many FILL rows (empty ones not counted) hold another value than theirs. One device synchronisation."""
        wrong = [(dst != src).any() for dst, src in zip(*self._fills)]
        return int(torch.stack(wrong).sum()) if wrong else 0

    def prepare(self, buffer: torch.Tensor) -> None:
        """Builds the views of `buffer` now instead of in the first call with it."""
        key = (buffer.data_ptr(), buffer.numel())
        if key not in self._bound:
            if buffer.numel() < self.nbytes:
                raise ValueError(f"the wire buffer has {buffer.numel()} bytes, the rows need {self.nbytes}")
            # The views hold the buffer's storage, so its address cannot come to mean another buffer.
            self._bound[key] = self._phases(buffer)

    def _through(self, side: str, buffer: torch.Tensor) -> None:
        if self.side != side:
            raise TypeError(f"rows bound as {self.side} cannot be used as {side}")
        bound = self._bound.get((buffer.data_ptr(), buffer.numel()))
        if bound is None:
            self.prepare(buffer)
            bound = self._bound[buffer.data_ptr(), buffer.numel()]
        bound.run()

    def _phases(self, buffer: torch.Tensor | None) -> _Phases:
        out = _Phases()
        wire = Space(buffer) if buffer is not None else None
        for move in self._moves:
            right = wire if move.right_root == WIRE else self._roots[move.right_root]
            assert right is not None  # only `copy` and `fill` have no buffer, and their rows no wire
            self._add(out, move, self._left[move.left_root], right)
        return out

    def _add(self, out: _Phases, m: StridedCopy, left: Space, right: Space) -> None:
        lstrides, rstrides = [a for _, a, _ in m.dims], [b for _, _, b in m.dims]
        if m.left_dtype == m.right_dtype:
            unit = _unit(m, left, right)
            extent = [*m.extent[:-1], m.extent[-1] // unit]
            lv = left.view(INTEGERS[unit], m.left, extent, [*lstrides[:-1], unit])
            rv = right.view(INTEGERS[unit], m.right, extent, [*rstrides[:-1], unit])
            early = late = None
        else:
            lv, early = self._typed(left, m.left_dtype, m.left, m.extent, lstrides)
            rv, late = self._typed(right, m.right_dtype, m.right, m.extent, rstrides)
        flip = list(m.mirrored)
        if self.side == "dst":  # the wire is read, the storage written
            lv, rv, early, late = rv, lv, late, early
        if early is not None:
            out.add(0, early[1], early[0])
        if flip:
            out.mirrors.append((rv, lv, flip))
        else:
            out.add(1, rv, lv)
        if late is not None:
            out.add(2, *late)

    def _typed(self, space: Space, name: str, offset: int, extent: Sequence[int], strides: Sequence[int]):
        """A typed view of one end of a cast; where its values are not aligned to their size, of a scratch copy instead,
        with the (bytes in the storage, bytes in the scratch) that have to be kept equal."""
        dtype = torch_dtype(name)
        if space.aligned(offset, strides, dtype.itemsize):
            return space.view(dtype, offset, extent, strides), None
        scratch = torch.empty(tuple(extent), dtype=dtype, device=space.flat.device)
        self.scratch_bytes += scratch.nbytes
        inner = scratch.reshape(-1).view(torch.uint8).view(*extent, dtype.itemsize)
        return scratch, (space.view(torch.uint8, offset, [*extent, dtype.itemsize], [*strides, 1]), inner)

    def _bind_fills(self, rows: np.ndarray) -> Copies:
        """Fills are copies from one expanded element."""
        dst, src = [], []
        for row in rows:
            item = ITEMSIZE[DTYPES[row["dst_dtype"]]]
            space = self._roots[int(row["dst_root"])]
            dims = [(int(n), int(s)) for n, s in zip(row["extent"], row["dst_strides"]) if n != 1]
            if any(n == 0 for n, _ in dims):
                continue
            offset = int(row["dst_offset"]) + sum((n - 1) * s for n, s in dims if s < 0)
            extent, strides = [n for n, _ in dims], [abs(s) for _, s in dims]
            bits = np.frombuffer(int(row["fill"]).to_bytes(8, "little")[:item], np.uint8).copy()
            element = torch.from_numpy(bits).to(space.flat.device)
            if space.aligned(offset, strides, item):
                element = element.view(INTEGERS[item])[0]
                target = space.view(INTEGERS[item], offset, extent, strides)
            else:
                target = space.view(torch.uint8, offset, [*extent, item], [*strides, 1])
            dst.append(target)
            src.append(element.expand(target.shape))
        return dst, src


class _Phases:
    """Copies in three phases: into scratch, the main ones, out of scratch. Usually only the middle one has any."""

    def __init__(self):
        self.phases: tuple[Copies, ...] = (([], []), ([], []), ([], []))
        self.mirrors: list[tuple[torch.Tensor, torch.Tensor, list[int]]] = []

    def add(self, phase: int, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.phases[phase][0].append(dst)
        self.phases[phase][1].append(src)

    def run(self) -> None:
        before, main, after = self.phases
        if before[0]:
            torch._foreach_copy_(*before)
        if main[0]:
            torch._foreach_copy_(*main)
        for dst, src, dims in self.mirrors:
            dst.copy_(src.flip(dims))  # the one path that allocates: torch has no view that runs backwards
        if after[0]:
            torch._foreach_copy_(*after)


def _unit(m: StridedCopy, left: Space, right: Space) -> int:
    """The widest integer that can carry a plain move: it divides the inner run and every offset and stride."""
    if not m.dims or m.dims[-1][1:] != (1, 1):
        return 1
    for unit in (8, 4, 2):
        outer = m.dims[:-1]
        if (
            m.dims[-1][0] % unit == 0
            and left.aligned(m.left, [a for _, a, _ in outer], unit)
            and right.aligned(m.right, [b for _, _, b in outer], unit)
        ):
            return unit
    return 1


def _check(rows: np.ndarray, side: str, roots: Sequence[torch.Tensor], src_roots: Sequence[torch.Tensor]) -> None:
    wrong: list[str] = []
    ends = {"src": (("src", src_roots),), "dst": (("dst", roots),), "local": (("src", src_roots), ("dst", roots))}[side]
    for end, own in ends:
        some = rows if end == "dst" else rows[rows["op"] != Op.FILL]
        index = some[f"{end}_root"]
        low, high = bounds(some, end)
        sizes = np.array([r.numel() for r in own] + [-1], np.int64)
        known = (index >= 0) & (index < len(own))
        bad = np.flatnonzero(~known | (low < 0) | (high > sizes[np.where(known, index, -1)]))
        for i in bad:
            size = f"{sizes[index[i]]} bytes" if known[i] else f"not one of the {len(own)} bound"
            wrong.append(
                f"tensor {some['tensor'][i]} {end} rank {some[end][i]}: "
                f"bytes {low[i]}..{high[i]} of storage {index[i]} ({size})"
            )
    if wrong:
        raise LayoutError("rows reach outside their storages: plan again for the storages as they are now", wrong)
