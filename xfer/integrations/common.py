"""The common parts of adapters of RL frameworks: an invitation (where to meet), and a session that connects at its first use."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xfer
from xfer.routes import Route

if TYPE_CHECKING:
    from xfer.api import Session
    from xfer.participants.trainer import Source

ANY_CAST: Route = xfer.Direct(narrow=["*"])
"""The route of adapters by default. The frameworks' own syncs cast, too: many train fp32 weights that the engine serves in bf16."""


@dataclass(frozen=True)
class Invitation:
    """Where the ranks of one job meet, and the job's token."""

    rendezvous: str
    token: str


def make_invitation(host: str) -> Invitation:
    """Return an invitation with a free port of this process's host and a new token. Trainer rank 0 calls it.

    Args:
        host: Address of this host, as the job's other hosts reach it.
    """
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as s:
        s.bind((host, 0))
        port = s.getsockname()[1]
    where = f"[{host}]" if family == socket.AF_INET6 else host
    return Invitation(f"tcp://{where}:{port}", secrets.token_hex(16))


class LazySession:
    """One rank's session, connected at the first use, when the framework has its weights in place.

    Args:
        trainer: Makes the adapter of this rank's weights.
        rendezvous: As for `xfer.connect`.
        token: As for `xfer.connect`.
        options: Further arguments of `xfer.connect`. Default of `route`: `ANY_CAST`.
    """

    def __init__(
        self, trainer: Callable[[], Source], rendezvous: str, token: str | None, options: Mapping[str, Any]
    ) -> None:
        self._args, self._options = (trainer, rendezvous, token), {"route": ANY_CAST, **options}
        self._session: Session | None = None

    @property
    def session(self) -> Session:
        if self._session is None:
            trainer, rendezvous, token = self._args
            self._session = xfer.connect(trainer(), rendezvous, token, **self._options)
        return self._session

    def close(self) -> None:
        """Leave the rendezvous, if the session was connected. Engines keep serving. Every rank calls it after training."""
        if self._session is not None:
            self._session.close()
