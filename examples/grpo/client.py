"""Asks rollouts for samples. Every wait has a deadline; nothing that they answer is unpickled."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from examples.grpo.rollout import password
from examples.grpo.samples import Sample
from xfer.errors import DeadlineExceeded, EngineLost, XferError

_FINAL_ONLY = 2
"""vLLM's RequestOutputKind. Its route for tokens answers with the last thing that the engine said; vLLM 0.25 does not ask the engine to
say all at the end, and so keeps, of several answers to one prompt, those that ended last."""

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Uses no proxy, whatever `http_proxy` says: rollouts are asked with a password, in clear."""


class RolloutClient:
    """`urls`: "http://HOST:PORT" of one rollout.py process per replica, in the order of the replicas."""

    def __init__(self, urls: Sequence[str], token: str, deadline_s: float = 300.0):
        self.urls, self.deadline_s = tuple(urls), deadline_s
        self._met: set[str] = set()
        self._headers = {"Authorization": f"Bearer {password(token)}", "Content-Type": "application/json"}

    def sample(
        self, prompts: Sequence[list[int]], *, n: int, tokens: int, seed: int, replicas: Sequence[int] | None = None
    ) -> list[list[Sample]]:
        """`n` answers to each prompt, in the prompts' order. `replicas`: whom to ask (those that a refit has committed to);
        default all. They share the prompts; what one does not answer the others are asked. EngineLost, with what became of
        each, when none is left."""
        asked = list(range(len(self.urls)) if replicas is None else replicas)
        out: list[list[Sample] | None] = [None] * len(prompts)
        why: list[str] = []
        while missing := [i for i, group in enumerate(out) if group is None]:
            if not asked:
                raise EngineLost("no replica is left that serves the last version", why or list(self.urls))
            shares = [missing[k :: len(asked)] for k in range(len(asked))]
            with ThreadPoolExecutor(len(asked)) as pool:
                calls = [
                    (r, share, pool.submit(self._ask, self.urls[r], [prompts[i] for i in share], n, tokens, seed + r))
                    for r, share in zip(asked, shares)
                    if share
                ]
            for r, share, call in calls:
                try:
                    for i, group in zip(share, call.result(), strict=True):
                        if len(group) != n:
                            raise XferError(
                                f"{self.urls[r]} gave {len(group)} of {n} answers to a prompt",
                                ["no sample of it is used"],
                            )
                        out[i] = group
                except (EngineLost, DeadlineExceeded) as e:
                    asked.remove(r)
                    why.append(str(e))
        return out

    def _ask(self, url: str, prompts: list[list[int]], n: int, tokens: int, seed: int) -> list[list[Sample]]:
        said = self.post(url, "/sample", {"prompts": prompts, "n": n, "tokens": tokens, "seed": seed})
        return [[Sample.read(s) for s in group] for group in said["groups"]]

    def post(self, url: str, path: str, body: dict) -> dict:
        """A rollout listens only once it serves: until then it is asked again. One that has answered before and listens no
        more is gone, and so is one that says that it failed. XferError for what no replica would answer."""
        end = time.monotonic() + self.deadline_s
        request = urllib.request.Request(url + path, json.dumps(body).encode(), self._headers)
        while True:
            try:
                with DIRECT.open(request, timeout=max(1.0, end - time.monotonic())) as reply:
                    said = json.loads(reply.read())
                self._met.add(url)
                return said
            except urllib.error.HTTPError as e:
                kind = EngineLost if e.code >= 500 else XferError
                raise kind(f"{url}{path} answered {e.code}", [e.read(2000).decode(errors="replace")]) from None
            except urllib.error.URLError as e:
                if url in self._met or not isinstance(e.reason, ConnectionRefusedError):
                    raise EngineLost(f"{url} cannot be reached: {e.reason}") from None
                if time.monotonic() > end:
                    raise DeadlineExceeded(f"{url} did not listen within {self.deadline_s:.0f} s") from None
                time.sleep(0.2)
            except (ConnectionError, http.client.HTTPException) as e:
                raise EngineLost(f"{url}{path} broke off: {type(e).__name__}: {e}") from None
            except TimeoutError:
                raise DeadlineExceeded(f"{url}{path} did not answer within {self.deadline_s:.0f} s") from None


class ServeClient(RolloutClient):
    """`urls`: of `vllm serve` processes with xfer's backend. Their route for tokens in and tokens out also says which
    weights made which token; vLLM 0.25 does not, and there `version_of(replica)` does, which its owner sets: no refit runs while
    this client asks, so what the replica's controller serves made all of it."""

    version_of: Callable[[int], int | str | None] | None = None

    def _ask(self, url: str, prompts: list[list[int]], n: int, tokens: int, seed: int) -> list[list[Sample]]:
        params = {"n": n, "temperature": 1.0, "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, "logprobs": 0,
                  "detokenize": False, "output_kind": _FINAL_ONLY}  # fmt: skip

        def one(i: int, prompt: list[int]) -> list[Sample]:
            body = {"token_ids": prompt, "sampling_params": {**params, "seed": seed * 100_003 + i}}
            said = self.post(url, "/inference/v1/generate", body)["choices"]
            return [self._read(prompt, c, version) for c in said]

        version = self.version_of(self.urls.index(url)) if self.version_of is not None else None

        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(one, range(len(prompts)), prompts))

    @staticmethod
    def _read(prompt: list[int], choice: dict, version: int | str | None) -> Sample:
        alone = () if version is None else [dict(version=version, start=0, end=len(choice["token_ids"]))]
        spans = choice.get("weight_versions") or alone
        return Sample.read(
            {
                "prompt": prompt,
                "tokens": choice["token_ids"],
                "logprobs": [c["logprob"] for c in choice["logprobs"]["content"]],
                "spans": [[s["version"], s["start"], s["end"]] for s in spans],
            }
        )
