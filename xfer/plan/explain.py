"""A plan in numbers, and as text for a person: what moves where, how evenly, and what happens to every byte."""

from __future__ import annotations

from dataclasses import dataclass

from xfer.plan.coverage import ByteClasses


@dataclass(frozen=True, slots=True)
class Casts:
    """Tensors that change dtype on the way."""

    src: str
    dst: str
    tensors: int
    pieces: int
    example: str


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """Numbers of one sub-plan. Per-trainer and per-worker tuples are in rank order; bytes are wire bytes unless named
    otherwise.
    """

    trainers: int
    workers: int
    waves: int
    messages: int
    tensors: int
    bytes_out: tuple[int, ...]  # per trainer
    bytes_in: tuple[int, ...]  # per worker
    pieces_out: tuple[int, ...]  # parts of pieces, per trainer
    pieces_in: tuple[int, ...]  # per worker
    largest_piece: int
    largest_message: int
    remote_bytes: int  # bytes that leave their host, when hosts are known
    fills: int
    direct: int  # pieces that land in live storage
    staged: int  # pieces that land in scratch, for recipes
    classes: tuple[ByteClasses, ...]  # per worker
    casts: tuple[Casts, ...]
    kept: tuple[tuple[str, int], ...]  # (reason, bytes over all workers)
    dropped: tuple[str, ...]  # checkpoint tensors that drop= excuses
    broadcast_bytes: int  # bytes if every worker got every tensor whole

    @property
    def nbytes(self) -> int:
        return sum(self.bytes_out)

    @property
    def imbalance(self) -> float:
        """Most bytes of a trainer over the mean: 1.0 is even. 1.0 too when nothing moves."""
        return max(self.bytes_out) * len(self.bytes_out) / self.nbytes if self.nbytes else 1.0

    @property
    def kept_bytes(self) -> int:
        """Live bytes of all workers that a refit leaves as they are; `kept` says which and why."""
        return sum(c.kept for c in self.classes)

    @property
    def direct_share(self) -> float:
        """Share of the received bytes that land in live storage, not in scratch."""
        live, scratch = sum(c.written for c in self.classes), sum(c.scratch for c in self.classes)
        return live / (live + scratch) if live + scratch else 1.0

    def scalars(self) -> dict[str, float]:
        """Flat numbers for a logger."""
        names = (
            "waves",
            "messages",
            "largest_piece",
            "largest_message",
            "remote_bytes",
            "fills",
            "direct",
            "staged",
            "broadcast_bytes",
            "nbytes",
        )
        return {n: float(getattr(self, n)) for n in names} | {
            "imbalance": self.imbalance,
            "max_bytes_out": float(max(self.bytes_out, default=0)),
            "max_bytes_in": float(max(self.bytes_in, default=0)),
            "pieces": float(sum(self.pieces_in)),
            "bytes_kept": float(self.kept_bytes),
        }


ROWS = 64
"""Most ranks listed per side. With more, only the extremes and a count are listed."""


def explain(s: PlanSummary, digest: str) -> str:
    """The answer to "what moves where", as lines of at most about 120 columns."""
    ratio = f" ({s.broadcast_bytes / s.nbytes:.1f}x)" if s.nbytes else ""
    lines = [
        f"sub-plan {digest[:12]}: {s.trainers} trainers -> {s.workers} engine workers, {s.tensors} checkpoint tensors",
        f"moves {size(s.nbytes)} in {sum(s.pieces_in):,} pieces, {s.messages:,} messages, {s.waves} waves;"
        f" a full broadcast would move {size(s.broadcast_bytes)}{ratio}",
        f"largest piece {size(s.largest_piece)}, largest message {size(s.largest_message)};"
        f" {s.direct:,} pieces direct, {s.staged:,} through scratch, {s.fills:,} fills",
        f"imbalance of sources {s.imbalance:.3f} (most over mean)"
        + (f"; {size(s.remote_bytes)} between hosts" if s.remote_bytes else ""),
        "",
    ]
    lines += table(
        ("trainer", "out", "pieces"),
        [(str(i), size(b), f"{p:,}") for i, (b, p) in enumerate(zip(s.bytes_out, s.pieces_out))],
    )
    lines.append("")
    rows = [
        (f"{i} (rank {i + s.trainers})", size(b), f"{p:,}", *(size(getattr(c, n)) for n in _CLASSES))
        for i, (b, p, c) in enumerate(zip(s.bytes_in, s.pieces_in, s.classes))
    ]
    lines += table(("worker", "in", "pieces", *_CLASSES), rows)
    lines += [
        f"cast {c.src} -> {c.dst}: {c.tensors:,} tensors, {c.pieces:,} pieces, such as {c.example}" for c in s.casts
    ]
    lines += [f"kept {size(n)}: {why}" for why, n in s.kept]
    if s.dropped:
        more = f" and {len(s.dropped) - 8} more" if len(s.dropped) > 8 else ""
        lines.append(f"dropped (no engine reads them, as asked): {', '.join(s.dropped[:8])}{more}")
    return "\n".join(lines)


_CLASSES = ("footprint", "written", "filled", "staged", "kept", "aliased", "scratch")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Right-aligned columns; the middle of a long table is left out."""
    hidden = len(rows) - ROWS
    shown = rows if hidden <= 0 else rows[: ROWS // 2] + rows[-ROWS // 2 :]
    width = [max(len(r[i]) for r in [head, *shown]) for i in range(len(head))]
    out = ["  ".join(c.rjust(w) for c, w in zip(r, width)) for r in [head, *shown]]
    if hidden > 0:
        out.insert(1 + ROWS // 2, f"… {hidden} more …")
    return out


def size(n: int) -> str:
    """Bytes with three digits: "15.3 GB", "768 B"."""
    value = float(n)
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if value < 999.5 or unit == "PB":
            return f"{n} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError("unreachable")
