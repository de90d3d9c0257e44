"""The public face: connect once per trainer rank, serve once per engine replica, refit after every optimizer step.

    session = xfer.connect(xfer.MegatronTrainer(model_chunks, bridge), "tcp://10.0.0.1:29600")
    for step in range(steps):
        train_step()
        report = session.refit()                 # or xfer.nccl_xfer_refit(session)

Trainers and engines prove the same token, from $XFER_TOKEN or `token=`. What happens underneath is in participants/; this
module checks arguments and puts the parts together.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from xfer import logs
from xfer.errors import XferError
from xfer.routes import Direct, Route

if TYPE_CHECKING:
    from xfer.participants.controller import Controller
    from xfer.participants.report import RefitReport
    from xfer.participants.trainer import Source, TrainerSession

logger = logging.getLogger("xfer")
DEADLINE_S = 600.0
TOKEN = "XFER_TOKEN"
"""Environment variable that is read where no token is given."""


class Session:
    """A connected trainer rank, made by `connect`. Also a context manager that closes itself.

    Attributes:
        controllers: Of the engines that were given to `connect`, on trainer rank 0.
    """

    def __init__(self, session: TrainerSession, controllers: Sequence[Controller]):
        self._session, self.controllers = session, tuple(controllers)

    def __repr__(self) -> str:
        return f"<Session of {self._session!r}>"

    @property
    def version(self) -> int | str | None:
        """The last version that this rank saw committed, in the type that it was given; None before the first."""
        return self._session.version

    def refit(
        self,
        *,
        version: int | str | None = None,
        verify: bool = False,
        wait: Literal["commit", "sources"] = "commit",
        min_replicas: int | None = None,
        deadline_s: float | None = None,
    ) -> RefitReport:
        """Move this trainer's current weights into every engine replica. Every trainer rank calls it, right after `step()`,
        with equal arguments, from one thread at a time.

        Args:
            version: Label that the engines report from then on. It comes back in the type that it has here: a number as int, a
                text as str. Engines keep it as text, so 1 and "1" are one label to them. A number must be above all that this
                session has committed; a text must not be the last one again. A call that raised used no label up, even if
                some replicas committed it: make it again under the same label, before training on. Default: the number after
                the highest that a connected engine has had: 1, 2, 3, …, and none twice when trainers restart.
            verify: Compare checksums of what was sent and of what lies in the engines, and of all trainers that hold the same
                box of a tensor, before the commit. (Until a session's first commit, some bytes of each tensor are compared in
                any case.)
            wait: "commit" returns when the replicas serve the version. "sources" returns as soon as this rank's storage is no
                longer read; the next call raises the outcome, or has it in its report's `before`.
            min_replicas: Raise only if fewer replicas committed. Default: all.
            deadline_s: Seconds from the call on. Default: that of `connect`.

        Returns:
            What became of each replica, with seconds and bytes.

        Raises:
            XferError: The typed error of what went wrong (`xfer.errors`), on every rank, at the latest
                `CALL_GRACE_S` (coordinator/deadlines.py) seconds after the deadline. The trainer can go on, and a later refit
                repairs.
        """
        return self._session.refit(
            version=version, verify=verify, wait=wait, min_replicas=min_replicas, deadline_s=deadline_s
        )

    def prepare(self) -> None:
        """Arm the engines for the next refit now: for loops that know that no request will be waiting.

        They serve again at the deadline of `connect` when no rank calls before. One that does has that deadline at most.
        """
        self._session.prepare()

    def release(self) -> None:
        """Call before this rank frees, offloads or replaces its weights. Not collective.

        Returns when no engine has them mapped and xfer holds no reference to them. The next refit finds them again, wherever
        they are then. Needed on GPUs only, where engines map the trainers' memory: freeing it under them is undefined, and
        keeps its pages.

        Raises:
            DeadlineExceeded: A transfer of this rank still runs, or a worker did not unmap in time.
            PeerLost: The rendezvous is gone.
        """
        self._session.release()

    def explain(self) -> str:
        """What moves where, per replica, for a person to read."""
        return self._session.explain()

    def close(self) -> None:
        """Leave the rendezvous. Engines keep serving what they have; trainer rank 0 leaving ends it for everyone.

        A call of this session after it is Unsupported; closing twice is not. After `wait="sources"` it first waits for what
        became of that refit, within its bound, and raises it.
        """
        try:
            self._session.settle()
        finally:
            for c in self.controllers:
                c.close()
            self._session.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self.close()
        except XferError as e:
            if error is None:
                raise
            logger.error("xfer: the last refit failed, too: %s", e)  # the error that is raised says more


def connect(
    trainer: Source,
    rendezvous: str,
    token: str | None = None,
    *,
    engines: Sequence[Any] = (),
    replicas: int | None = None,
    route: Route = Direct(),  # noqa: B008  frozen
    drop: Sequence[str] = (),
    deadline_s: float = DEADLINE_S,
    wait: bool = True,
) -> Session:
    """Join the rendezvous as one trainer rank. Every rank of the trainer calls this with equal arguments.

    Args:
        trainer: What this rank's weights are: a `MegatronTrainer`, `TensorTrainer` or `LayerWiseTrainer`.
        rendezvous: "tcp://HOST:PORT". Trainer rank 0 listens there; HOST must reach it from every trainer and engine host. An
            IPv6 address stands in brackets.
        token: Secret of at least 8 characters, the same on all processes of the job. Default: $XFER_TOKEN.
        engines: Engines or URLs that trainer rank 0 itself controls, in place of `serve` calls elsewhere.
        replicas: Number of engine replicas that will join (each calls `serve`). Default: `len(engines)`, else 1.
        route: `Direct(...)` or `Packed(...)`. Engines follow the trainers' choice.
        drop: Globs of checkpoint tensors that engines do not take. They must not name all tensors that require grad.
        deadline_s: Seconds for connecting and, unless given there, for each refit. Every wait inside ends by it.
        wait: Return only when every replica has a plan. With False, `serve` may come later in this same thread.

    Raises:
        LayoutError, CoverageError, Unsupported, HandshakeError, PlanMismatch, DeadlineExceeded, PeerLost: All ranks may then
            call it again, at once and with other arguments.
    """
    from xfer.coordinator.state import Options
    from xfer.engines.choose_handle import handle_for
    from xfer.participants import arguments as check
    from xfer.participants.controller import Controller
    from xfer.participants.trainer import TrainerSession

    logs.show()
    token = token if token is not None else os.environ.get(TOKEN)
    bad = check.wrong_engines(engines)
    count = replicas if replicas is not None else 1 if bad else max(1, len(engines))
    bad += check.wrong_whole("replicas", count, 1)
    if not bad and engines and len(engines) != count:
        bad.append(f"replicas={count} but {len(engines)} engines")
    known = not bad and not check.wrong_trainer(trainer)
    bad += check.wrong_trainer(trainer) + check.wrong_meeting(token, rendezvous)
    bad += check.wrong_seconds("deadline_s", deadline_s) + check.wrong_globs("drop", drop)
    if not isinstance(route, Route):
        bad.append(f"route={route!r}: xfer.Direct(...) or xfer.Packed(...)")
    else:
        bad += route.wrong(trainer if known else None, check.whole(count) or 0)
    if bad:
        raise XferError("connect() was called with arguments that cannot work", bad)
    source = route.source(trainer)
    options = Options(source.world, check.whole(count), float(deadline_s), 0, tuple(drop))
    session = TrainerSession(source, rendezvous, token, route.options(options, source), route.side(source, tuple(drop)))
    controllers: list[Controller] = []
    try:
        for i, e in enumerate(engines if source.rank == 0 else ()):
            tell = partial(session.cannot_join, i, wait)
            try:
                made = Controller(handle_for(e), rendezvous, token, replica=i, deadline_s=options.deadline_s, tell=tell)
                controllers.append(made)
            except Exception as error:  # told first, or the others would only hear that this rank has left
                session.cannot_join(i, True, error)
                raise
        session.open(wait)
    except BaseException:
        Session(session, controllers).close()
        raise
    return Session(session, controllers)


def serve(
    engine: Any,
    rendezvous: str,
    token: str | None = None,
    *,
    replica: int = 0,
    keep: Sequence[str] = (),
    engine_rendezvous: str | None = None,
    deadline_s: float = DEADLINE_S,
    **handle_options: Any,
) -> Controller:
    """Put one engine replica under xfer's control and return at once. Refits happen when the trainers call.

    Args:
        engine: An in-process `LLM`, an `AsyncLLM`, a URL, or any object that forwards vLLM's weight-transfer calls. It must
            have been started with `weight_transfer_config={"backend": "xfer"}`. With an in-process `LLM` generate inside
            `with controller.serving() as llm:` only.
        rendezvous: As for `connect`.
        token: As for `connect`. Default: $XFER_TOKEN.
        replica: This engine's number, from 0. `connect(replicas=N)` waits for N of them.
        keep: Globs of engine parameters, by the names that vLLM's model gives them ("*vision_model*"), that stay as they are.
            Of one that the trainers send in part (q of a fused qkv_proj) that part is written, and only the rest stays.
        engine_rendezvous: The rendezvous as the engine's workers see it, where that differs from this process's view.
        deadline_s: Seconds for joining.
        **handle_options: By kind of engine. `name`: of any, as errors and logs call it. `pause_mode`: of an `AsyncLLM` or a
            URL, what a refit does with requests under way, as in vLLM: "keep" (the default) freezes them and goes on under
            the new weights, "wait" lets them end before, "abort" ends them. `loop`: of an `AsyncLLM`, its event loop; not
            needed in a coroutine of that loop. `in_order`: of one that is wrapped, whether its calls are carried out in the
            order in which they were made (engines/handles.py). `headers`: of a URL, sent with every request, e.g.
            {"Authorization": "Bearer …"}. `workers`, `pause`, `resume`, `reset_prefix_cache`: of an object that forwards
            calls, what it lacks itself (`CallableEngine`).

    Returns:
        The replica's controller. `wait_ready()` raises what kept the replica from joining; `wait_version()` waits for its
        first weights. It is a context manager that closes itself.

    Raises:
        XferError: With all arguments that cannot work.
        Unsupported: No engine can be reached through such an object.
    """
    from xfer.engines.choose_handle import handle_for, wrong_options
    from xfer.participants import arguments as check
    from xfer.participants.controller import Controller

    logs.show()
    token = token if token is not None else os.environ.get(TOKEN)
    seen = (rendezvous,) if engine_rendezvous is None else (rendezvous, engine_rendezvous)
    bad = check.wrong_meeting(token, *seen) + check.wrong_whole("replica", replica, 0)
    bad += check.wrong_seconds("deadline_s", deadline_s) + check.wrong_globs("keep", keep)
    modes = check.wrong_pause_mode(handle_options["pause_mode"]) if "pause_mode" in handle_options else []
    others = {k: v for k, v in handle_options.items() if not modes or k != "pause_mode"}
    bad += modes + wrong_options(engine, others)
    if bad:
        raise XferError("serve() was called with arguments that cannot work", bad)
    return Controller(
        handle_for(engine, **handle_options),
        rendezvous,
        token,
        replica=check.whole(replica),
        deadline_s=float(deadline_s),
        keep=tuple(keep),
        engine_rendezvous=engine_rendezvous,
    )


def nccl_xfer_refit(
    session: Session,
    *,
    version: int | str | None = None,
    verify: bool = False,
    wait: Literal["commit", "sources"] = "commit",
    min_replicas: int | None = None,
    deadline_s: float | None = None,
) -> RefitReport:
    """`session.refit(...)`: see there."""
    return session.refit(version=version, verify=verify, wait=wait, min_replicas=min_replicas, deadline_s=deadline_s)
