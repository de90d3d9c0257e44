"""Handles of engines in another process: an HTTP server in development mode, or any object that forwards calls.

This module holds the wire format of each call. participants/engine.py has the interface of a handle.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from xfer.engines.handles import CallThread, Handle, PauseMode
from xfer.errors import EngineLost, Unsupported, XferError
from xfer.participants.engine import ASK_S

_STRAGGLER_S = 3600.0
"""Longest wait for the answer to a request, on its socket. Callers have shorter timeouts of their own. Closing the socket
earlier would not stop the call in the engine, and its end would stay unknown."""
_AGAIN_S = 0.5
DRAFTERS_ASKED = (0, 28)
"""The first vLLM whose workers say whether they have a drafter."""
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens requests to servers of engines. It ignores `http_proxy`: `init` carries the job's token, which http:// sends in clear."""


class HttpEngine(Handle):
    """`vllm serve … --weight-transfer-config '{"backend": "xfer"}'`, started with VLLM_SERVER_DEV_MODE=1.

    Requests go straight to the server and never through a proxy, even if the environment names one.

    Args:
        url: "http://host:port".
        pause_mode: `mode` of vLLM's `/pause`, or "keep_cache": see `xfer.serve`.
        headers: Sent with every request, e.g. {"Authorization": "Bearer …"}.
        name: Its name in errors and logs. Default: the URL.

    Raises:
        Unsupported: `url` is no such URL, or has a user or password in it.
    """

    def __init__(
        self,
        url: str,
        *,
        pause_mode: PauseMode = "keep",
        headers: Mapping[str, str] | None = None,
        name: str | None = None,
    ):
        if "@" in url:  # the error must not quote it: errors and logs would then show the password
            raise Unsupported(
                "an engine URL with a user or password in it",
                ['pass them as headers=, e.g. {"Authorization": "Basic …"}'],
            )
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise Unsupported(f"not an engine URL: {url!r}", ["expected http://host:port"])
        super().__init__(name or url, pause_mode)
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._thread = CallThread(self.name)

    @property
    def engine(self) -> str:
        """The URL."""
        return self._url

    def workers(self, timeout: float = ASK_S) -> int:
        """Return the number of workers. This is the first call to a server, so it retries while the server loads its model."""
        until = time.monotonic() + timeout
        while True:
            try:
                return super().workers(max(_AGAIN_S, until - time.monotonic()))
            except EngineLost:
                if time.monotonic() + _AGAIN_S > until:
                    raise
            time.sleep(_AGAIN_S)

    def ranks_in_step(self, timeout: float = ASK_S) -> bool:
        self._in_step = bool(self._call("ranks_in_step", timeout))
        return self._in_step

    def _send(self, call: str, **args: Any) -> Future:
        return self._thread.submit(lambda: self._now(call, **args))

    def _now(self, call: str, info: dict[str, Any] | None = None, text: str = "") -> Any:
        calls: dict[str, Callable[[], Any]] = {
            "workers": lambda: self._ask("GET", "/get_world_size")["world_size"],
            "init": lambda: self._ask("POST", "/init_weight_transfer_engine", {"init_info": info}),
            "is_paused": lambda: self._ask("GET", "/is_paused", optional=True).get("is_paused"),
            "ranks_in_step": lambda: (
                self._ask("GET", "/get_world_size?include_dp=false")["world_size"]
                < self._ask("GET", "/get_world_size")["world_size"]
            ),
            "pause": lambda: self._ask("POST", f"/pause?mode={self._mode}&clear_cache=false"),
            "resume": lambda: self._ask("POST", "/resume"),
            "start": lambda: self._ask("POST", "/start_weight_update"),
            "has_drafter": self._has_drafter,
            "start_draft": lambda: self._ask("POST", "/start_draft_weight_update"),
            "update": lambda: self._ask("POST", "/update_weights", {"update_info": info}),
            "finish": lambda: self._ask("POST", "/finish_weight_update", {}),
            "set_version": lambda: self._ask("POST", "/update_weight_version", {"new_version": text}, optional=True),
            "get_version": lambda: self._ask("GET", "/weight_info", optional=True).get("weight_version"),
            "reset_prefix": lambda: self._ask(
                "POST", "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
            ).get("success", True),
            "reset_encoder": lambda: self._ask("POST", "/reset_encoder_cache"),
        }
        return calls[call]()

    def _has_drafter(self) -> list[bool]:
        """Return whether each worker has a drafter, if the server's own list of routes and its version say that it can be asked.

        A call that the workers do not have would leave vLLM's answers out of step, so both are read first. A server that
        hides the list counts as one without a drafter; its workers then refuse a drafter and name it.
        """
        try:
            routes = self._ask("GET", "/openapi.json").get("paths", {})
        except Unsupported:
            return []
        if "/start_draft_weight_update" not in routes:
            return []
        version = str(self._ask("GET", "/version", optional=True).get("version", ""))
        if tuple(int(n) for n in re.findall(r"\d+", version)[:2]) < DRAFTERS_ASKED:
            return []
        asked = self._ask("POST", "/collective_rpc", {"method": "supports_draft_weight_updates"})
        return [answer in (True, "True") for answer in asked["results"]]  # the route turns answers into text

    def _ask(self, method: str, path: str, body: Any = None, *, optional: bool = False) -> dict[str, Any]:
        """Send a request and return the JSON of its answer.

        Args:
            method: "GET" or "POST".
            path: Route and query.
            body: Data for JSON.
            optional: Older servers do not have the route. The answer is then {}.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data=data, headers=self._headers, method=method)
        try:
            with OPENER.open(request, timeout=_STRAGGLER_S) as reply:
                text = reply.read()
        except urllib.error.HTTPError as e:
            detail = e.read(2000).decode(errors="replace")
            if e.code == 404 and optional:
                return {}
            if e.code == 404:
                raise Unsupported(
                    f"{self.name} has no route {path}",
                    ["start the server with VLLM_SERVER_DEV_MODE=1 in its environment"],
                ) from None
            raise XferError(f"{self.name}: {path} answered {e.code}", [detail] if detail else []) from None
        except urllib.error.URLError as e:
            raise EngineLost(f"{self.name} cannot be reached: {e.reason}", [f"{method} {path}"]) from None
        return json.loads(text) if text else {}


class CallableEngine(Handle):
    """Any object that forwards vLLM's calls, e.g. around a Ray actor: synchronous methods by vLLM's names, plain arguments.

    Required methods: init_weight_transfer_engine, start_weight_update, update_weights, finish_weight_update (vLLM's
    weight-sync client), pause_generation, resume_generation, reset_prefix_cache. Optional methods: is_paused (without it
    every refit ends a pause that another party began), update_weight_version, get_weight_version, reset_encoder_cache, and
    for an engine with a drafter supports_draft_weight_updates (a list, one answer per worker) and
    start_draft_weight_update. Optional attribute: keeps_caches. If it is true, refits drop caches only where these must not
    survive (participants/controller.py). The owner of an object with data-parallel ranks under load should pause it while it joins:
    this handle cannot detect such ranks.

    Args:
        obj: The object.
        workers: Number of workers that the four weight-sync calls reach. Default: `obj.get_world_size()`.
        pause: Used in place of `obj.pause_generation`.
        resume: Used in place of `obj.resume_generation`.
        reset_prefix_cache: Used in place of `obj.reset_prefix_cache`.
        name: Its name in errors and logs. Default: the name of its class.

    Raises:
        Unsupported: Lists the missing methods. An engine that cannot pause or reset its caches would go on serving results
            of old weights.
    """

    _METHODS = {
        "init": "init_weight_transfer_engine",
        "start": "start_weight_update",
        "update": "update_weights",
        "finish": "finish_weight_update",
        "pause": "pause_generation",
        "resume": "resume_generation",
        "reset_prefix": "reset_prefix_cache",
        "workers": "get_world_size",
    }
    _OPTIONAL = {
        "is_paused": "is_paused",
        "set_version": "update_weight_version",
        "get_version": "get_weight_version",
        "reset_encoder": "reset_encoder_cache",
        "has_drafter": "supports_draft_weight_updates",
        "start_draft": "start_draft_weight_update",
    }

    def __init__(
        self,
        obj: Any,
        *,
        workers: int | None = None,
        pause: Callable[[], Any] | None = None,
        resume: Callable[[], Any] | None = None,
        reset_prefix_cache: Callable[[], Any] | None = None,
        name: str | None = None,
    ):
        super().__init__(name or type(obj).__name__)
        given: dict[str, Callable[..., Any] | None] = {
            "pause": pause,
            "resume": resume,
            "reset_prefix": reset_prefix_cache,
            "workers": None if workers is None else lambda: workers,
        }
        self._calls = {
            call: given.get(call) or getattr(obj, method, None)
            for call, method in {**self._METHODS, **self._OPTIONAL}.items()
        }
        missing = [
            f"{type(obj).__name__}.{method}" for call, method in self._METHODS.items() if self._calls[call] is None
        ]
        if missing:
            raise Unsupported("this object cannot stand for an engine; it lacks", missing)
        self._engine, self._thread = obj, CallThread(self.name)
        self.keeps_caches = getattr(obj, "keeps_caches", False) is True

    @property
    def engine(self) -> Any:
        return self._engine

    def _send(self, call: str, **args: Any) -> Future:
        return self._thread.submit(lambda: self._now(call, **args))

    def _now(self, call: str, info: dict[str, Any] | None = None, text: str = "") -> Any:
        method = self._calls[call]
        if method is None:
            return None
        if call in ("init", "update"):
            return method({f"{call}_info": info})
        return method(text) if call == "set_version" else method()
