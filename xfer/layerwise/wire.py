"""Collectives among the ranks that own parameters together, over a link of their own: gloo for CPU parameters, NCCL on GPUs.

The link is not made by `torch.distributed.new_group`, which names a group after its ranks and after how many groups this process is
in already. Pipeline stages are in different numbers of groups, so they would wait for each other under different names for ever.
Here the first rank draws a name and broadcasts it over a group that exists.

Over NCCL no wait blocks the host, so a watch (watch.py) has the deadlines. It aborts a collective that is late, and first
writes NaNs where bytes were to arrive, because the operations that wait for them then go on.

gather.py, pulls.py and gradients.py decide which tensors travel when.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from xfer.agreement import Agreement
from xfer.background import BackgroundCall
from xfer.errors import DeadlineExceeded, PeerLost, Unsupported, XferError
from xfer.layerwise.shares import NAN_BYTE
from xfer.layerwise.watch import DeadlineWatch, Post
from xfer.transport import nccl
from xfer.transport.group import Aborted, Link, from_rank, opened
from xfer.transport.links import open_group

ON_ALL_RANKS = (
    "if no rank has ended: call forwards, drain() and state_dict() after a step on all ranks; a rank that calls them with the others "
    "waiting at a barrier waits for ever"
)
_NAME_BYTES = 16
_SPOIL_S = 2.0
_NUMBERS = 1 << 16


class Wire:
    """This rank's end of the collectives. Ranks are numbered within the group, from 0 to size - 1.

    A returned work is waited for by its `wait()`. Over gloo that blocks for at most `deadline_s` and raises a RuntimeError if a peer
    is gone. Over NCCL the current stream waits, and another thread aborts what is late by `deadline_s`: `lost` is that error
    then, and every method raises it.

    Args:
        link: The link among these ranks; the wire closes it.
        store: The store of these ranks alone, with a prefix.
        deadline_s: Seconds from the start of a collective to its end.
    """

    def __init__(self, link: Link, store: dist.Store, deadline_s: float):
        self.rank, self.size, self.device, self.store = link.rank, link.size, link.device, store
        self.lost: XferError | None = None
        self.behind: list[torch.cuda.Stream] = []
        """Streams that wait for collectives of this wire and then write the bytes that these were to bring."""
        self._link, self._closed, self.deadline_s = link, False, deadline_s
        self._who = f"rank {dist.get_rank()}"
        self._watch: DeadlineWatch | None = None
        if self.device.type != "cuda":
            return
        # Two streams: the one that notes arrivals waits for them, and the one that writes NaNs must not.
        self._notes, self._spare = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        self._numbers = torch.arange(_NUMBERS, dtype=torch.int32, device=self.device)
        self._note = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._read, self._seen = self._note.numpy(), 0
        torch.cuda.synchronize(self.device)
        self._watch = DeadlineWatch(deadline_s, self._arrived, self._expire)

    @classmethod
    def over(
        cls, group: dist.ProcessGroup | None, device: torch.device, deadline_s: float, max_ctas: int | None = None
    ) -> Wire:
        """A wire among the ranks of `group` (None: the default group). Collective over them.

        Args:
            device: Where the parameters are.
            deadline_s: Seconds within which all ranks must come, and of every collective afterwards.
            max_ctas: Most thread blocks that NCCL may take from the GPU for one collective; None leaves it to NCCL.

        Raises:
            DeadlineExceeded: Not all ranks came in time. PeerLost: A rank is gone.
        """
        rank, size, who = dist.get_rank(group), dist.get_world_size(group), f"rank {dist.get_rank()}"
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        late, until = "the ranks that own parameters together did not all meet", time.monotonic() + deadline_s
        advice = f"ranks {ranks}: build the optimizer on all of them"
        # `group` has a deadline of its own, and nothing else ends a wait in it.
        name = opened(BackgroundCall(lambda: _name(group, rank), device), until, late, who, advice=advice)
        store = dist.PrefixStore(f"xfer layerwise {name}", dist.distributed_c10d._get_default_store())
        labels = [f"rank {r}" for r in ranks]

        def over() -> bool:
            return time.monotonic() >= until

        try:
            # Blocking, as is NCCL's default: otherwise it starts a thread for each group of broadcasts.
            link = open_group(store, rank, size, deadline_s, device, labels, over, blocking=True, max_ctas=max_ctas)
            if isinstance(link, nccl.NcclLink):
                link.host_call(lambda: _load(link), "not all ranks took part in the first collectives", over)
            try:  # or a rank that raises next would close connections that another one is still making
                Agreement(store, "opened", rank, range(size), lambda r: labels[r]).meet(until)
            except XferError:
                link.close()
                raise
        except (DeadlineExceeded, PeerLost) as e:
            kind = DeadlineExceeded if over() else type(e)
            raise kind(late, [f"{advice} ({e.message[:160]})"], where=who) from e
        return cls(link, dist.PrefixStore("more", store), deadline_s)

    # ---- to and from owners

    def broadcasts(self, moves: Sequence[tuple[int, torch.Tensor]], what: Callable[[], str]) -> list[dist.Work]:
        """Starts broadcasts together. moves: (owner, flat uint8 tensor) of each. what: describes them in an error."""
        if not moves:
            return []
        if not self._link.grouped:
            return [self._start(partial(_broadcast, owner=owner, tensor=t)) for owner, t in moves]

        def each(pg: dist.ProcessGroup) -> None:
            for owner, t in moves:
                _broadcast(pg, owner, t)

        # One launch, in which NCCL runs the broadcasts side by side.
        return [
            self._start(
                lambda pg: nccl.together(pg, partial(each, pg)), what, [t for owner, t in moves if owner != self.rank]
            )
        ]

    def reduce(self, tensor: torch.Tensor, owner: int) -> dist.Work:
        """Starts to sum all ranks' tensors into the owner's; the others' may hold anything afterwards. Not over gloo, where several
        reductions that are under way wait for each other."""
        options = dist.ReduceOptions()
        options.rootRank, options.asyncOp = owner, True
        return self._start(lambda pg: pg.reduce([tensor], options), lambda: f"gradients on their way to rank {owner}")

    def send(self, tensor: torch.Tensor, to: int) -> dist.Work:
        """Starts to send a tensor to a rank. Over gloo only."""
        return self._start(lambda pg: pg.send([tensor], to, 0))

    def receive(self, tensor: torch.Tensor, source: int) -> dist.Work:
        """Starts to receive from a rank, over gloo. Messages of a pair of ranks match in the order in which they are posted."""
        return self._start(lambda pg: pg.recv([tensor], source, 0))

    def meet(self, what: Callable[[], str], received: Sequence[torch.Tensor], word: torch.Tensor) -> dist.Work:
        """Starts to sum all ranks' `word`s, in place. After a wait for the work, `word` has the sum if all ranks have started theirs (on
        GPUs: their streams have reached it). If the work was aborted, `word` has another number. received: flat uint8 tensors whose bytes
        arrive after this meeting."""
        return self._start(lambda pg: pg.allreduce([word]), what, received)

    # ---- small collectives, complete on return (over NCCL: for the current stream)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums the ranks' tensors, in place."""
        self._start(lambda pg: pg.allreduce([tensor]), lambda: "a sum over all ranks").wait()

    def broadcast(self, tensor: torch.Tensor, owner: int) -> None:
        self._start(partial(_broadcast, owner=owner, tensor=tensor), lambda: f"a value from rank {owner}").wait()

    # ---- deadlines over NCCL

    def check(self) -> None:
        """Raises `lost`. Call it after a wait for the device, which also ends when a collective is aborted."""
        if self.lost is not None:
            raise self.lost

    def _start(
        self,
        collective: Callable[[dist.ProcessGroup], dist.Work],
        what: Callable[[], str] = str,
        received: Sequence[torch.Tensor] = (),
    ) -> dist.Work:
        self.check()
        if self._closed:
            raise Unsupported("this layer-wise optimizer is closed", ["build a new one, on all ranks"])
        if self._watch is None:
            return self._link.start(collective)
        watch = self._watch

        def watched(pg: dist.ProcessGroup) -> tuple[Post, dist.Work]:
            self.check()  # under the link's lock, so `lost` is set before this or after the start
            return watch.post(what, received), collective(pg)

        try:
            post, work = self._link.start(watched)
        except Aborted:
            self.check()
            raise
        with torch.cuda.stream(self._notes):
            work.wait()
            i = post.number % _NUMBERS
            self._note.copy_(self._numbers[i : i + 1], non_blocking=True)
        return work

    def _arrived(self) -> int:
        self._seen += (int(self._read[0]) - self._seen) % _NUMBERS
        return self._seen

    def _expire(self, missing: list[Post]) -> None:
        """Runs on the watch's thread. Sets `lost` first: a caller that the abort frees must see it."""
        late = [p.what() for p in missing if p.until <= time.monotonic()]
        lost = DeadlineExceeded(
            f"ranks that own parameters together did not exchange them within {self.deadline_s:g} s: a peer has ended, "
            "stopped, or is late",
            [
                *late,
                ON_ALL_RANKS,
                f"{len(missing) - len(late)} collectives behind it; build the model anew and load a checkpoint, with all ranks there",
            ],
            where=self._who,
        )
        with self._link.no_post(nccl.POSTED_S):  # a start that is stuck is aborted all the same
            self.lost = lost
        if self._watch is not None:
            missing = self._watch.missing()  # with what was posted meanwhile; from now on nothing is started
        _for_seconds(_SPOIL_S, lambda: self._spoil(missing))
        self._link.abort()
        if self.behind:  # these streams go on now, and nothing holds them
            _for_seconds(_SPOIL_S, lambda: self._spoil(missing, aborted=True))

    def _spoil(self, missing: list[Post], aborted: bool = False) -> None:
        """Writes NaNs over tensors that did not arrive, or only in part: a forward that waits for them then gives NaNs, and not numbers
        that look right."""
        torch.cuda.set_device(self.device)
        with torch.cuda.stream(self._spare):
            if aborted:
                for stream in self.behind:
                    self._spare.wait_stream(stream)
            for post in missing:
                for t in post.received:
                    t.fill_(NAN_BYTE)
        self._spare.synchronize()

    # ---- the end

    def close(self) -> None:
        """Closes the connections and frees NCCL's memory. All that is under way must have been waited for."""
        if self._closed:
            return
        if self._watch is not None:
            torch.cuda.synchronize(self.device)  # watched until then
            self._watch.close()
        self._closed, self._watch = True, None
        if self.lost is None:
            self._link.close()


def _for_seconds(seconds: float, call: Callable[[], None]) -> None:
    """Runs `call` in the background and waits for it for at most `seconds`. Ignores its errors."""
    running = BackgroundCall(call)
    running.ended(time.monotonic() + seconds)
    running.give_up()


def _broadcast(pg: dist.ProcessGroup, owner: int, tensor: torch.Tensor) -> dist.Work:
    return pg.broadcast([tensor], from_rank(owner))


def _load(link: nccl.NcclLink) -> None:
    """Runs each collective once. NCCL connects at the first use of each, and would wait on the host for that later."""
    some = torch.zeros(1 << 20, dtype=torch.uint8, device=link.device)
    some.fill_(NAN_BYTE)  # loads kernels: beside a kernel of NCCL's that waits, that can hang
    few = torch.zeros(16, dtype=torch.int64, device=link.device)
    link.start(lambda pg: pg.broadcast([some], from_rank(0))).wait()
    link.start(lambda pg: pg.allreduce([few])).wait()
    torch.cuda.synchronize(link.device)


def _name(group: dist.ProcessGroup | None, rank: int) -> str:
    """Draws a name that is the same on all ranks of `group` and was never used before. Collective."""
    on_cpu = "cpu:" in dist.get_backend_config(group)
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    drawn = torch.frombuffer(bytearray(secrets.token_bytes(_NAME_BYTES)), dtype=torch.uint8).to(device)
    first = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)[0]
    dist.broadcast(drawn, first, group=group)
    return bytes(drawn.tolist()).hex()
