"""Asks rollouts for samples. Every wait has a deadline; nothing that they answer is unpickled."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from examples.grpo.rollout import password
from examples.grpo.samples import Sample
from xfer.errors import DeadlineExceeded, EngineLost, XferError


class RolloutClient:
    """`urls`: "http://HOST:PORT" of one rollout.py process per replica, in the order of the replicas."""

    def __init__(self, urls: Sequence[str], token: str, deadline_s: float = 300.0):
        self.urls, self.deadline_s = tuple(urls), deadline_s
        self._headers = {"Authorization": f"Bearer {password(token)}", "Content-Type": "application/json"}

    def sample(
        self, prompts: Sequence[list[int]], *, n: int, tokens: int, seed: int, replicas: Sequence[int] | None = None
    ) -> list[list[Sample]]:
        """`n` answers to each prompt, in the prompts' order. `replicas`: whom to ask (those that a refit has committed to);
        default all. They share the prompts evenly. EngineLost, DeadlineExceeded, XferError."""
        asked = list(range(len(self.urls)) if replicas is None else replicas)
        if not asked:
            raise EngineLost(
                "no replica serves the last version", [f"there are {len(self.urls)}: {', '.join(self.urls)}"]
            )
        shares = [list(prompts[i :: len(asked)]) for i in range(len(asked))]
        with ThreadPoolExecutor(len(asked)) as pool:
            parts = list(
                pool.map(
                    lambda i, share: self._ask(self.urls[i], share, n, tokens, seed + i) if share else [], asked, shares
                )
            )
        out: list[list[Sample]] = [[]] * len(prompts)
        for i, part in enumerate(parts):
            out[i :: len(asked)] = part
        return out

    def _ask(self, url: str, prompts: list[list[int]], n: int, tokens: int, seed: int) -> list[list[Sample]]:
        body = {"prompts": prompts, "n": n, "tokens": tokens, "seed": seed}
        said = self.post(url, "/sample", body)
        return [[Sample.read(s) for s in group] for group in said["groups"]]

    def post(self, url: str, path: str, body: dict) -> dict:
        """A rollout listens only once it serves: until then it is asked again."""
        end = time.monotonic() + self.deadline_s
        request = urllib.request.Request(url + path, json.dumps(body).encode(), self._headers)
        while True:
            try:
                with urllib.request.urlopen(request, timeout=max(1.0, end - time.monotonic())) as reply:
                    return json.loads(reply.read())
            except urllib.error.HTTPError as e:
                raise XferError(f"{url}{path} answered {e.code}", [e.read(2000).decode(errors="replace")]) from None
            except urllib.error.URLError as e:
                if not isinstance(e.reason, ConnectionRefusedError):
                    raise EngineLost(f"{url} cannot be reached: {e.reason}") from None
                if time.monotonic() > end:
                    raise DeadlineExceeded(f"{url} did not listen within {self.deadline_s:.0f} s") from None
                time.sleep(0.2)
            except TimeoutError:
                raise DeadlineExceeded(f"{url}{path} did not answer within {self.deadline_s:.0f} s") from None
