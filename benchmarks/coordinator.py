"""Measure how the rendezvous scales: simulated clients meet over loopback, refit without bytes, and lose workers.

Messages, sockets, the token's proof and the coordinator are the real ones. Clients answer at once, so what is measured is
the rendezvous: seconds until all replicas are ready, seconds of a refit from the first Enter to the last Outcome, the
processor time of trainer 0's process in it (of that, of the coordinator without sockets and coding), its threads and memory.

    python -m benchmarks.coordinator                                                    2,048 participants, 128 replicas
    python -m benchmarks.coordinator --trainers 1 --replicas 1 --workers 1 --refits 500     a refit of no bytes
    python -m benchmarks.coordinator --tree PATH                                        measure the xfer of another checkout
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import hmac
import importlib.util
import json
import multiprocessing as mp
import os
import resource
import socket
import statistics
import struct
import sys
import threading
import time
from pathlib import Path

from benchmarks.lib import command

TOKEN = "a token for benchmarks"
FAR_S = 600.0


def arguments() -> argparse.Namespace:
    p = command.parser("coordinator", __doc__)
    p.add_argument("--trainers", type=int, default=1024)
    p.add_argument("--replicas", type=int, default=128)
    p.add_argument("--workers", type=int, default=8, help="workers of a replica")
    p.add_argument("--processes", type=int, default=4, help="processes that hold the clients")
    p.add_argument("--refits", type=int, default=10)
    p.add_argument("--dense", action="store_true", help="every trainer reports bytes for every replica")
    p.add_argument(
        "--lose",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="then lose a worker of one replica and all processes of another one, and refit again",
    )
    p.add_argument(
        "--tree",
        type=Path,
        default=Path(__file__).resolve().parents[1],
        help="the checkout whose xfer is measured; default: this one",
    )
    p.add_argument("--json", action="store_true", help="print one line of JSON")
    return p.parse_args()


def use(tree: Path) -> None:
    """Make `import xfer` mean the package of checkout `tree`. Call it before anything of xfer is imported."""
    folder = tree.resolve() / "xfer"
    spec = importlib.util.spec_from_file_location(
        "xfer", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    sys.modules["xfer"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["xfer"])


# ---- clients


class Client:
    """One connection; `heard` answers its messages. All clients of a process share one asyncio loop."""

    def __init__(self, place, hello):
        self.place, self.hello, self.buffer, self.proven = place, hello, bytearray(), 0

    async def connect(self) -> None:
        for _ in range(200):
            try:
                _, self.protocol = await asyncio.get_running_loop().create_connection(
                    lambda: Wire(self), "127.0.0.1", self.place.port
                )
                await asyncio.wait_for(self.protocol.ready.wait(), 60)
                break
            except (OSError, asyncio.TimeoutError):
                await asyncio.sleep(0.05)
        self.say(self.hello)

    def say(self, message) -> None:
        data = self.place.m.encode(message)
        self.protocol.write(struct.pack("<I", len(data)) + data)

    def lane(self, x) -> bool:
        m = self.place.m
        if isinstance(x, m.PlanInputs):
            more = (0.0,) if "seconds" in m.Planned.__struct_fields__ else ()
            self.say(m.Planned(x.replica, x.epoch, "digest", *more))
        elif isinstance(x, m.OpenLink):
            self.say(m.LinkOpen(x.replica, x.epoch))
        elif isinstance(x, m.Go) and hasattr(x, "replicas"):
            moved = [m.Moved(r, 1, 1, 0.1, 0.1, 0.1) for r in x.replicas] if self.place.a.dense else ()
            self.say(m.Done(x.attempt, x.replicas, tuple(moved)))
        elif isinstance(x, m.Go):  # a message for each pair of a trainer and a replica
            self.say(m.Done(x.replica, x.attempt, 0, 0, 0.0, 0.0, 0.0))
        elif isinstance(x, m.CloseRoutes):
            self.say(m.RoutesClosed(x.replica))
        else:
            return False
        return True


class Wire(asyncio.Protocol):
    """The client's end of rendezvous/channel.py's handshake and frames."""

    def __init__(self, client: Client):
        self.client, self.buffer, self.state, self.ready = client, bytearray(), 0, asyncio.Event()
        self.unsent: list[bytes] = []
        self.hearing = False

    def connection_made(self, transport) -> None:
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc) -> None:
        self.client.place.gone += 1

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        magic = self.client.place.magic
        if self.state == 0 and len(self.buffer) >= len(magic) + 32:
            theirs, mine = bytes(self.buffer[len(magic) : len(magic) + 32]), os.urandom(32)
            del self.buffer[: len(magic) + 32]
            proof = hmac.new(TOKEN.encode(), b"client" + theirs + mine, hashlib.sha256).digest()
            self.transport.write(magic + mine + proof)
            self.state = 1
        if self.state == 1 and len(self.buffer) >= 32:
            del self.buffer[:32]
            self.state = 2
            self.ready.set()
        self.hearing, at, buffer = True, 0, self.buffer
        while self.state == 2 and len(buffer) >= at + 4:
            (n,) = struct.unpack_from("<I", buffer, at)
            if len(buffer) < at + 4 + n:
                break
            self.client.heard(self.client.place.m.decode(bytes(buffer[at + 4 : at + 4 + n])))
            at += 4 + n
        del buffer[:at]
        self.hearing = False
        self.flush()

    def write(self, frame: bytes) -> None:
        """Answers to frames that came together leave together."""
        self.unsent.append(frame)
        if not self.hearing:
            self.flush()

    def flush(self) -> None:
        if self.unsent:
            self.transport.write(b"".join(self.unsent))
            self.unsent.clear()


class Trainer(Client):
    def heard(self, x) -> None:
        m = self.place.m
        if isinstance(x, m.Welcome):
            self.say(m.Specs(self.place.specs))
        elif isinstance(x, m.CatalogMsg):
            self.generation = x.generation
            self.say(m.InventoryMsg(b"t" * 32, x.generation))
        elif isinstance(x, m.ReplicaReady):
            self.place.ready += 1
        elif isinstance(x, m.Outcome):
            self.place.outcomes.append((x.attempt, sum(o.committed for o in x.outcomes), time.monotonic()))
        else:
            self.lane(x)

    def refit(self, number: int) -> None:
        m = self.place.m
        asked = "", False, 1, 60.0
        self.say(m.Enter(number, m.Arguments(*asked)) if hasattr(m, "Arguments") else m.Enter(number, *asked))
        self.say(m.Ready(number))


class Worker(Client):
    def heard(self, x) -> None:
        m = self.place.m
        if isinstance(x, m.CatalogMsg):
            self.say(m.InventoryMsg(b"w" * 32, x.generation))
        elif isinstance(x, m.Commit):
            self.say(m.Committed(x.replica, x.attempt))
        elif isinstance(x, m.Abort):
            self.say(m.Stopped(self.hello.replica, x.attempt, False))
        else:
            self.lane(x)


class Controller(Client):
    def heard(self, x) -> None:
        m = self.place.m
        if isinstance(x, m.Welcome):
            asyncio.get_running_loop().create_task(self.bring())
        elif isinstance(x, m.Arm):
            for w in self.workers:
                w.say(m.Armed(x.attempt))
        elif isinstance(x, m.Settle) or isinstance(x, m.Commit) and hasattr(m, "Decided"):  # as older trees say it
            self.say(m.Settled(x.attempt, getattr(x, "version", "0"), True, 0.0))

    async def bring(self) -> None:
        await asyncio.gather(*(w.connect() for w in self.workers))


class Place:
    """One process of clients. Its pipe brings orders: "meet", the number of a refit, "lose" or "end"."""

    def __init__(self, pipe, port: int, a: argparse.Namespace, trainers: list[int], replicas: list[int]):
        use(a.tree)
        try:
            from xfer.coordinator import messages as m
            from xfer.rendezvous import channel

            try:
                from xfer.coordinator.layouts import pack_specs
            except ImportError:  # e2eed4f and before
                from xfer.coordinator.packing import pack_specs
        except ImportError:  # 1db6d82 and before
            from xfer.session import channel
            from xfer.session import messages as m
            from xfer.session.packing import pack_specs
        from xfer.trace.catalog import Catalog
        from xfer.trace.fragment import TensorSpec

        self.m, self.magic, self.port, self.a, self.pipe = m, channel.MAGIC, port, a, pipe
        some = Catalog.union([("t", [TensorSpec("t", (4,), "bfloat16")])]).to_bytes()
        self.specs = pack_specs(some, [])
        self.ready = self.gone = 0
        self.outcomes: list[tuple[int, int, float]] = []

        def hello(role, index, size, replica=0):
            said = role, index, size, replica, f"host{replica}", os.getpid()
            return m.Hello(*said) if "wire_version" not in m.Hello.__struct_fields__ else m.Hello(m.WIRE_VERSION, *said)

        self.trainers = [Trainer(self, hello("trainer", i, a.trainers)) for i in trainers]
        self.controllers = []
        for r in replicas:
            c = Controller(self, hello("controller", 0, a.workers, r))
            c.workers = [Worker(self, hello("worker", i, a.workers, r)) for i in range(a.workers)]
            self.controllers.append(c)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        orders: asyncio.Queue = asyncio.Queue()

        def read() -> None:
            while True:
                order = self.pipe.recv()
                loop.call_soon_threadsafe(orders.put_nowait, order)
                if order == "end":
                    return

        threading.Thread(target=read, daemon=True).start()
        while (order := await orders.get()) != "end":
            if order == "meet":
                await asyncio.gather(*(c.connect() for c in (*self.trainers, *self.controllers)))
                while self.ready < len(self.trainers) * self.a.replicas:
                    await asyncio.sleep(0.005)
                self.pipe.send(time.monotonic())
            elif order == "lose":
                for c in self.controllers:
                    if c.hello.replica < 2:
                        gone = c.workers[:1] if c.hello.replica == 0 else [c, *c.workers]
                        for client in gone:
                            client.protocol.transport.abort()
                await asyncio.sleep(0.5)
                self.pipe.send(time.monotonic())
            else:
                number, began = order, time.monotonic()
                for t in self.trainers:
                    t.refit(number)
                until = began + 120
                while sum(o[0] == number for o in self.outcomes) < len(self.trainers) and time.monotonic() < until:
                    await asyncio.sleep(0.0002 if len(self.trainers) < 8 else 0.002)
                mine = [o for o in self.outcomes if o[0] == number]
                committed = min((o[1] for o in mine), default=self.a.replicas)
                self.pipe.send((began, max((o[2] for o in mine), default=began), committed))


def place(pipe, *args) -> None:
    asyncio.run(Place(pipe, *args).run())


# ---- the rendezvous


def serve(port: int, a: argparse.Namespace):
    """Start the rendezvous in this process, under the names of old and new checkouts."""
    address = f"tcp://127.0.0.1:{port}"
    try:
        from xfer.coordinator.state import Options
        from xfer.rendezvous.server import Server

        return Server(address, TOKEN, Options(a.trainers, a.replicas, FAR_S, 1 << 20))
    except ImportError:
        from xfer.session.hub import Hub
        from xfer.session.roster import HubOptions

        return Hub(address, TOKEN, HubOptions(a.trainers, a.replicas, FAR_S, 1 << 20))


def timed(server) -> list[float]:
    """Add up the processor time of `Coordinator.handle`, without sockets and coding, in the only entry of the list."""
    out, handle = [0.0], server.coordinator.handle

    def handled(event, now):
        began = time.thread_time()
        effects = handle(event, now)
        out[0] += time.thread_time() - began
        return effects

    server.coordinator.handle = handled
    return out


def main() -> None:
    a = arguments()
    use(a.tree)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ctx = mp.get_context("spawn")
    pipes, children = [], []
    for p in range(a.processes):
        ours, theirs = ctx.Pipe()
        mine = list(range(p, a.trainers, a.processes)), list(range(p, a.replicas, a.processes))
        child = ctx.Process(target=place, args=(theirs, port, a, *mine), daemon=True)
        child.start()
        pipes.append(ours)
        children.append(child)
    import xfer

    server = serve(port, a)
    deciding = timed(server)
    began, cpu = time.monotonic(), time.process_time()
    for pipe in pipes:
        pipe.send("meet")
    met = max(pipe.recv() for pipe in pipes) - began
    met_cpu = time.process_time() - cpu
    threads, seconds, busy = threading.active_count(), [], []
    own: list[float] = []
    gc.collect()

    def refit(number: int) -> int:
        cpu, decided = time.process_time(), deciding[0]
        for pipe in pipes:
            pipe.send(number)
        said = [pipe.recv() for pipe in pipes]
        seconds.append(max(x[1] for x in said) - min(x[0] for x in said))
        busy.append(time.process_time() - cpu)
        own.append(deciding[0] - decided)
        return min(x[2] for x in said)

    committed = [refit(n + 1) for n in range(a.refits)]
    out = {
        "xfer": str(Path(xfer.__file__).parents[1]),
        "participants": a.trainers + a.replicas * a.workers,
        "seconds_to_meet": round(met, 3),
        "cpu_s_to_meet": round(met_cpu, 3),
        "refit_ms_median": round(1e3 * statistics.median(seconds), 3),
        "cpu_ms_per_refit_median": round(1e3 * statistics.median(busy), 3),
        "coordinator_ms_per_refit_median": round(1e3 * statistics.median(own), 3),
        "replicas_committed": min(committed),
        "threads": threads,
        "rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }
    if a.lose:
        for pipe in pipes:
            pipe.send("lose")
        [pipe.recv() for pipe in pipes]
        seconds.clear()
        out["replicas_committed_after_losses"] = refit(a.refits + 1)
    for pipe in pipes:
        pipe.send("end")
    server.close()
    print(json.dumps(out) if a.json else "\n".join(f"{k:34} {v}" for k, v in out.items()))


if __name__ == "__main__":
    main()
