"""Tensors that all ranks of a group compute together: each rank computes its own share again, bit for bit. The merge of an adapter,
`W + s * (B @ A)`, is traced for each rank alone, and its recipes run on real numbers, one thread per rank, with real gathers.
"""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.examples import EXAMPLES
from tests.support.fake_group import one_rank
from tests.support.replay import trace_export
from tests.support.threads import Gather, all_good, run_ranks
from xfer.errors import Unsupported
from xfer.trace.export import ExportWatch
from xfer.trace.traced import Traced, byte_region
from xfer.trainers.computed import Computed

OUT, IN, RANK = 12, 8, 4
SHAPES = {"w": (OUT, IN), "a": (RANK, IN), "b": (OUT, RANK)}


@dataclass(frozen=True)
class Merge:
    """`cut`: the dim along which each factor lies on the ranks, None where every rank has all of it."""

    world: int
    cut: tuple[int | None, int | None, int | None]  # w, a, b
    interleaved: bool = False  # rows of w and b are reordered on the way, as q, k and v are
    halves: bool = False  # gate and up: two exported tensors from one parameter
    scale: float = 2.0
    into: bool = False  # gathered into one tensor, not a list
    rows: bool = False  # a factor per row, which is broadcast: what it scales is computed whole
    dtype: torch.dtype = torch.bfloat16

    def local(self, name: str, full: torch.Tensor, rank: int) -> torch.Tensor:
        dim = self.cut["wab".index(name)]
        return full if dim is None else full.chunk(self.world, dim)[rank].contiguous()

    def whole(self, name: str, mine: torch.Tensor) -> torch.Tensor:
        """On a rank: all of it, gathered."""
        dim = self.cut["wab".index(name)]
        if dim is None or self.world == 1:
            return mine
        if self.into:
            flat = torch.empty(self.world * mine.numel(), dtype=mine.dtype, device=mine.device)
            dist.all_gather_into_tensor(flat, mine.reshape(-1))
            return torch.cat([x.view(mine.shape) for x in flat.chunk(self.world)], dim)
        slots = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(slots, mine)
        return torch.cat(slots, dim)

    def outputs(self, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        """From whole tensors. The same code on meta and on real ones."""
        if self.interleaved:
            order = torch.arange(OUT).view(2, 3, 2).transpose(0, 1).reshape(-1)
            w, b = w[order], b[order]
        parts = {"x": (w, b)}
        if self.halves:
            (w0, w1), (b0, b1) = w.chunk(2), b.chunk(2)
            parts = {"x": (w0, b0), "y": (w1, b1)}
        out = {}
        for name, (wp, bp) in parts.items():
            delta = self.scale * (bp @ a)
            if self.rows:
                delta = delta * bp.sum(1, keepdim=True)
            out[name] = wp + delta
        return out


cuts = st.sampled_from([None, 0, 1])
merges = st.builds(
    Merge, world=st.sampled_from([1, 2, 4]), cut=st.tuples(cuts, cuts, cuts), interleaved=st.booleans(),
    halves=st.booleans(), scale=st.sampled_from([1.0, 0.3]), into=st.booleans(), rows=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)  # fmt: skip


def traced(m: Merge, full: dict[str, torch.Tensor], rank: int) -> Traced:
    """The trace that rank `rank` takes of the export, alone."""
    with one_rank(rank, m.world):
        twins = {n: torch.empty(m.local(n, t, rank).shape, dtype=m.dtype, device="meta") for n, t in full.items()}
        watch = ExportWatch(twins)

        def stream():
            # What is parameters is gathered inside the watch, and the rest follows from it.
            yield from m.outputs(*(m.whole(n, watch.sources[n]) for n in "wab")).items()

        return trace_export(watch, stream())


def computed(m: Merge, full: dict[str, torch.Tensor], rank: int) -> Computed:
    made = traced(m, full, rank)
    assert not made.unread
    return Computed(made, torch.device("cpu"))


def full_tensors(m: Merge, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=g).to(m.dtype) for n, s in SHAPES.items()}


@settings(max_examples=EXAMPLES, deadline=None)
@given(merges, st.integers(0, 10))
def test_each_rank_computes_its_share_of_what_all_compute_bit_for_bit(m, seed):
    ranks = [computed(m, full_tensors(m, seed), r) for r in range(m.world)]
    for again in (seed, seed + 100):  # new values, same recipes
        full, gather = full_tensors(m, again), Gather(m.world)

        def one(rank: int, full=full, gather=gather) -> None:
            local = {n: m.local(n, t, rank) for n, t in full.items()}
            ranks[rank].run(local.__getitem__, lambda group, mine: gather(rank, mine))

        all_good(run_ranks(m.world, one))
        want = m.outputs(*(full[n] for n in "wab"))
        holders = {n: torch.zeros(t.shape, dtype=torch.int64) for n, t in want.items()}
        for c in ranks:
            for f in c.fragments:
                got = byte_region(c.storage, f.offset, f.extent, f.strides, f.dtype).contiguous()
                assert torch.equal(got.view(torch.uint8), want[f.tensor][f.index].contiguous().view(torch.uint8))
                holders[f.tensor][f.index] += 1
    cut = m.cut[0] is not None
    for n, h in holders.items():
        if m.world == 1 or not cut:
            assert bool((h == m.world).all()), n
        else:  # exactly one rank, though all of them have all of it in the framework
            assert bool((h == 1).all()), n
    if cut:
        share = OUT * IN * m.dtype.itemsize // m.world
        assert all(c.nbytes < share + 1024 * len(c.fragments) for c in ranks)
    assert len({str([x.digest() for x in c.exchanges]) for c in ranks}) == 1  # ranks agree on what may be gathered


def test_a_base_that_is_cut_is_not_gathered_again():
    m = Merge(2, (0, 0, 0))
    c = computed(m, full_tensors(m, 0), 0)
    (x,) = c.exchanges
    assert [x.gathers[i].mine.view.shape for i in x.needed] == [(RANK // 2, IN), (OUT // 2, RANK)], "and not the weight"
    assert c.gathered_bytes == sum(full_tensors(m, 0)[n].nbytes for n in "ab")


def test_scratch_beyond_the_limit_is_refused_with_the_bytes_that_it_takes():
    m = Merge(1, (None, None, None))
    made = traced(m, full_tensors(m, 0), 0)
    need = Computed(made, torch.device("cpu")).nbytes
    with pytest.raises(Unsupported, match=f"{need} bytes of scratch .*; {need - 1} are allowed"):
        Computed(made, torch.device("cpu"), need - 1)


@settings(max_examples=min(EXAMPLES, 50), deadline=None)
@given(merges, st.floats(0.1, 9.0))
def test_recipes_digest_what_they_compute(m, other):
    """Equal for every rank that computes the same, other for another factor."""
    assume(float(other) != m.scale)
    full = full_tensors(m, 0)
    digests = [[s.recipe.digest() for s in computed(m, full, 0)._steps] for m in (m, m, replace(m, scale=other))]
    assert digests[0] == digests[1] != digests[2]
