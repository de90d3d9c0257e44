"""MeshInfo is a value: it keeps what it was given, tells where ranks sit, and converts to other forms and back."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import EXAMPLES
from tests.support.fake_group import one_rank
from xfer.errors import LayoutError
from xfer.mesh import Interleaved, MeshInfo, MeshRecord, Segmented, Shard, StridedShard
from xfer.mesh.placement import checked

NAMES = ("pp", "dp", "cp", "tp")
PAIR = MeshInfo.grid(tp=2)
BIG = 1 << 63


@st.composite
def meshes(draw):
    sizes = draw(st.lists(st.integers(1, 4), max_size=4))
    n = int(np.prod(sizes))
    table = draw(st.lists(st.integers(-5, 10**12), min_size=n, max_size=n, unique=True))
    return MeshInfo(draw(st.permutations(NAMES))[: len(sizes)], np.array(table).reshape(sizes))


@settings(max_examples=EXAMPLES, deadline=None)
@given(meshes(), st.data())
def test_every_rank_is_found_where_the_table_has_it(mesh, data):
    flat = mesh.ranks.ravel().tolist()
    assert all(mesh.ranks[mesh.coordinate(r)] == r and r in mesh for r in flat)
    assert all(mesh.coordinate(r) is None and r not in mesh for r in range(-10, 0) if r not in flat)

    rank = data.draw(st.sampled_from(flat))
    here = mesh.coordinate(rank)
    axes = data.draw(st.permutations(mesh.axes))[: data.draw(st.integers(0, mesh.ndim))]
    groups = mesh.groups(axes)
    assert sorted(groups.ravel()) == sorted(flat) and groups.shape[1] == np.prod([mesh.size(a) for a in axes])
    (mine,) = (g for g in groups.tolist() if rank in g)
    for r in mine:  # only the coordinates along `axes` differ inside a group
        assert all(x == y for x, y, name in zip(mesh.coordinate(r), here, mesh.axes) if name not in axes)
    along = [tuple(mesh.coordinate(r)[mesh.index(a)] for a in axes) for r in mine]
    assert along == sorted(along), "the first of the axes is the slowest"
    turned = mesh.transpose(order := data.draw(st.permutations(mesh.axes)))
    assert turned.axes == tuple(order) and turned.coordinate(rank) == tuple(here[mesh.index(a)] for a in order)


@settings(max_examples=EXAMPLES, deadline=None)
@given(meshes())
def test_records_survive_the_wire_and_equality_is_by_value(mesh):
    wire = msgspec.msgpack.encode(mesh.to_record())
    back = MeshInfo.from_record(msgspec.msgpack.decode(wire, type=MeshRecord))
    assert back == mesh and hash(back) == hash(mesh)
    other = MeshInfo(mesh.axes, mesh.ranks + 1)
    assert other != mesh and MeshInfo(mesh.axes, other.ranks - 1) == mesh
    if mesh.ndim:
        assert MeshInfo(("other", *mesh.axes[1:]), mesh.ranks) != mesh


def test_a_mesh_does_not_follow_the_array_it_was_made_from():
    table = np.arange(4).reshape(2, 2)
    mesh = MeshInfo(("dp", "tp"), table)
    table[:] = 7
    assert mesh == MeshInfo.grid(dp=2, tp=2)
    with pytest.raises(ValueError):
        mesh.ranks[0, 0] = 9


def test_all_faults_of_a_mesh_come_at_once():
    with pytest.raises(LayoutError) as e:
        MeshInfo(("tp", "tp", ""), np.array([[1, 2], [2, 1]]))
    text = "\n".join(e.value.violations)
    assert len(e.value.violations) == 5
    assert all(part in text for part in ("3 axis names", "'tp' appears 2", "''", "rank 1 ", "rank 2 "))


@pytest.mark.parametrize(
    "made",
    [
        lambda: MeshInfo(("a",), np.zeros((0,), int)),
        lambda: MeshInfo(("a",), np.array([0.5])),
        lambda: MeshInfo(("a", "b"), [[1, 2], [3]]),
        lambda: MeshInfo(("a",), [None, 1]),
        lambda: MeshInfo(("a",), [BIG, 1]),
        lambda: MeshInfo(("a",), np.array([BIG + 1, 1], np.uint64)),
        lambda: MeshInfo((["a"], ["a"]), [[0, 1]]),
        lambda: MeshInfo(None, [0, 1]),
        lambda: MeshInfo.from_record(MeshRecord(("a",), (3,), (1, 2))),
        lambda: MeshInfo.from_record(MeshRecord(("a",), (-1,), (1, 2))),
        lambda: MeshInfo.from_record(MeshRecord(("a",), (1,), (1 << 80,))),
        lambda: MeshInfo.line("a", ["x"]),
        lambda: MeshInfo.line("a", [0.5]),
        lambda: MeshInfo.grid(tp=True),
        lambda: PAIR.size("pp"),
        lambda: PAIR.groups(["tp", "tp"]),
        lambda: PAIR.transpose([]),
        lambda: PAIR.transpose([1, "tp"]),
        lambda: checked((4,), PAIR, (Shard("x"),)),
        lambda: checked((4,), PAIR, (StridedShard(0, 1.5),)),
        lambda: checked((4,), PAIR, (Segmented(0, (2, "a")),)),
        lambda: checked((4,), PAIR, (Segmented(0, (2, 2), (1, None)),)),
        lambda: checked((4,), PAIR, (Interleaved(0, (2, 2), None),)),
        lambda: checked(("4",), PAIR, (Shard(0),)),
    ],
)
def test_what_is_no_mesh_or_no_placement_is_a_layout_error(made):
    with pytest.raises(LayoutError):
        made()


@pytest.fixture(scope="module")
def fake_world():
    with one_rank(3, 24):
        yield


@settings(max_examples=max(EXAMPLES // 8, 5), deadline=None)
@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda s: np.prod(s) <= 24), data=st.data())
def test_device_meshes_are_read_as_they_are(fake_world, sizes, data):
    from torch.distributed.device_mesh import DeviceMesh

    ranks = data.draw(st.permutations(range(24)))[: int(np.prod(sizes))]
    names = data.draw(st.sampled_from([None, NAMES[: len(sizes)]]))
    ours = MeshInfo.from_device_mesh(DeviceMesh("cpu", np.array(ranks).reshape(sizes), mesh_dim_names=names))
    assert ours.sizes == tuple(sizes) and ours.ranks.ravel().tolist() == list(ranks)
    assert ours.axes == (names or tuple(f"axis{d}" for d in range(len(sizes))))
