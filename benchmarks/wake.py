"""Time one message between two resting processes of this host: the floor of a refit that moves almost no bytes.

    python -m benchmarks.wake [--rests 0 8] [--repeats 200] [--out wake.json]

A refit's commit takes the path of one round trip here: the coordinator's thread sends a message (Channel), the reading thread
of the other process hands it to a second thread (a queue), and that thread answers; a reading thread takes the answer and
wakes the first. Also timed: a thread that wakes another one and is woken by it. --rests: milliseconds for which both sleep
before each round trip, since a processor that has rested wakes up later. Medians and quartiles, microseconds.
benchmarks.gpu_session --trainers nothing times the refit.
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

from benchmarks.lib import command
from xfer.coordinator import messages as m
from xfer.rendezvous.channel import Channel
from xfer.turns import quick_turns, short_sleeps

WAIT_S = 20.0


def echo(fd: int) -> None:
    """The other process: its reading thread wakes a thread, which answers."""
    words: queue.SimpleQueue[m.Message | None] = queue.SimpleQueue()
    channel = Channel(socket.socket(fileno=fd), "asker")
    channel.start(words.put, lambda reason: words.put(None))
    short_sleeps()
    while (word := words.get()) is not None:
        channel.send(word)


def timed(once: Callable[[], object], repeats: int, rest_ms: float) -> list[float]:
    """Microseconds of each call after the first ten."""
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
            [sys.executable, "-m", "benchmarks.wake", "--echo", str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self.words: queue.SimpleQueue[m.Message | None] = queue.SimpleQueue()
        self.channel = Channel(ours, "echo")
        self.channel.start(self.words.put, lambda reason: self.words.put(None))

    def ask(self) -> None:
        self.channel.send(m.Commit(0, 1, "a version"))
        if self.words.get(timeout=WAIT_S) is None:
            raise SystemExit("the other process has ended")

    def close(self) -> None:
        self.channel.close()
        self.process.wait(WAIT_S)


class Threads:
    """A thread that wakes another one and waits for its answer."""

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


def main() -> None:
    p = command.parser("wake", __doc__)
    p.add_argument("--rests", type=float, nargs="+", default=[0.0, 8.0], help="milliseconds of sleep before each")
    p.add_argument("--repeats", type=int, default=200)
    p.add_argument("--out", type=Path, help="write all figures there, JSON")
    p.add_argument("--echo", type=int, help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.echo is not None:
        return echo(a.echo)
    short_sleeps()
    asker, threads = Asker(), Threads()
    asked = {"a message to a process and back": asker.ask, "a thread wakes another and back": threads.ask}
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
        a.out.write_text(json.dumps({"command": sys.argv[1:], "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
