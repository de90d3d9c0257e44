"""Layouts that TensorTrainer reads from FSDP2, HSDP and tensor-parallel modules and from declarations. torch itself cuts real modules,
rank by rank, over its fake process group; what each rank then claims to hold is compared with the whole tensor.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor

from tests.support.examples import EXAMPLES
from tests.support.fake_group import one_rank
from tests.support.layouts import region
from tests.support.memory import Watched
from xfer import Declared, MeshInfo, TensorTrainer
from xfer.errors import LayoutError, RebindError, Unsupported
from xfer.mesh.placement import from_dtensor
from xfer.packed.source import PackedSource
from xfer.packed.tensors import TensorStream
from xfer.trace.slots import device_of, local

WORLD = 4


class Net(torch.nn.Module):
    """Two matrices, an odd vector and a buffer; every element of the whole has another value. `tied`: the second matrix is
    the first."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype, tied: bool):
        super().__init__()
        self.a = torch.nn.Linear(width, rows, bias=False)
        self.b = torch.nn.Linear(width, rows) if tied else torch.nn.Linear(rows, width)
        if tied:
            self.b.weight = self.a.weight
        for i, p in enumerate(self.parameters()):
            p.data = torch.arange(p.numel()).view(p.shape).add(100 * i).to(dtype)
        self.register_buffer("bias", torch.arange(3.0))
        self.register_buffer("cache", torch.arange(5.0), persistent=False)


def cut(net: Net, scheme: str) -> None:
    axes = {"hsdp": ("copies", "shards"), "fsdp over tp": ("dp", "tp")}.get(scheme)
    mesh = init_device_mesh("cpu", (2, 2) if axes else (WORLD,), mesh_dim_names=axes)
    by_columns = lambda p: Shard(1) if p.dim() > 1 and not p.shape[1] % WORLD else None  # noqa: E731
    if "tp" in scheme:
        plan = {"a": ColwiseParallel(), "b": RowwiseParallel()}
        parallelize_module(net, mesh["tp"] if axes else mesh, plan, src_data_rank=None)
    if scheme == "fsdp" and net.a.weight is not net.b.weight:  # FSDP2 keeps a tie only within one group
        fully_shard(net.a)
    if "sdp" in scheme:
        fully_shard(
            net,
            mesh=mesh["dp"] if "tp" in scheme else mesh,
            shard_placement_fn=by_columns if "columns" in scheme else None,
        )


SCHEMES = ("whole", "fsdp", "fsdp by columns", "hsdp", "tp", "fsdp over tp")


@settings(max_examples=EXAMPLES // 4, deadline=None)
@given(
    st.sampled_from(SCHEMES), st.integers(1, 13), st.integers(1, 9), st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)  # fmt: skip
def test_every_rank_finds_just_its_elements_and_together_all_are_held_equally_often(scheme, rows, width, dtype, tied):
    tied = tied and "tp" not in scheme  # torch's plans for the two would contradict each other
    whole = dict(Net(rows, width, dtype, tied).state_dict())
    if tied:
        del whole["b.weight"]  # one tensor, under its first name
    specs = {n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in whole.items()}
    copies = {n: torch.zeros(t.shape, dtype=torch.int32) for n, t in whole.items()}
    for rank in range(WORLD):
        with one_rank(rank, WORLD):
            net = Net(rows, width, dtype, tied)
            cut(net, scheme)
            trainer = TensorTrainer(net)
            layout = trainer.read()
            assert (trainer.rank, trainer.world, trainer.check()) == (rank, WORLD, "same")
        assert {s.name: (s.shape, s.dtype) for s in layout.traced.specs} == specs
        for f in layout.traced.fragments:
            assert torch.equal(region(layout.tensors[f.root], f), whole[f.tensor][f.index])
            copies[f.tensor][f.index] += 1
    for name, count in copies.items():
        assert int(count.min()) == int(count.max()), f"{name}: some elements have more holders than others"


@settings(max_examples=EXAMPLES // 4, deadline=None)
@given(st.integers(1, 11), st.integers(1, 7), st.sampled_from([(Shard(0),), (Shard(1),), (Replicate(),)]))
def test_a_declared_layout_means_what_the_dtensor_says(rows, width, placements):
    whole = torch.arange(rows * width).view(rows, width).float()
    with one_rank(2, WORLD):
        mesh = init_device_mesh("cpu", (WORLD,))
        d = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        said = TensorTrainer(lambda: {"w": d}).read()
        declared = Declared(whole.shape, mesh, placements)
        plain = TensorTrainer(lambda: {"w": d.to_local()}, declared={"w": declared}).read()
        assert plain.traced == said.traced and plain.roots == said.roots
        declared = Declared(whole.shape, *from_dtensor(d))
        assert TensorTrainer(lambda: {"w": d.to_local()}, declared={"w": declared}).read().traced == said.traced


def test_wrappers_leave_names_alone_and_a_rename_may_not_join_two():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    wrapped = net
    for name in ("_orig_mod", "layer", "module"):
        wrapped = torch.nn.ModuleDict({name: wrapped})
    names = [s.name for s in TensorTrainer(wrapped).read().traced.specs]
    assert names == ["layer.0.bias", "layer.0.weight", "layer.1.bias", "layer.1.weight"]
    with pytest.raises(LayoutError) as e:
        TensorTrainer(net, rename=lambda name: name.split(".")[1])
    assert len(e.value.violations) == 2


# ---- from refit to refit


def test_gathered_parameters_go_back_to_shards_before_a_refit():
    with one_rank(1, WORLD):
        net = Net(6, 4, torch.float32, False)
        cut(net, "fsdp")
        trainer = TensorTrainer(net)
        before = trainer.read()
        net.unshard()
        net.a.unshard()
        assert type(net.a.weight) is not DTensor
        trainer.drain()
        assert type(net.a.weight.data) is DTensor and trainer.check() == "same"
        assert trainer.read().traced == before.traced


def _dtensor(part: torch.Tensor, mesh, placement, **more) -> DTensor:
    return DTensor.from_local(part, mesh, [placement], run_check=False, **more)


class Two(torch.nn.Module):
    """A matrix that is cut by rows, and a vector that is not."""

    def __init__(self, mesh):
        super().__init__()
        self.put("w", distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0)], src_data_rank=None))
        self.put("v", torch.arange(3.0))

    def put(self, name: str, t: torch.Tensor) -> None:
        setattr(self, name, torch.nn.Parameter(t, requires_grad=False))


CHANGES = {
    "an address": (lambda net, mesh: net.put("v", net.v.clone()), "moved"),
    # As FSDP2 does after load_state_dict(assign=True).
    "a shard's address": (lambda net, mesh: setattr(net.w, "_local_tensor", net.w._local_tensor.clone()), "moved"),
    "another whole": (
        lambda net, mesh: net.put("w", _dtensor(torch.zeros(1, 4), mesh, Shard(0), shape=(3, 4), stride=(4, 1))),
        "changed",
    ),
    "placements": (lambda net, mesh: net.put("w", _dtensor(torch.zeros(1, 4), mesh, Replicate())), "changed"),
    # Its bytes have the same shape as before: only what they are a part of tells.
    "a part of a DTensor": (lambda net, mesh: net.put("v", _dtensor(torch.ones(3), mesh, Shard(0))), "changed"),
    "a shape": (lambda net, mesh: net.put("v", torch.arange(4.0)), "changed"),
    "a dtype": (lambda net, mesh: net.put("v", torch.arange(3.0).double()), "changed"),
    "one more": (lambda net, mesh: net.put("more", torch.zeros(1)), "changed"),
    "one less": (lambda net, mesh: delattr(net, "v"), "changed"),
    "none": (lambda net, mesh: setattr(net, "v", None), "changed"),
    "resized": (lambda net, mesh: net.v.untyped_storage().resize_(0), "offloaded"),
    "emptied": (lambda net, mesh: setattr(net.v, "data", torch.empty(0)), "offloaded"),
    # These have the shape, the strides and the dtype of the one before, and perhaps its bytes.
    "negated": (lambda net, mesh: net.put("v", torch._neg_view(net.v.detach())), "hidden"),
    "a negated copy": (lambda net, mesh: net.put("v", torch._neg_view(net.v.detach().clone())), "hidden"),
    "two": (lambda net, mesh: net.put("v", TwoTensor(net.v.detach(), net.v.detach().clone())), "hidden"),
}


@pytest.mark.parametrize("given", ["a module", "a callable"])
@pytest.mark.parametrize("change, state", CHANGES.values(), ids=CHANGES)
def test_a_change_since_the_last_read_is_noticed(change, state, given):
    with one_rank(0, WORLD):
        mesh = init_device_mesh("cpu", (WORLD,))
        net, back = Two(mesh), torch.arange(3.0)  # never at the address of "v"
        trainer = TensorTrainer(net if given == "a module" else lambda: dict(net.named_parameters()))
        assert trainer.check() == "changed"
        trainer.read()
        assert trainer.check() == "same" and trainer.begin_check()()
        change(net, mesh)
        if state == "hidden":
            for _ in range(2):
                assert trainer.begin_check() is None
                with pytest.raises(Unsupported, match="v: is a "):
                    trainer.check()
            return
        trainer.drain()  # also looks at what is given
        if state == "offloaded":
            for _ in range(2):
                with pytest.raises(RebindError, match="cannot be read") as e:
                    trainer.check()
                (line,) = e.value.violations
                assert line == "v: has no bytes (offloaded?): bring the parameters back before the refit"
            net.v.data = back
            state = "moved"
        assert state == "moved" or trainer.begin_check() is None
        assert trainer.check() == state
        tensors = dict(net.named_parameters())
        if state == "moved":
            now = {t.data_ptr() for t in trainer.rebind().values()}
            assert now == {local(t).untyped_storage().data_ptr() for t in tensors.values()}
        else:
            assert {s.name for s in trainer.read().traced.specs} == tensors.keys()
        assert trainer.check() == "same"


GIVEN = {
    "state_dict": lambda net: net.state_dict(),
    "detached": lambda net: {n: p.detach() for n, p in net.named_parameters()},
    "parameters": lambda net: dict(net.named_parameters()),
    "views": lambda net: {"a.top": net.a.weight.detach()[:3], "a.rest": net.a.weight.detach()[3:]},
    "a DTensor's part": lambda net: {n: local(p).view(-1) for n, p in net.named_parameters()},
}
"""Functions of callers that make new tensor objects at every call."""


@pytest.mark.parametrize(
    "kind, scheme, released",
    [
        *((kind, "whole", released) for kind in GIVEN for released in ("", "let go")),
        *((kind, "fsdp", "") for kind in GIVEN if kind != "views"),
        ("state_dict", "whole", "packed"),
    ],
)
def test_new_objects_over_the_same_bytes_have_not_moved_and_new_bytes_have(kind, scheme, released):
    """Released ones are free when the trainer drops them."""
    with one_rank(1, WORLD):
        net = Net(8, 4, torch.float32, False)
        cut(net, scheme)
        trainer = TensorTrainer(lambda: GIVEN[kind](net))
        holder = TensorStream(trainer) if released == "packed" else trainer
        for _ in range(2):
            holder.read()
            for _ in range(3):
                holder.drain()
                assert holder.check() == "same"
            if released:
                holder.forget() if released == "packed" else holder.let_go()
            old, at = Watched(local(net.a.weight.data)), local(net.a.weight.data).data_ptr()
            other = local(net.a.weight.data).clone()
            if scheme == "fsdp":
                net.a.weight._local_tensor = other
            else:
                net.a.weight.data = other
            if released:
                assert not old.held
            else:
                holder.drain()
            assert holder.check() == "moved"
            places = {t.data_ptr() for t in trainer.rebind().values()}
            assert other.data_ptr() in places and at not in places
            assert holder.check() == "same"


@pytest.mark.parametrize("given", ["a module", "a callable"])
def test_the_device_is_where_tensors_lie_when_they_are_first_read_and_then_for_good(given):
    """A model may be made without bytes, or on the CPU, and moved before it is connected; not between two refits."""
    net = torch.nn.Linear(2, 2, device="meta")
    trainer = TensorTrainer(net if given == "a module" else net.state_dict, rank=0, world=1)
    assert trainer.device.type == "meta"
    net.to_empty(device="cpu")
    assert trainer.device.type == "cpu"
    trainer.read()
    net.to("meta")
    assert trainer.device.type == "cpu"
    # A GPU counts even where only a part lies on it.
    at = [SimpleNamespace(device=torch.device(d)) for d in ("cpu", "cuda:1", "cuda:0")]
    assert device_of(at) == torch.device("cuda:1") and device_of(at[:1]) == torch.device("cpu") == device_of([])


def test_every_tensor_that_lies_elsewhere_is_named():
    net = Net(4, 2, torch.float32, False)
    net.b.bias = torch.nn.Parameter(torch.zeros(0))  # without bytes: it is nowhere
    trainer = TensorTrainer(net)
    trainer._device = torch.device("cuda", 0)  # as of one that read this model there
    with pytest.raises(RebindError, match="read on cuda:0") as e:
        trainer.read()
    assert sorted(v.split(":")[0] for v in e.value.violations) == ["a.weight", "b.weight", "bias"]
    assert "lies on cpu; bring it to cuda:0" in e.value.violations[0]


# ---- refusals


def test_all_contradictions_are_listed_at_once():
    with one_rank(3, WORLD):
        mesh = init_device_mesh("cpu", (WORLD,))
        d = distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)], src_data_rank=None)
        declared = dict.fromkeys(("d", "long", "away", "fits", "typo"), Declared((8, 4), mesh, (Shard(0),)))
        declared["away"] = Declared((4,), MeshInfo.line("tp", [0, 1]), (Shard(0),))
        given = {"d": d, "long": torch.zeros(3, 4), "away": torch.zeros(2), "fits": torch.zeros(2, 4)}
        trainer = TensorTrainer(lambda: given, declared=declared)
        with pytest.raises(LayoutError) as e:
            trainer.read()
        text = "\n".join(e.value.violations)
        assert [v.split(":")[0] for v in e.value.violations] == ["typo", "d", "long", "away"]
        assert "rank 3 holds (3, 4), expected (2, 4) of (8, 4)" in text and "is not in MeshInfo" in text


def test_values_that_no_rank_holds_and_hidden_bytes_are_refused():
    with one_rank(0, WORLD):
        mesh = init_device_mesh("cpu", (WORLD,))
        partial = DTensor.from_local(torch.zeros(2), mesh, [Partial()], run_check=False)
        with pytest.raises(Unsupported, match="w: axis 0: .*sum not yet formed"):
            TensorTrainer(lambda: {"w": partial}).read()
        net = FullyShardedDataParallel(torch.nn.Linear(4, 4), use_orig_params=True, device_id=torch.device("cpu"))
        with pytest.raises(Unsupported, match="FSDP1"):
            TensorTrainer(net).read()
    sparse = torch.zeros(2, 2).to_sparse()
    with pytest.raises(Unsupported, match="torch.sparse_coo"):
        TensorTrainer(lambda: {"w": sparse}).read()
    negative = torch.zeros(2, dtype=torch.complex64).conj().imag
    for lazy in (negative, negative.view(1, 2)):
        with pytest.raises(Unsupported, match="w: is a lazy negation"):
            TensorTrainer(lambda lazy=lazy: {"w": lazy}).read()
    assert TensorTrainer(lambda: {"w": negative.resolve_neg()}).read()


def test_trained_tensors_have_the_checkpoints_names_on_both_routes():
    given = {
        "base_model.a.base_layer.weight": torch.zeros(3),
        "base_model.a.lora_A.weight": torch.zeros(2, requires_grad=True),
    }
    trainer = TensorTrainer(lambda: given, rename=lambda n: n.removeprefix("base_model."), rank=0, world=1)
    assert trainer.read().trained == {"a.lora_A.weight"}
    assert PackedSource(TensorStream(trainer), 1 << 20).read().trained == {"a.lora_A.weight"}
