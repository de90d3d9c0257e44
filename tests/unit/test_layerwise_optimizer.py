"""A layer-wise optimizer in one process: refusals, Muon, hooks, memory, failures. `Half` is rank 0 of two; what rank 1 owns is made up.
Real gathers: tests/functional/test_layerwise_torch.py."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tests.support import layerwise_model as lm
from tests.support.layerwise_half import Half, layers, values
from tests.support.layerwise_model import step
from xfer.errors import DeadlineExceeded, LayoutError, PeerLost, RebindError, StaleWeights, Unsupported
from xfer.layerwise import LayerWiseOptimizer, Muon, ParamGather, ParamGroup, checkpoint, newton_schulz
from xfer.layerwise.shares import known_elsewhere, settle_in
from xfer.trainers.dtensor import TensorTrainer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SGD = torch.optim.SGD


# ---- Muon


@given(st.integers(1, 24), st.integers(1, 24), st.integers(0, 5))
def test_newton_schulz_brings_singular_values_near_one(rows, columns, seed):
    """This holds for each matrix of a batch, and the singular vectors stay."""
    x = torch.randn(2, rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    assume((s.amin(-1) >= 0.02 * s.amax(-1)).all())
    rotated = u.mT @ newton_schulz(x, steps=8) @ v.mT
    values = rotated.diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(rotated, torch.diag_embed(values), atol=1e-8)
    assert values.min() > 0.6 and values.max() < 1.3


def test_muon_computes_in_the_dtype_that_it_is_told():
    exact, rounded = (nn.Parameter(torch.zeros(8, 12)) for _ in range(2))
    exact.grad = rounded.grad = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
    Muon([exact]).step()
    Muon([rounded], compute_dtype=torch.bfloat16).step()
    assert not torch.equal(exact, rounded)
    assert torch.cosine_similarity(exact.flatten(), rounded.flatten(), dim=0) > 0.99


# ---- what is refused


def optimizer(net: nn.Module, **options) -> LayerWiseOptimizer:
    return LayerWiseOptimizer(net, lm.groups(net), **options)


def sgd(params) -> ParamGroup:
    return ParamGroup(list(params), SGD, {"lr": 0.1})


REFUSED = {
    "groups": (
        lambda net: [sgd([net[0].weight]), sgd([net[0].weight, nn.Parameter(torch.zeros(7))])], {},
        ["1.weight: in no ParamGroup", "group 0: a parameter of shape (4, 4) is in group 1 too", "group 1: a parameter of shape (7,)"],
    ),
    "memory": (
        lambda net: setattr(net[1], "weight", nn.Parameter(net[0].weight.detach())) or [sgd(net.parameters())], {},
        ["1.weight: shares memory with 0.weight"],
    ),
    "nothing to train": (
        lambda net: [sgd(net.requires_grad_(False).parameters())], {}, ["trained parameters lie on no device"],
    ),
    "options": (
        lambda net: [ParamGroup([net[0].weight], SGD, cost="newton"), ParamGroup([net[1].weight], SGD, cost=len)],
        dict(reduce="to_owner", guard="nans", route="pulls"),
        ["reduce='to_owner'", "guard='nans'", "route='pulls'", "group 0: cost='newton'"],
    ),
    "what Muon cannot update": (
        lambda net: net.append(nn.LayerNorm(4)) and [ParamGroup(net.parameters(), Muon, cost="newton")], {},
        ["2.weight of shape (4,)", "2.bias of shape (4,)", "group 0: cost='newton'"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("groups, options, lines", REFUSED.values(), ids=REFUSED)
def test_every_mistake_is_named_on_every_rank_before_anything_is_touched(monkeypatch, groups, options, lines):
    """Also on ranks that own none of these parameters. Otherwise only the owner would fail."""
    monkeypatch.setattr(Half, "owns", lambda self, name: False)
    net = layers(2)
    groups = groups(net)
    at = [p.data_ptr() for p in net.parameters()]
    with pytest.raises(LayoutError, match="cannot have") as e:
        Half(net, groups, **options)
    assert len(e.value.violations) == len(lines)
    assert all(any(v.startswith(line) for v in e.value.violations) for line in lines), e.value.violations
    assert at == [p.data_ptr() for p in net.parameters()]


CHANGES = {
    "freeze": lambda net, o: net.blocks[0].up.weight.requires_grad_(False),
    "thaw": lambda net, o: net.frozen.requires_grad_(True),
    "replace": lambda net, o: setattr(net.blocks[0].up, "weight", nn.Parameter(net.blocks[0].up.weight.detach())),
    "add": lambda net, o: setattr(net, "extra", nn.Linear(3, 3, bias=False)),
    "regroup": lambda net, o: o.param_groups[0]["params"].pop(),
    "append": lambda net, o: o.param_groups.append({"params": [nn.Parameter(torch.zeros(2))], "lr": 0.1}),
    "another dict": lambda net, o: o.param_groups.__setitem__(0, dict(o.param_groups[0])),
    "reloaded": lambda net, o: o.inner[0].load_state_dict(o.inner[0].state_dict()),  # it makes new groups
    "other memory": lambda net, o: setattr(net.embed.weight, "data", net.embed.weight.detach().clone()),
    "float16": lambda net, o: net.half(),
    "float16, not rehomed": lambda net, o: net.half(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_is_trained_is_an_error_before_anything_is_stepped(change):
    net = lm.Transformer(dtype=torch.bfloat16)
    o = Half(net, lm.groups(net), rehome="not rehomed" not in change, bucket_bytes=1 << 20)
    step(net, o, 0)
    o.drain()
    CHANGES[change](net, o)
    lm.backward(net, o, 1)
    before, version = lm.digest(net), o.gather.version
    cast = "float16" in change
    error, said = (RebindError, "other memory") if cast or "memory" in change else (LayoutError, "have changed")
    with pytest.raises(error, match=said) as e:
        o.step()
    assert lm.digest(net) == before and o.gather.version == version
    assert len(e.value.violations) == (len(o.owner) if cast else 1)


def test_groups_cannot_be_added_and_state_dict_says_what_to_use():
    o = optimizer(lm.Transformer())
    with pytest.raises(Unsupported, match="added"):
        o.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(Unsupported) as e:
        o.state_dict()
    assert "checkpoint.save" in e.value.violations[0]


# ---- gradients


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("clip", [None, 6.0, 48.0])
def test_gradients_of_any_dtype_are_unscaled_and_then_clipped_by_their_norm(dtype, scale, clip):
    net = layers().to(dtype)
    o = LayerWiseOptimizer(net, [sgd(net.parameters())], clip_grad=clip)
    before = [x.target.detach().clone() for x in o.owned]
    for p in net.parameters():
        p.grad = torch.full((4, 4), 3.0 * scale, dtype=dtype)
    o.step(grad_scale=scale)
    assert o.grad_norm == 24.0
    change = 0.1 * 3.0 * (0.25 if clip == 6.0 else 1.0)
    for x, was in zip(o.owned, before):
        assert torch.allclose(x.target, was - change, atol=1e-5) and torch.equal(x.param, x.target.to(dtype))


def refused(net: nn.Module, step: Callable[[], object], match: str) -> str:
    """What is said of a step that is refused and changes nothing."""
    before = lm.digest(net)
    with pytest.raises(Unsupported, match=match) as e:
        step()
    assert lm.digest(net) == before
    (said,) = e.value.violations
    return said


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("gradient", [1.0, float("inf")])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_gradient_scaler_is_refused_on_every_rank_before_any_of_them_steps_or_skips(layer, gradient, unscaled):
    """Either rank may own the gradient that is not finite. A rank that skipped alone would leave the other one waiting."""
    net = layers()
    o = Half(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(net(torch.ones(2, 4)).sum()).backward()
    net[layer].weight.grad[0] = gradient
    if unscaled:
        scaler.unscale_(o)
    assert "grad_scale= to step()" in refused(net, lambda: scaler.step(o), "GradScaler")
    o.train(101.0)  # by itself it goes on, and so it does with a scaler that is off
    torch.amp.GradScaler("cpu", enabled=False).step(o)


@pytest.mark.parametrize("reduce", ["done", "to_owners"])
def test_sparse_gradients_are_refused_before_anything_is_stepped_and_the_next_step_is_whole(reduce):
    """An owner raised in the norm of the gradients, and the others waited for it until their deadline."""
    net = nn.Sequential(nn.Embedding(3, 4, sparse=True), nn.Linear(4, 4))
    o, tokens = Half(net, reduce=reduce), torch.tensor([0, 2])
    net(tokens).sum().backward()
    assert refused(net, o.step, "sparse").startswith("0.weight:")
    if reduce == "done":
        before = [p.detach().clone() for p in net.parameters()]
        net[0].sparse = False
        o.zero_grad()
        net(tokens).sum().backward()
        o.step()
        assert not o.skipped and not any(map(torch.equal, before, net.parameters()))


@pytest.mark.parametrize("graph", [False, True])
def test_gradients_that_are_views_become_zeros(graph):
    """DDP's are, with gradient_as_bucket_view; with a graph behind them they are after backward(create_graph=True)."""
    net = layers(2)
    o, flat = LayerWiseOptimizer(net, [sgd(net.parameters())]), torch.ones(32)
    for p, part in zip(net.parameters(), flat.split(16)):
        p.grad = (p * 1.0 if graph else part.view(4, 4)).requires_grad_(graph)
    o.zero_grad(set_to_none=False)
    assert all(not p.grad.any() and not p.grad.requires_grad for p in net.parameters())
    assert graph or not flat.any(), "DDP reads them where they were"


# ---- parameters that are written from outside


@pytest.mark.parametrize("way", ["load_state_dict", "of a part", "synchronize"])
@pytest.mark.parametrize("model", [lm.Transformer, lm.MixedTransformer])
def test_the_next_step_goes_on_from_what_was_written_and_keeps_the_masters_of_the_rest(model, way):
    """At small rates a 16-bit parameter keeps its bits while its master moves. Loading the same bits undoes that, too."""
    net, other = model(), model(seed=11).state_dict()
    o, root = optimizer(net), "" if way == "load_state_dict" else "blocks.0."
    for i in range(2):
        step(net, o, i)
    for g in o.param_groups:
        g["lr"] = 0.0
    masters = {x.name: x for x in o.owned if x.target is not x.param}
    with torch.no_grad():
        for x in masters.values():
            x.target.copy_(x.param.float() * (1 + 1e-5))
    drifted = {n: x.target.detach().clone() for n, x in masters.items()}
    there = {k: v.clone() for k, v in net.state_dict().items() if k.startswith(root)}
    given = {k: v if i % 2 else other[k] for i, (k, v) in enumerate(there.items())}
    if way == "synchronize":
        with torch.no_grad():
            for k, v in given.items():
                net.get_parameter(k).copy_(v)
        o.synchronize()
    else:
        net.get_submodule(root[:-1]).load_state_dict({k.removeprefix(root): v for k, v in given.items()})
    want = lm.digest(net)
    step(net, o, 5)
    assert lm.digest(net) == want and all(torch.equal(net.state_dict()[k], v) for k, v in given.items())
    for n, x in masters.items():
        new = n in given and (way != "synchronize" or not torch.equal(given[n], there[n]))
        assert torch.equal(x.target, x.param.float() if new else drifted[n]), n


# ---- reads


class Raising(nn.Module):
    """Raises as a forward does that runs out of memory."""

    def forward(self, x):
        raise torch.OutOfMemoryError("tried to allocate")


class Tries(nn.Module):
    """Begins with a part that raises, goes on without it if it may, and reads the weight of its other part itself."""

    def __init__(self):
        super().__init__()
        self.first, self.other, self.goes_on = Raising(), nn.Linear(4, 4, bias=False), False

    def forward(self, x):
        with contextlib.suppress(*[torch.OutOfMemoryError] * self.goes_on):
            self.first(x)
        return x @ self.other.weight


@pytest.mark.parametrize("rehome", [True, False])
@pytest.mark.parametrize("guard, given", [("nan", math.nan), ("first", 101.0), ("always", 102.0)])
def test_a_read_that_no_hook_announces_unless_hooks_have_learnt_of_it(guard, given, rehome):
    """Such a read gives NaN, the old or the new value, depending on `guard`. Owners have their values at once. Hooks learn in the first
    forward which module reads what, also behind a part that raised. No forward leaves a watch behind."""
    net, unknown, learnt = nn.Sequential(*layers(1), Tries(), *layers(2)), [], []
    o, watches = Half(net, guard=guard, rehome=rehome), _get_current_dispatch_mode_stack
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            net(torch.ones(2, 4))
        assert not watches()
    net[1].goes_on = True
    o.train(101.0)
    net[1].first = nn.Identity()
    assert o.others == ["1.other.weight", "3.weight"]
    net[0].register_forward_pre_hook(lambda *_: unknown.append(net[3].weight.detach()[0, 0].item()))
    net[2].register_forward_pre_hook(lambda *_: learnt.append(net[1].other.weight.detach()[0, 0].item()))
    o.train(102.0)
    assert not any(p.isnan().any() for n, p in o.named if n not in o.others)
    net(torch.ones(1, 4))
    assert unknown == pytest.approx([101.0, given], nan_ok=True) and learnt == [101.0, 102.0]
    assert not watches() and values(net, o.others) == [102.0] * 2


@pytest.mark.filterwarnings("ignore:Dynamo")
@pytest.mark.parametrize("guard", ["nan", "first", "always"])
def test_a_module_that_was_compiled_before_has_the_hooks_too(guard):
    """torch keeps compiled code when hooks are added, and then no forward announced what it reads: old values, or NaN."""
    net, x = layers(), torch.ones(2, 4)
    compiled = torch.compile(net, backend="eager")
    with torch.no_grad():
        compiled(x)
    compiled(x).sum().backward()
    o = Half(net, guard=guard)
    for value in (0.1, 0.2, 0.3):
        o.train(value)
        with torch.no_grad():
            seen = compiled(x)
            o.drain()
            assert torch.equal(seen, net(x))
    o.train(0.4)
    compiled(x).sum().backward()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("rehome", [True, False])
def test_what_would_compute_with_values_of_the_step_before_raises_whoever_owns_them(rehome, overlap):
    """A forward past the hooks, a captured graph and a copy would read them. torch's own optimizers make such a backward raise, too;
    autograd does not see the writes of a gather by itself."""
    net = layers()
    o = Half(net, rehome=rehome, overlap=overlap)
    for name, layer in net.named_children():
        o.train(0.1)
        o.drain()
        x = torch.ones(1, 4, requires_grad=True)
        old = layer(x).sum()
        o.train(0.2)
        if overlap:
            with pytest.raises(StaleWeights, match="no hook had asked for") as e:
                layer.forward(torch.ones(2, 4)).sum().backward()
            assert e.value.violations[0].startswith(f"{name}.weight: call the module")
            capturing = patch.multiple(torch.cuda, is_available=lambda: True, is_current_stream_capturing=lambda: True)
            with capturing, pytest.raises(StaleWeights, match="drain\\(\\) before capturing"):
                net(torch.ones(1, 4))
            with pytest.raises(StaleWeights, match="copied"):
                copy.deepcopy(net)
        net(x)  # all is here, and asked for
        assert not o.skipped
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()
        assert x.grad is None, name


class Ordered(nn.Module):
    def __init__(self, n: int, use):
        super().__init__()
        self.layers, self.use = layers(n), [i for i in use if i < n]

    def forward(self, x):
        for i in self.use:
            x = self.layers[i](x)
        return x


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.permutations(range(6)), st.integers(1, 7), st.booleans())
@settings(max_examples=60, deadline=None)
def test_buckets_that_are_used_first_travel_while_the_others_are_stepped(group_of, use, depth, overlap):
    """Before each group steps, the first buckets in use are on their way, up to the first one that is yet to be stepped, and no others."""
    net, said = Ordered(len(group_of), use), []
    parts = [[m.weight for m, g in zip(net.layers, group_of) if g == n] for n in range(3)]
    o = Half(net, [sgd(p) for p in parts if p], prefetch_depth=depth, overlap=overlap)
    for inner in o.inner:
        inner.register_step_pre_hook(
            lambda *_: said.append([b.index for b in o.gather.order if b.state.value == "in flight"])
        )
    groups, order = list(dict.fromkeys(group_of)), net.use  # groups in the order in which they are stepped
    for value in (101.0, 102.0):
        said.clear()
        o.train(value)
        for at, on_their_way in enumerate(said):
            ready = [group_of[i] in groups[:at] for i in order]
            most = ready.index(False) if False in ready else len(ready)
            assert sorted(on_their_way) == sorted(order[: min(most, depth)] if overlap else []), (order, groups, at)
        net(torch.ones(2, 4))
        assert o.gather.settled and values(net, o.others) == [value] * len(o.others)


def test_a_copy_of_a_module_is_an_ordinary_module():
    net = layers()
    o = Half(net)
    reference = copy.deepcopy(net)  # before the first step, as for GRPO
    o.train(101.0)
    o.drain()
    twin = copy.deepcopy(net)
    assert lm.digest(twin) == lm.digest(net) != lm.digest(reference)
    o.train(102.0)
    for m in (twin, reference):
        before = lm.digest(m)
        m(torch.ones(1, 4)).sum().backward()
        m.load_state_dict(m.state_dict())
        SGD(m.parameters(), lr=0.0).step()
        assert lm.digest(m) == before
    assert not o.gather.settled, "what the copies did reached the gather of the module"


# ---- failures

CLOSED = RuntimeError("[gloo/pair.cc:1] Connection closed by peer")
LATE = RuntimeError("Timed out waiting 1000ms for recv operation to complete")
FULL = torch.OutOfMemoryError("CUDA out of memory")
# where the error is raised; the error; what the caller sees; what every later use raises, with which text
FAILURES = [
    ("an inner step", CLOSED, PeerLost, PeerLost, "closed its connections"),
    *(("an inner step", e, type(e), StaleWeights, type(e).__name__) for e in (ValueError("x"), KeyboardInterrupt(), AssertionError())),
    *((where, FULL, type(FULL), StaleWeights, "OutOfMemory") for where in ("an inner step", "_collect", "_scale_and_clip", "_after_step")),
    ("an aborted norm", DeadlineExceeded("not exchanged in time"), DeadlineExceeded, DeadlineExceeded, "in time"),
    *((f"a write of {n}{how}", None, StaleWeights, StaleWeights, f"{n}.weight: drain()") for n in "01" for how in ("", ", not rehomed")),
    ("a second step beside a gather", MemoryError(), MemoryError, StaleWeights, "in flight"),
    ("memory moves in a step", None, RebindError, RebindError, "other memory"),
    ("a gather", CLOSED, PeerLost, PeerLost, "closed its connections"),
    ("a gather", FULL, type(FULL), StaleWeights, "OutOfMemory"),
    ("a late gather", LATE, DeadlineExceeded, DeadlineExceeded, "barrier"),
    ("a watch", DeadlineExceeded("aborted by the watch"), DeadlineExceeded, DeadlineExceeded, "by the watch"),
]  # fmt: skip


@pytest.mark.parametrize("where, error, first, later, text", FAILURES)
def test_after_a_failure_every_later_use_raises_and_a_close_lets_go(
    monkeypatch, tmp_path, where, error, first, later, text
):
    """Other ranks may be ahead, and a part of this rank's parameters has been stepped."""
    net = layers()
    how = dict(deadline_s=1e-9 if where == "a late gather" else 600.0, rehome="not rehomed" not in where)
    o = Half(net, [sgd([m.weight]) for m in net], **how)
    o.train(101.0)
    loss = net(torch.ones(1, 4)).sum()  # all is here
    fail, failing = Mock(side_effect=error), lambda: o.train(102.0)

    def aborted(total: torch.Tensor) -> None:
        """NCCL's watch says so, lets the sum go, and leaves rubbish in it. The wire of the norm may have no bucket."""
        o.wire.lost = error
        total.fill_(1e-6)

    def move(inner, *_):
        p = inner.param_groups[0]["params"][0]
        p.data = p.detach().clone()

    if where in ("a gather", "a late gather"):
        o.train(102.0)
        o.wire.fails, failing = error, o.drain
    elif where == "a watch":
        o.wire.lost, failing = error, o.drain
    elif where.startswith("a write"):  # some ranks would have what was written, others what was sent before
        clip = lambda: net[int(where[11])].weight.detach().clamp_(-0.05, 0.05)  # noqa: E731
        o.drain()
        clip()  # after a drain it may be written
        o.train(102.0)
        clip()
        failing = o.drain
    elif where == "an aborted norm":
        o.wire.all_reduce = aborted
    elif where == "memory moves in a step":
        next(i for i in o.inner if i.param_groups[0]["params"]).register_step_post_hook(move)
    elif where.startswith("_"):
        monkeypatch.setattr(o, where, fail)
    else:
        o.inner[1 if "second" in where else 0].register_step_pre_hook(fail)
    before = lm.digest(net)
    with pytest.raises(first):
        failing()
    if where == "an aborted norm":
        assert lm.digest(net) == before, "no rank steps on it"
        with pytest.raises(first):
            ParamGather([], wires=[o.wire]).check()
    uses = [lambda: net(torch.ones(1, 4)), o.step, o.drain, net.state_dict, lambda: copy.deepcopy(net)]
    uses += [lambda: checkpoint.save(o, tmp_path), lambda: checkpoint.load(o, tmp_path)]
    backward = [loss.backward] if where == "a watch" else []
    for use in (*uses, *backward, TensorTrainer(net).drain, o.close, *uses):
        with pytest.raises(later) as e:
            use()
        assert text in str(e.value), e.value
    assert not o.wire.open and not list(tmp_path.iterdir())


# ---- memory


def test_parameters_lie_one_behind_the_other_at_aligned_places_and_keep_their_values():
    net = lm.MixedTransformer()
    params, before = list(net.named_parameters()), lm.digest(net)
    for s in settle_in({0: params[::2], 1: params[1::2]}, move=True, fixed=frozenset()):
        end = 0
        for m in s.members:
            assert end <= m.offset < end + 64 and m.offset % 64 == 0
            assert m.param.data_ptr() == s.home.data_ptr() + m.offset
            end = m.offset + m.nbytes
        assert end == s.nbytes
    assert lm.digest(net) == before


def test_memory_that_modules_hold_elsewhere_stays_where_it_is():
    """Modules hold views in buffers, attributes, lists and dicts. A list of Parameter objects does not count: these follow their memory."""
    net = layers(6)
    views = [m.weight.detach()[:2] for m in net]
    net[0].register_buffer("seen", views[0])
    net[1].cached = views[1].t()
    net[2].views = [views[2]]
    net[3].by_name = {"halves": (1, [views[3]])}
    net[3].by_name["again"] = net[3].by_name
    net[4].flat_weights = [net[4].weight]  # as recurrent layers have them
    assert known_elsewhere([net], list(net.parameters())) == {id(net[i].weight) for i in range(4)}
    o = Half(net)
    for value in (101.0, 102.0):
        o.train(value)
        o.drain()
    assert values(net, o.others) == [102.0] * len(o.others)
    assert all(torch.equal(view, m.weight[:2]) for view, m in zip(views[:4], net))


def test_modules_that_several_roots_share_have_their_hooks_once_and_none_after_close():
    """And a parameter under two names is one parameter."""
    shared = nn.Linear(4, 4)
    roots = [nn.Sequential(shared, nn.Linear(4, 4)), nn.Sequential(shared, nn.Linear(4, 4)), shared]
    roots[1][1].weight = roots[0][1].weight
    params = dict.fromkeys(p for root in roots for p in root.parameters())
    o = LayerWiseOptimizer(roots, [sgd(params)])
    assert len(o.named) == len(params) == 5
    hooks = lambda m: len(m._forward_pre_hooks) + len(m._forward_hooks) + len(m._state_dict_pre_hooks)  # noqa: E731
    assert hooks(roots[0][1]) == 3 and hooks(shared) == 5, "a root has two more"
    for root in roots:
        root(torch.ones(1, 4)).sum().backward()
    o.step()
    o.close()
    assert not any(hooks(m) for root in roots for m in root.modules())
