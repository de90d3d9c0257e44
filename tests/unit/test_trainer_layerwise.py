"""Refits of a model under a layer-wise optimizer: tensors that owners offer, and gathers that an adapter finishes before it reads.
`Half` is rank 0 of two. The parameters of rank 1 are made up."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.examples import EXAMPLES
from tests.support.layerwise_half import Half, layers, values
from xfer import pending
from xfer.errors import Unsupported
from xfer.trace.fragment import Fragment
from xfer.trainers.dtensor import TensorTrainer
from xfer.trainers.layerwise import LayerWiseTrainer, _Owners

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


# ---- what is finished first


def test_a_refit_has_what_is_on_its_way_although_the_optimizer_was_dropped():
    def trained(net: nn.Module) -> list[str]:
        o = Half(net)
        o.train(101.0)
        o.train(102.0)
        return o.others

    net = layers()
    others = trained(net)
    assert others and 102.0 not in values(net, others), "nothing is on its way: this proves nothing"
    TensorTrainer(net).drain()
    assert values(net, others) == [102.0] * len(others)


COPIES = {
    "of another dtype": lambda p: p.detach().to(torch.bfloat16),
    "made in place": lambda p: torch.zeros_like(p.data).add_(p.data),
    "of a part": lambda p: p.data[:2].clone(),
}


@pytest.mark.parametrize("made", COPIES.values(), ids=COPIES)
def test_a_refit_of_what_is_computed_from_parameters_has_those_of_the_last_step(made):
    """Other models are left alone, since not all ranks of this one may know them."""
    nets, ours = [layers(), layers()], []
    for net in nets:
        ours.append(Half(net))
        ours[-1].train(101.0)
        ours[-1].train(102.0)
    source = TensorTrainer(lambda: {n: made(p) for n, p in nets[0].named_parameters()}, rank=0, world=2)
    owners, everybody = (LayerWiseTrainer(source, ours[0], sources) for sources in ("owners", "all"))
    owners.drain()
    with pytest.raises(Unsupported, match="nothing says who owns them") as e:
        owners.read()
    assert len(e.value.violations) == 4
    dtype = made(nets[0][0].weight).dtype
    for value, adapter in ((103.0, source), (104.0, everybody)):
        ours[0].train(value)
        assert not ours[0].gather.settled, "nothing is on its way: this proves nothing"
        adapter.drain()
        layout = adapter.read()
        first = {f.tensor: layout.tensors[f.root].view(dtype)[0].item() for f in layout.traced.fragments}
        assert [first[n] for n in ours[0].others] == [value] * len(ours[0].others)
    assert not ours[1].gather.settled


@pytest.mark.parametrize("sources", ["owners", "all"])
def test_a_refit_from_owners_waits_for_their_step_and_not_for_the_device(monkeypatch, sources):
    """On the device are the gather's copies. A wait for it would finish them first. (Streams and events are only feigned.) So an adapter
    that can only wait for the device is refused."""
    net, cuda = layers(), Mock()
    o = Half(net)
    cannot = SimpleNamespace(rank=0, world=2, device=torch.device("cpu"), reads_together=False)
    with (
        pytest.raises(Unsupported, match="whole device(?s:.*)finish_gathers") if sources == "owners" else nullcontext()
    ):
        LayerWiseTrainer(cannot, o, sources)
    o._device = torch.device("cuda")
    source = LayerWiseTrainer(TensorTrainer(net, rank=0, world=2), o, sources)
    for kind in (LayerWiseTrainer, TensorTrainer):
        monkeypatch.setattr(kind, "device", o._device)
    o.inner[0].register_step_post_hook(lambda *_: cuda.stepped())
    begin = o.gather.begin
    monkeypatch.setattr(o.gather, "begin", lambda: (cuda.gather(), begin()))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: cuda.stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: cuda.synchronize())
    for value in (101.0, 102.0):
        o.train(value)
    step = [call.stepped(), call.stream.record_event(), call.gather()]
    assert cuda.mock_calls == step * 2
    source.drain()
    waits = cuda.mock_calls[6:]
    if sources == "all":
        assert call.synchronize() in waits and o.gather.settled
    else:
        assert waits == [call.stream.record_event().synchronize(), call.stream.synchronize()] and not o.gather.settled


def test_gathers_that_one_thread_leaves_alone_are_finished_by_another():
    """A refit from owners gives up while its adapter waits, on a thread of its own. Another adapter then reads the same parameters."""
    tensor, inside, go_on = torch.ones(4), threading.Event(), threading.Event()
    gathers = Mock(named=[("w", tensor)])
    pending.announce(gathers)

    def hung() -> None:
        with pending.left_alone(gathers):
            inside.set()
            go_on.wait(20)
            pending.drain_over([tensor])

    thread = threading.Thread(target=hung)
    thread.start()
    try:
        assert inside.wait(20)
        pending.drain_over([tensor])
        assert gathers.drain.call_count == 1
    finally:
        go_on.set()
        thread.join(20)
        pending.forget(gathers)
    assert gathers.drain.call_count == 1, "and that one leaves them alone"


# ---- what owners offer


@pytest.mark.parametrize("order", ["qk", "kq"])
def test_a_tensor_over_parameters_of_two_owners_is_offered_by_no_rank(order):
    """They lie in one storage; the checkpoint's tensor is the fused one."""
    flat = torch.zeros(8, 4)
    net = nn.ParameterDict({name: nn.Parameter(half) for name, half in zip(order, flat.split(4))})
    net.flat = [flat]
    o = Half(net)
    assert len(o.others) == 1, "both are this rank's: this proves nothing"
    whole = TensorTrainer(lambda: {"qk": flat}, rank=0, world=2)
    with pytest.raises(Unsupported, match="several owners") as e:
        LayerWiseTrainer(whole, o).read()
    assert e.value.violations[0].startswith("qk: give one view per parameter")
    parts = TensorTrainer(lambda: dict(zip(order, flat.split(4))), rank=0, world=2)
    assert len(LayerWiseTrainer(parts, o).read().traced.fragments) == 1
    assert [f.tensor for f in LayerWiseTrainer(whole, o, "all").read().traced.fragments] == ["qk"]


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_the_owners_of_a_fragment_are_those_of_its_elements_and_of_no_byte_between(data):
    flat, cuts = torch.zeros(48), sorted(data.draw(st.sets(st.integers(0, 48), min_size=2, max_size=6)))
    params = {f"p{i}": flat[a:b] for i, (a, b) in enumerate(zip(cuts, cuts[1:]))}
    owner = {n: data.draw(st.integers(0, 2)) for n in params if data.draw(st.booleans())}  # others are frozen
    optimizer = SimpleNamespace(
        named=list(params.items()), owner={n: (None, r) for n, r in owner.items()}, owns=lambda n: owner[n] == 0
    )
    extent = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    strides = [0 if e == 1 else data.draw(st.integers(-6, 6).filter(bool)) for e in extent]
    at = sum(s * torch.arange(e).view(-1, *[1] * d) for d, (e, s) in enumerate(zip(extent[::-1], strides[::-1])))
    at = (at - at.min()).flatten().tolist()
    if max(at) >= 48:
        return
    start = data.draw(st.integers(0, 47 - max(at)))
    first = start - min(0, sum((e - 1) * s for e, s in zip(extent, strides) if s < 0))
    f = Fragment("w", (0,) * len(extent), tuple(extent), "flat", first * 4, tuple(s * 4 for s in strides), "float32")
    by_element = {i: r for n, r in owner.items() for i in range(cuts[int(n[1:])], cuts[int(n[1:]) + 1])}
    want = {by_element[start + i] for i in at if start + i in by_element}
    met = _Owners({"flat": flat}, optimizer).of(f)
    assert {r for _, _, r in met} == want and all(mine == (r == 0) for mine, _, r in met)
