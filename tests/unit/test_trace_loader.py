"""Random loaders, traced on meta and replayed on real bytes: the replay must leave what the loader leaves, bit for bit.

A loader is a list of the steps of tests/support/trace_steps.py and of writes into its model.
"""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import EXAMPLES
from tests.support.replay import load as load_into
from tests.support.replay import storage_bytes
from tests.support.trace_maps import addresses
from tests.support.trace_steps import COMPUTES, MOVES, bits, move, shorten
from xfer.errors import LayoutError, Unsupported
from xfer.trace.fragment import TensorSpec
from xfer.trace.loader import trace_loader
from xfer.trace.watch import PythonData, Watch

SPECS = (
    TensorSpec("a", (6, 8), "float32"),
    TensorSpec("b", (4, 3, 2), "float32"),
    TensorSpec("c", (8, 6), "bfloat16"),
    TensorSpec("d", (5,), "float32"),
)
EFFECTS = "take emit emit_t back touch swapdata".split()
number = st.integers(0, 997)
step = st.tuples(st.sampled_from([*MOVES, *MOVES, *COMPUTES, *EFFECTS, *EFFECTS]), number, number)
steps = st.integers(0, 14).flatmap(lambda n: st.lists(step, min_size=n, max_size=n))  # long ones as often as short ones


class Toy(torch.nn.Module):
    """Three parameters; `w` and `tied` are views of one storage. Every element starts as 77."""

    def __init__(self, program: list, device: str):
        super().__init__()
        self.program = program
        base = torch.full((96,), 77.0, device=device)
        self.w = torch.nn.Parameter(base[:64], requires_grad=False)
        self.tied = torch.nn.Parameter(base[32:].view(8, 8), requires_grad=False)
        self.v = torch.nn.Parameter(torch.full((8, 12), 77.0, dtype=torch.bfloat16, device=device), requires_grad=False)

    def load_weights(self, weights) -> None:
        given = list(dict(weights).values())
        x, last = given[0], None
        targets = [self.w, self.tied, self.v]
        for op, i, j in self.program:
            p = targets[j % 3]
            if op == "take":
                x = given[i % len(given)]
            elif op == "emit":
                at = i % 7 % p.numel()
                n = min(x.numel(), p.numel() - at)
                last = p.data.view(-1)[at : at + n]
                last.copy_(x.reshape(-1)[:n])
            elif op == "emit_t" and p.dim() == 2:
                r, c = p.shape
                y = x.reshape(-1)[: x.numel() // r * r].reshape(-1, r)
                k = min(c, y.shape[0])
                if k:
                    last = p.data.t()[:k]
                    last.copy_(y[:k])
            elif op == "back" and last is not None:
                x = last.clone()
            elif op == "touch":  # writes into what it was given, as one loader does with a bias
                given[i % len(given)].view(-1)[j % 5 :].zero_()
            elif op == "swapdata" and j % 4 == 0:
                self.v.data = shorten(x).reshape(-1)[: 1 + i % 8].clone().to(torch.bfloat16)
            elif op not in EFFECTS:
                x = shorten(move(op, i, j, x))
        n = min(x.numel(), 64)
        self.w.data[:n].copy_(x.reshape(-1)[:n])


def real_tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    return {s.name: torch.randn(s.shape, generator=g).to(getattr(torch, s.dtype)) for s in SPECS}


def run(program: list, traced) -> tuple[Toy, dict[str, torch.Tensor]]:
    """The real loader's model, and what the trace alone leaves in storages that began alike."""
    real = Toy(program, "cpu")
    with torch.no_grad():
        real.load_weights([(n, t.clone()) for n, t in real_tensors().items()])
    roots = {n: torch.full_like(storage_bytes(p.data).view(p.dtype), 77.0) for n, p in real.named_parameters()}
    load_into(traced, real_tensors(), roots)
    return real, roots


def disjoint(traced) -> bool:
    """Each byte is written once, however often the loader wrote it."""
    count: Counter = Counter()
    regions = [(f.root, f.offset, f.extent, f.strides) for f in (*traced.fragments, *traced.fills)]
    regions += [(r.target, r.offset, r.shape, r.strides) for r in traced.recipes]
    for root, *region in regions:
        count.update((root, at) for at in addresses(*region).tolist())
    return max(count.values(), default=1) == 1


def test_a_replayed_trace_leaves_what_the_loader_leaves():
    tally: Counter[str] = Counter()

    @settings(max_examples=3 * EXAMPLES, deadline=None, database=None)
    @given(steps)
    def holds(program: list) -> None:
        tally["runs"] += 1
        try:
            traced = trace_loader(Toy(program, "meta"), SPECS)
        except LayoutError as e:
            tally["refused"] += 1
            assert e.violations and e.__cause__ is None  # by name, and not because the loader itself failed
            return
        rounding = {"cast", "back"}  # "back" reads bfloat16
        moved_only = not {op for op, _, _ in program} & {*COMPUTES, *rounding}
        tally["needlessly staged"] += moved_only and bool(traced.recipes)
        real, roots = run(program, traced)
        assert all(torch.equal(storage_bytes(getattr(real, n).data), storage_bytes(roots[n])) for n in "wv")
        assert "swapdata" in {op for op, _, _ in program} or disjoint(traced)
        assert set(traced.reads).isdisjoint(traced.unread)
        assert set(traced.reads) | set(traced.unread) == {s.name for s in SPECS}

    holds()
    assert tally["refused"] <= 0.02 * tally["runs"], tally
    assert tally["needlessly staged"] <= 0.02 * tally["runs"], tally


class Single(torch.nn.Module):
    def __init__(self, load) -> None:
        super().__init__()
        self.p = torch.nn.Parameter(torch.empty(4, 4, device="meta"), requires_grad=False)
        self.q = torch.nn.Parameter(torch.empty(4, device="meta"), requires_grad=False)
        self.load = load

    def load_weights(self, weights) -> None:
        self.load(self.p, dict(weights))


ELSEWHERE = torch.empty(4, 4, device="meta")


@pytest.mark.parametrize(
    "name, load",
    [
        ("random numbers", lambda p, w: p.data.copy_(torch.rand(4, 4, device="meta"))),
        ("never written", lambda p, w: p.data.copy_(torch.empty(4, 4, device="meta"))),
        ("its own old value", lambda p, w: p.data.mul_(2)),
        ("half unwritten", lambda p, w: p.data.copy_(half(w["a"]))),
        ("a real tensor", lambda p, w: p.data.copy_(torch.arange(16.0).view(4, 4))),
        ("storage from elsewhere", lambda p, w: setattr(p, "data", ELSEWHERE)),
        ("other element size", lambda p, w: p.data.view(torch.bfloat16).copy_(w["a"][:4].to(torch.bfloat16))),
        (
            "other element size afterwards",
            lambda p, w: setattr(p, "data", p.data.copy_(w["a"][:4, :4]).view(torch.int8)),
        ),
        ("computed in place from a half", lambda p, w: (p.data[:2].copy_(w["a"][:2, :4]), p.data.mul_(2))),
        ("computed from a half", lambda p, w: p.data.copy_(half(w["a"]) * 2)),
        ("moved by an operator without a rule", lambda p, w: p.data.copy_(half(w["a"]).flip(0, 1))),
        ("grown and read", lambda p, w: p.data.copy_(w["d"].resize_(4, 4))),
        ("grown and computed with", lambda p, w: p.data.copy_(w["d"].resize_(4, 4) * 2)),
        ("set to more than there is", lambda p, w: p.data.copy_(wider(w["d"]))),
        ("one of several results", lambda p, w: torch.mul(w["a"][:4, :4], 2, out=p.data.zero_())),
        ("a list of results", lambda p, w: torch.unbind_copy(w["a"][:4, :4], out=list(p.data.zero_().unbind()))),
        (
            "results that are not returned",
            lambda p, w: torch.split_copy(w["a"][:4, :4], 2, out=p.data.zero_().split(2)),
        ),
        ("a row that is not there", lambda p, w: p.data.copy_(w["a"][torch.tensor([0, 1, 2, 6]), :4])),
        (
            "a row written that is not there",
            lambda p, w: p.data.zero_().index_put_((torch.tensor([0, 4]),), w["a"][:2, :4]),
        ),
        ("the negative of what bytes say", lambda p, w: p.data.copy_(torch._neg_view(w["a"][:4, :4]))),
    ],
)
def test_what_cannot_be_named_is_refused_by_name(name, load):
    with pytest.raises(LayoutError) as e:
        trace_loader(Single(load), SPECS)
    assert all(v.startswith("p:") for v in e.value.violations) and e.value.violations, name


def wider(d: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, device="meta").set_(d.untyped_storage(), 0, (4, 4), (4, 1))


def half(a: torch.Tensor) -> torch.Tensor:
    s = torch.empty(4, 4, device="meta")
    s[:2].copy_(a[:2, :4])
    return s


def test_what_is_overwritten_is_no_error_and_no_read():
    def load(p, w):
        p.data.normal_()
        p.data.copy_(w["a"][:4, :4])
        p.data.copy_(w["b"].reshape(-1)[:16].view(4, 4))

    traced = trace_loader(Single(load), SPECS)
    assert traced.reads == ("b",) and {f.tensor for f in traced.fragments} == {"b"}


def test_two_roundings_are_staged_and_one_is_a_listed_cast():
    twice = trace_loader(Single(lambda p, w: p.data.copy_(w["a"][:4, :4].to(torch.bfloat16))), SPECS)
    assert not twice.fragments and [r.sources for r in twice.recipes] == [("a",)]
    once = trace_loader(Single(lambda p, w: p.data.copy_(w["c"][:4, :4].to(torch.float64))), SPECS)
    assert not once.recipes and [c.dtypes for c in once.casts] == [("bfloat16", "float32")]


def test_recipes_of_equal_traces_read_the_same():
    a, b, c = (
        trace_loader(Single(lambda p, w, at=at: p.data.copy_(-torch.exp(w["a"][:4, at : at + 4]))), SPECS).recipes[0]
        for at in (0, 0, 1)
    )
    assert a.describe() == b.describe() != c.describe() and set(a.ops) == {"aten.exp.default", "aten.neg.default"}


def test_what_no_weight_has_a_part_in_keeps_its_values_on_meta():
    """Moved or computed with, an operator that needs numbers gets those that the same code has on real tensors."""
    numbers = torch.randn(6, 8, generator=torch.Generator().manual_seed(2)).tolist()

    @settings(max_examples=EXAMPLES, deadline=None, database=None)
    @given(st.lists(st.tuples(st.sampled_from([*MOVES, *COMPUTES]), number, number), max_size=10))
    def holds(program: list) -> None:
        def made(device: str) -> torch.Tensor:
            x = torch.tensor(numbers, device=device)
            for op, i, j in program:
                x = shorten(move(op, i, j, x))
            return x

        with PythonData(), Watch():
            got = made("meta").cpu()
        assert torch.equal(bits(got), bits(made("cpu")))

    holds()


class Mapped(torch.nn.Module):
    """As vLLM's models: the constructor makes constants and looks at them, the loader goes by them."""

    def __init__(self, device: str):
        super().__init__()
        with torch.device(device):
            self.p = torch.nn.Parameter(torch.full((4, 8), 77.0), requires_grad=False)
            self.register_buffer("map", torch.full((6,), -1, dtype=torch.int32))
            self.map[2:5] = torch.arange(3, dtype=torch.int32)
            self.scale = torch.tensor([0.5, 0.25])
            self.eps = float(torch.tensor(-1e-6, dtype=torch.bfloat16).cpu().float().item())
        assert self.map.device.type == self.scale.device.type == device
        assert torch.where(self.map != -1)[0].tolist() == [2, 3, 4] and self.eps < 0
        assert self.map.numpy().max() == 2

    def load_weights(self, weights) -> None:
        a = dict(weights)["a"]
        mine = (self.map != -1).nonzero().flatten().to(a.device)
        self.p.data[:3].copy_(a[mine])
        self.p.data[self.map[4].item()].copy_(a[torch.tensor([5, 0], device=a.device)][1])
        keep = torch.zeros(8, dtype=torch.bool, device=a.device)
        keep[[1, 3]] = True
        self.p.data[3, : int(keep.sum())].copy_(a[0, keep])
        self.p.data[3, 2:4].copy_(a[1, :2] * self.scale)
        self.p.data[3, 4:] = 2.0


def test_a_loader_goes_by_constants_of_the_constructor():
    """Expert maps, rows of an index, masks: on meta as on any device, and what they choose is moved, not computed."""
    with PythonData(), Watch() as built:
        model = Mapped("meta")
    traced = trace_loader(model, SPECS, built=built)
    assert [r.ops for r in traced.recipes] == [("aten.mul.Tensor",)] and len(traced.fills) == 1
    real, weights = Mapped("cpu"), real_tensors()
    real.load_weights([(n, t.clone()) for n, t in weights.items()])
    roots = {"p": torch.full((4, 8), 77.0)}
    load_into(traced, weights, roots)
    assert torch.equal(real.p.data, roots["p"])


@pytest.mark.parametrize("read", ["item", "tolist", "nonzero", "numpy"])
def test_a_loader_that_needs_the_values_of_weights_is_refused_with_its_line(read):
    def load(p, w):
        try:
            getattr(w["a"].sum(), read)()
        except (RuntimeError, TypeError) as e:
            raise ValueError("no such checkpoint") from e

    with pytest.raises(Unsupported, match="values of weights") as e:
        trace_loader(Single(load), SPECS)
    line = load.__code__.co_firstlineno + 2
    assert e.value.violations[0].startswith(f"load ({__name__}, line {line}): ")


def test_a_loader_that_raises_is_a_layout_error_with_its_cause_and_line():
    with pytest.raises(LayoutError, match="size of tensor") as e:
        trace_loader(Single(lambda p, w: p.data.copy_(w["a"])), SPECS)
    assert isinstance(e.value.__cause__, RuntimeError)
    assert e.value.violations[0].startswith(f"raised by <lambda> ({__name__}, line ")


def test_what_runs_after_loading_moves_what_was_loaded_and_nothing_else():
    """A framework may put another parameter in a loaded one's place. A module without loaded parameters is left alone."""
    loaded, other = Single(lambda p, w: p.data.copy_(w["a"][:4, :4])), Single(lambda p, w: None)
    both = torch.nn.ModuleDict({"loaded": loaded, "other": other})

    def swap(module) -> None:
        halves = module.p.data.view(2, 2, 4).flip(0).reshape(4, 4)
        module.p = torch.nn.Parameter(halves.contiguous(), requires_grad=False)

    steps = [(m, lambda m=m: swap(m)) for m in both.values()]
    traced = trace_loader(both, SPECS, loaded.load_weights, after=steps)
    assert {f.root for f in traced.fragments} == {"loaded.p"} and not traced.recipes
    weights, roots = real_tensors(), {"loaded.p": torch.full((4, 4), 77.0)}
    load_into(traced, weights, roots)
    assert torch.equal(roots["loaded.p"], torch.cat([weights["a"][2:4, :4], weights["a"][:2, :4]]))


def test_all_offenders_are_listed_at_once_and_a_name_given_twice_is_refused():
    model = Single(lambda p, w: (p.data.normal_(), model.q.data.copy_(torch.rand(4, device="meta"))))
    with pytest.raises(LayoutError) as e:
        trace_loader(model, SPECS)
    assert [v[:2] for v in e.value.violations] == ["p:", "q:"]
    with pytest.raises(LayoutError, match="twice"):
        trace_loader(Single(lambda p, w: None), (*SPECS, SPECS[0]))
