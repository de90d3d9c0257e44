"""Few threads for the gloo groups that torch.distributed makes. For tests and demos only.

One worker thread for each group. A group has two, and both write the name of the work that they have just ended into one string, with
no lock (`runLoop` in torch's ProcessGroupGloo.cpp, 2.13). A name of up to 15 letters lies in the string itself and is only garbled.
"ALLGATHER_COALESCED", by which Megatron's distributed optimizer gathers parameters, is longer: then two threads free the same memory,
and the process dies later, anywhere, of "malloc(): unaligned tcache chunk detected" or a segmentation fault. One thread alone has
nobody to race with.

xfer's own links and wires make their groups themselves and keep two; no work of theirs has so long a name.

One device for all groups of a process. A device has a thread that wakes up a hundred times a second, and each group has a device of its
own: beside four ranks of Megatron and an engine these threads alone took a quarter of two processors.

What else torch's gloo threads do at the end of a process: gloo_end.py.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta

from torch.distributed import ProcessGroupGloo


def few_threads() -> None:
    """From now on, in this process and in those that it forks. Idempotent."""
    first = ProcessGroupGloo.__init__
    if hasattr(first, "__wrapped__"):
        return

    @functools.wraps(first)
    def init(self, store, rank: int, size: int, *more, timeout: timedelta | None = None) -> None:
        if not more:
            options = ProcessGroupGloo._Options()
            options._devices = _devices(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME", ""))
            options._threads = 1
            if timeout is not None:
                options._timeout = timeout
            more = (options,)
        first(self, store, rank, size, *more)

    ProcessGroupGloo.__init__ = init


@functools.cache
def _devices(pid: int, interfaces: str) -> list:
    """Those that torch itself would make in this process."""
    named = [n for n in interfaces.split(",") if n]
    return [ProcessGroupGloo.create_device(interface=n) for n in named] or [ProcessGroupGloo.create_default_device()]
