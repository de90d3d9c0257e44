"""Parallelism sizes -> meshes, for both roles, in the rank orders of Megatron-Core and of vLLM.

Each role has two meshes over the same ranks: one that cuts dense tensors and one that cuts experts. Which tensor is of
which kind is read off the structure of its grouped name, never off its words. Not here: which layer lives on which
pipeline stage or virtual stage (read from the frameworks). For declared layouts, simulation and tests; real refits read
their layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from xfer.errors import LayoutError
from xfer.mesh.mesh_info import MeshInfo

MEGATRON_ORDER = "tp-cp-ep-dp-pp"
"""Megatron-Core's default: fastest first. Dense meshes skip ep; expert meshes skip cp (tp: etp, dp: edp)."""


class Parallel(Protocol):
    """The two meshes of a role. Axes that cut tensors: `tp` of the dense mesh, `ep` and `etp` of the expert mesh."""

    def dense(self) -> MeshInfo: ...
    def expert(self) -> MeshInfo: ...


@dataclass(frozen=True, kw_only=True)
class TrainerParallel:
    """Megatron-Core's parallelism of `world` ranks. `dp` follows from the others and need not be given.

    `etp` defaults to `tp`, as Megatron's does. `vpp` (model chunks per rank) moves no rank. Raises LayoutError with all
    violations.
    """

    world: int
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    dp: int | None = None
    ep: int = 1
    etp: int | None = None
    order: str = MEGATRON_ORDER

    def __post_init__(self) -> None:
        etp = self.tp if self.etp is None else self.etp
        wrong = _sizes(self, ("world", "tp", "pp", "vpp", "cp", "dp", "ep", "etp"))
        if sorted(self.order.split("-")) != sorted(MEGATRON_ORDER.split("-")):
            wrong.append(f"order {self.order!r} must name each of {MEGATRON_ORDER.split('-')} once")
        if not wrong:
            model, experts = self.tp * self.cp * self.pp, etp * self.ep * self.pp
            if self.world % model:
                wrong.append(
                    f"world {self.world} is not a multiple of tp*cp*pp = {self.tp}*{self.cp}*{self.pp} = {model}"
                )
            elif self.dp is not None and self.dp * model != self.world:
                wrong.append(
                    f"tp*cp*dp*pp = {self.tp}*{self.cp}*{self.dp}*{self.pp} = {self.dp * model}, world is {self.world}"
                )
            if self.world % experts:
                wrong.append(
                    f"world {self.world} is not a multiple of etp*ep*pp = {etp}*{self.ep}*{self.pp} = {experts}"
                )
            if (self.vpp or 1) > 1 and self.pp == 1:
                wrong.append(f"vpp {self.vpp} needs pp > 1")
        object.__setattr__(self, "etp", etp)
        if not wrong:
            object.__setattr__(self, "dp", self.world // model)
            # Stages must be the same ranks for experts as for everything else; only some orders give that.
            if not np.array_equal(self.dense().groups(["pp"]), self.expert().groups(["pp"])):
                wrong.append(f"with order {self.order!r} dense and expert pipeline groups differ: put pp last")
        if wrong:
            raise LayoutError("this is no Megatron-Core parallelism", wrong)

    @property
    def _dp(self) -> int:
        """`dp`, which is known once this has been checked."""
        return self.world // (self.tp * self.cp * self.pp) if self.dp is None else self.dp

    @property
    def _etp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def edp(self) -> int:
        """Replicas of each expert shard."""
        return self.world // (self._etp * self.ep * self.pp)

    def dense(self) -> MeshInfo:
        """Axes pp, dp, cp, tp (slowest first in Megatron's default order)."""
        sizes = {"tp": self.tp, "cp": self.cp, "dp": self._dp, "pp": self.pp}
        return MeshInfo.grid(**{a: sizes[a] for a in self._slowest_first() if a in sizes})

    def expert(self) -> MeshInfo:
        """Axes pp, edp, ep, etp (slowest first in Megatron's default order)."""
        sizes = {"tp": ("etp", self._etp), "ep": ("ep", self.ep), "dp": ("edp", self.edp), "pp": ("pp", self.pp)}
        return MeshInfo.grid(**dict(sizes[a] for a in self._slowest_first() if a in sizes))

    def _slowest_first(self) -> list[str]:
        return self.order.split("-")[::-1]


@dataclass(frozen=True, kw_only=True)
class EngineParallel:
    """vLLM's parallelism of one replica: DP x PP x PCP x TP ranks, TP fastest. `ep`: expert parallelism enabled.

    Experts are cut over DP, PCP and TP together, in that order, per pipeline stage: into whole experts with `ep`, along
    their own dims without. A dense engine ignores data parallelism here: replicas are described one by one.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: bool = False
    pcp: int = 1

    def __post_init__(self) -> None:
        if wrong := _sizes(self, ("tp", "pp", "dp", "pcp")):
            raise LayoutError("this is no vLLM parallelism", wrong)

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.pcp

    def dense(self) -> MeshInfo:
        """Axes dp, pp, pcp, tp."""
        return MeshInfo.grid(dp=self.dp, pp=self.pp, pcp=self.pcp, tp=self.tp)

    def expert(self) -> MeshInfo:
        """Axes pp, ep, etp; one of ep and etp has size dp*pcp*tp, the other 1."""
        stages = self.dense().groups(["dp", "pcp", "tp"])
        return MeshInfo(("pp", "ep", "etp"), stages[:, :, None] if self.ep else stages[:, None, :])


def place_of(parallel: Parallel, rank: int) -> dict[str, int]:
    """Coordinates of a rank on the axes that cut tensors: pp, tp, ep and etp. Ranks of one place hold the same."""
    dense, expert = parallel.dense(), parallel.expert()
    at = {a: int(i) for m in (dense, expert) for a, i in zip(m.axes, m.coordinate(rank) or ())}
    return {a: at[a] for a in ("pp", "tp", "ep", "etp")}


def _sizes(parallel: object, fields: Sequence[str]) -> list[str]:
    given = {f: getattr(parallel, f) for f in fields}
    return [f"{f} is {n!r}, must be an integer >= 1" for f, n in given.items() if n is not None and not _is_size(n)]


def _is_size(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n >= 1
