"""A communicator of our own among the ranks that own parameters together: gloo for parameters on CPUs, NCCL on GPUs.

Made directly and not by `torch.distributed.new_group`: without all ranks of the job that names a group after its ranks and
after how many groups this process is in already. Pipeline stages are in different numbers of groups, so they would wait for
each other under different names, for ever. Here the first rank draws a name and tells it over a group that exists.

What travels when is gather.py's and gradients.py's to say.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from xfer.errors import DeadlineExceeded, PeerLost, Unsupported
from xfer.transport.group import Aside

_NAME_BYTES = 16
_ABORT_S = 10.0


class Wire:
    """This rank's end. Ranks are those within the group: 0 to size - 1.

    Work that is returned is waited for by its `wait()`: over gloo that blocks for at most `deadline_s` and raises a
    RuntimeError when a peer is gone; over NCCL the current stream waits, and torch's watchdog has the deadline.
    """

    def __init__(self, backend, rank: int, size: int, device: torch.device):
        self.rank, self.size, self.device = rank, size, device
        self._backend = backend

    @classmethod
    def over(
        cls, group: dist.ProcessGroup | None, device: torch.device, deadline_s: float, max_ctas: int | None = None
    ) -> Wire:
        """Among the ranks of `group` (None: the default group). Collective over them.

        device: where parameters lie. max_ctas: most thread blocks that NCCL may take from the GPU for one collective; None
        leaves it to NCCL. DeadlineExceeded when not all ranks come within `deadline_s`, PeerLost when one ends.
        """
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        timeout = timedelta(seconds=deadline_s)

        def connect():
            if device.type == "cuda":
                torch.cuda.set_device(device)  # of this thread
            prefix = f"xfer layerwise {_name(group, rank)}"
            store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
            if device.type != "cuda":
                return dist.ProcessGroupGloo(store, rank, size, timeout)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            if max_ctas is not None:
                options.config.max_ctas = max_ctas
            return dist.ProcessGroupNCCL(store, rank, size, options)

        try:
            make = Aside(connect)  # the group's own deadline is somebody else's, and nothing frees a wait in it
            if (error := make.wait(deadline_s)) is not None:
                raise error
        except (RuntimeError, TimeoutError) as e:
            late = isinstance(e, TimeoutError) or "imed out" in str(e) or "imeout" in str(e)
            ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
            raise (DeadlineExceeded if late else PeerLost)(
                "the ranks that own parameters together did not all meet",
                [f"ranks {ranks}: build the optimizer on all of them ({str(e).splitlines()[0][:160]})"],
                where=f"rank {dist.get_rank()}",
            ) from e
        return cls(make.value, rank, size, device)

    # ---- to and from owners

    def broadcasts(self, moves: Sequence[tuple[int, torch.Tensor]]) -> list[dist.Work]:
        """Each (owner, tensor) from its owner to all, started together."""
        if not moves:
            return []
        pg = self._alive()
        if self.device.type != "cuda":
            return [pg.broadcast([t], _from(owner)) for owner, t in moves]
        pg._start_coalescing()  # one launch, in which NCCL runs the broadcasts side by side
        for owner, t in moves:
            pg.broadcast([t], _from(owner))
        return [pg._end_coalescing()]

    def reduce(self, tensor: torch.Tensor, owner: int) -> dist.Work:
        """The sum of all ranks' into the owner's; the others' may be anything afterwards. Not over gloo, whose reduce waits
        for itself when several are on their way."""
        options = dist.ReduceOptions()
        options.rootRank, options.asyncOp = owner, True
        return self._alive().reduce([tensor], options)

    def send(self, tensor: torch.Tensor, to: int) -> dist.Work:
        return self._alive().send([tensor], to, 0)

    def receive(self, tensor: torch.Tensor, source: int) -> dist.Work:
        """Messages of a pair of ranks match in the order in which they are posted."""
        return self._alive().recv([tensor], source, 0)

    # ---- small things, all done on return (over NCCL: for the current stream)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """By rank."""
        out = [torch.empty_like(tensor) for _ in range(self.size)]
        self._alive().allgather([out], [tensor]).wait()
        return out

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """The sum, in place."""
        self._alive().allreduce([tensor]).wait()

    def broadcast(self, tensor: torch.Tensor, owner: int) -> None:
        self._alive().broadcast([tensor], _from(owner)).wait()

    # ---- the end

    def close(self) -> None:
        """Let go of connections and of NCCL's memory. What is on its way must have been waited for."""
        pg, self._backend = self._backend, None
        if pg is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            Aside(pg.abort).wait(_ABORT_S)

    def _alive(self):
        if self._backend is None:
            raise Unsupported("this layer-wise optimizer is closed", ["build a new one, on all ranks"])
        return self._backend


def _from(owner: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = owner, 0, True
    return options


def _name(group: dist.ProcessGroup | None, rank: int) -> str:
    """The same on all ranks of `group`, and never used before."""
    on_cpu = "cpu:" in dist.get_backend_config(group)
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    drawn = torch.frombuffer(bytearray(secrets.token_bytes(_NAME_BYTES)), dtype=torch.uint8).to(device)
    dist.broadcast(drawn, dist.get_global_rank(group if group is not None else dist.group.WORLD, 0), group=group)
    return bytes(drawn.tolist()).hex()
