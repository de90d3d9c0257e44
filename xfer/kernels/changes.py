"""The units of a message that changed, as a compact message, and their way into storages.

A message is the wire bytes of some rows, one behind the other. Its *units* are its elements of two bytes, or of one byte if a row has
such elements; larger elements are several units. A compact message has, for each block of 65,536 units, the number of units that
changed, then the place of each of these in its block, and then their new values. New values are absolute: they do not depend on
what the receiver holds.

    counts   int32 [blocks]
    places   uint16 [changed], rising in each block
    values   unit [changed]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from xfer.errors import ProtocolError
from xfer.kernels.bits import INTEGERS
from xfer.plan.program import ITEM, MAX_DIMS, Op, row_wire_bytes

BLOCK = 1 << 16
"""Units of a block: as many as a place of 16 bits can tell apart."""


def unit_of(rows: np.ndarray) -> int:
    """Return the bytes of a unit of these rows, equal on both ends: 2, or 1 if an element has one byte or an odd address; 0 if an
    element's bytes on the wire are not those in its destination, so that a part of them cannot be written there."""
    src, dst = ITEM[rows["src_dtype"]], ITEM[rows["dst_dtype"]]
    if not len(rows) or ((rows["op"] == Op.CAST) & (src <= dst)).any():
        return 0
    even = (np.minimum(src, dst) % 2 == 0).all() and not (rows["dst_offset"] % 2).any()
    return 2 if even and not (rows["dst_strides"] % 2).any() else 1


def compact_bytes(units: int, changed: int, unit: int) -> int:
    """Return the length of a compact message about `units` units of `unit` bytes of which `changed` changed."""
    return 4 * -(-units // BLOCK) + changed * (2 + unit)


def encode(now: torch.Tensor, before: torch.Tensor, unit: int, most: int) -> torch.Tensor | None:
    """Compare two messages.

    Args:
        now: uint8 [nbytes]; the new bytes.
        before: uint8 [nbytes]; the bytes that the receiver holds.
        unit: Bytes of a unit, which divide `nbytes`.
        most: Bytes that the compact message may have.

    Returns:
        The compact message, uint8; empty if nothing changed; None if it would be longer than `most`.
    """
    new, old = now.view(INTEGERS[unit]), before.view(INTEGERS[unit])
    differs = new != old
    changed = int(torch.count_nonzero(differs))
    if not changed:
        return now[:0]
    if compact_bytes(len(new), changed, unit) > most:
        return None
    at = differs.nonzero().view(-1)
    counts = torch.bincount(at // BLOCK, minlength=-(-len(new) // BLOCK)).to(torch.int32)
    places = at.to(torch.int16)  # the lower 16 bits
    return torch.cat([x.contiguous().view(torch.uint8) for x in (counts, places, new[at])])


class Patch:
    """The rows of one message on the receiver's side, by which changed units find their places.

    Args:
        rows: The rows, in wire order; dtype ROW.
        roots: The receiver's storages: flat uint8.
        label: The sender's name, for errors.

    Attributes:
        unit: Bytes of a unit; 0 if the message cannot be compact (`unit_of`).
        units: Number of units of the message.
    """

    def __init__(self, rows: np.ndarray, roots: Sequence[torch.Tensor], label: str):
        rows = rows[row_wire_bytes(rows) > 0]
        self.unit, self._roots, self._label = unit_of(rows), roots, label
        self.units = int(row_wire_bytes(rows).sum()) // max(self.unit, 1)
        if not self.unit:
            return
        ends = np.cumsum(row_wire_bytes(rows)) // self.unit
        item = ITEM[rows["dst_dtype"]]
        dims = [d for d in range(MAX_DIMS) if (rows["extent"][:, d] > 1).any()]
        device = roots[0].device

        def table(x: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(x, np.int64)).to(device)

        self._ends, self._starts = table(ends), table(ends - row_wire_bytes(rows) // self.unit)
        self._root, self._offset, self._per = (
            table(rows["dst_root"]),
            table(rows["dst_offset"]),
            table(item // self.unit),
        )
        self._dims = [(table(rows["extent"][:, d]), table(rows["dst_strides"][:, d])) for d in reversed(dims)]

    def apply(self, message: torch.Tensor) -> None:
        """Write the changed units of a compact message. Raises as `places`; then nothing was written."""
        for whole, at, values in self.places(message):
            whole[at] = values

    def places(self, message: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return where the changed units of a compact message belong: for each storage that has some, a view of it by units, their indices
        in it, and their values.

        Raises:
            ProtocolError: The message is not one about these rows.
        """
        at, values = self._decode(message)
        row = torch.searchsorted(self._ends, at, right=True)
        unit, per = at - self._starts[row], self._per[row]
        element, byte = unit // per, self._offset[row] + unit % per * self.unit
        for extent, stride in self._dims:
            n = extent[row]
            byte += element % n * stride[row]
            element = element // n
        root = self._root[row]
        some, order = torch.sort(root, stable=True)
        found, counts = torch.unique_consecutive(some, return_counts=True)
        out = []
        for number, part in zip(found.tolist(), order.split(counts.tolist())):
            flat = self._roots[number]
            whole = flat[: len(flat) // self.unit * self.unit].view(INTEGERS[self.unit])
            out.append((whole, byte[part] // self.unit, values[part]))
        return out

    def _decode(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers of the changed units, int64, and their values."""
        head = 4 * -(-self.units // BLOCK)
        changed, odd = divmod(message.numel() - head, 2 + self.unit)
        if changed < 0 or odd:
            raise self._wrong(f"{message.numel()} bytes")
        counts = message[:head].view(torch.int32).to(torch.int64)
        places = message[head : head + 2 * changed].view(torch.int16).to(torch.int64) & BLOCK - 1
        if bool((counts < 0).any()) or int(counts.sum()) != changed:
            raise self._wrong("counts that do not add up")
        blocks = torch.arange(len(counts), device=counts.device) * BLOCK
        at = torch.repeat_interleave(blocks, counts) + places
        if changed and int(at.max()) >= self.units:
            raise self._wrong("places behind its end")
        return at, message[head + 2 * changed :].view(INTEGERS[self.unit])

    def _wrong(self, what: str) -> ProtocolError:
        return ProtocolError(f"a message about changed bytes from {self._label} has {what}; nothing of it was written")
