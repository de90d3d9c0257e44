"""A communicator of our own among the ranks that own parameters together: gloo for parameters on CPUs, NCCL on GPUs.

Made directly and not by `torch.distributed.new_group`: without all ranks of the job that names a group after its ranks and
after how many groups this process is in already. Pipeline stages are in different numbers of groups, so they would wait for
each other under different names, for ever. Here the first rank draws a name and tells it over a group that exists.

Over NCCL nothing blocks the host, so a watch (watch.py) has the deadlines: what has not arrived in time is aborted, and bytes
that were awaited become NaNs first, because the operations that wait for them then go on.

What travels when is gather.py's and gradients.py's to say.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from xfer.errors import DeadlineExceeded, PeerLost, Unsupported, XferError
from xfer.layerwise.shares import NAN_BYTE
from xfer.layerwise.watch import Post, Watch
from xfer.transport.group import Aside, from_rank
from xfer.transport.nccl import quiet, together

ON_ALL_RANKS = (
    "if all ranks are there: forwards, drain() and state_dict() after a step are for all of them; on one rank only, with the others "
    "waiting at a barrier, they wait for each other"
)
_NAME_BYTES = 16
_ABORT_S = 10.0
_SPOIL_S = 2.0
_POSTED_S = 1.0
"""So long an abort lets what is being started end: closing a group of messages over a freed communicator may crash."""
_NUMBERS = 1 << 16


class Wire:
    """This rank's end. Ranks are those within the group: 0 to size - 1.

    Work that is returned is waited for by its `wait()`: over gloo that blocks for at most `deadline_s` and raises a
    RuntimeError when a peer is gone; over NCCL the current stream waits, and what is late by `deadline_s` is aborted by
    another thread: `lost` then says so, and everything here raises it. store: these ranks' own, with a prefix.
    """

    def __init__(self, backend, store, rank: int, size: int, device: torch.device, deadline_s: float):
        self.rank, self.size, self.device, self.store = rank, size, device, store
        self.lost: XferError | None = None
        self.behind: list[torch.cuda.Stream] = []
        """Streams that wait for collectives of this wire, and then write what these were to bring."""
        self._backend = backend
        self._starting = threading.Lock()
        """Held from the look at `lost` until what was allowed is started: an abort comes before or behind that."""
        self._who = f"rank {dist.get_rank()}"
        self._watch = None
        if device.type != "cuda":
            return
        self._deadline_s = deadline_s
        # Two streams: what notes arrivals waits for them, and what spoils must not.
        self._notes, self._spare = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._numbers = torch.arange(_NUMBERS, dtype=torch.int32, device=device)
        self._note = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._read, self._seen = self._note.numpy(), 0
        torch.cuda.synchronize(device)
        self._watch = Watch(deadline_s, self._arrived, self._expire)

    @classmethod
    def over(
        cls, group: dist.ProcessGroup | None, device: torch.device, deadline_s: float, max_ctas: int | None = None
    ) -> Wire:
        """Among the ranks of `group` (None: the default group). Collective over them.

        device: where parameters lie. max_ctas: most thread blocks that NCCL may take from the GPU for one collective; None
        leaves it to NCCL. DeadlineExceeded when not all ranks come within `deadline_s`, PeerLost when one ends.
        """
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        made: list = []
        stores: list = []
        gone = threading.Event()  # nobody waits for what is made

        def connect() -> None:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # of this thread
            prefix = f"xfer layerwise {_name(group, rank)}"
            store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
            stores.append(store)
            if device.type != "cuda":
                made.append(dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=deadline_s)))
            else:
                _connect_nccl(made, gone, store, rank, size, device, max_ctas)

        try:
            make = Aside(connect)  # the group's own deadline is somebody else's, and nothing frees a wait in it
            if (error := make.wait(deadline_s)) is not None:
                raise error
        except (RuntimeError, TimeoutError) as e:
            gone.set()  # before the look at what is made: who makes it looks at this after
            if made and device.type == "cuda":
                Aside(made[0].abort).wait(_ABORT_S)
            late = isinstance(e, TimeoutError) or "imed out" in str(e) or "imeout" in str(e)
            ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
            raise (DeadlineExceeded if late else PeerLost)(
                "the ranks that own parameters together did not all meet",
                [f"ranks {ranks}: build the optimizer on all of them ({str(e).splitlines()[0][:160]})"],
                where=f"rank {dist.get_rank()}",
            ) from e
        return cls(made[0], dist.PrefixStore("more", stores[0]), rank, size, device, deadline_s)

    # ---- to and from owners

    def broadcasts(self, moves: Sequence[tuple[int, torch.Tensor]], what: Callable[[], str]) -> list[dist.Work]:
        """Each (owner, flat uint8 tensor) from its owner to all, started together. what: describes it in an error."""
        if not moves:
            return []
        pg = self._alive()
        if self.device.type != "cuda":
            return [pg.broadcast([t], from_rank(owner)) for owner, t in moves]

        def each() -> None:
            for owner, t in moves:
                pg.broadcast([t], from_rank(owner))

        start = partial(together, pg, each)  # one launch, in which NCCL runs the broadcasts side by side
        return [self._watched(what, start, [t for owner, t in moves if owner != self.rank])]

    def reduce(self, tensor: torch.Tensor, owner: int) -> dist.Work:
        """The sum of all ranks' into the owner's; the others' may be anything afterwards. Not over gloo, whose reduce waits
        for itself when several are on their way."""
        options = dist.ReduceOptions()
        options.rootRank, options.asyncOp = owner, True
        return self._watched(
            lambda: f"gradients on their way to rank {owner}", lambda: self._alive().reduce([tensor], options)
        )

    def send(self, tensor: torch.Tensor, to: int) -> dist.Work:
        """Over gloo only, as `receive`."""
        return self._alive().send([tensor], to, 0)

    def receive(self, tensor: torch.Tensor, source: int) -> dist.Work:
        """Messages of a pair of ranks match in the order in which they are posted."""
        return self._alive().recv([tensor], source, 0)

    def meet(self, what: Callable[[], str], received: Sequence[torch.Tensor], word: torch.Tensor) -> dist.Work:
        """The sum of all ranks' words, in place, started: when it is waited for, all ranks have started theirs (on GPUs: their
        streams were there), or it was aborted, which leaves another number there. received: what comes only behind it, flat uint8."""
        return self._watched(what, lambda: self._alive().allreduce([word]), received)

    # ---- small things, all done on return (over NCCL: for the current stream)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """By rank."""
        out = [torch.empty_like(tensor) for _ in range(self.size)]
        self._watched(lambda: "what all ranks say", lambda: self._alive().allgather([out], [tensor])).wait()
        return out

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """The sum, in place."""
        self._watched(lambda: "a sum over all ranks", lambda: self._alive().allreduce([tensor])).wait()

    def broadcast(self, tensor: torch.Tensor, owner: int) -> None:
        start = lambda: self._alive().broadcast([tensor], from_rank(owner))  # noqa: E731
        self._watched(lambda: f"what rank {owner} says", start).wait()

    # ---- deadlines over NCCL

    def check(self) -> None:
        """Raises `lost`. After a wait for the device, for that ends when a collective is aborted, too."""
        if self.lost is not None:
            raise self.lost

    def _watched(
        self, what: Callable[[], str], start: Callable[[], dist.Work], received: Sequence[torch.Tensor] = ()
    ) -> dist.Work:
        if self._watch is None:
            return start()
        with self._starting:
            self.check()
            post = self._watch.post(what, received)
            work = start()
        with torch.cuda.stream(self._notes):
            work.wait()
            i = post.number % _NUMBERS
            self._note.copy_(self._numbers[i : i + 1], non_blocking=True)
        return work

    def _arrived(self) -> int:
        self._seen += (int(self._read[0]) - self._seen) % _NUMBERS
        return self._seen

    def _expire(self, missing: list[Post]) -> None:
        """On the watch's thread. `lost` is set first: whoever is freed by the abort has to see it."""
        late = [p.what() for p in missing if p.until <= time.monotonic()]
        lost = DeadlineExceeded(
            f"ranks that own parameters together did not exchange them within {self._deadline_s:g} s: a peer has ended, "
            "stopped, or is late",
            [
                *late,
                ON_ALL_RANKS,
                f"{len(missing) - len(late)} collectives behind it; build the model anew and load a checkpoint, with all ranks there",
            ],
            where=self._who,
        )
        started = self._starting.acquire(timeout=_POSTED_S)  # a start that is stuck is freed all the same
        self.lost = lost
        if started:
            self._starting.release()
        missing = self._watch.missing()  # also what was posted meanwhile; from now on nothing is started
        Aside(lambda: self._spoil(missing)).wait(_SPOIL_S)
        Aside(self._backend.abort).wait(_ABORT_S)
        if self.behind:  # they go on now, and nothing holds them
            Aside(lambda: self._spoil(missing, aborted=True)).wait(_SPOIL_S)

    def _spoil(self, missing: list[Post], aborted: bool = False) -> None:
        """What was to be received, and perhaps half is: a forward that was waiting for it gives NaNs, not numbers that look
        right."""
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
        """Let go of connections and of NCCL's memory. What is on its way must have been waited for."""
        pg, watch = self._backend, self._watch
        if pg is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # watched until then
            if watch is not None:
                watch.close()
            if self.lost is None:
                Aside(pg.abort).wait(_ABORT_S)
        self._backend = self._watch = None

    def _alive(self):
        self.check()
        if self._backend is None:
            raise Unsupported("this layer-wise optimizer is closed", ["build a new one, on all ranks"])
        return self._backend


def _connect_nccl(
    made: list, gone: threading.Event, store, rank: int, size: int, device: torch.device, max_ctas: int | None
) -> None:
    """Into `made`, as soon as there is something to abort; no further once `gone`. All that NCCL would connect at the first use
    of it is connected when this returns: later it would wait on the host."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=30)  # deadlines are the watch's; this one must never be the first
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    with quiet():
        made.append(dist.ProcessGroupNCCL(store, rank, size, options))
    pg = made[0]
    if gone.is_set():
        pg.abort()
        raise TimeoutError("the other ranks came too late")
    pg.eager_connect_single_device(device)
    some = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
    some.fill_(NAN_BYTE)  # kernels are loaded now: beside a kernel of NCCL's that waits, that can hang
    few = torch.zeros(16, dtype=torch.int64, device=device)
    pg.broadcast([some], from_rank(0)).wait()
    pg.allreduce([few]).wait()
    pg.allgather([[torch.empty_like(few) for _ in range(size)]], [few]).wait()
    torch.cuda.synchronize(device)


def _name(group: dist.ProcessGroup | None, rank: int) -> str:
    """The same on all ranks of `group`, and never used before."""
    on_cpu = "cpu:" in dist.get_backend_config(group)
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    drawn = torch.frombuffer(bytearray(secrets.token_bytes(_NAME_BYTES)), dtype=torch.uint8).to(device)
    dist.broadcast(drawn, dist.get_global_rank(group if group is not None else dist.group.WORLD, 0), group=group)
    return bytes(drawn.tolist()).hex()
