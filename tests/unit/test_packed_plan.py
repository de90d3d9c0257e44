"""Buckets: planned from sizes, announced, packed and unpacked, for any tensors; and what a receiver refuses."""

from __future__ import annotations

from itertools import accumulate
from unittest.mock import patch

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.memory import allocations
from xfer.errors import LayoutError, PlanMismatch, ProtocolError, Unsupported
from xfer.packed import buffer, wire
from xfer.packed.buffer import Buffers, Packer, Unpacker, wire_sum
from xfer.packed.lockstep import _apart, _joined
from xfer.packed.plan import ALIGN, TaskSize, make_plan
from xfer.packed.wire import BucketRequest, Manifest
from xfer.trace.fragment import TensorSpec

CPU = torch.device("cpu")
DTYPES = ("bfloat16", "float16", "float32", "uint8", "float8_e4m3fn", "float64", "int64")

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
tensor_lists = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=12)


@st.composite
def task_lists(draw) -> list[TaskSize]:
    """Tasks of some tensors, or of none; some share a key."""
    found = draw(tensor_lists)
    tasks, i = [], 0
    while i < len(found):
        n = draw(st.sampled_from([1, 2, 3, 0]))
        specs = tuple(TensorSpec(f"t{i + j}", s, d) for j, (s, d) in enumerate(found[i : i + n]))
        tasks.append(TaskSize(len(tasks), specs, draw(st.sampled_from([None, None, "a", "b"]))))
        i += n
    return tasks


def filled(spec: TensorSpec, seed: int) -> torch.Tensor:
    """Any bits: dense, as every other element of a storage, or with dims in another order."""
    g = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (wire.nbytes_of(spec),), dtype=torch.uint8, generator=g)
    dense = data.view(getattr(torch, spec.dtype)).view(spec.shape)
    turned = dense.new_empty(spec.shape[::-1]).permute(tuple(reversed(range(dense.dim()))))
    return [dense, dense.new_empty((*spec.shape, 2))[..., 0].copy_(dense), turned.copy_(dense)][seed % 3]


def computed(into, tensors, non_blocking=False) -> None:
    """torch's `_foreach_copy_` on GPUs: it sends floats through arithmetic, after which every NaN is the same one."""
    for a, b in zip(into, tensors, strict=True):
        a.copy_(torch.where(b.isnan(), torch.full_like(b, torch.nan), b) if b.is_floating_point() else b)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    dense = (t.clone(memory_format=torch.contiguous_format) for t in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*(t.view(-1).view(torch.uint8) for t in dense))


def sent(plan, tensors) -> list[torch.Tensor]:
    """Every message, as bytes of its own."""
    out, buffers = [], Buffers(2, CPU)
    buffers.begin(plan.messages)
    for group in plan.groups:
        packer = Packer(
            group,
            lambda message: buffers.take(len(out), message.nbytes).fill_(0xEE),
            lambda data: out.append(data.clone()),
            buffers.views,
        )
        for spec in group.tensors:
            packer.put(spec.name, tensors[spec.name])
        packer.close()
    return out


def received(plan, specs, data) -> dict[str, torch.Tensor]:
    messages, got, unpacker = wire.checked(wire.decode_manifest(plan.manifest), specs), {}, Unpacker(CPU)
    assert [m.nbytes for m in messages] == [d.numel() for d in data]
    for message, bytes_ in zip(messages, data, strict=True):
        for spec, tensor in unpacker.take(message, bytes_):
            assert spec.name not in got
            got[spec.name] = tensor
    unpacker.close(specs)
    return got


@settings(deadline=None)
@given(task_lists(), st.integers(ALIGN, 4096), st.integers(0, 9))
@example([TaskSize(0, (TensorSpec("t0", (1, 1), "bfloat16"),))], 4096, 1)  # one element, of a storage with gaps
def test_every_pattern_of_bits_comes_out_as_it_was_within_the_limit(tasks, limit, seed):
    """Also as exports in lockstep gather tensors: together, of one dtype or of several."""
    plan = make_plan(tasks, limit)
    specs = {t.name: t for task in tasks for t in task.tensors}
    tensors = {name: filled(spec, seed + i) for i, (name, spec) in enumerate(specs.items())}
    alike = [t for t in tensors.values() if t.dtype == tensors["t0"].dtype]
    with patch.object(torch, "_foreach_copy_", computed):
        data = sent(plan, tensors)
        got = received(plan, specs, data)
        for together in ([*tensors.values()], alike):
            into = [torch.zeros(t.shape, dtype=t.dtype) for t in together]
            _apart(_joined(together), into)
            assert all(map(same, into, together))
    assert all(d.numel() <= limit for d in data)
    assert all(p.offset % ALIGN == 0 for m in plan.messages for p in m.parts)
    assert got.keys() == tensors.keys() and all(same(got[n], tensors[n]) for n in got)


@settings(deadline=None)
@given(task_lists(), st.integers(ALIGN, 4096))
def test_tasks_of_one_key_are_never_in_two_groups_and_no_group_is_empty(tasks, limit):
    plan = make_plan(tasks, limit)
    where = {position: i for i, g in enumerate(plan.groups) for position in g.positions}
    gives = {t.key for t in tasks if t.key and t.tensors}
    assert sorted(where) == sorted(t.position for t in tasks if t.tensors or t.key in gives)
    for key in gives:
        assert len({where[t.position] for t in tasks if t.key == key}) == 1
    for group in plan.groups:
        units = {t.key or t.position for t in tasks if t.position in group.positions}
        size = sum(-(-wire.nbytes_of(t) // ALIGN) * ALIGN for t in group.tensors)
        assert group.messages and (size <= limit or len(units) == 1), "only what cannot be split may pass the limit"


def test_plans_of_different_exports_have_different_fingerprints():
    a = TaskSize(0, (TensorSpec("a", (4, 4), "bfloat16"),))

    def tasks(position=1, shape=(3,), dtype="float32"):
        return [a, TaskSize(position, (TensorSpec("b", shape, dtype),))]

    some = [tasks(), [a], tasks(2), tasks(dtype="bfloat16"), tasks(shape=(1, 3))]
    plans = [make_plan(tasks(), 512), *(make_plan(x, 1024) for x in some)]
    assert plans[1].fingerprint == make_plan(tasks(), 1024).fingerprint
    assert len({p.fingerprint for p in plans}) == len(plans)


@pytest.mark.parametrize(
    "tasks, kind, named",
    [
        ([(TensorSpec("a", (2,), "float32"),)] * 2, LayoutError, ["a"]),
        ([(TensorSpec("x", (2,), "complex64"), TensorSpec("y", (2,), "quint4"))], Unsupported, ["x: dtype complex64", "y: dtype quint4"]),
        ([()], LayoutError, ["give the trainer's adapter a model with parameters"]),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused_with_all_names(tasks, kind, named):
    with pytest.raises(kind) as e:
        make_plan([TaskSize(i, specs) for i, specs in enumerate(tasks)])
    assert list(e.value.violations) == named


def test_a_packer_takes_only_what_was_planned():
    plan = make_plan([TaskSize(0, (TensorSpec("a", (2,), "bfloat16"), TensorSpec("b", (2,), "bfloat16")))])
    right = torch.zeros(2, dtype=torch.bfloat16)

    def packer() -> Packer:
        return Packer(plan.groups[0], lambda m: torch.zeros(m.nbytes, dtype=torch.uint8), lambda data: None)

    for name, tensor in (("b", right), ("a", right.float()), ("a", torch.zeros(3, dtype=torch.bfloat16))):
        with pytest.raises(PlanMismatch):
            packer().put(name, tensor)
    short = packer()
    short.put("a", right)
    with pytest.raises(PlanMismatch) as e:
        short.close()
    assert e.value.violations == ("b: planned and not exported",)


# ---- what a receiver refuses

GOOD = dict(
    names=("a", "b"), dtypes=("float32", "bfloat16"), shapes=((2, 3), (5,)), sizes=(24, 10), offsets=(0, 256), nbytes=266
)  # fmt: skip
EXPECTED = {"a": TensorSpec("a", (2, 3), "float32"), "b": TensorSpec("b", (5,), "bfloat16")}
ONE = dict(names=("a",), dtypes=("float32",), shapes=((2, 3),), sizes=(24,), offsets=(0,), nbytes=24)
TWICE = {k: v * 2 for k, v in ONE.items() if k != "nbytes"} | dict(offsets=(0, 256), nbytes=280)
MANY = dict(sizes=(20, 12), offsets=(0, 8), nbytes=19)
NONE = dict(names=("none",), dtypes=("int8",), shapes=((0,),), sizes=(0,), offsets=(266,))
EMPTY_TWICE = {k: GOOD[k] + v * 2 for k, v in NONE.items()}


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(sizes=(24, 12)), "b: 12 bytes are announced"),
        (dict(sizes=(24,)), "sizes: 1 entries for 2 names"),
        (MANY, "begins at byte 8 of its buffer"),
        (dict(dtypes=("float32", "float32")), "b: 10 bytes are announced"),
        (dict(dtypes=("float32", "bf16")), "dtype 'bf16' is unknown"),
        (dict(offsets=(0, 16)), "but the tensor before it ends at byte 24"),
        (dict(nbytes=260), "ends at byte 266, but its buffer has 260 bytes"),
        (dict(names=("a", "c")), "c: no tensor of this name was announced"),
        (TWICE, "exactly once"),
        (dict(shapes=((3, 2), (5,))), "was announced"),
        (dict(starts=(0, 4), sizes=(24, 6), nbytes=262), "exactly once"),
        (dict(offsets=(0, 1024), nbytes=1034), "the limit is 512"),
        (ONE, "b: is in no bucket"),
        (EMPTY_TWICE, "none: its parts do not make up its 0 bytes exactly once"),
    ],
)
def test_every_kind_of_wrong_request_is_refused_before_a_byte_is_read(change, words):
    expected = EXPECTED | ({"none": TensorSpec("none", (0,), "int8")} if change is EMPTY_TWICE else {})
    with pytest.raises(ProtocolError) as e:
        wire.checked(Manifest((BucketRequest(**{**GOOD, **change}),), 512), expected)
    assert any(words in v for v in e.value.violations), e.value.violations
    assert change is not MANY or len(e.value.violations) == 4, "all of them come at once"


def test_a_bucket_that_was_cut_short_or_comes_twice_is_refused():
    message = wire.message_of(BucketRequest(**GOOD))
    unpacker = Unpacker(CPU)
    with pytest.raises(ProtocolError, match="differs from its announcement"):
        unpacker.take(message, torch.zeros(265, dtype=torch.uint8))
    unpacker.take(message, torch.zeros(266, dtype=torch.uint8))
    with pytest.raises(ProtocolError, match="differs from its announcement"):
        unpacker.take(message, torch.zeros(266, dtype=torch.uint8))
    with pytest.raises(ProtocolError) as e:
        unpacker.close(["a", "b", "c"])
    assert e.value.violations == ("c: did not arrive",)


@pytest.mark.parametrize("data", [b"", b"\x81", b"\xc1" * 40, *map(msgspec.msgpack.encode, ({"buckets": [1]}, [1, 2]))])
def test_bytes_that_are_no_manifest_are_refused(data):
    with pytest.raises(ProtocolError):
        wire.decode_manifest(data)


def test_a_wide_dtype_after_an_odd_number_of_bytes_is_viewed():
    message = wire.message_of(BucketRequest(("x", "y"), ("uint8", "float32"), ((3,), (2,)), (3, 8), (0, 3), 11))
    data = torch.arange(11, dtype=torch.uint8)
    got = {s.name: t for s, t in Unpacker(CPU).take(message, data)}
    assert same(got["y"], data[3:].clone().view(torch.float32))


# ---- sums


few_values = st.binary(min_size=1, max_size=3).flatmap(
    lambda some: st.lists(st.sampled_from(some), min_size=1, max_size=200)
)


@pytest.fixture(params=[4, 1 << 20], ids=["chunks of 4 words", "one chunk"])
def chunks(request, monkeypatch):
    monkeypatch.setattr(buffer, "CHUNK", request.param)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(min_size=1, max_size=200), few_values), st.data())
def test_a_sum_sees_any_change_of_bits_any_swap_any_signs_and_the_order_of_messages(chunks, data, draw):
    """Also where values are few, so that what one change adds another could take away."""
    t = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    item = draw.draw(st.sampled_from([1, 2, 4, 8]))
    places = st.integers(0, len(data) // item - 1) if len(data) >= item else st.nothing()
    step = st.sampled_from([1, 2, 3, 4, 8])
    other = t.clone()
    items = other[: len(data) // item * item].view(-1, item)
    if draw.draw(st.booleans()) and len(items):
        some = draw.draw(
            st.one_of(st.lists(places, max_size=30, unique=True), st.builds(slice, places, st.none(), step))
        )
        items[some, -1] ^= 0x80  # the sign, of floats of any size; also of every n-th from any place on
    if draw.draw(st.booleans()) and len(items) > 1:
        for a, b in draw.draw(st.lists(st.tuples(places, places), max_size=8)):
            items[[a, b]] = items[[b, a]]
    for i in draw.draw(st.lists(st.integers(0, len(data) * 8 - 1), max_size=4)):
        other[i // 8] ^= 1 << i % 8
    assert (wire_sum(t, 0) == wire_sum(other, 0)) == torch.equal(t, other)
    loose = torch.cat([t[:1], t])[1:]
    assert wire_sum(loose, 3) == wire_sum(t, 3), "bytes count, not how they are aligned"
    assert not any(data) or wire_sum(t, 0) != wire_sum(t, 1)


def test_a_sum_needs_no_memory_that_grows_with_the_message(monkeypatch):
    monkeypatch.setattr(buffer, "CHUNK", 1 << 14)

    def peak(chunks: int) -> int:
        data = torch.ones(chunks * buffer.CHUNK, dtype=torch.uint8)
        return max(accumulate(allocations(lambda: wire_sum(data, 0))))

    assert 0 < peak(240) <= 2 * peak(24)
