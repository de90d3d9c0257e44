"""Random rows, random programs, and a plain numpy executor of both: the judge of kernels and transports.

The executor walks elements one by one through byte offsets. It shares no code with what it judges; values are converted
by torch, one whole box at a time.
"""

import numpy as np
import torch

from tests.support.trace_maps import places
from xfer.mesh.box import row_major
from xfer.plan.program import DTYPE_CODE, DTYPES, ITEMSIZE, MAX_DIMS, ROW, Op, Program, wire_dtype

PLAIN = ("bfloat16", "float32", "uint8", "float16", "int64", "float8_e4m3fn")
CASTS = [
    ("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32"), ("bfloat16", "float16"),
    ("float16", "bfloat16"), ("float64", "float32"), ("float32", "float8_e4m3fn"),
]  # fmt: skip


def row(extent, *, src_dtype="bfloat16", dst_dtype=None, src_strides=None, dst_strides=None, **columns) -> np.ndarray:
    """One row; strides default to dense."""
    dst_dtype = dst_dtype or src_dtype
    r = np.zeros(1, ROW)
    r["src_dtype"], r["dst_dtype"] = DTYPE_CODE[src_dtype], DTYPE_CODE[dst_dtype]
    r["op"] = Op.COPY if src_dtype == dst_dtype else Op.CAST
    k = MAX_DIMS - len(extent)
    r["extent"][:, :k] = 1
    r["extent"][:, k:] = extent
    for end, strides, item in (("src", src_strides, ITEMSIZE[src_dtype]), ("dst", dst_strides, ITEMSIZE[dst_dtype])):
        r[f"{end}_strides"][:, k:] = np.multiply(row_major(extent), item) if strides is None else strides
    for name, value in columns.items():
        r[name] = value
    return r


def box_bytes(r, end: str) -> np.ndarray:
    """Where the elements of one end of a row lie, int64 [elements, bytes of one]."""
    item = ITEMSIZE[DTYPES[r[f"{end}_dtype"]]]
    return places(int(r[f"{end}_offset"]), r["extent"].tolist(), r[f"{end}_strides"].tolist(), item)


def read_box(storage: np.ndarray, r, end: str) -> torch.Tensor:
    return torch.from_numpy(storage[box_bytes(r, end)].reshape(-1)).view(getattr(torch, DTYPES[r[f"{end}_dtype"]]))


def write_box(storage: np.ndarray, r, value: torch.Tensor) -> None:
    at = box_bytes(r, "dst")
    storage[at] = value.contiguous().view(torch.uint8).numpy().reshape(at.shape)


def apply_row(r, src: list[np.ndarray], target: np.ndarray) -> None:
    """Write what one row leaves in its destination storage."""
    name = DTYPES[r["dst_dtype"]]
    if r["op"] == Op.FILL:
        one = np.frombuffer(int(r["fill"]).to_bytes(8, "little")[: ITEMSIZE[name]], np.uint8)
        value = torch.from_numpy(np.tile(one, int(r["extent"].prod()))).view(getattr(torch, name))
    else:
        value = read_box(src[r["src_root"]], r, "src").to(getattr(torch, name))
    write_box(target, r, value)


def apply_rows(rows: np.ndarray, src: list[np.ndarray], dst: list[np.ndarray]) -> list[np.ndarray]:
    """What the destination storages hold afterwards."""
    out = [d.copy() for d in dst]
    for r in rows:
        apply_row(r, src, out[r["dst_root"]])
    return out


def unpacked_wire(rows: np.ndarray, src: list[np.ndarray], nbytes: int, blank: int) -> np.ndarray:
    """The wire bytes, with `blank` where no row has any."""
    out = np.full(nbytes, blank, np.uint8)
    for r in rows:
        if r["op"] == Op.FILL:
            continue
        name = wire_dtype(DTYPES[r["src_dtype"]], DTYPES[r["dst_dtype"]])
        value = read_box(src[r["src_root"]], r, "src").to(getattr(torch, name))
        data = value.view(torch.uint8).numpy()
        out[int(r["wire"]) : int(r["wire"]) + len(data)] = data
    return out


Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Origin, extent, and the step from one index to the next, per dim."""


def cut(rng: np.random.Generator, shape: tuple[int, ...], parts: int, interleaved: float = 0.0) -> list[Box]:
    """Disjoint boxes that cover a shape: halves of halves, or, as often as `interleaved` says, every other index of a dim."""
    boxes: list[Box] = [((0,) * len(shape), tuple(shape), (1,) * len(shape))]
    for _ in range(parts):
        box = boxes.pop(int(rng.integers(len(boxes))))
        some = [d for d, n in enumerate(box[1]) if n > 1]
        if not some:
            boxes.append(box)
            continue
        d = int(rng.choice(some))
        first, n, step = (x[d] for x in box)
        at = int(rng.integers(1, n))
        halves = [(first, at, step), (first + at * step, n - at, step)]
        if rng.random() < interleaved:
            halves = [(first, -(-n // 2), 2 * step), (first + step, n // 2, 2 * step)]
        boxes += [tuple((*x[:d], v, *x[d + 1 :]) for x, v in zip(box, half)) for half in halves]
    return [boxes[i] for i in rng.permutation(len(boxes))]


class Heap:
    """Hands out disjoint places in a few storages; grows them."""

    def __init__(self, rng: np.random.Generator, roots: int):
        self.rng, self.used = rng, [0] * roots

    def place(self, end: str, extent, item: int, aligned: bool) -> dict[str, object]:
        """Columns of one end of a box: dims permuted, padded and sometimes walked backwards."""
        rng, root = self.rng, int(self.rng.integers(len(self.used)))
        start = self.used[root] + int(rng.integers(0, 3)) * (item if aligned else 1)
        start = -(-start // item) * item if aligned else start
        order = list(range(len(extent)))
        if rng.random() < 0.3:
            rng.shuffle(order)
        strides, step = [0] * len(extent), item
        for d in reversed(order):
            strides[d] = step
            step *= extent[d]
            if rng.random() < 0.2:
                step += item * int(rng.integers(1, 4))
        offset = start
        for d, n in enumerate(extent):
            if n == 1:
                strides[d] = 0
            elif n and rng.random() < 0.2:
                offset, strides[d] = offset + (n - 1) * strides[d], -strides[d]
        self.used[root] = start + step * all(extent)
        return {f"{end}_root": root, f"{end}_offset": offset, f"{end}_strides": tuple(strides)}

    def storages(self, noise: int = 3) -> list[np.ndarray]:
        return [self.rng.integers(0, 256, n + noise, dtype=np.uint8) for n in self.used]


def _values(rng: np.random.Generator, storages: list[np.ndarray], rows: np.ndarray) -> list[np.ndarray]:
    """Storages whose casted elements are ordinary numbers: NaN payloads are not kept by a conversion."""
    for r in rows[rows["op"] == Op.CAST]:
        at = box_bytes(r, "src")
        value = torch.from_numpy(rng.standard_normal(len(at))).to(getattr(torch, DTYPES[r["src_dtype"]]))
        storages[r["src_root"]][at] = value.view(torch.uint8).numpy().reshape(at.shape)
    return storages


def fresh_sources(rng: np.random.Generator, rows: np.ndarray, like: list[np.ndarray]) -> list[np.ndarray]:
    """New source storages for the same rows."""
    return _values(rng, [rng.integers(0, 256, len(r), dtype=np.uint8) for r in like], rows)


def change(rng: np.random.Generator, rows: np.ndarray, storages: list[np.ndarray], share: float) -> None:
    """Write new values into about `share` of the elements that the rows read, and into nothing else."""
    new = fresh_sources(rng, rows, storages)
    for r in rows:
        root, at = int(r["src_root"]), box_bytes(r, "src")
        at = at[rng.random(len(at)) < share]
        storages[root][at] = new[root][at]


def random_row(rng: np.random.Generator, source: Heap | None, destination: Heap, aligned: bool) -> np.ndarray:
    """A copy or a cast; a fill if there is no source."""
    extent = tuple(int(n) for n in rng.integers(1, 6, int(rng.integers(0, 4))))
    src = dst = PLAIN[rng.integers(len(PLAIN))]
    if source is None:
        bits = int(rng.integers(0, 2**63)) & ((1 << 8 * ITEMSIZE[dst]) - 1)
        place = destination.place("dst", extent, ITEMSIZE[dst], aligned)
        return row(extent, src_dtype=dst, **place, fill=bits, op=Op.FILL, tensor=-1, src=-1)
    if rng.random() < 0.3:
        src, dst = CASTS[rng.integers(len(CASTS))]
    ends = source.place("src", extent, ITEMSIZE[src], aligned), destination.place("dst", extent, ITEMSIZE[dst], aligned)
    return row(extent, src_dtype=src, dst_dtype=dst, **ends[0], **ends[1])


def wire_bytes(r) -> int:
    return int(r["extent"].prod()) * ITEMSIZE[wire_dtype(DTYPES[r["src_dtype"]], DTYPES[r["dst_dtype"]])]


def random_rows(rng: np.random.Generator) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Rows of one message and some fills, with source and destination storages."""
    source, destination = Heap(rng, int(rng.integers(1, 4))), Heap(rng, int(rng.integers(1, 4)))
    aligned = rng.random() < 0.7
    out, wire = [], 0
    for _ in range(int(rng.integers(1, 12))):
        r = random_row(rng, None if rng.random() < 0.15 else source, destination, aligned)
        if r["op"][0] != Op.FILL:
            r["wire"] = wire
            wire += wire_bytes(r[0])
        out += [r]
    rows = np.concatenate(out)
    return rows, _values(rng, source.storages(), rows), destination.storages()


def random_world(
    rng: np.random.Generator, ranks: int, waves: int, rows: int
) -> tuple[list[Program], list[list[np.ndarray]]]:
    """Return programs of ranks that are sources, destinations or both, and the storages of each. Some rows are unaligned.

    A rank reads and writes disjoint places of its storages.
    """
    heaps = [Heap(rng, int(rng.integers(1, 3))) for _ in range(ranks)]
    found, used = [], {}
    for _ in range(rows):
        destination = int(rng.integers(ranks))
        if rng.random() < 0.1:
            r = random_row(rng, None, heaps[destination], True)
        else:
            source, wave = int(rng.integers(ranks)), int(rng.integers(waves))
            r = random_row(rng, heaps[source], heaps[destination], rng.random() < 0.8)
            r["src"], r["wave"] = source, wave
            if source != destination:
                key = (source, destination, wave)
                r["wire"] = used.get(key, 0)
                used[key] = used.get(key, 0) + wire_bytes(r[0])
        r["dst"] = destination
        found.append(r)
    table = np.concatenate(found)
    table = table[np.lexsort((table["wire"], table["dst"], table["src"], table["wave"], table["op"] != Op.FILL))]
    programs = [Program(k, waves, table[(table["src"] == k) | (table["dst"] == k)]) for k in range(ranks)]
    return programs, [_values(rng, heaps[k].storages(), table[table["src"] == k]) for k in range(ranks)]


def apply_world(
    programs: list[Program], storages: list[list[np.ndarray]], before: list[list[np.ndarray]] | None = None
) -> list[list[np.ndarray]]:
    """All storages after a refit: every row reads what was there before it, or, if given, `before`."""
    out = [[r.copy() for r in s] for s in storages]
    for p in programs:
        for r in p.rows[p.rows["dst"] == p.rank]:
            apply_row(r, (before or storages)[int(r["src"])], out[p.rank][r["dst_root"]])
    return out


def hard_values(dtype: str) -> torch.Tensor:
    """Values whose conversion shows how it rounds: random bits, ties, subnormals, infinities, NaNs."""
    bits = torch.randint(-(2**31), 2**31 - 1, (4096,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    ties = (torch.arange(2048, dtype=torch.int32) << 20) | 0x8000
    ends = torch.tensor([0x7F800000, 0x7FC00001, 1], dtype=torch.int32)
    return torch.cat([bits, ties, ends]).view(torch.float32).to(getattr(torch, dtype))
