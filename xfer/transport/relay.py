"""Runs a relay (plan/relay.py) on the GPUs of one host: takers pull from the trainers and, a wave later, from each other.

Everything is launched at once; no host stands between two waves. A taker that has a wave writes its number into a word of
each other taker's memory; before its own next wave a taker's stream waits for such words *in its own memory*, so that whoever
watches a stuck taker can write them and let it go. Numbers only grow, over all runs.

What the caller sees to: all takers run together, and none begins its next run, frees or sleeps before all have ended this
one (their storages are being read); if one's run raises, none of them has a whole version, and all open anew. So takers of a
relay commit together or not at all. No session does that yet: relays are run by scripts/bench_gpu.py and tests.
Not here: which row is in which wave (plan/relay.py), pulls without waves (peer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from xfer.errors import Unsupported
from xfer.plan.program import Op, Program
from xfer.transport import cuda_driver as driver
from xfer.transport.peer import Export, Mapping, Pull, PullStats
from xfer.transport.routes import Exchange, any_rank

WORD = 4
"""Bytes of a number that says how far a taker is."""


class Relay:
    """One taker's part. Made by `open_relay`. The gate of its own pull."""

    def __init__(
        self,
        program: Program,
        mapping: Mapping,
        export: Export,
        roots,
        words: torch.Tensor,
        takers: Sequence[int],
        **how,
    ):
        self.mapping, self.export, self.words = mapping, export, words
        self._waves, self._runs = program.waves, 0
        self._place = takers.index(program.rank)
        self._others = [i for i in range(len(takers)) if i != self._place]
        # Where each other taker keeps what this one tells it: words lie behind its storages in its offer.
        self._theirs = [mapping.roots[takers[i]][len(roots)].data_ptr() + self._place * WORD for i in self._others]
        self._free = torch.zeros(len(takers), dtype=torch.int32, pin_memory=True)
        moved = program.rows[program.rows["op"] != Op.FILL]
        self._pull = Pull(moved, mapping, roots, waves=program.waves, gate=self, **how)

    @property
    def extra_bytes(self) -> int:
        return self._pull.extra_bytes + self.words.numel()

    def run(self, deadline: float, cancelled: Callable[[], bool] = lambda: False, where: str = "") -> PullStats:
        """As `Pull.finish`. The other takers have to run too for this to end in time."""
        self._runs += 1
        self._free.fill_(self._number(self._waves))
        self._pull.begin()
        return self._pull.finish(deadline, cancelled, where)

    def stop(self) -> None:
        """From any thread, beside `run`."""
        self._pull.stop()

    def close(self) -> None:
        """Unmaps the others. When all have done so, storages may be freed."""
        self.mapping.close()

    # ---- the gate

    def before(self, wave: int, stream: torch.cuda.Stream) -> None:
        if wave:
            for i in self._others:
                driver.stream_wait_at_least(stream, self.words.data_ptr() + i * WORD, self._number(wave))

    def after(self, wave: int, stream: torch.cuda.Stream) -> None:
        if wave + 1 < self._waves:  # for the last one nobody waits
            for word in self._theirs:
                driver.stream_write(stream, word, self._number(wave + 1))

    def open(self) -> None:
        self.words.view(torch.int32).copy_(self._free, non_blocking=True)

    def _number(self, waves: int) -> int:
        """What a taker's word holds once it has so many waves of this run."""
        return (self._runs - 1) * self._waves + waves


class Sending:
    """A sender's part: to let itself be read."""

    extra_bytes = 0

    def __init__(self, export: Export):
        self.export = export

    def run(self, deadline: float, cancelled: Callable[[], bool] = lambda: False, where: str = "") -> PullStats:
        return PullStats(0, (), 0.0, 0.0)

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


def open_relay(
    program: Program,
    roots: Sequence[torch.Tensor],
    takers: Sequence[int],
    labels: Sequence[str],
    device: torch.device,
    exchange: Exchange,
    **how,
) -> Relay | Sending:
    """Collective over all ranks, `labels` naming them: takers, and all others as senders.

    program: of `plan.relay.relay`; on a sender its rows do not matter. roots: as for `P2P`, equally many on all takers. how: for
    `TritonRows`.
    Unsupported, on all ranks, where a taker cannot map something: then bytes have to go by the usual routes.
    """
    rank, size, taking = program.rank, len(labels), program.rank in takers
    words = torch.zeros(len(takers) * WORD, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    export = Export(rank, [*roots, words] if taking else roots, device)
    offers = exchange(export.to_bytes(), range(size) if taking else ())
    mapping, missing = Mapping(rank, device), []
    try:
        for other in sorted(set(offers) - {rank}):
            mine = (program.rows["src"] == other) & (program.rows["op"] != Op.FILL)
            wanted = sorted(set(program.rows["src_root"][mine].tolist()) | ({len(roots)} if other in takers else set()))
            if wanted:
                mapping.open(offers[other], other, wanted)
                if len(mapping.roots[other]) < len(wanted):
                    missing.append(f"{labels[rank]} from {labels[other]}: {mapping.why(other)}")
        if any_rank(bool(missing), rank, size, exchange):
            raise Unsupported(
                "a relay needs every storage mapped by every taker",
                missing or ["another rank says which"],
                where=labels[rank],
            )
        return Relay(program, mapping, export, roots, words, takers, **how) if taking else Sending(export)
    except BaseException:
        mapping.close()
        raise
