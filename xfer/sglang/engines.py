"""An SGLang engine for `xfer.serve`: it forwards a controller's calls, under the names that CallableEngine (engines/remote.py) knows.

A refit is SGLang's pause_generation, begin_weight_update, xfer's own call (plugin.py) in which the bytes move,
end_weight_update, flush_cache and continue_generation.
"""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping
from typing import Any, Literal

from xfer.engines.remote import OPENER
from xfer.errors import EngineLost, Unsupported, XferError
from xfer.sglang.plugin import text_of

PauseMode = Literal["retract", "in_place", "abort"]
"""What a refit does with running requests, as in SGLang: "retract" computes their prefix again under the new weights and goes on,
"in_place" goes on with the keys and values that they have, "abort" ends them."""
_STRAGGLER_S = 24 * 3600.0


class _Forwarder(ABC):
    """The calls of a controller in terms of SGLang's routes."""

    def __init__(self, pause_mode: PauseMode):
        if pause_mode not in ("retract", "in_place", "abort"):
            raise Unsupported(f"pause_mode={pause_mode!r}", ['"retract", "in_place" or "abort"'])
        self._mode, self.keeps_caches = pause_mode, pause_mode == "in_place"
        self._paused = False

    @abstractmethod
    def _ask(self, route: str, **body: Any) -> Any:
        """Send one request of SGLang and return its answer."""

    def _tell_workers(self, call: str, info: Mapping[str, Any]) -> list[float]:
        """Carry out a call of xfer on every worker. Return the first answer."""
        answer = self._ask("get_weights_by_name", name=text_of(call, dict(info)))
        while answer and isinstance(answer[0], list):  # one answer per data-parallel rank
            answer = answer[0]
        return answer or []

    def get_world_size(self) -> int:
        """Return the number of workers, over all data-parallel ranks.

        Raises:
            Unsupported: SGLang's processes do not know xfer.
        """
        answer = self._tell_workers("workers", {})
        if len(answer) != 1:
            raise Unsupported(
                "SGLang's workers do not know xfer",
                ["install xfer in SGLang's environment, and leave it in SGLANG_PLUGINS if that is set"],
            )
        return int(answer[0])

    def init_weight_transfer_engine(self, request: Mapping[str, Mapping[str, Any]]) -> None:
        """Have every worker join. The engine is paused meanwhile: joining keeps workers in a call, ranks that share a step would wait
        for each other, and SGLang's watchdog ends an engine that does not go on with a running batch."""
        if self._paused or self.is_paused():
            self._tell_workers("init", request["init_info"])
            return
        self._ask("pause_generation", mode="retract")
        try:
            self._tell_workers("init", request["init_info"])
        finally:
            self._ask("continue_generation", torch_empty_cache=False)

    def pause_generation(self) -> None:
        self._ask("pause_generation", mode=self._mode)
        self._paused = True

    def is_paused(self) -> bool | None:
        """Return whether the engine is paused, by anybody; None if it does not say."""
        return None

    def resume_generation(self) -> None:
        self._ask("continue_generation", torch_empty_cache=False)
        self._paused = False

    def start_weight_update(self) -> None:
        self._ask("begin_weight_update")

    def update_weights(self, request: Mapping[str, Mapping[str, Any]]) -> None:
        self._tell_workers("update", request["update_info"])

    def finish_weight_update(self) -> None:
        self._ask("end_weight_update")

    def reset_prefix_cache(self) -> bool:
        """Drop the prefix cache. False if SGLang still holds parts of it."""
        if self.keeps_caches:  # SGLang drops nothing while requests hold parts of it
            self._ask("pause_generation", mode="retract")
        return bool(self._ask("flush_cache"))

    def update_weight_version(self, text: str) -> None:
        self._ask("update_weight_version", new_version=text, abort_all_requests=False)

    @abstractmethod
    def get_weight_version(self) -> str | None:
        """Return the label of `update_weight_version`; SGLang's own, "default", before the first."""


class SGLangServer(_Forwarder):
    """An SGLang server by its URL.

    Args:
        url: "http://host:port".
        headers: Sent with every request, e.g. {"Authorization": "Bearer …"}, the server's admin key.
        pause_mode: See `PauseMode`.
    """

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None, pause_mode: PauseMode = "retract"):
        super().__init__(pause_mode)
        if not url.startswith(("http://", "https://")) or "@" in url:
            raise Unsupported("not an engine URL", ["expected http://host:port, and passwords in headers="])
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json", **(headers or {})}

    def is_paused(self) -> bool | None:
        """Return whether the server is paused, by anybody; None from one that is not well, or is too old to say."""
        said = self._status("ready")
        return False if said == 200 else True if said == 503 and self._status("ping") == 200 else None

    def get_weight_version(self) -> str | None:
        return self._get("model_info").get("weight_version")

    def _ask(self, route: str, **body: Any) -> Any:
        try:
            answer = self._send("POST", route, json.dumps(body).encode())
        except _Declined as e:
            if route == "flush_cache":
                return False
            raise XferError(f"{self._url}: /{route} answered {e.code}", [e.detail] if e.detail else []) from None
        return True if route == "flush_cache" else answer

    def _get(self, route: str) -> dict[str, Any]:
        try:
            return self._send("GET", route, None)
        except _Declined as e:
            raise XferError(f"{self._url}: /{route} answered {e.code}", [e.detail] if e.detail else []) from None

    def _status(self, route: str) -> int:
        try:
            self._send("GET", route, None)
        except _Declined as e:
            return e.code
        return 200

    def _send(self, method: str, route: str, data: bytes | None) -> Any:
        request = urllib.request.Request(f"{self._url}/{route}", data=data, headers=self._headers, method=method)
        try:
            with OPENER.open(request, timeout=_STRAGGLER_S) as reply:
                text = reply.read().decode()
        except urllib.error.HTTPError as e:
            raise _Declined(e.code, e.read(2000).decode(errors="replace")) from None
        except urllib.error.URLError as e:
            raise EngineLost(f"{self._url} cannot be reached: {e.reason}", [f"{method} /{route}"]) from None
        return json.loads(text) if text[:1] in ("{", "[") else text


class _Declined(Exception):
    def __init__(self, code: int, detail: str):
        super().__init__(code, detail)
        self.code, self.detail = code, detail


class SGLangEngine(_Forwarder):
    """An `sglang.Engine` of this process.

    SGLang's own `Engine.generate` runs the engine's event loop in the caller's thread, and no two threads can do that. So this
    object runs the loop in a thread of its own, unless it runs already: generate with `generate` here, or with the engine's
    `async_generate` on that loop.

    Args:
        engine: The engine.
        pause_mode: See `PauseMode`.
    """

    def __init__(self, engine: Any, *, pause_mode: PauseMode = "retract"):
        super().__init__(pause_mode)
        self.engine = engine
        if not engine.loop.is_running():
            threading.Thread(target=engine.loop.run_forever, name="xfer runs SGLang's loop", daemon=True).start()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the engine's `async_generate` and wait for its result, from any thread but the loop's."""
        return self._wait(self.engine.async_generate(*args, **kwargs))

    def shutdown(self) -> None:
        """Stop the loop, then the engine."""
        self.engine.loop.call_soon_threadsafe(self.engine.loop.stop)
        self.engine.shutdown()

    def is_paused(self) -> bool:
        return bool(self.engine.tokenizer_manager.is_pause)

    def get_weight_version(self) -> str | None:
        return self.engine.get_model_info()["weight_version"]

    def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.engine.loop).result()

    def _ask(self, route: str, **body: Any) -> Any:
        from sglang.srt.managers import io_struct as io

        manager = self.engine.tokenizer_manager
        requests = {
            "pause_generation": io.PauseGenerationReqInput,
            "continue_generation": io.ContinueGenerationReqInput,
            "begin_weight_update": io.BeginWeightUpdateReqInput,
            "end_weight_update": io.EndWeightUpdateReqInput,
            "get_weights_by_name": io.GetWeightsByNameReqInput,
            "update_weight_version": io.UpdateWeightVersionReqInput,
        }
        if route == "flush_cache":
            return self._wait(manager.flush_cache()).success
        answer = self._wait(getattr(manager, route)(requests[route](**body)))
        if route in ("begin_weight_update", "end_weight_update") and not answer[0]:
            raise XferError(f"SGLang refused {route}", [str(answer[1])])
        return answer
