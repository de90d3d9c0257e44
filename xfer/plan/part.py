"""Parts: a joint rank's program of a sub-plan, and the numbers that all ranks share.

A sub-plan of thousands of ranks is tens of megabytes of tables; one rank has a few hundred rows of it. Lanes keep parts,
and the cache stores parts. Not here: the tables from which rows are computed (subplan.py), files (cache.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from xfer.errors import ProtocolError
from xfer.plan import columns as col
from xfer.plan.explain import PlanSummary, explain
from xfer.plan.program import ROW, Program
from xfer.plan.subplan import PLANNER, SubPlan


@dataclass(frozen=True, slots=True, eq=False)
class PlanPart:
    """`key` and `digest` are the sub-plan's, and with them equal on all of its ranks. `shared`, `handed_on`: see `SubPlan`."""

    key: str
    digest: str
    trainers: int
    workers: int
    program: Program
    summary: PlanSummary
    shared: np.ndarray
    handed_on: np.ndarray

    @classmethod
    def of(cls, plan: SubPlan, rank: int) -> PlanPart:
        """ValueError for a rank that is not in the plan."""
        own = plan.program(rank), plan.summary, plan.shared(rank), plan.handed_on(rank)
        return cls(plan.key, plan.digest, plan.trainers, plan.workers, *own)

    def explain(self) -> str:
        return explain(self.summary, self.digest)

    def to_bytes(self) -> bytes:
        p = self.program
        return msgspec.msgpack.encode(
            _PlanPartRecord(
                PLANNER, self.key, self.digest, self.trainers, self.workers, p.rank, p.waves, len(p.rows),
                memoryview(col.pack(p.rows, ROW)), self.summary, len(self.shared), memoryview(col.pack(self.shared, ROW)),
                self.handed_on.tolist(),
            )
        )  # fmt: skip

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> PlanPart:
        """Decode a part. ProtocolError unless `data` has the form that `to_bytes` of this version writes. The caller must
        check that the content is unchanged: the digest in it covers tables that a part lacks. The rows are a view of `data`.
        """
        try:
            w = _wire.decode(col.size_checked(data, "plan"))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
            raise ProtocolError(f"plan: {e}") from e
        if w.version != PLANNER:
            raise ProtocolError(f"plan: made by planner {w.version!r}, this one is {PLANNER}")
        rows, shared = col.unpack(w.rows, ROW, w.count, what="rows"), col.unpack(w.shared, ROW, w.copies, what="copies")
        handed_on = np.array(w.handed_on, np.int32).reshape(-1, 2)
        return cls(w.key, w.digest, w.trainers, w.workers, Program(w.rank, w.waves, rows), w.summary, shared, handed_on)


class _PlanPartRecord(msgspec.Struct, forbid_unknown_fields=True, array_like=True):
    version: str
    key: str
    digest: str
    trainers: int
    workers: int
    rank: int
    waves: int
    count: int
    rows: memoryview  # not copied when decoded
    summary: PlanSummary
    copies: int
    shared: memoryview
    handed_on: list[tuple[int, int]]


_wire = msgspec.msgpack.Decoder(_PlanPartRecord)  # once: see inventory.py
