"""What the transport alone costs on CPUs: 2 trainers and 2 takers, one process each, over gloo on this host; no session,
no engine (bench_cpu.py has those).

    python scripts/bench_wire.py [--layers 8] [--layout padded|dense|replicas] [--repeats 7]

Prints, of one run: ours (the planned program, warm), raw gloo send/recv of the same bytes between the same pairs (the
floor), a broadcast of every full tensor with slicing (the usual way), and golden. Median seconds of the slowest rank.
The planner is the real one; the model is a synthetic dense decoder whose fused tensors lie as Megatron-Core and vLLM
lay them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.distributed import FileStore

from xfer.plan.inventory import engine_inventory, trainer_inventory
from xfer.plan.planner import PlanOptions, plan_replica
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import Fragment, Root, Span, TensorSpec
from xfer.transport import p2p as p2p_module
from xfer.transport.golden import golden
from xfer.transport.group import open_group
from xfer.transport.p2p import P2P

ITEM = 2  # bfloat16
SIDE = 2  # ranks of each side


@dataclass
class Model:
    """A Qwen-like decoder. `pad`: elements between the rows of tensors cut along their columns, on both sides."""

    layers: int
    hidden: int = 1024
    ffn: int = 7168
    heads: int = 16
    groups: int = 8
    head_dim: int = 128
    vocab: int = 8192
    pad: int = 0
    specs: list[TensorSpec] = field(default_factory=list)

    def __post_init__(self) -> None:
        h, d = self.hidden, self.head_dim
        for i in range(self.layers):
            for name, shape in (
                ("self_attn.q_proj", (self.heads * d, h)),
                ("self_attn.k_proj", (self.groups * d, h)),
                ("self_attn.v_proj", (self.groups * d, h)),
                ("self_attn.o_proj", (h, self.heads * d)),
                ("mlp.gate_proj", (self.ffn, h)),
                ("mlp.up_proj", (self.ffn, h)),
                ("mlp.down_proj", (h, self.ffn)),
                ("input_layernorm", (h,)),
                ("post_attention_layernorm", (h,)),
            ):
                self.specs.append(TensorSpec(f"model.layers.{i}.{name}.weight", shape, "bfloat16"))
        self.specs.append(TensorSpec("model.embed_tokens.weight", (self.vocab, h), "bfloat16"))


class Layout:
    """Fragments of one rank; every fused tensor is a storage of its own."""

    def __init__(self) -> None:
        self.fragments: list[Fragment] = []
        self.sizes: dict[str, int] = {}

    def put(self, tensor: str, origin, extent, root: str, at_row: int, pitch: int) -> None:
        """A box whose rows begin every `pitch` elements, the first at row `at_row` of `root`."""
        strides = (pitch * ITEM, ITEM) if len(extent) == 2 else (ITEM,)
        self.fragments.append(
            Fragment(tensor, tuple(origin), tuple(extent), root, at_row * pitch * ITEM, strides, "bfloat16")
        )
        rows = extent[0] if len(extent) == 2 else 1
        self.sizes[root] = max(self.sizes.get(root, 0), (at_row + rows) * pitch * ITEM)

    def roots(self) -> list[Root]:
        return [Root(n, s) for n, s in sorted(self.sizes.items())]


def layout(m: Model, rank: int, tp: int, interleaved: bool) -> Layout:
    out, h, d = Layout(), m.hidden, m.head_dim
    q, g, f, cols = m.heads // tp, m.groups // tp, m.ffn // tp, m.heads * d // tp
    per = m.heads // m.groups
    for i in range(m.layers):
        layer = f"model.layers.{i}."
        attn, mlp = layer + "self_attn.", layer + "mlp."
        if interleaved:  # Megatron: per KV group its queries, its key, its value
            for k in range(g):
                base, group = k * (per + 2) * d, rank * g + k
                out.put(attn + "q_proj.weight", (group * per * d, 0), (per * d, h), attn + "qkv", base, h)
                out.put(attn + "k_proj.weight", (group * d, 0), (d, h), attn + "qkv", base + per * d, h)
                out.put(attn + "v_proj.weight", (group * d, 0), (d, h), attn + "qkv", base + (per + 1) * d, h)
        else:  # vLLM: all queries, all keys, all values
            out.put(attn + "q_proj.weight", (rank * q * d, 0), (q * d, h), attn + "qkv", 0, h)
            out.put(attn + "k_proj.weight", (rank * g * d, 0), (g * d, h), attn + "qkv", q * d, h)
            out.put(attn + "v_proj.weight", (rank * g * d, 0), (g * d, h), attn + "qkv", (q + g) * d, h)
        out.put(attn + "o_proj.weight", (0, rank * cols), (h, cols), attn + "o", 0, cols + m.pad)
        out.put(mlp + "gate_proj.weight", (rank * f, 0), (f, h), mlp + "gate_up", 0, h)
        out.put(mlp + "up_proj.weight", (rank * f, 0), (f, h), mlp + "gate_up", f, h)
        out.put(mlp + "down_proj.weight", (0, rank * f), (h, f), mlp + "down", 0, f + m.pad)
        out.put(layer + "input_layernorm.weight", (0,), (h,), layer + "ln1", 0, h)
        out.put(layer + "post_attention_layernorm.weight", (0,), (h,), layer + "ln2", 0, h)
    v = m.vocab // tp
    out.put("model.embed_tokens.weight", (rank * v, 0), (v, h), "embed", 0, h)
    return out


def timed(link, repeats: int, *works: Callable[[], object]) -> list[float]:
    """Median seconds of each from the last rank's start to the last rank's end. They take turns, so that a busy
    machine is as busy for one as for the other; the first turn is not counted.
    """
    token, spent = torch.zeros(1), [[] for _ in works]
    for _ in range(repeats + 1):
        for work, seconds in zip(works, spent):
            _meet(link, token)
            t0 = time.perf_counter()
            work()
            _meet(link, token)
            seconds.append(time.perf_counter() - t0)
    return [statistics.median(s[1:]) for s in spent]


def _meet(link, token: torch.Tensor) -> None:
    for r in range(link.size):
        link.broadcast(token, r, until())


def until() -> float:
    return time.monotonic() + 300


def main_rank(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rank = args.rank
    m = Model(args.layers, pad=64 if args.layout == "padded" else 0)
    trainers = [layout(m, r, SIDE, interleaved=True) for r in range(SIDE)]
    whole = args.layout == "replicas"
    workers = [layout(m, 0, 1, False) if whole else layout(m, r, SIDE, False) for r in range(SIDE)]
    catalog = Catalog.union([("bench", m.specs)])
    sources = [
        trainer_inventory(catalog, rank=i, host="", roots=t.roots(), fragments=t.fragments)
        for i, t in enumerate(trainers)
    ]
    takers = [
        engine_inventory(
            catalog,
            rank=i,
            host="",
            roots=w.roots(),
            fragments=w.fragments,
            reads=[s.name for s in m.specs],
            footprint=[span for f in w.fragments for span in _touched(f)],
        )
        for i, w in enumerate(workers)
    ]
    plan = plan_replica(catalog, sources, takers, PlanOptions())
    mine = (trainers + workers)[rank]
    torch.manual_seed(rank // SIDE)  # replicated tensors are equal on all trainers
    roots = [torch.randint(0, 255, (r.nbytes,), dtype=torch.uint8) for r in mine.roots()]
    link = open_group(FileStore(args.store, 2 * SIDE), rank, 2 * SIDE, 60.0)
    transfer = P2P(link, plan.program(rank), roots, step_bytes=args.step, direct_bytes=args.direct)
    last = transfer.run(until())
    # Written to: pages that nobody has touched are all one page of zeros, which a cache has.
    buffers = [
        (torch.ones(p.bytes_in, dtype=torch.uint8), torch.ones(p.bytes_out, dtype=torch.uint8), p.peer)
        for p in last.peers
    ]

    def raw() -> None:
        into, out = link.post(
            [(i, peer, 0) for i, _, peer in buffers if len(i)], [(o, peer, 0) for _, o, peer in buffers if len(o)]
        )
        for pending in (*into, *out):
            pending.wait(until())

    stats = []
    ours, floor = timed(link, args.repeats, lambda: stats.append(transfer.run(until())), raw)
    last = stats[-1]
    holders = [t.fragments for t in trainers] + [[]] * SIDE
    storages = dict(zip([r.name for r in mine.roots()], roots))
    wanted = mine.fragments if rank >= SIDE else []
    full = {s.name: torch.zeros(s.shape, dtype=torch.bfloat16) for s in m.specs}
    (usual,) = timed(link, max(1, args.repeats // 3), lambda: _broadcast_all(link, holders, storages, wanted, full))
    copies = {n: t.clone() for n, t in storages.items()} if rank >= SIDE else {}
    oracle = float("nan")
    if args.golden:
        t0 = time.perf_counter()
        golden(link, m.specs, holders, storages, wanted, (), copies, until())
        oracle = time.perf_counter() - t0
    if rank >= SIDE and args.golden:
        transfer_ok = all(torch.equal(_seen(copies, f), _seen(storages, f)) for f in wanted)
        if not transfer_ok:
            raise SystemExit(f"rank {rank}: golden and p2p differ")
    if rank == SIDE:
        mb = last.bytes_in / 1e6
        print(
            f"{args.layout}: {mb:.0f} MB per taker, step {args.step or p2p_module.STEP_BYTES['cpu']}, "
            f"{last.messages} messages, "
            f"extra {last.extra_bytes / 1e6:.1f} MB"
        )
        lines = [("ours", ours), ("raw gloo", floor), ("tensor broadcast", usual)] + [("golden", oracle)] * args.golden
        for name, s in lines:
            print(f"  {name:18s} {s * 1e3:9.1f} ms  {mb / s / 1e3:6.2f} GB/s per taker  {s / floor:6.2f}x raw")
        print(
            f"  taker: unpack {last.unpack_s * 1e3:.0f} ms, blocked on the wire {last.wire_s * 1e3:.0f} ms, "
            f"all {last.seconds * 1e3:.0f} ms"
        )
    if rank == 0:
        print(f"  sender: pack {last.pack_s * 1e3:.0f} ms, blocked on the wire {last.wire_s * 1e3:.0f} ms")
    _meet(link, torch.zeros(1))
    link.close()


def _touched(f: Fragment) -> Iterator[Span]:
    """The bytes of a fragment whose rows may be apart."""
    row = f.extent[-1] * ITEM
    if len(f.extent) == 1 or f.strides[0] == row:
        yield Span(f.root, f.offset, f.offset + row * (f.extent[0] if len(f.extent) == 2 else 1))
        return
    for i in range(f.extent[0]):
        yield Span(f.root, f.offset + i * f.strides[0], f.offset + i * f.strides[0] + row)


def _view(storages: dict[str, torch.Tensor], f: Fragment) -> torch.Tensor:
    return torch.as_strided(
        storages[f.root].view(torch.bfloat16), f.extent, [s // ITEM for s in f.strides], f.offset // ITEM
    )


def _seen(storages: dict[str, torch.Tensor], f: Fragment) -> torch.Tensor:
    return _view(storages, f).contiguous().view(torch.int16)


def _broadcast_all(link, holders, storages, wanted, full) -> None:
    """Every tensor to every rank, in pieces as they are held; takers copy their share out of it."""
    for rank, fragments in enumerate(holders):
        for f in fragments:
            piece = (
                _view(storages, f).contiguous() if rank == link.rank else torch.empty(f.extent, dtype=torch.bfloat16)
            )
            link.broadcast(piece, rank, until())
            if wanted:
                full[f.tensor][tuple(slice(o, o + e) for o, e in zip(f.origin, f.extent))] = piece
    for f in wanted:
        _view(storages, f).copy_(full[f.tensor][tuple(slice(o, o + e) for o, e in zip(f.origin, f.extent))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--layout", choices=("padded", "dense", "replicas"), default="padded")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--step", type=int, help="bytes of a pair in a step")
    parser.add_argument("--direct", type=int, help="shortest row that is a message of its own")
    parser.add_argument("--golden", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        main_rank(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--store", f"{folder}/store"]
        ranks = [
            subprocess.Popen([*command, "--rank", str(r)], env={**os.environ, "OMP_NUM_THREADS": "1"})
            for r in range(2 * SIDE)
        ]
        try:
            codes = [p.wait(900) for p in ranks]
        finally:
            for p in ranks:
                p.kill()
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


if __name__ == "__main__":
    main()
