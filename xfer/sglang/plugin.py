"""The entry point by which SGLang finds xfer (`sglang.srt.plugins` in pyproject). Registration only.

SGLang calls `register` in every process before it builds anything, and then applies the hook. The workers' calls come in as
`get_weights_by_name` with a name that no tensor has. It is SGLang's only call that carries a text to every worker of
every data-parallel rank, by `Engine` and by HTTP, and that is written to no log.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

CALL = "xfer:"
"""Prefix of the name of a call. A JSON object follows."""
TARGET = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.get_weights_by_name"


def register() -> None:
    """Let xfer's calls through to its worker, and show xfer's log lines in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from xfer import logs

    logs.show()
    HookRegistry.register(TARGET, answer, HookType.AROUND)


def text_of(call: str, info: dict[str, Any]) -> str:
    """Return the name that carries a call of xfer."""
    return CALL + json.dumps({"call": call, "info": info})


def answer(ask: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Answer a call of xfer in place of SGLang. Other names pass."""
    if not request.name.startswith(CALL):
        return ask(manager, request)
    from sglang.srt.managers.io_struct import GetWeightsByNameReqOutput

    from xfer.sglang.worker import worker_of

    asked = json.loads(request.name.removeprefix(CALL))
    return GetWeightsByNameReqOutput(parameter=worker_of(manager).run(asked["call"], asked["info"]))
