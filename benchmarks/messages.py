"""Time what a message costs on a link of xfer beside its bytes: the `message_s` of predictions.

    python -m benchmarks.messages [--ranks 2] [--counts 1 4 16 64] [--bytes 4096 65536 1048576] [--repeats 30] [--hosts] [--out FILE]

Rank 0 sends so many messages of so many bytes to each other rank in one step (one group of NCCL), as a plan's wave does. Seconds are from
a barrier until the slowest rank has all of them, medians. For each size, least squares over the numbers of messages give what a
step costs and what each further message costs; of that, what its bytes take is told by the size above and the rate of the largest
messages. NCCL between GPUs, a GPU for each rank, gloo without GPUs. --hosts: each rank is a host of its own to NCCL, which then speaks
through sockets or a network card, and ranks may share a GPU.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch.distributed import TCPStore

from benchmarks.lib import command
from examples.common.ports import free_port
from xfer.transport.group import Link
from xfer.transport.links import open_group

WAIT_S, WARM = 60.0, 5


def step(link: Link, buffers: list[torch.Tensor]) -> None:
    """One step: rank 0 sends each buffer to each other rank."""
    until = time.monotonic() + WAIT_S
    sends = [(b, peer, tag) for peer in range(1, link.size) for tag, b in enumerate(buffers)] if link.rank == 0 else []
    receives = [(b, 0, tag) for tag, b in enumerate(buffers)] if link.rank else []
    for some in link.post(receives, sends):
        for pending in some:
            pending.wait(until)
    link.finish(until)


def rank_main(
    rank: int, size: int, port: int, counts: list[int], sizes: list[int], repeats: int, hosts: bool, folder: str
) -> None:
    if hosts:
        os.environ["NCCL_HOSTID"] = f"host-{rank}"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=WAIT_S))
    link, word = open_group(store, rank, size, WAIT_S, device), torch.zeros(1, dtype=torch.uint8, device=device)
    link.warm([r for r in range(size) if (r == 0) != (rank == 0)])
    out = {}
    for nbytes in sizes:
        for count in counts:
            buffers, seconds = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(count)], []
            for _ in range(repeats + WARM):
                link.broadcast(word, 0, time.monotonic() + WAIT_S)
                began = time.perf_counter()
                step(link, buffers)
                seconds.append(time.perf_counter() - began)
            out[f"{nbytes} {count}"] = seconds[WARM:]
    Path(folder, str(rank)).write_text(json.dumps(out))


def measure(size: int, counts: list[int], sizes: list[int], repeats: int, hosts: bool) -> dict[tuple[int, int], float]:
    """Microseconds of a step by (bytes of a message, messages to each rank): the median of the slowest rank's."""
    port = free_port()
    store = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=WAIT_S), wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (size, port, counts, sizes, repeats, hosts, folder), size)
        ranks = [json.loads(Path(folder, str(r)).read_text()) for r in range(size)]
    del store
    return {
        (nbytes, count): 1e6 * statistics.median(map(max, zip(*(r[f"{nbytes} {count}"] for r in ranks))))
        for nbytes in sizes
        for count in counts
    }


def main() -> None:
    p = command.parser("messages", __doc__)
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--counts", type=int, nargs="+", default=[1, 4, 16, 64], help="messages to each rank in a step")
    p.add_argument("--bytes", type=int, nargs="+", default=[4096, 65536, 1 << 20], help="of a message")
    p.add_argument("--repeats", type=int, default=30)
    p.add_argument("--hosts", action="store_true", help="each rank is a host of its own to NCCL")
    p.add_argument("--out", type=Path, help="write all figures there, JSON")
    a = p.parse_args()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if a.ranks < 2 or len(a.counts) < 2:
        p.error("two ranks and two counts are needed")
    if 0 < gpus < a.ranks and not a.hosts:
        p.error(f"{a.ranks} ranks need as many GPUs, or --hosts; here are {gpus}")
    found = measure(a.ranks, a.counts, a.bytes, a.repeats, a.hosts)
    print(f"{'NCCL' if gpus else 'gloo'}, {a.ranks} ranks, us, medians of {a.repeats}")
    print("| bytes | " + " | ".join(f"{n} messages" for n in a.counts) + " | a step | each message | GB/s |")
    print("|---" * (len(a.counts) + 4) + "|")
    rows = []
    for nbytes in a.bytes:
        each, base = np.polyfit([n * (a.ranks - 1) for n in a.counts], [found[nbytes, n] for n in a.counts], 1)
        some = " | ".join(f"{found[nbytes, n]:.0f}" for n in a.counts)
        print(f"| {nbytes} | {some} | {base:.0f} | {each:.1f} | {nbytes / each / 1e3:.2f} |")
        rows.append({"bytes": nbytes, "us": [found[nbytes, n] for n in a.counts], "step_us": base, "message_us": each})
    if a.out:
        a.out.write_text(json.dumps({"meta": command.facts("messages", ranks=a.ranks), "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
