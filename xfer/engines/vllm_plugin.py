"""The entry point by which vLLM finds xfer (`vllm.general_plugins` in pyproject). Registration only; no engine code.

vLLM calls `register` in the front end, the engine core and every worker, before a model is built, sometimes twice in
one process. So it is idempotent and cheap: the backend is registered by module path and imported by the workers alone.

vLLM logs and skips a plug-in that raises, and the user then sees "Invalid weight transfer backend: xfer" much later.
Code that can fail therefore runs later, when it is needed.
"""

from __future__ import annotations

import os

from xfer import logs

BACKEND = "xfer"
RESIDENT_SWITCH = "XFER_CPU_RESIDENT"
"""Set to 1 on CPU engines, in the environment of the process that starts vLLM: weights stay in their parameters
(vllm_cpu)."""


def register() -> None:
    """Make `LLM(weight_transfer_config={"backend": "xfer"})` known to this process, and show xfer's log lines in it."""
    logs.show()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # The factory raises on a second registration of a name; it has no public way to ask first.
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "xfer.engines.vllm_worker", "XferWeightTransferEngine")
    register_trainer()
    if resident_asked():
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            from xfer.engines import vllm_cpu

            vllm_cpu.install()


def register_trainer() -> None:
    """Make xfer known to vLLM's factory of trainer engines, which vLLM has since 0.26."""
    from vllm.distributed.weight_transfer import factory

    trainers = getattr(factory, "WeightTransferTrainerFactory", None)
    if trainers is not None and BACKEND not in trainers._registry:
        trainers.register_engine(BACKEND, "xfer.integrations.vllm_trainer", "XferTrainerWeightTransferEngine")


def resident_asked() -> bool:
    return os.environ.get(RESIDENT_SWITCH, "0") == "1"
