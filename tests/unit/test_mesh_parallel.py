"""The meshes of both roles hold the same groups, in the same rank order, as Megatron-Core's and vLLM's own code."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import EXAMPLES
from tests.support.fake_group import one_rank
from xfer.errors import LayoutError
from xfer.mesh import EngineParallel, MeshInfo, TrainerParallel

# Which axes of which mesh make each process group that Megatron creates.
DENSE_GROUPS = {
    "TENSOR_MODEL_PARALLEL_GROUP": ["tp"],
    "PIPELINE_MODEL_PARALLEL_GROUP": ["pp"],
    "CONTEXT_PARALLEL_GROUP": ["cp"],
    "DATA_PARALLEL_GROUP": ["dp"],
    "DATA_PARALLEL_GROUP_WITH_CP": ["dp", "cp"],
    "MODEL_PARALLEL_GROUP": ["pp", "tp"],
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": ["cp", "tp"],
}
EXPERT_GROUPS = {
    "EXPERT_MODEL_PARALLEL_GROUP": ["ep"],
    "EXPERT_TENSOR_PARALLEL_GROUP": ["etp"],
    "EXPERT_DATA_PARALLEL_GROUP": ["edp"],
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": ["ep", "etp"],
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": ["pp", "ep", "etp"],
}

TRAINERS = [
    TrainerParallel(world=1),
    TrainerParallel(world=8, tp=2, cp=2, pp=2),
    TrainerParallel(world=8, tp=2, ep=4, etp=1),
    TrainerParallel(world=16, tp=4, pp=2, vpp=2, ep=2, etp=2),
    TrainerParallel(world=16, tp=1, cp=4, pp=2, ep=8),
    TrainerParallel(world=24, tp=2, cp=3, dp=2, pp=2, ep=3),
    TrainerParallel(world=16, tp=2, etp=4, ep=2),
    TrainerParallel(world=16, tp=2, pp=2, order="tp-cp-ep-pp-dp"),
    TrainerParallel(world=32, tp=2, cp=2, pp=2, ep=2, etp=4),
]


def megatron_groups(p: TrainerParallel, monkeypatch) -> dict[str, list[tuple[int, ...]]]:
    import torch.distributed as dist
    from megatron.core import parallel_state

    made: dict[str, list[tuple[int, ...]]] = {}
    real = dist.new_group

    def new_group(ranks=None, *args, group_desc=None, **kwargs):
        made.setdefault(group_desc, []).append(tuple(ranks))
        kwargs.pop("backend", None), kwargs.pop("pg_options", None)
        return real(ranks, backend="fake", group_desc=group_desc, **kwargs)

    with one_rank(0, p.world), monkeypatch.context() as patch:
        patch.setattr(dist, "new_group", new_group)
        try:
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=p.tp,
                pipeline_model_parallel_size=p.pp,
                virtual_pipeline_model_parallel_size=p.vpp,
                context_parallel_size=p.cp,
                expert_model_parallel_size=p.ep,
                expert_tensor_parallel_size=p.etp,
                order=p.order,
                create_gloo_process_groups=False,
            )
        finally:
            parallel_state.destroy_model_parallel()
    return made


@pytest.mark.trainer
@pytest.mark.parametrize(
    "p", TRAINERS, ids=lambda p: f"w{p.world}tp{p.tp}cp{p.cp}pp{p.pp}ep{p.ep}etp{p.etp}{p.order[-2:]}"
)
def test_trainer_meshes_hold_megatrons_own_groups(p, monkeypatch):
    pytest.importorskip("megatron.core")
    made = megatron_groups(p, monkeypatch)
    for mesh, table in [(p.dense(), DENSE_GROUPS), (p.expert(), EXPERT_GROUPS)]:
        assert mesh.size() == p.world
        for description, axes in table.items():
            axes = [a for a in mesh.axes if a in axes]  # slowest first, in the order at hand
            ours = {tuple(g) for g in mesh.groups(axes).tolist()}
            assert ours == set(made[description]), description
            assert len(ours) == len(made[description])


def vllm_groups(p: EngineParallel, monkeypatch) -> dict[str, list[list[int]]]:
    """The rank lists that vLLM hands to the makers of its groups: kind -> groups."""
    from types import SimpleNamespace

    import vllm.config
    from vllm.distributed import parallel_state

    made: dict[str, list[list[int]]] = {}

    def record(group_ranks, local_rank, backend, *, group_name, **_):
        made[group_name] = group_ranks
        return SimpleNamespace(rank_in_group=0, world_size=1)

    parallel = SimpleNamespace(data_parallel_size=p.dp, enable_elastic_ep=False, enable_eplb=False, use_all2all=False)
    config = SimpleNamespace(parallel_config=parallel, model_config=None, engram_config=None)
    with one_rank(0, p.world), monkeypatch.context() as patch:
        patch.setattr(vllm.config, "get_current_vllm_config", lambda: config)
        patch.setattr(parallel_state, "get_world_group", lambda: SimpleNamespace(local_rank=0))
        patch.setattr(parallel_state, "init_model_parallel_group", record)
        for name in [n for n in vars(parallel_state) if n.startswith("_") and n[1:].isupper()]:
            patch.setattr(parallel_state, name, None)
        parallel_state.initialize_model_parallel(p.tp, p.pp, p.pcp, 1, backend="fake")
    return made


@pytest.mark.engine
@pytest.mark.parametrize("ep", [False, True])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1), (4, 1, 1, 1), (2, 2, 1, 1), (2, 1, 3, 1), (2, 2, 3, 1), (2, 3, 2, 2)], ids=str
)
def test_engine_meshes_hold_vllms_own_groups(sizes, ep, monkeypatch):
    pytest.importorskip("vllm")
    tp, pp, dp, pcp = sizes
    p = EngineParallel(tp=tp, pp=pp, dp=dp, ep=ep, pcp=pcp)
    made = vllm_groups(p, monkeypatch)
    dense, expert = p.dense(), p.expert()
    for axis in ("tp", "pp", "dp", "pcp"):
        assert sorted(dense.groups([axis]).tolist()) == sorted(made[axis])
    assert sorted(expert.groups(["pp"]).tolist()) == sorted(made["pp"])
    assert sorted(expert.groups(["ep" if ep else "etp"]).tolist()) == sorted(made["ep"])
    assert expert.size("etp" if ep else "ep") == 1


@settings(max_examples=EXAMPLES, deadline=None)
@given(*[st.integers(1, 3)] * 6)
def test_trainer_meshes_are_two_views_of_the_same_ranks(tp, pp, cp, dp, ep, etp):
    world = tp * pp * cp * dp
    if world % (etp * ep * pp):
        with pytest.raises(LayoutError, match=f"multiple of etp.* = {etp * ep * pp}"):
            TrainerParallel(world=world, tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, etp=etp)
        return
    p = TrainerParallel(world=world, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)
    dense, expert = p.dense(), p.expert()
    assert p.dp == dp and dense == MeshInfo.grid(pp=pp, dp=dp, cp=cp, tp=tp)
    assert expert.sizes == (pp, p.edp, ep, etp)
    assert (dense.ranks.ravel() == expert.ranks.ravel()).all()
    assert (dense.groups(["pp"]) == expert.groups(["pp"])).all(), "a layer's experts live where the layer lives"


@pytest.mark.parametrize(
    "made, faults",
    [
        (lambda: TrainerParallel(world=6, tp=4, ep=5, etp=1, vpp=2), 3),
        (lambda: TrainerParallel(world=0, tp=-1, order="tp-dp"), 3),
        (lambda: TrainerParallel(world=8, tp=2, dp=2), "world is 8"),
        (lambda: TrainerParallel(world=16, tp=2, pp=2, ep=4, etp=1, order="tp-cp-ep-pp-dp"), "put pp last"),
        (lambda: EngineParallel(tp=0, dp=True), 2),
    ],
)
def test_all_faults_of_a_parallelism_come_at_once(made, faults):
    with pytest.raises(LayoutError, match=faults if isinstance(faults, str) else None) as e:
        made()
    assert isinstance(faults, str) or len(e.value.violations) == faults
