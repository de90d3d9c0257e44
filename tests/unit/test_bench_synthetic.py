"""Made-up bytes of `xfer bench`: ranks agree on every element, and a worker finds each kind of wrong byte."""

from __future__ import annotations

import pytest
import torch

from xfer.cli.bench.synthetic import UNTOUCHED, Layout, SyntheticTrainer, SyntheticWorker
from xfer.plan.inventory import Kept, engine_inventory, trainer_inventory
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import Fill, Fragment, Root, Span, TensorSpec

CPU = torch.device("cpu")
NAMES = [f"layers.0.experts.{i}.w" for i in range(2)]
CATALOG = Catalog((*(TensorSpec(n, (4, 6), "bfloat16") for n in NAMES), TensorSpec("norm", (6,), "float32")))


def trainer(rank: int) -> SyntheticTrainer:
    """Rank `rank` of two holds columns of both experts, transposed, and the norm in fp32."""
    held = [Fragment(n, (0, 3 * rank), (4, 3), f"w{i}", 0, (2, 8), "bfloat16") for i, n in enumerate(NAMES)]
    roots = [Root("n", 24), Root("w0", 24), Root("w1", 24)]
    fragments = [*held, Fragment("norm", (0,), (6,), "n", 0, (4,), "float32")]
    made = trainer_inventory(CATALOG, rank=rank, host="h", roots=roots, fragments=fragments)
    return SyntheticTrainer(Layout(CATALOG, made, CPU), 2)


def worker() -> SyntheticWorker:
    """Holds both experts in one storage, two rows of padding behind them, the norm in bf16, and four bytes that nobody sends."""
    held = [Fragment(n, (0, 0), (4, 6), "w", 48 * i, (12, 2), "bfloat16") for i, n in enumerate(NAMES)]
    fragments = [*held, Fragment("norm", (0,), (6,), "n", 0, (2,), "bfloat16")]
    made = engine_inventory(
        CATALOG, rank=0, host="h", roots=[Root("n", 16), Root("w", 120)], fragments=fragments,
        fills=[Fill("w", 96, (2, 6), (12, 2), "bfloat16", b"\0\0")], footprint=[Span("n", 0, 16), Span("w", 0, 120)],
        kept=[Kept("n", 12, 16, "a buffer")], reads=[*NAMES, "norm"],
    )  # fmt: skip
    return SyntheticWorker(Layout(CATALOG, made, CPU))


def received(seed: int) -> SyntheticWorker:
    """A worker after a perfect refit: each whole tensor is put together from the trainers' parts, and loaded."""
    trainers, taker = [trainer(0), trainer(1)], worker()
    for t in trainers:
        t.train(seed)
    (group,) = (s for s in taker.layout.specs.values() if len(s.shape) == 3)
    whole, norms = torch.zeros(group.shape, dtype=torch.int16), []
    for t in trainers:
        for f in t.layout.fragments:
            if f.tensor == group.name:
                whole[f.index] = t.layout.region(f)
            else:
                norms.append(t.layout.region(f))
    assert torch.equal(*norms), "both hold it, bit for bit"
    taker.begin(())
    taker.load([(group.name, whole.view(torch.bfloat16)), ("norm", norms[0].view(torch.float32))])
    return taker


def test_what_trainers_hold_is_what_a_worker_expects_whatever_the_cuts():
    before, taker = worker(), received(1)
    assert all(t.eq(UNTOUCHED).all() for t in before.layout.tensors.values())
    assert sum(before.wrong(1).values()) == 2 * 24 + 6 + 12, "before a refit every value is wrong"
    assert taker.wrong(1) == {}
    for f in taker.layout.fragments:
        live = taker.layout.region(f)
        assert live.unique().numel() > live.numel() // 2, "values differ, so that a wrong place shows"
        assert live.view(torch.bfloat16).isfinite().all()
    assert received(2).wrong(1).keys() == {f.tensor for f in taker.layout.fragments}, "each refit brings other bytes"


@pytest.mark.parametrize(
    ("root", "byte", "name"),
    [("w", 0, "experts"), ("w", 95, "experts"), ("n", 11, "norm"), ("w", 119, "constants"), ("n", 12, "kept")],
)
def test_one_wrong_bit_is_found_in_values_constants_and_kept_bytes(root, byte, name):
    taker = received(1)
    taker.layout.tensors[root][byte] ^= 1
    (found,) = taker.wrong(1).items()
    assert name in found[0] and found[1] == 1
