"""What a word costs between two processes of this host that rest in between: the floor of a refit that moves nearly no byte.

    python scripts/bench_wake.py [--gpu 0] [--rests 0 8] [--repeats 200] [--out wake.json]

A refit's decision takes the way that one round trip takes here: the coordinator's thread sends a word (Channel), the other process's
reading thread hands it to a second thread (a queue), which answers; here a reading thread takes the answer and wakes the first.
--rests: milliseconds for which both sleep before each, since a processor that has rested wakes later. Beside it, alone: a thread
that wakes another one and is woken by it; and on --gpu two small kernels, and one in a graph, each waited for. Medians and
quartiles, microseconds. Not here: the refit (bench_gpu_session.py --trainers nothing).
"""

from __future__ import annotations

import argparse
import json
import queue
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from xfer.coordinator import messages as m
from xfer.participants.turns import quick_turns, short_sleeps
from xfer.rendezvous.channel import Channel

WAIT_S = 20.0


def echo(fd: int) -> None:
    """The other process: what is read wakes a thread, which answers it."""
    words: queue.SimpleQueue[m.Message | None] = queue.SimpleQueue()
    channel = Channel(socket.socket(fileno=fd), "asker")
    channel.start(words.put, lambda reason: words.put(None))
    short_sleeps()
    while (word := words.get()) is not None:
        channel.send(word)


def timed(once: Callable[[], object], repeats: int, rest_ms: float) -> list[float]:
    """Microseconds of each but the first ten."""
    out = []
    for _ in range(repeats + 10):
        time.sleep(rest_ms / 1e3)
        began = time.perf_counter()
        once()
        out.append(1e6 * (time.perf_counter() - began))
    return out[10:]


class Asker:
    def __init__(self):
        listening = socket.create_server(("127.0.0.1", 0))
        ours = socket.create_connection(listening.getsockname(), timeout=WAIT_S)
        theirs, _ = listening.accept()
        listening.close()
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--echo", str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self.words: queue.SimpleQueue[m.Message | None] = queue.SimpleQueue()
        self.channel = Channel(ours, "echo")
        self.channel.start(self.words.put, lambda reason: self.words.put(None))

    def ask(self) -> None:
        self.channel.send(m.Commit(0, 1, "a version"))
        if self.words.get(timeout=WAIT_S) is None:
            raise SystemExit("bench_wake: the other process has ended")

    def close(self) -> None:
        self.channel.close()
        self.process.wait(WAIT_S)


class Threads:
    """One that wakes another one, which wakes it."""

    def __init__(self):
        self.there, self.back = queue.SimpleQueue(), queue.SimpleQueue()
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        short_sleeps()
        while self.there.get():
            self.back.put(True)

    def ask(self) -> None:
        self.there.put(True)
        self.back.get(timeout=WAIT_S)


def on_gpu(gpu: int) -> dict[str, Callable[[], object]]:
    import torch

    torch.cuda.set_device(gpu)
    x, stream = torch.zeros(256, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x.add_(1)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            x.add_(1)

    def two() -> None:
        with torch.cuda.stream(stream):
            x.add_(1)
            x.mul_(1)
        stream.synchronize()

    def replayed() -> None:
        with torch.cuda.stream(stream):
            graph.replay()
        stream.synchronize()

    return {"two kernels, waited for": two, "a graph of one, waited for": replayed}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gpu", type=int)
    p.add_argument("--rests", type=float, nargs="+", default=[0.0, 8.0])
    p.add_argument("--repeats", type=int, default=200)
    p.add_argument("--out", type=Path)
    p.add_argument("--echo", type=int, help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.echo is not None:
        return echo(a.echo)
    short_sleeps()
    asker, threads = Asker(), Threads()
    asked = {"a word to another process and back": asker.ask, "a thread wakes another and back": threads.ask}
    asked |= on_gpu(a.gpu) if a.gpu is not None else {}
    rows = []
    with quick_turns():
        for what, once in asked.items():
            for rest in a.rests:
                low, mid, high = statistics.quantiles(timed(once, a.repeats, rest), n=4)
                rows.append({"what": what, "rest_ms": rest, "median_us": mid, "quartiles_us": [low, high]})
                print(f"{what:38} after {rest:g} ms of rest: {mid:7.1f} us ({low:.1f}-{high:.1f})", flush=True)
    threads.there.put(False)
    asker.close()
    if a.out:
        a.out.write_text(json.dumps({"command": sys.argv, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
