"""The adapters of xfer/integrations against the frameworks' own classes, with the engine of tests/support/tiny_engine.py. The slow tests
run each example with a real vLLM."""

import asyncio
import os
import re
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.rl
pytest.importorskip("verl")  # the rl environment, which has the others too

import ray  # noqa: E402
import torch  # noqa: E402
from verl.utils.import_utils import import_external_libs  # noqa: E402

import xfer  # noqa: E402
from examples.common.ports import free_port  # noqa: E402
from examples.integrations import nemo_rl_interface, skyrl_imports  # noqa: E402
from tests.functional.test_extending import Trained  # noqa: E402
from tests.support.proc import PATIENCE, ROOT, environment  # noqa: E402
from tests.support.tiny_engine import WIDTH, Engine  # noqa: E402
from xfer.errors import Unsupported, XferError  # noqa: E402
from xfer.integrations import trl  # noqa: E402
from xfer.observers import TrainerFinished, observe  # noqa: E402

nemo_rl_interface.install()
from xfer.integrations import nemo_rl  # noqa: E402

with skyrl_imports.importable():
    from xfer.integrations import skyrl
import_external_libs("xfer.integrations.verl")  # as verl finds it
verl = sys.modules["xfer.integrations.verl"]

ROUTE = xfer.Direct(narrow=["*"], cache_dir=None)
OPTIONS = {"verify": True, "keep": ["tower*"], "deadline_s": 30.0, "connect": {"route": ROUTE}}


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
def ends():
    """What ends after a test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Actors answer at once, without Ray's transport."""
    monkeypatch.setattr(ray, "get", lambda answer: answer)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")


# ---- each framework's own calls of a sync: `sync(version, replicas)` returns the version of its refit


class ServerActor:
    """verl's server actor, as far as it forwards vLLM's calls: `actor.method.remote(...)` answers at once."""

    def __init__(self, engine: Engine):
        self.collective_rpc = SimpleNamespace(
            remote=lambda name, kwargs: getattr(engine, name)(*[kwargs] * bool(kwargs))
        )
        self.abort_all_requests = self.clear_kv_cache = SimpleNamespace(remote=lambda: None)


def worker(is_master=False, **given):
    """The checkpoint engine of a worker of verl that constructs it as verl's workers do."""
    from verl.checkpoint_engine import CheckpointEngineRegistry
    from verl.single_controller.base import Worker

    class OneWorker(Worker):
        def __init__(self):
            vars(self).update(given)
            self.checkpoint_engine = CheckpointEngineRegistry.new("xfer", bucket_size=1, is_master=is_master, **OPTIONS)

    return OneWorker().checkpoint_engine


def adapter(engine: Engine | None = None, replica: int = 0, rank: int = 0, **config):
    parallel = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "data_parallel_size": 1}
    config = {"name": "vllm", "disaggregation": SimpleNamespace(enabled=False), **parallel, **config}
    return SimpleNamespace(
        replica_rank=replica, rollout_rank=rank, config=SimpleNamespace(**config), server_handle=ServerActor(engine),
        _ensure_server_handle=lambda: True,
    )  # fmt: skip


def verl_job(module, engines, begun, ends):
    """As verl's manager calls it: prepare, build_topology, init_process_group, then both update_weights."""
    trainer = worker(is_master=True, engine=SimpleNamespace(module=module, is_param_offload_enabled=False))
    beside = [[worker(server_adapter=adapter(s, 4 + i, rank)) for rank in (0, 1)] for i, s in enumerate(engines)]

    async def sync(step: int, replicas: int) -> int:
        rollout = [e for both in beside[:replicas] for e in both]
        prepared = [e.prepare() for e in (trainer, *rollout)]
        ours, theirs = verl.XferCheckpointEngine.build_topology(1, len(rollout), prepared)
        for workers, kwargs in (([trainer], ours), (rollout, theirs)):
            for i, e in enumerate(workers):
                e.init_process_group(**{name: values[i] for name, values in kwargs.items()})
        for e in rollout:
            assert [w async for w in e.receive_weights(step)] == []
        metrics = await trainer.send_weights((begun.append(name) for name in "w"), global_steps=step)
        for e in (trainer, *rollout):
            e.finalize()
        assert metrics["xfer/bytes"] > 0
        return trainer.session.version

    def close() -> None:
        for link in (trainer.session, *(both[0].controller for both in beside)):
            if link is not None:
                link.close()

    ends.callback(close)
    return lambda *how: asyncio.run(sync(*how))


class Client:
    """TRL's client of a vLLM server, which is not asked."""

    def __init__(self, base_url, group_port, connection_timeout):
        self.base_url = base_url

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}


def generation(model: torch.nn.Module, engine: Engine | None, ends: ExitStack, mode: str = "server"):
    """TRL's own VLLMGeneration around a module, whose server is a tiny engine."""
    from accelerate import Accelerator
    from trl.generation.vllm_generation import VLLMGeneration

    patch = ends.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(trl, "VLLMClient", Client)
    patch.setattr(trl, "_url", lambda generation: engine)
    patch.setenv("XFER_TOKEN", "token of the tiny engine")
    original = VLLMGeneration._init_vllm
    with trl.refits(f"tcp://127.0.0.1:{free_port()}", verify=True, route=ROUTE, deadline_s=30.0):
        made = VLLMGeneration(model, Accelerator(cpu=True), None, mode=mode)
    assert VLLMGeneration._init_vllm is original and made.vllm_client.base_url is engine
    ends.callback(made.xfer.close)
    return made


def trl_job(module, engines, begun, ends):
    made = generation(module, *engines, ends)

    def sync(version: int, replicas: int) -> int:
        made.sync_weights()
        return made.xfer.session.version

    return sync


def skyrl_job(module, engines, begun, ends, **cfg):
    """As SkyRL's `Worker.init_weight_sync_state` and `broadcast_to_inference_engines` call it."""

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

    one_rank(ends)
    policy, client = Policy(), SimpleNamespace(server_urls=engines)
    cfg = SimpleNamespace(**{"data_parallel_size": 1, "enable_pd": False, "colocate_all": False, **cfg})
    asyncio.run(policy.init_weight_sync_state(client, cfg))
    assert skyrl.weight_sync.get_transfer_strategy_cls("nccl", False) is skyrl.weight_sync.BroadcastTransferStrategy
    sender = policy._weight_transfer_sender
    ends.callback(sender.teardown)

    def sync(version: int, replicas: int) -> int:
        asyncio.run(sender.send_chunks(policy.weight_extractor.extract_weights(torch.bfloat16)))
        return int(sender.report.version)

    return sync


def one_rank(ends: ExitStack) -> None:
    """A process group of one rank, unless there is one."""
    if torch.distributed.is_initialized():
        return
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    ends.callback(torch.distributed.destroy_process_group)


class Actor:
    """A Ray actor that runs in this process: `__ray_call__` calls a function with its object."""

    def __init__(self, **given):
        self.me = SimpleNamespace(**given)
        self.__ray_call__ = SimpleNamespace(remote=lambda function: function(self.me))


def synchronizer(engines: list[Engine], module: torch.nn.Module, **cfg):
    """NeMo-RL's, of engines with two workers each, as with tp2."""
    workers = [a for e in engines for a in (Actor(llm=e), Actor())]
    group = SimpleNamespace(workers=workers, dp_size=len(engines), get_dp_leader_worker_idx=lambda i: 2 * i)
    generation = SimpleNamespace(worker_group=group, cfg={"backend": "vllm", "colocated": {"enabled": False}, **cfg})
    policy = SimpleNamespace(worker_group=SimpleNamespace(workers=[Actor(model=module, cpu_offload=False)]))
    return nemo_rl.XferWeightSynchronizer(policy, generation, **OPTIONS)


def nemo_rl_job(module, engines, begun, ends):
    """As NeMo-RL's setup and `refit_policy_generation` call it."""
    from nemo_rl.weight_sync.interfaces import WeightSynchronizer

    made, phases = synchronizer(engines, module), []
    timer = SimpleNamespace(time=lambda phase: phases.append(phase) or nullcontext())
    assert isinstance(made, WeightSynchronizer) and made.is_stale
    with pytest.raises(XferError, match="before init_communicator"):
        made.sync_weights()
    made.init_communicator()
    ends.callback(made.shutdown)

    def sync(version: int, replicas: int) -> int:
        metrics = made.sync_weights(timer=timer)
        assert phases == ["prepare_for_generation/transfer_and_update_weights"] * version
        assert metrics["xfer/bytes"] > 0 and not made.is_stale
        return int(made.report.version)

    return sync


@pytest.mark.parametrize(
    "job, syncs",
    [
        (verl_job, [(0, 1), (1, 1), (2, 2), (3, 2)]),  # it connects anew when a replica is added
        (trl_job, [(1, 1), (2, 1)]),
        (skyrl_job, [(1, 1), (2, 1)]),
        (nemo_rl_job, [(1, 2), (2, 2)]),
    ],
)
def test_each_sync_by_a_frameworks_own_calls_is_a_refit_with_the_options_of_its_adapter(job, syncs, ends, monkeypatch):
    """`syncs`: the version of each, and the replicas that take part. The framework gathers no whole tensor."""
    seen = {"connect": [], "serve": [], "verified": []}

    def spied(call, name, *args, **options):
        seen[name].append(options)
        return call(*args, **options)

    def told(ended):
        if isinstance(ended, TrainerFinished):
            seen["verified"].append(ended.report.verified)

    for name in ("connect", "serve"):
        monkeypatch.setattr(xfer, name, partial(spied, getattr(xfer, name), name))
    ends.callback(observe(told))
    module, engines, begun = filled(Trained()), [started() for _ in range(syncs[-1][1])], []
    sync = job(module, engines, begun, ends)
    for version, replicas in syncs:
        filled(module)
        assert sync(version, replicas) == version
        assert [holds(e, module.gate.weight) for e in engines] == [i < replicas for i in range(len(engines))]
    assert begun == [] and seen["verified"] == [True] * len(syncs)
    worlds = list(dict.fromkeys(replicas for _, replicas in syncs))
    assert [c["deadline_s"] for c in seen["connect"]] == [30.0] * len(worlds)
    if job in (verl_job, nemo_rl_job):  # whose adapters serve the engines
        assert [c["replicas"] for c in seen["connect"]] == worlds
        assert [(s["keep"], s["deadline_s"]) for s in seen["serve"]] == [(("tower*",), 30.0)] * sum(worlds)


def test_what_a_framework_cannot_refit_by_xfer_is_refused(ends):
    def refused(match: str):
        return pytest.raises(Unsupported, match=match)

    for wrong in ({"name": "sglang"}, {"data_parallel_size": 2}, {"disaggregation": SimpleNamespace(enabled=True)}):
        with refused("a rollout server that verl cannot refit by xfer"):
            verl.VerlServer(adapter(**wrong))
    with refused("LoRA"):
        verl.trainer_of(SimpleNamespace(module=SimpleNamespace(peft_config={})))
    with refused("that no worker of verl constructs"):
        verl.XferCheckpointEngine(bucket_size=1)
    with refused("colocate"):
        generation(Trained(), None, ends, mode="colocate")
    for wrong in ({"data_parallel_size": 2}, {"enable_pd": True}, {"colocate_all": True}):
        with refused("SkyRL"):
            skyrl_job(None, [], [], ends, **wrong)
    for wrong in ({"backend": "sglang"}, {"colocated": {"enabled": True}}):
        with refused("a generation of NeMo-RL"):
            synchronizer([], Trained(), **wrong)
    for wrong in ("lora_enabled", "cpu_offload"):
        with refused("a DTensor policy worker of NeMo-RL"):
            nemo_rl.trainer_of(SimpleNamespace(**{wrong: True}))
    with refused("kv_scales"):
        synchronizer([], Trained()).sync_weights(kv_scales={"a": 1.0})


def test_skyrls_other_ranks_hear_at_once_that_rank_0_made_no_invitation(ends, monkeypatch):
    """They waited for it until the group's timeout, half an hour by default."""
    one_rank(ends)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "no address")
    for rank, kind, text in ((0, OSError, None), (1, XferError, "rank 0 found no address")):
        monkeypatch.setattr(skyrl, "_calls", iter([7]))
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        with pytest.raises(kind, match=text):
            skyrl.XferTransferStrategy.create_init_info(SimpleNamespace(data_parallel_size=1, enable_pd=False))


def test_trl_sends_merged_adapters_and_takes_them_out_again(ends):
    from peft import LoraConfig, get_peft_model

    model, engine = filled(Trained()), started()
    peft = get_peft_model(model, LoraConfig(r=2, target_modules=["gate", "up"], init_lora_weights=False))
    base = model.gate.base_layer.weight
    for p in peft.parameters():
        p.data = torch.randint_like(p, -3, 4)  # so that sums are exact, and are taken out exactly
    made, was = generation(peft, engine, ends), base.clone()
    made.sync_weights()
    merged = was + model.gate.get_delta_weight("default")
    assert not torch.equal(merged, was) and holds(engine, merged) and torch.equal(base, was)


# ---- pages


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
    with skyrl_imports.importable():
        from skyrl.train.config import SkyRLTrainConfig

        read = SkyRLTrainConfig.from_cli_overrides(settings("skyrl"))
    assert read.generator.inference_engine.engine_init_kwargs == {"weight_transfer_config": {"backend": "xfer"}}
    assert read.trainer.placement.colocate_all is False


def test_trl_constructs_the_trainer_of_its_page(monkeypatch, tmp_path):
    """As printed, but for the model, and settings that a GPU has by default. It neither trains nor asks the server."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from examples.integrations.toy_model import write_model

    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/integrations/trl.md").read_text(), re.S | re.M)
    write_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trl, "VLLMClient", Client)
    monkeypatch.setattr("trl.GRPOConfig", partial(GRPOConfig, use_cpu=True, bf16=False, report_to=[]))
    monkeypatch.setattr(GRPOTrainer, "train", lambda self: None)
    space = {"prompts": Dataset.from_dict({"prompt": ["1 2", "3 4"] * 8})}
    assert block.count("Qwen/Qwen3-4B") == 1
    exec(block.replace("Qwen/Qwen3-4B", str(tmp_path / "model")), space)
    assert space["trainer"].vllm_generation.vllm_client.base_url == "http://10.0.0.2:8000"


def test_the_stand_in_for_nemo_rl_has_the_interface_of_a_checkout():
    """NeMo-RL is on no package index. XFER_NEMO_RL names a folder with its source."""
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
