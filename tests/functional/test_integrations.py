"""The adapters of xfer/integrations against the frameworks' own classes, with the engine of tests/support/tiny_engine.py. The slow tests
run each example with a real vLLM."""

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.rl
pytest.importorskip("verl")
pytest.importorskip("trl")

import torch  # noqa: E402

import xfer  # noqa: E402
from examples.common.ports import free_port  # noqa: E402
from tests.functional.test_extending import Trained  # noqa: E402
from tests.support.proc import PATIENCE, ROOT, environment  # noqa: E402
from tests.support.tiny_engine import WIDTH, Engine  # noqa: E402
from xfer.errors import Unsupported, XferError  # noqa: E402
from xfer.observers import TrainerFinished, observe  # noqa: E402


def filled(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    return model


def started() -> Engine:
    engine = Engine()
    for a in engine.adapters:
        filled(a.model)
        torch.nn.init.ones_(a.model.norm)
    return engine


def holds(engine: Engine, gate: torch.Tensor) -> bool:
    return torch.equal(torch.cat([a.model.fused[: WIDTH // 2] for a in engine.adapters]), gate)


@pytest.fixture
def given(monkeypatch):
    """The options that adapters gave `xfer.connect` and `xfer.serve`, and whether each refit was verified."""
    seen = SimpleNamespace(connect=[], serve=[], verified=[])

    def spied(call, options_of, *args, **options):
        options_of.append(options)
        return call(*args, **options)

    def told(ended):
        if isinstance(ended, TrainerFinished):
            seen.verified.append(ended.report.verified)

    for name in ("connect", "serve"):
        monkeypatch.setattr(xfer, name, partial(spied, getattr(xfer, name), getattr(seen, name)))
    stop = observe(told)
    yield seen
    stop()


ROUTE = xfer.Direct(narrow=["*"], cache_dir=None)
OPTIONS = {"verify": True, "keep": ["tower*"], "deadline_s": 30.0, "connect": {"route": ROUTE}}


class ServerActor:
    """verl's server actor, as far as it forwards vLLM's calls: `actor.method.remote(...)` answers at once."""

    def __init__(self, engine: Engine):
        self.collective_rpc = SimpleNamespace(
            remote=lambda name, kwargs: getattr(engine, name)(*[kwargs] * bool(kwargs))
        )
        self.abort_all_requests = self.clear_kv_cache = SimpleNamespace(remote=lambda: None)


def settings(page: str) -> list[str]:
    """The settings of the framework that a page gives, each on a line of its own."""
    text = (ROOT / f"docs/integrations/{page}.md").read_text()
    return re.findall(r"^ +(\+*[\w.]+=\S+)$", text, re.M)


def test_verl_takes_the_settings_and_options_of_its_page():
    from hydra import compose, initialize_config_module

    options = "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.xfer."
    assert options in (ROOT / "docs/integrations/verl.md").read_text()
    given = [*settings("verl"), *(options + o for o in ("verify=true", "keep=[*vision*,*tower*]", "deadline_s=60"))]
    with initialize_config_module("verl.trainer.config", version_base=None):
        rollout = compose("ppo_trainer", overrides=given).actor_rollout_ref.rollout
    engine = rollout.checkpoint_engine
    assert (engine.backend, engine.custom_backend_module) == ("xfer", "xfer.integrations.verl")
    assert engine.engine_kwargs.xfer == {"verify": True, "keep": ["*vision*", "*tower*"], "deadline_s": 60}
    assert rollout.engine_kwargs.vllm == {"weight_transfer_config": {"backend": "xfer"}}


def test_skyrl_takes_the_settings_of_its_page():
    pytest.importorskip("skyrl")
    from examples.integrations.skyrl_imports import importable

    with importable():
        from skyrl.train.config import SkyRLTrainConfig

        read = SkyRLTrainConfig.from_cli_overrides(settings("skyrl"))
    assert read.generator.inference_engine.engine_init_kwargs == {"weight_transfer_config": {"backend": "xfer"}}
    assert read.trainer.placement.colocate_all is False


@pytest.fixture
def verl(monkeypatch):
    """The adapter, found as verl finds it, without Ray's transport."""
    from verl.utils.import_utils import import_external_libs

    import_external_libs("xfer.integrations.verl")
    module = sys.modules["xfer.integrations.verl"]
    monkeypatch.setattr(module.ray, "get", lambda answer: answer)
    monkeypatch.setattr(module.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    return module


def worker(verl, **given):
    """A worker of verl that constructs its checkpoint engine as verl's workers do."""
    from verl.checkpoint_engine import CheckpointEngineRegistry
    from verl.single_controller.base import Worker

    class OneWorker(Worker):
        def __init__(self, is_master=False, **given):
            vars(self).update(given)
            self.checkpoint_engine = CheckpointEngineRegistry.new("xfer", bucket_size=1, is_master=is_master, **OPTIONS)

    return OneWorker(**given).checkpoint_engine


def adapter(engine: Engine, replica: int, rank: int, **config):
    parallel = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "data_parallel_size": 1}
    config = {"name": "vllm", "disaggregation": SimpleNamespace(enabled=False), **parallel, **config}
    return SimpleNamespace(
        replica_rank=replica, rollout_rank=rank, config=SimpleNamespace(**config), server_handle=ServerActor(engine),
        _ensure_server_handle=lambda: True,
    )  # fmt: skip


def test_verl_syncs_weights_twice_and_connects_anew_when_a_replica_is_added(verl, given):
    """As verl's manager calls it: prepare, build_topology, init_process_group, then both update_weights."""
    module, servers = filled(Trained()), [started(), started()]
    begun = []
    trainer = worker(verl, is_master=True, engine=SimpleNamespace(module=module, is_param_offload_enabled=False))
    beside = [[worker(verl, server_adapter=adapter(s, 4 + i, rank)) for rank in (0, 1)] for i, s in enumerate(servers)]

    async def sync(step: int, replicas: int) -> dict[str, float]:
        rollout = [e for both in beside[:replicas] for e in both]
        prepared = [e.prepare() for e in (trainer, *rollout)]
        ours, theirs = verl.XferCheckpointEngine.build_topology(1, len(rollout), prepared)
        for engines, kwargs in (([trainer], ours), (rollout, theirs)):
            for i, e in enumerate(engines):
                e.init_process_group(**{name: values[i] for name, values in kwargs.items()})
        for e in rollout:
            assert [w async for w in e.receive_weights(step)] == []
        weights = (begun.append(name) for name in "w")
        metrics = await trainer.send_weights(weights, global_steps=step)
        for e in (trainer, *rollout):
            e.finalize()
        return metrics

    try:
        for step, replicas in ((0, 1), (1, 1), (2, 2), (3, 2)):
            filled(module)
            metrics = asyncio.run(sync(step, replicas))
            assert [holds(s, module.gate.weight) for s in servers] == [True, replicas == 2]
            assert metrics["xfer/bytes"] > 0 and trainer.session.version == step
    finally:
        for link in (trainer.session, *(both[0].controller for both in beside)):
            if link is not None:
                link.close()
    assert begun == [], "verl's own gather of whole tensors was begun"
    assert [(c["replicas"], c["deadline_s"]) for c in given.connect] == [(1, 30.0), (2, 30.0)]
    assert {(s["keep"], s["deadline_s"]) for s in given.serve} == {(("tower*",), 30.0)} and given.verified == [True] * 4


@pytest.mark.parametrize(
    "config", [{"name": "sglang"}, {"data_parallel_size": 2}, {"disaggregation": SimpleNamespace(enabled=True)}]
)
def test_verl_servers_that_a_call_would_not_reach_are_refused(verl, config):
    with pytest.raises(Unsupported, match="a rollout server that verl cannot refit by xfer"):
        verl.VerlServer(adapter(started(), 0, 0, **config))


def test_verl_trainers_with_adapters_and_engines_without_a_worker_are_refused(verl):
    module = Trained()
    module.peft_config = {}
    with pytest.raises(Unsupported, match="LoRA"):
        verl.trainer_of(SimpleNamespace(module=module))
    with pytest.raises(Unsupported, match="that no worker of verl constructs"):
        verl.XferCheckpointEngine(bucket_size=1)


@pytest.fixture
def generation(monkeypatch):
    """Makes TRL's own VLLMGeneration around a module, whose server is a tiny engine."""
    from accelerate import Accelerator
    from trl.generation.vllm_generation import VLLMGeneration

    from xfer.integrations import trl

    class Client:
        def __init__(self, base_url, group_port, connection_timeout):
            self.base_url = base_url

    monkeypatch.setattr(trl, "VLLMClient", Client)
    monkeypatch.setenv("XFER_TOKEN", "token of the tiny engine")
    links = []

    def make(model: torch.nn.Module, engine: Engine, mode: str = "server"):
        monkeypatch.setattr(trl, "_url", lambda generation: engine)
        with trl.refits(f"tcp://127.0.0.1:{free_port()}", verify=True, route=ROUTE, deadline_s=30.0):
            made = VLLMGeneration(model, Accelerator(cpu=True), None, mode=mode)
        links.append(made.xfer)
        return made

    original = VLLMGeneration._init_vllm
    yield make
    assert VLLMGeneration._init_vllm is original
    for link in links:
        link.close()


def test_trl_syncs_weights_twice(generation, given):
    model, engine = filled(Trained()), started()
    made = generation(model, engine)
    for version in (1, 2):
        filled(model)
        made.sync_weights()
        assert holds(engine, model.gate.weight) and made.xfer.session.version == version
    assert made.vllm_client.base_url is engine
    assert [c["deadline_s"] for c in given.connect] == [30.0] and given.verified == [True, True]
    with pytest.raises(Unsupported, match="colocate"):
        generation(model, engine, mode="colocate")


def test_trl_sends_merged_adapters_and_takes_them_out_again(generation):
    from peft import LoraConfig, get_peft_model

    model, engine = filled(Trained()), started()
    peft = get_peft_model(model, LoraConfig(r=2, target_modules=["gate", "up"], init_lora_weights=False))
    base = model.gate.base_layer.weight
    for p in peft.parameters():
        p.data = torch.randint_like(p, -3, 4)  # so that sums are exact, and are taken out exactly
    made, was = generation(peft, engine), base.clone()
    made.sync_weights()
    layer = model.gate
    merged = was + layer.get_delta_weight("default")
    assert not torch.equal(merged, was) and holds(engine, merged) and torch.equal(base, was)


def test_trl_constructs_the_trainer_of_its_page(monkeypatch, tmp_path):
    """As printed, but for the model, and settings that a GPU has by default. It neither trains nor asks the server."""
    import trl
    from datasets import Dataset

    from examples.integrations.toy_model import write_model
    from xfer.integrations import trl as adapter

    class Client:
        def __init__(self, base_url, **_):
            self.base_url = base_url

        def get_server_info(self):
            return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/integrations/trl.md").read_text(), re.S | re.M)
    write_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(adapter, "VLLMClient", Client)
    config = partial(trl.GRPOConfig, use_cpu=True, bf16=False, report_to=[])
    monkeypatch.setattr(trl, "GRPOConfig", config)
    monkeypatch.setattr(trl.GRPOTrainer, "train", lambda self: None)
    space = {"prompts": Dataset.from_dict({"prompt": ["1 2", "3 4"] * 8})}
    assert block.count("Qwen/Qwen3-4B") == 1
    exec(block.replace("Qwen/Qwen3-4B", str(tmp_path / "model")), space)
    assert space["trainer"].vllm_generation.vllm_client.base_url == "http://10.0.0.2:8000"


@pytest.fixture
def skyrl(monkeypatch):
    """The adapter, on SkyRL's own interface, with a process group of one rank."""
    pytest.importorskip("skyrl")
    from examples.integrations.skyrl_imports import importable

    with importable():
        from xfer.integrations import skyrl as module

    monkeypatch.setattr(module.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield module
    torch.distributed.destroy_process_group()


def test_skyrl_syncs_weights_twice_by_its_own_interface(skyrl, given):
    """As SkyRL's `Worker.init_weight_sync_state` and `broadcast_to_inference_engines` call it."""
    module, engine = filled(Trained()), started()
    begun = []

    class Extractor(skyrl.weight_sync.WeightExtractor):
        model, weight_prefix = module, ""

        def extract_weights(self, dtype):
            begun.append(dtype)
            yield

        def get_weight_metadata(self, dtype):
            return {"names": [], "dtype_names": [], "shapes": []}

    class Base:
        """SkyRL's worker from `get_transfer_strategy_cls` to the sender."""

        async def init_weight_sync_state(self, client, cfg):
            choose = skyrl.weight_sync.get_transfer_strategy_cls
            strategy = choose(weight_sync_backend="nccl", colocate_all=cfg.colocate_all)
            assert issubclass(strategy, skyrl.weight_sync.WeightTransferStrategy)
            info = strategy.create_init_info(cfg, inference_world_size=2)
            assert info.for_servers(2, 1, dp_size=1) == []
            self._weight_transfer_sender = strategy.create_sender(init_info=info, inference_client=client)
            self.weight_extractor = Extractor()

    class Policy(skyrl.RefitByXfer, Base):
        xfer_verify = True
        xfer_connect = {"route": ROUTE, "deadline_s": 30.0}

    policy, client = Policy(), SimpleNamespace(server_urls=[engine])
    cfg = SimpleNamespace(data_parallel_size=1, enable_pd=False, colocate_all=False)
    asyncio.run(policy.init_weight_sync_state(client, cfg))
    sender = policy._weight_transfer_sender
    try:
        for version in (1, 2):
            filled(module)
            asyncio.run(sender.send_chunks(policy.weight_extractor.extract_weights(torch.bfloat16)))
            assert holds(engine, module.gate.weight) and int(sender.report.version) == version
    finally:
        sender.teardown()
    assert begun == [], "SkyRL's own gather of whole tensors was begun"
    assert [c["deadline_s"] for c in given.connect] == [30.0] and given.verified == [True, True]
    assert skyrl.weight_sync.get_transfer_strategy_cls("nccl", False) is skyrl.weight_sync.BroadcastTransferStrategy
    for wrong in ({"data_parallel_size": 2}, {"enable_pd": True}, {"colocate_all": True}):
        with pytest.raises(Unsupported, match="SkyRL"):
            asyncio.run(Policy().init_weight_sync_state(client, SimpleNamespace(**{**vars(cfg), **wrong})))


def test_skyrls_other_ranks_hear_at_once_that_rank_0_made_no_invitation(skyrl, monkeypatch):
    """They waited for it until the group's timeout, half an hour by default."""
    cfg = SimpleNamespace(data_parallel_size=1, enable_pd=False)
    monkeypatch.setattr(skyrl.ray.util, "get_node_ip_address", lambda: "no address")
    for rank, kind, text in ((0, OSError, None), (1, XferError, "rank 0 found no address")):
        monkeypatch.setattr(skyrl, "_calls", iter([7]))
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        with pytest.raises(kind, match=text):
            skyrl.XferTransferStrategy.create_init_info(cfg)


class Actor:
    """A Ray actor that runs in this process: `__ray_call__` calls a function with its object."""

    def __init__(self, **given):
        self.me = SimpleNamespace(**given)
        self.__ray_call__ = SimpleNamespace(remote=lambda function: function(self.me))


@pytest.fixture
def nemo_rl(monkeypatch):
    """The adapter, on NeMo-RL's interface or the stand-in's, without Ray's transport."""
    from examples.integrations import nemo_rl_interface

    nemo_rl_interface.install()
    from xfer.integrations import nemo_rl as module

    monkeypatch.setattr(module.ray, "get", lambda answers: answers)
    monkeypatch.setattr(module.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    return module


def nemo_job(engines: list[Engine], module: torch.nn.Module, **cfg):
    leaders = [Actor(llm=e) for e in engines]
    workers = [a for leader in leaders for a in (leader, Actor())]  # two workers each, as with tp2
    group = SimpleNamespace(workers=workers, dp_size=len(engines), get_dp_leader_worker_idx=lambda i: 2 * i)
    generation = SimpleNamespace(worker_group=group, cfg={"backend": "vllm", "colocated": {"enabled": False}, **cfg})
    policy = SimpleNamespace(worker_group=SimpleNamespace(workers=[Actor(model=module, cpu_offload=False)]))
    return policy, generation


def test_nemo_rl_syncs_weights_twice(nemo_rl, given):
    """As NeMo-RL's setup and `refit_policy_generation` call it."""
    from nemo_rl.weight_sync.interfaces import WeightSynchronizer

    module, engines, phases = filled(Trained()), [started(), started()], []
    policy, generation = nemo_job(engines, module)
    sync = nemo_rl.XferWeightSynchronizer(policy, generation, **OPTIONS)
    assert isinstance(sync, WeightSynchronizer) and sync.is_stale
    with pytest.raises(xfer.XferError, match="before init_communicator"):
        sync.sync_weights()
    sync.init_communicator()
    timer = SimpleNamespace(time=lambda phase: phases.append(phase) or contextlib.nullcontext())
    try:
        for version in (1, 2):
            filled(module)
            metrics = sync.sync_weights(timer=timer)
            assert all(holds(e, module.gate.weight) for e in engines) and not sync.is_stale
            assert int(sync.report.version) == version and metrics["xfer/bytes"] > 0
        with pytest.raises(Unsupported, match="kv_scales"):
            sync.sync_weights(kv_scales={"a": 1.0})
    finally:
        sync.shutdown()
    assert phases == ["prepare_for_generation/transfer_and_update_weights"] * 2
    assert [(c["replicas"], c["deadline_s"]) for c in given.connect] == [(2, 30.0)] and given.verified == [True, True]
    assert [(s["keep"], s["deadline_s"]) for s in given.serve] == [(("tower*",), 30.0)] * 2


@pytest.mark.parametrize("cfg", [{"backend": "sglang"}, {"colocated": {"enabled": True}}])
def test_nemo_rl_generations_that_cannot_be_refitted_are_refused(nemo_rl, cfg):
    with pytest.raises(Unsupported, match="a generation of NeMo-RL"):
        nemo_rl.XferWeightSynchronizer(*nemo_job([started()], Trained(), **cfg))


@pytest.mark.parametrize("wrong", ["lora_enabled", "cpu_offload"])
def test_nemo_rl_workers_that_cannot_refit_are_refused(nemo_rl, wrong):
    with pytest.raises(Unsupported, match="a DTensor policy worker of NeMo-RL"):
        nemo_rl.trainer_of(SimpleNamespace(model=Trained(), **{wrong: True}))


def test_the_stand_in_for_nemo_rl_has_the_interface_of_a_checkout():
    """NeMo-RL is on no package index. XFER_NEMO_RL names a folder with its source."""
    from examples.integrations import nemo_rl_interface

    source = Path(os.environ.get("XFER_NEMO_RL", "")) / "nemo_rl/weight_sync/interfaces.py"
    if not os.environ.get("XFER_NEMO_RL"):
        pytest.skip("XFER_NEMO_RL names no checkout of NVIDIA-NeMo/RL")
    assert nemo_rl_interface.abstract_methods(source) == nemo_rl_interface.abstract_methods(
        Path(nemo_rl_interface.__file__)
    )


EXAMPLES = {"nemo_rl_sync": ("sync", 2), "ray_async": ("refit", 2), "skyrl_sync": ("sync", 0), "trl_grpo": ("refit", 0)}
EXAMPLES |= {"verl_sync": ("sync", 0)}
"""What each calls a refit, and its replicas if it names them."""


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, tmp_path):
    """Its one command ends well and has compared every refit with a new engine."""
    words = [sys.executable, "-m", f"examples.integrations.{name}", "--work", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600 * PATIENCE)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    word, replicas = EXAMPLES[name]
    named = [f", replica {r}" for r in range(replicas)] or [""]
    lines = [f"{word} {i}{who}: 19 parameters of the engine are bit-exact" for i in (1, 2) for who in named]
    assert [line for line in done.stdout.splitlines() if line in lines] == lines
