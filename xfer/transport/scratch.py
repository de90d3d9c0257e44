"""Scratch into which bytes come while an engine serves, and their way from there into its live storage.

A destination whose routes end in scratch runs the same program as any other, with storages of its own in place of the live ones. So
bytes may be sent, pulled or handed on. The result of a run is a `Held`, which is applied by local copies of the rows that the program
writes; all other bytes of live storage stay. A compact message (changes.py) is only decoded, not unpacked: its units are written to their
places. If only marked granules were pulled, only these are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from xfer.errors import Unsupported, out_of_memory
from xfer.kernels import BoundRows, bind
from xfer.kernels.changes import Patch
from xfer.plan import intervals
from xfer.plan.program import DTYPE_CODE, ITEM, MAX_DIMS, ROW, Program
from xfer.plan.relay import handed_on
from xfer.transport.group import wait_for_stream

UINT8 = DTYPE_CODE["uint8"]


class Scratch:
    """One storage for each live storage that a program writes, of the same size.

    Args:
        program: The program of this rank.
        live: The storages of this rank, flat uint8.
        budget: Most bytes that the scratch may take.
        where: This rank, for errors.
        before: The scratch that this one replaces; its storages are used again if they fit.

    Attributes:
        live: The live storages.
        device: The device of the storages.
        roots: The scratch storages, flat uint8, in the order of `live`; empty where the program writes nothing.
        nbytes: Bytes of all `roots`.

    Raises:
        Unsupported: The scratch does not fit in the budget, or in the memory that the device has free.
    """

    def __init__(self, program: Program, live: Sequence[torch.Tensor], budget: int, where: str, before: Scratch | None):
        self.live, self._program = list(live), program
        rows = program.rows[program.rows["dst"] == program.rank]
        written = set(rows["dst_root"].tolist())
        sizes = [t.numel() if i in written else 0 for i, t in enumerate(live)]
        self.nbytes = sum(sizes)
        device = self.device = live[0].device if len(live) else torch.device("cpu")
        _refuse(self.nbytes, budget, "stage_budget allows", where)
        if before is not None and [t.numel() for t in before.roots] == sizes:
            self.roots: list[torch.Tensor] = before.roots
        else:
            _refuse(self.nbytes, _free(device), f"{device} has free", where)
            self.roots = _storages(sizes, device, where)
        self._whole = bind(_joined(rows), self.live, "local", src_roots=self.roots)

    @property
    def extra_bytes(self) -> int:
        """Bytes of the scratch and of kernels' tables."""
        return self.nbytes + self._whole.scratch_bytes

    def serves(self, program: Program, live: Sequence[torch.Tensor], budget: int) -> bool:
        """Whether a new scratch with these arguments would be equal to this one."""
        same = (
            program is self._program
            and len(live) == len(self.live)
            and all(map(torch.Tensor.is_set_to, live, self.live))
        )
        return same and self.nbytes <= budget

    def copies(self, whole: np.ndarray | None) -> BoundRows:
        """Return the copies of these rows into live storage; None: of all rows."""
        if whole is None:
            return self._whole
        return bind(handed_on(whole, self._program.rank), self.live, "local", src_roots=self.roots)


class Held:
    """The bytes that one run has brought, before they are in live storage.

    Args:
        scratch: Holds the bytes of whole messages and pulled rows.
        whole: The rows of these bytes; None: all rows of the program.
        patches: The compact messages, each with its rows bound to live storage.
        marked: Applies the rows of which only marked granules are in scratch (`peer.Pull.apply`).

    Attributes:
        needs_base: Whether the bytes are right only if live storage holds the bytes with which sources compared.
    """

    def __init__(
        self,
        scratch: Scratch,
        whole: np.ndarray | None = None,
        patches: Sequence[tuple[Patch, torch.Tensor]] = (),
        marked: Callable[[], None] | None = None,
    ):
        self._copies, self._marked = scratch.copies(whole), marked
        self._places = [place for patch, message in patches for place in patch.places(message)]
        self.needs_base = whole is not None
        self._scratch = scratch  # stays allocated until this is applied
        self._copied: torch.cuda.Event | None = None

    @property
    def drained(self) -> bool:
        """Whether no copy that `apply` has begun is still on the device."""
        return self._copied is None or self._copied.query()

    def apply(self, deadline: float, where: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Bring it into live storage, on the current stream.

        Args:
            deadline: A time.monotonic() value.
            where: Label of this rank in errors.
            meanwhile: Called while the device copies. What it raises is raised when the device has ended.

        Raises:
            DeadlineExceeded: The device has not done it. It may still do so: see `drained`.
        """
        try:
            self._copies.copy()
            if self._marked is not None:
                self._marked()
            for storage, at, values in self._places:
                storage[at] = values
        finally:
            if self._scratch.device.type == "cuda":
                self._copied = torch.cuda.Event()
                self._copied.record(torch.cuda.current_stream(self._scratch.device))
        try:
            meanwhile()
        finally:
            if self._copied is not None:
                wait_for_stream(self._scratch.device, deadline, where)


def _joined(rows: np.ndarray) -> np.ndarray:
    """Return rows that copy the same bytes within this rank, joined where they lie side by side."""
    own = handed_on(rows, int(rows["dst"][0]) if len(rows) else 0)
    parts = []
    for root in np.unique(own["dst_root"]):
        some = own[own["dst_root"] == root]
        found = intervals.runs(some["dst_offset"], some["extent"], some["dst_strides"], ITEM[some["dst_dtype"]])
        start, stop = intervals.union(found.start, found.stop)
        if len(start) > len(some):  # runs that stay apart: boxes are fewer
            parts.append(some)
            continue
        runs = np.zeros(len(start), ROW)
        runs["tensor"], runs["src"], runs["dst"] = -1, some["dst"][0], some["dst"][0]
        runs["src_dtype"] = runs["dst_dtype"] = UINT8
        runs["src_root"] = runs["dst_root"] = root
        runs["src_offset"] = runs["dst_offset"] = start
        runs["extent"][:] = 1
        runs["extent"][:, MAX_DIMS - 1] = stop - start
        runs["src_strides"][:, MAX_DIMS - 1] = runs["dst_strides"][:, MAX_DIMS - 1] = 1
        parts.append(runs)
    return np.concatenate(parts) if parts else own


def _storages(sizes: Sequence[int], device: torch.device, where: str) -> list[torch.Tensor]:
    try:
        return [torch.empty(n, dtype=torch.uint8, device=device) for n in sizes]
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        raise _too_large(sum(sizes), str(e).partition("\n")[0], where) from e


def _free(device: torch.device) -> int:
    """Bytes that a device can give; a host's memory is not asked for."""
    if device.type != "cuda":
        return 1 << 62
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def _refuse(nbytes: int, most: int, says: str, where: str) -> None:
    if nbytes > most:
        raise _too_large(nbytes, f"{says} {most:,}", where)


def _too_large(nbytes: int, why: str, where: str) -> Unsupported:
    return Unsupported(
        f"a staged refit takes {nbytes:,} bytes of scratch on this worker; nothing was moved",
        [f"{where}: {why}", "give the engine less memory (gpu_memory_utilization), or refit without stage=True"],
        where=where,
    )
