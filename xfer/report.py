"""The report of a refit: versions, bytes, and seconds on three clocks that are never mixed.

transfer   last trainer ready and all workers armed -> decision        (coordinator's clock; a new plan and link are part of it;
           staged: last trainer ready -> all bytes in scratch, and all workers armed -> decision)
outage     pause sent -> resume acknowledged, as requests see it        (controller's clock)
call       entry of nccl_xfer_refit -> return                           (trainer's clock)
"""

from __future__ import annotations

from dataclasses import dataclass

from xfer.coordinator.messages import ReplicaOutcome
from xfer.errors import RefitFailed
from xfer.logs import counted
from xfer.plan.explain import size


@dataclass(frozen=True, slots=True)
class RefitReport:
    """Result of `nccl_xfer_refit` on one trainer rank.

    Attributes:
        rank: The trainer rank.
        version: The label, in the type that the caller gave it; a number if the caller gave none. None in a pending report
            if this rank does not know the number yet.
        seconds: Wall time of the call.
        outcomes: The outcome on each replica; empty in a pending report.
        bytes_sent: Bytes that this rank sent, or that others read from it.
        broadcast_bytes: Bytes that the replicas would receive if every worker got every tensor whole.
        extra_bytes: Bytes of buffers that this rank holds beside the model.
        kept_bytes: Live bytes of all workers that refits leave as they are, by `keep=` or because they are buffers that no
            checkpoint fills; `Session.explain()` lists them.
        pending: Whether the call returned before the outcomes were known: `publish`, or `wait="sources"`.
        before: The report of the refit before this one, if that call was pending, with the `seconds` of that call.
        fence_s: After `publish`: seconds for which the fence waited for engines that were still reading.
        rules: Names of the rules by which this rank quantized weights for engines that serve them in FP8 ("ieee", "pow2"), and
            "native" if it keeps such weights in FP8 itself; () if no engine does. `Session.explain()` says what engines then hold.
        compare_s: With `delta="auto"`: seconds, before this rank was ready, in which it compared its weights with those of the refit
            before, or read those whose optimizer marks what it changes, to see whether anything else has written them.
    """

    rank: int
    version: int | str | None
    seconds: float
    outcomes: tuple[ReplicaOutcome, ...]
    bytes_sent: int
    broadcast_bytes: int
    extra_bytes: int
    kept_bytes: int
    pending: bool = False
    before: RefitReport | None = None
    fence_s: float = 0.0
    rules: tuple[str, ...] = ()
    compare_s: float = 0.0

    def __str__(self) -> str:
        name = "a version without a number yet" if self.version is None else f"version {self.version!r}"
        if self.pending:
            return f"{name} is under way, after {self.seconds * 1e3:.1f} ms"
        routes = " and ".join(dict.fromkeys(r.route for o in self.outcomes for r in o.routes))
        parts = [f"{size(self.bytes)} in {self.transfer_s * 1e3:.1f} ms"]
        parts[0] += f", {self.gb_per_s:.3g} GB/s" if self.gb_per_s else ""
        parts[0] += f" by {routes}" if routes else ""
        parts += [f"outage {self.outage_s * 1e3:.1f} ms", *(["verified"] if self.verified else [])]
        parts += [str(o) for o in self.outcomes if not o.committed]
        return f"{name} committed by {self.committed} of {counted(len(self.outcomes), 'replica')}: {'; '.join(parts)}"

    def __repr__(self) -> str:
        return f"<RefitReport of trainer {self.rank}: {self}>"

    @property
    def bytes(self) -> int:
        """Bytes received by all workers of all replicas, also of those that did not commit."""
        return sum(o.bytes_moved for o in self.outcomes)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch that all workers hold for staged refits."""
        return sum(o.scratch_bytes for o in self.outcomes)

    @property
    def transfer_s(self) -> float:
        """Seconds on the transfer clock of the slowest replica."""
        return max((o.transfer_s for o in self.outcomes), default=0.0)

    @property
    def outage_s(self) -> float:
        """Seconds on the outage clock of the slowest replica."""
        return max((o.outage_s for o in self.outcomes), default=0.0)

    @property
    def gb_per_s(self) -> float:
        """Gigabytes (1e9 bytes) per second over the slowest replica's transfer clock; 0 if nothing was moved."""
        return self.bytes / self.transfer_s / 1e9 if self.transfer_s else 0.0

    def routes(self) -> str:
        """One line per replica with the bytes and the rate of each route, over all its workers."""
        return "\n".join(
            f"replica {o.replica}: {'; '.join(map(str, o.routes)) or 'nothing came over a wire'}" for o in self.outcomes
        )

    @property
    def committed(self) -> int:
        """Number of replicas that committed."""
        return sum(o.committed for o in self.outcomes)

    @property
    def verified(self) -> bool:
        """Whether some replica committed, and all that did compared checksums."""
        return self.committed > 0 and all(o.verified for o in self.outcomes if o.committed)

    def flatten(self, prefix: str = "xfer/") -> dict[str, float]:
        """Return scalars for a logger.

        A report of `wait="sources"` has no outcomes yet: the next report includes them with "before/" in front of the name.

        Args:
            prefix: Beginning of all names.
        """
        out = {
            "call_s": self.seconds, "broadcast_bytes": float(self.broadcast_bytes), "bytes_sent": float(self.bytes_sent),
            "kept_bytes": float(self.kept_bytes),
        }  # fmt: skip
        if not self.pending:
            out |= {
                "transfer_s": self.transfer_s, "outage_s": self.outage_s, "bytes": float(self.bytes), "gb_per_s": self.gb_per_s,
                "committed": float(self.committed), "replicas": float(len(self.outcomes)),
                "scratch_bytes": float(self.scratch_bytes),
            }  # fmt: skip
        if self.fence_s:
            out["fence_s"] = self.fence_s
        if self.compare_s:
            out["compare_s"] = self.compare_s
        if self.before is not None:
            out |= {k: v for k, v in self.before.flatten("before/").items() if k != "before/call_s"}
        for name in dict.fromkeys(n for o in self.outcomes for n, _ in o.phases):
            out[f"{name}_s"] = max(s for o in self.outcomes for n, s in o.phases if n == name)
        for name in dict.fromkeys(r.route for o in self.outcomes for r in o.routes):
            taken = [r for o in self.outcomes for r in o.routes if r.route == name]
            out[f"route/{name}_bytes"] = float(sum(r.bytes for r in taken))
            out[f"route/{name}_s"] = max(r.seconds for r in taken)
        return {prefix + k: v for k, v in out.items()}

    def raise_unless(self, min_replicas: int) -> None:
        """Raise if fewer than `min_replicas` committed: the common type of all causes, else RefitFailed."""
        if self.pending or self.committed >= min_replicas:
            return
        errors = [o.error for o in self.outcomes if o.error is not None]
        lines = []
        for o in self.outcomes:
            state = "serves nothing" if o.version is None else f"serves version {o.version!r}"
            lines.append(
                f"replica {o.replica}: {'committed' if o.committed else 'not committed'}, {state}"
                + (f"; {o.error}" if o.error is not None and len(errors) > 1 else "")
            )
        head = f"refit to version {self.version!r}: {self.committed} of {len(self.outcomes)} replicas committed, {min_replicas} wanted"
        kinds = {type(e) for e in errors}
        if len(kinds) == 1:
            first = errors[0]
            raise type(first)(f"{first.message} ({head})", (*first.violations, *lines), where=first.where)
        raise RefitFailed(head, lines)
