"""Settings of a vLLM that are refused when an engine joins, since the engine would go on using old weights or their results."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from xfer.engines import settings
from xfer.engines.handles import AsyncEngine
from xfer.engines.vllm_layout import EngineModel
from xfer.engines.vllm_loader import PackedModel
from xfer.errors import Unsupported
from xfer.trace.catalog import Catalog


def some(**fields):
    return SimpleNamespace(**fields)


def config(cache=None, **parts):
    return some(cache_config=some(cpu_offload_gb=0, **cache or {}), **parts)


def refused(vllm_config, workers=0) -> list[str]:
    try:
        settings.refuse_settings(vllm_config, workers)
    except Unsupported as e:
        return list(e.violations)
    return []


def loads(how="auto", **extra):
    return some(load_format=how, model_loader_extra_config=extra)


THERE = some(ec_connector="ECThere")
SETTINGS = [
    (config(), []),
    # Connectors.
    (config(kv_transfer_config=None, ec_transfer_config=None), []),
    (config(kv_transfer_config=some(kv_connector=None), ec_transfer_config=some(ec_connector=None)), []),
    (config(ec_transfer_config=THERE), ["ec_transfer_config: ECThere", "start vLLM without it"]),
    # Weights that a daemon lends, unless they are copied.
    (config(load_config=loads("dummy")), []),
    (config(load_config=loads("ipc_cache", mode="copy")), []),
    (config(load_config=loads("ipc_cache", mode="zero_copy"), speculative_config=None), ["load_format"]),
    (config(load_config=loads("ipc_cache"), speculative_config=some(draft_load_config=None)), ["load_format"]),
    (config(load_config=loads(), speculative_config=some(draft_load_config=loads("ipc_cache"))), ["draft_load_config"]),
    (config(load_config=loads(), speculative_config=some(draft_load_config=loads("ipc_cache", mode="copy"))), []),
    # Weights in host memory: test_packed_reached.py.
    (some(cache_config=some(cpu_offload_gb=1.5)), ["cpu_offload_gb=1.5: start vLLM without it"]),
    # Scales of a KV cache that has any, calculated once.
    *(
        (config(dict(calculate_kv_scales=calculate, cache_dtype=kind)), ["start vLLM"] * (calculate and kind not in plain))
        for plain in [("auto", "bfloat16")]
        for calculate in (False, True)
        for kind in (*plain, "fp8", "fp8_e4m3", "nvfp4")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("vllm_config", "names"), SETTINGS)
def test_a_setting_that_would_keep_old_weights_or_their_results_is_refused_by_name(vllm_config, names):
    said = refused(vllm_config)
    assert len(said) == len(names) and all(map(str.startswith, said, names)), said


def test_an_encoder_connector_is_taken_if_its_owner_answers_for_it(monkeypatch):
    assert settings.TRUSTED in refused(config(ec_transfer_config=THERE))[-1]
    monkeypatch.setenv(settings.TRUSTED, "Another, ECThere")
    assert not refused(config(ec_transfer_config=THERE))


def test_both_routes_ask_before_anything_is_read():
    unread = config(parallel_config=some(enable_eplb=False), ec_transfer_config=THERE, load_config=None)
    engine = EngineModel(unread, torch.nn.Linear(2, 2), torch.device("cpu"))
    for join in (engine.read, PackedModel(engine).accept):
        with pytest.raises(Unsupported, match="ECThere"):
            join(Catalog(()))


def parallel(balanced, ranks, local, dense=False):
    """As vLLM has it in its front end, or, `dense`, in a dense model's workers, where each data-parallel rank is on its own."""
    if dense:
        ranks = local = 1
    return some(
        world_size=2, world_size_across_dp=2 * ranks, data_parallel_size=ranks, data_parallel_size_local=local,
        data_parallel_external_lb=balanced == "external", data_parallel_hybrid_lb=balanced == "hybrid",
        local_engines_only=balanced != "internal",
    )  # fmt: skip


def test_a_client_that_reaches_some_of_the_workers_is_told_by_its_engine_or_by_the_workers_that_it_reaches():
    for balanced, ranks, local in (
        ("internal", 1, 1), ("internal", 4, 2), ("external", 4, 1), ("hybrid", 4, 2), ("hybrid", 4, 4), ("hybrid", 1, 1)
    ):  # fmt: skip
        counted, unreached = 2 * ranks, balanced != "internal" and local < ranks
        engine = MagicMock(vllm_config=some(parallel_config=parallel(balanced, ranks, local)))
        ask = AsyncEngine(engine, None)._now("workers")
        if unreached:
            with pytest.raises(Unsupported, match=f"reaches {2 * local} of its {counted} workers"):
                asyncio.run(ask)
        else:
            assert asyncio.run(ask) == counted
        for dense in (False, True):
            told = refused(config(parallel_config=parallel(balanced, ranks, local, dense)), counted)
            assert bool(told) == (unreached and not (dense and balanced == "hybrid")), (balanced, ranks, dense)
        # A forwarder that counts right.
        assert not refused(config(parallel_config=parallel(balanced, ranks, local)), 2 * local)


def connector(name, **extra):
    from vllm.config import KVTransferConfig

    return config(
        kv_transfer_config=KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra)
    )


@pytest.mark.engine
def test_a_connector_is_refused_where_its_class_says_nothing_of_a_reset(monkeypatch):
    """vLLM's scheduler takes each of those for one that was reset."""
    factory = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    seen = {True: set(), False: set()}
    for name in factory._registry:
        try:
            kind = factory.get_connector_class_by_name(name)
        except ImportError:  # of a package that is not installed
            continue
        resets = any("reset_cache" in vars(c) for c in kind.__mro__[:-1] if c.__name__ != "KVConnectorBase_V1")
        said = refused(connector(name))
        assert bool(said) != resets, (name, said)
        seen[resets].add(name)
        if not resets:
            assert kind.__name__ in said[0] and "reset_cache" in said[0] and settings.TRUSTED in said[-1]
            with monkeypatch.context() as trust:
                trust.setenv(settings.TRUSTED, kind.__name__)
                assert not refused(connector(name))
    assert "ExampleConnector" in seen[False] and {"OffloadingConnector", "MultiConnector"} <= seen[True]


@pytest.mark.engine
def test_connectors_and_tiers_inside_another_and_connectors_from_elsewhere_are_asked_too():
    pytest.importorskip("vllm")
    offload, example, inner = (
        dict(kv_connector=f"{name}Connector", kv_role="kv_both") for name in ("Offloading", "Example", "Multi")
    )
    inner["kv_connector_extra_config"] = {"connectors": [example]}
    assert not refused(connector("MultiConnector", connectors=[offload]))
    for connectors in ([offload, example], [offload, inner]):
        said = refused(connector("MultiConnector", connectors=connectors))
        assert len(said) == 2 and "ExampleConnector" in said[0]
    tiers = dict(spec_name="TieringOffloadingSpec", secondary_tiers=[{"type": "fs", "path": "somewhere"}])
    said = refused(connector("OffloadingConnector", **tiers))
    assert "OffloadingConnector" in said[0] and "fs" in said[0]
    assert not refused(connector("OffloadingConnector", spec_name="TieringOffloadingSpec", secondary_tiers=[]))
    there = connector("ExampleConnector")
    there.kv_transfer_config.kv_connector_module_path = "vllm.distributed.kv_transfer.kv_connector.v1.example_connector"
    assert "ExampleConnector" in refused(there)[0]
