"""State that the ranks of a process group keep between calls of `xferdtensor`: opened routes, a link.

Routes are those of refits (transport/routes.py). They are kept by what all ranks say of a transfer, and bound to the
addresses of the tensors of each call; they hold no memory of the caller but sources that other ranks have mapped.
Not here: what ranks say, and the plan (dtensor.py); how it travels (dtensor_exchange.py).
"""

from __future__ import annotations

import secrets
import struct
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import torch

from xfer.dtensor_claims import Claim
from xfer.dtensor_exchange import RankExchange, digest
from xfer.errors import PeerLost, ProtocolError, Unsupported, XferError
from xfer.kernels import cuda_driver
from xfer.transport import p2p
from xfer.transport.routes import NoLink, find_ways, open_link

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

    from xfer.plan.program import Program
    from xfer.transport.group import Link
    from xfer.transport.routes import Routed, Ways

KEPT_ROUTES = 1024
LOOKED_AT = 4
"""Routes of which each call asks, in turn, whether their source is still in use."""
KEPT_BUFFER_BYTES = 512 << 20
"""Most bytes of message buffers that idle routes of one group keep on a device."""
DIRECT_BYTES = {**p2p.DIRECT_BYTES, "cuda": 32 << 20}
"""Shorter dense rows are packed. A single tensor has few rows, so a message for each costs less than their copy (measured)."""
DRAIN_S = 5.0
"""Longest wait, after a failure, for kernels that still read or write."""


class Routes:
    """Routes that all ranks of a group opened for one layout and one set of source storages.

    `ways` holds this rank's source storage where another rank has mapped it; nothing else here keeps memory of the
    caller. `pulls`: whether any rank of the group reads another one's memory.
    """

    def __init__(self, ways: Ways, link: Link, pulls: bool):
        self.ways, self.link, self.pulls = ways, link, pulls
        self.routed: Routed | None = None
        self._bound: tuple[int, int] = 0, 0

    def bind(self, src: torch.Tensor | None, dst: torch.Tensor | None) -> Routed:
        """The routes between these tensors' storages; bound anew only when one lies elsewhere than in the last call."""
        addresses = _address(src), _address(dst)
        if self.routed is None or addresses != self._bound:
            self.routed = None  # frees its buffers before the new ones are made
            source, destination = ([] if t is None else [_borrowed(t)] for t in (src, dst))
            direct = DIRECT_BYTES[self.link.device.type]
            self.routed = self.ways.over(self.link, destination, src_roots=source, direct_bytes=direct)
            self._bound = addresses
        return self.routed

    def settled(self) -> bool:
        """Whether nothing of the last run goes on reading or writing; waits for that up to DRAIN_S seconds."""
        until = time.monotonic() + DRAIN_S
        while not (drained := self.routed is None or self.routed.drained) and time.monotonic() < until:
            time.sleep(1e-3)
        return drained

    def abandoned(self) -> bool:
        """Whether nothing but these routes holds this rank's source storage any more."""
        export = self.ways.export
        # One count is the flat tensor's of the export, one that of the Python object that is asked here.
        return export is not None and torch._C._storage_Use_Count(export._roots[0].untyped_storage()._cdata) <= 2

    def close(self) -> None:
        if self.settled():  # unmapping would wait for the kernel that still reads
            self.routed = None
            self.ways.mapping.close()


class GroupState:
    """State that the ranks of one process group keep between calls.

    All ranks add, use and remove entries in the same calls and in the same order, so an entry is there on all ranks or
    on none. A rank that fails drops everything, its `name` too; in the next call all ranks see that their names differ,
    drop everything and take a new name.
    """

    def __init__(self, group: ProcessGroup):
        self.rank, self.size = group.rank(), group.size()
        self.labels = tuple(f"rank {r}" for r in range(self.size))
        self.routes: OrderedDict[bytes, Routes] = OrderedDict()
        self.links: list[Link] = []
        self.name = bytes(8)
        self.ranks = RankExchange(group)
        self._leaving: list[Routes] = []
        self._looked = 0

    # ---- messages between ranks

    def exchange(self, data: bytes, deadline: float) -> list[bytes]:
        """See `RankExchange`. When it returns, all ranks have closed the routes that this rank closed before it, which are then freed."""
        leaving = len(self._leaving)
        said = self.ranks.exchange(data, deadline)
        del self._leaving[:leaving]
        return said

    def meet(self, claim: Claim, source: tuple[int, int], deadline: float) -> bytes:
        """Begin a call with all ranks.

        Args:
            claim: This rank's claim.
            source: Address and allocation of the storage that other ranks may read; zeros: none.
            deadline: A time.monotonic() value.

        Returns:
            The key of this call's routes: a digest of all ranks' claims and sources, equal on all ranks.
        """
        gone = next((key for key in self._some() if self.routes[key].abandoned()), bytes(8))
        mine = digest(msgspec.msgpack.encode((claim, source)))
        heads = [
            HEAD.unpack(h)
            for h in self.exchange(HEAD.pack(self.name, secrets.token_bytes(8), gone[:8], mine), deadline)
        ]
        names, fresh, going, said = zip(*heads)
        if not all(any(s) for s in said):
            lines = [
                f"rank {r}: called forget() while others called xferdtensor()" for r, d in enumerate(said) if not any(d)
            ]
            raise ProtocolError("the ranks of the group call different functions", lines)
        if not any(self.name) or len({*names}) > 1:
            self.drop()
            self.name = fresh[0]
            self.ranks.share_memory(deadline)
        self.close([k for k in self.routes if k[:8] in going])
        return digest(*said)

    # ---- entries

    def _some(self) -> list[bytes]:
        """Keys of the routes of the last call and of LOOKED_AT others, in turn."""
        keys = [*self.routes]
        self._looked = (self._looked + LOOKED_AT) % max(1, len(keys))
        return [*keys[-1:], *keys[self._looked :][:LOOKED_AT]]

    def close(self, keys: Iterable[bytes]) -> None:
        """Unmaps other ranks' memory. This rank's sources stay until the others have unmapped them (see `exchange`)."""
        for key in keys:
            routes = self.routes.pop(key)
            routes.close()
            self._leaving.append(routes)

    def trim(self) -> None:
        """Free message buffers of all routes but the last used ones."""
        total = 0
        for routes in reversed(self.routes.values()):
            if routes.routed is not None:
                before, total = total, total + routes.routed.extra_bytes
                if before and total > KEPT_BUFFER_BYTES:
                    routes.routed = None

    def fail(self, key: bytes, error: BaseException, src: torch.Tensor | None, dst: torch.Tensor | None) -> None:
        """Closes everything after an error. Holds what the device may still read or write."""
        routes = self.routes.get(key)
        if routes is not None and not (routes.settled() and getattr(error, "drained", True)):
            STUCK.append((routes, src, dst))
        self.drop()

    def drop(self) -> None:
        """Closes everything."""
        self.name = bytes(8)
        self.close([*self.routes])
        while self.links:
            self.links.pop().close()

    # ---- how bytes move

    def open_routes(
        self, key: bytes, program: Program, kind: str, peer: bool, src: torch.Tensor | None, deadline: float
    ) -> Routes:
        """Opens routes for a program, and a link where the group needs one and has none. Collective.

        Args:
            key: Key of the routes, from `meet`.
            program: Rows that this rank sends and receives, in ranks of the group.
            kind: Type of device of all tensors.
            peer: Whether destinations may read sources' memory themselves; the same on all ranks.
            src: This rank's source.
            deadline: A time.monotonic() value.
        """

        def exchange(data: bytes, ranks: Iterable[int] = ()) -> dict[int, bytes]:
            return dict(enumerate(self.ranks.gather(data, deadline)))

        device = torch.empty(0, device=kind).device  # with the number of the current one
        source = [] if src is None else [_bytes_under(src)]
        ways = find_ways(program, self.size, device, source, exchange, self.labels, allow_peer=peer)
        try:
            link: Link = NoLink(self.rank, self.size, device, self.labels)
            if ways.wired:
                there = [x for x in self.links if x.device == device]
                if self.ranks.some_rank(not there, deadline):
                    store = _store(self.ranks.group, f"xferdtensor/{self.name.hex()}/{key.hex()}")
                    left, why = max(0.001, deadline - time.monotonic()), ways.plan.refused
                    new = open_link(
                        store, self.rank, self.size, left, device, self.labels, refused=why, exchange=exchange
                    )
                    there.insert(0, new)
                    self.links.insert(0, new)
                link = there[0]
            pulls = peer and self.ranks.some_rank(bool((ways.pulled["src"] != self.rank).any()), deadline)
        except BaseException:
            ways.mapping.close()
            raise
        routes = Routes(ways if ways.plan.pulled_out else replace(ways, export=None), link, pulls)
        self.routes[key] = routes
        self.close([*self.routes][:-KEPT_ROUTES])
        return routes

    def run(self, key: bytes, src: torch.Tensor | None, dst: torch.Tensor | None, deadline: float) -> None:
        """Moves the bytes. Where ranks read each other's memory, it returns when all of them have ended.

        Raises:
            PeerLost: Another rank failed.
            XferError: As `Routed.run`.
        """
        self.routes.move_to_end(key)
        routes = self.routes[key]
        failure: Exception | None = None
        ends: list[bytes] = []
        try:
            routes.bind(src, dst).run(deadline)
            self.trim()
        except Exception as e:
            failure = e
        try:
            if routes.pulls:
                ends = self.exchange(bytes([failure is not None, not routes.settled()]), deadline)
        except XferError:
            if failure is None:
                raise
        if failure is not None:
            raise failure
        failed = [rank for rank, end in enumerate(ends) if any(end)]
        if failed:
            lines = [f"rank {rank}: failed while bytes moved, see its own error" for rank in failed]
            raise PeerLost("other ranks did not get their bytes", lines, drained=not any(end[1] for end in ends))


def _bytes_under(t: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor as flat uint8."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def _borrowed(t: torch.Tensor) -> torch.Tensor:
    """As `_bytes_under`, without holding the storage. The caller of `xferdtensor` holds it while a call reads or writes."""
    return cuda_driver.tensor_at(_address(t), t.untyped_storage().nbytes(), t.device)


def _address(t: torch.Tensor | None) -> int:
    return 0 if t is None else t.untyped_storage().data_ptr()


def place_of(t: torch.Tensor) -> tuple[int, int]:
    """Address of a tensor's storage, and the number of its device allocation: new memory at an old address has another one."""
    try:
        return _address(t), cuda_driver.identity(_address(t)) if t.is_cuda and t.numel() else 0
    except cuda_driver.DriverError:  # memory of a kind that other ranks cannot map either
        return _address(t), 0


def state_of(group: ProcessGroup | None) -> GroupState:
    """Return the state of a group (None: the default group)."""
    group = group if group is not None else torch.distributed.group.WORLD
    if group is None:
        raise Unsupported("there is no process group: call torch.distributed.init_process_group() first, or pass one")
    if group not in _STATES:
        _STATES[group] = state = GroupState(group)
        weakref.finalize(group, state.drop)  # when the group is destroyed or the process ends
    return _STATES[group]


def _store(group: ProcessGroup, prefix: str) -> Store:
    """The store that the group was made with, under a prefix."""
    from torch.distributed import PrefixStore, distributed_c10d

    try:  # torch 2.6 knows the stores of registered groups only
        ask = getattr(group, "get_group_store", None)
        store = ask() if ask is not None else distributed_c10d._get_process_group_store(group)
    except (KeyError, RuntimeError) as e:
        raise Unsupported(f"the group has no store at which its ranks could open a link: {e}") from None
    return PrefixStore(prefix, store)


HEAD = struct.Struct("<8s8s8s16s")
"""The first message of a rank in a call: the name of its state, 8 random bytes, the beginning of the key of routes to close, and a
digest of its claim and source (zeros: from `forget`)."""
_STATES: weakref.WeakKeyDictionary[ProcessGroup, GroupState] = weakref.WeakKeyDictionary()
STUCK: list[tuple[Routes, torch.Tensor | None, torch.Tensor | None]] = []
"""Kept until the process ends: after a failure the device may still read and write these."""
