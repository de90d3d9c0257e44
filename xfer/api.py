"""The public functions: connect once per trainer rank, serve once per engine replica, refit after every optimizer step.

    session = xfer.connect(xfer.MegatronTrainer(model_chunks, bridge), "tcp://10.0.0.1:29600")
    for step in range(steps):
        train_step()
        report = session.refit()                 # or xfer.nccl_xfer_refit(session)

Trainers and engines prove the same token, from $XFER_TOKEN or `token=`. This module checks arguments and puts together the
parts of participants/.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from xfer import logs
from xfer.arguments import RefitOptions
from xfer.errors import Unsupported, XferError
from xfer.routes import Direct, Route

if TYPE_CHECKING:
    from xfer.participants.controller import Controller
    from xfer.participants.trainer import Source, TrainerSession
    from xfer.report import RefitReport

logger = logging.getLogger("xfer")
DEADLINE_S = 600.0
TOKEN = "XFER_TOKEN"
"""Environment variable with the token, read if none is given."""
_readers: weakref.WeakValueDictionary[int, TrainerSession] = weakref.WeakValueDictionary()
"""The last session of each trainer adapter, which it keeps alive, by the adapter's id."""


class Session:
    """A connected trainer rank, made by `connect`. Also a context manager that closes itself.

    Attributes:
        controllers: On trainer rank 0, the controllers of the engines that were given to `connect`; else empty.
    """

    def __init__(self, session: TrainerSession, controllers: Sequence[Controller]):
        self._session, self.controllers = session, tuple(controllers)

    def __repr__(self) -> str:
        return f"<Session of {self._session!r}>"

    @property
    def version(self) -> int | str | None:
        """The last version that this rank saw committed, in the type that the caller gave; None before the first."""
        return self._session.version

    def refit(
        self,
        *,
        version: int | str | None = None,
        verify: bool = False,
        wait: Literal["commit", "sources"] = "commit",
        min_replicas: int | None = None,
        deadline_s: float | None = None,
        delta: Literal["auto"] | None = None,
        at_once: int | None = None,
        stage: bool = False,
        stage_budget: int | None = None,
    ) -> RefitReport:
        """Move this trainer's current weights into every engine replica.

        Every trainer rank calls it right after `step()`, with equal arguments, from one thread at a time.

        Args:
            version: Label that the engines report from then on. Reports return it in the type that it has here: a number as
                int, a text as str. Engines keep it as text, so 1 and "1" are the same label to them. A number must be higher
                than all that this session has committed; a text must differ from the last label. A call that raised uses no
                label, even if some replicas committed it: call again with the same label before the next training step.
                Default: the number after the highest that a connected engine has had: 1, 2, 3, …, without repetition when
                trainers restart.
            verify: Before the commit, compare checksums of the sent bytes with those of the engines, and checksums of all
                trainers that hold the same box of a tensor. (Until a session's first commit, some bytes of each tensor are
                compared in any case.)
            wait: "commit" returns when the replicas serve the version. "sources" returns as soon as this rank's storages are
                no longer read; the next call raises the outcome's error, or has the outcome in its report's `before`.
            min_replicas: Raise only if fewer replicas committed. Default: all.
            deadline_s: Seconds from the call to the deadline. Default: `deadline_s` of `connect`.
            delta: "auto" sends of each message only the elements that changed since the last refit that the replica committed,
                if that is less, and else all of it. Workers that pull from a trainer's memory on their own host read only the
                granules of 32 bytes that changed, if these are few. The engine ends up with the same bytes. This rank keeps a
                copy of what it sent, until `release` (`extra_bytes` of the report has its size). The packed route
                refuses it. Default: send all bytes, keep no copy.
            at_once: Most replicas that are out of service at the same time: the next one is paused when another serves again, and
                none before all trainers are ready. A replica that is not done when its share of the time to the deadline is over
                leaves the refit, and the next one begins. Not after `prepare`, which pauses all. Default: all at once.
            stage: Bring the bytes into scratch of the engines' workers while they serve. Then pause, copy them into live storage
                from there, commit and resume: an outage of the engine's own calls and a local copy. The scratch is as large as what
                is written, and stays until `release`, or a refit without `stage` (`scratch_bytes` of the report has its size). An
                engine that serves nothing yet, or has changed its layout, is paused first as without `stage`. Not on the packed
                route.
            stage_budget: Bytes of scratch that each worker may take. Default: what its device has free. A replica whose workers
                need more takes no part, and its error has the number; its engine goes on serving.

        Returns:
            The outcome on each replica, with seconds and bytes.

        Raises:
            XferError: The refit failed. Every rank raises a typed error (`xfer.errors`), at the latest `CALL_GRACE_S`
                (coordinator/deadlines.py) seconds after the deadline. The trainer can continue, and a later refit repairs
                the engines.
        """
        return self._session.refit(
            RefitOptions(version, verify, wait, min_replicas, deadline_s, delta, at_once, stage, stage_budget)
        )

    def publish(
        self,
        *,
        version: int | str | None = None,
        verify: bool = False,
        min_replicas: int | None = None,
        deadline_s: float | None = None,
        delta: Literal["auto"] | None = None,
        at_once: int | None = None,
        stage: bool = False,
        stage_budget: int | None = None,
    ) -> RefitReport:
        """Begin a refit and return when this rank has looked at its storages: engines read its weights while the next forward and
        backward run.

        Every trainer rank calls it, as `refit`, which documents the arguments. Call `fence` before weights change again, or let
        `fence_before` do that. The next `publish` or `refit` waits for the outcome of this one first, so that engines commit versions
        in their order: it raises its error, or has its report in `before`. The packed route refuses it: its gathers use the process
        groups that the next step uses.

        What needs only this rank's bytes goes on in the background: comparing for `delta`, quantizing, checksums. On a GPU the call
        does not wait for the device: it sends the bytes that are there once the work that the current stream was given before the call
        is done. Gathers of parameters, and exports that ranks compute together, use process groups of the trainer: the call waits for
        these, and a `LayerWiseTrainer` waits for its stream.

        Returns:
            A pending report.

        Raises:
            XferError: As `refit`, for what fails before the call returns. The fence raises what fails later.
        """
        return self._session.refit(
            RefitOptions(version, verify, "ready", min_replicas, deadline_s, delta, at_once, stage, stage_budget)
        )

    def fence(self) -> float:
        """Wait until no engine reads this rank's weights any more, so that they may change. Returns at once if nothing was published,
        and after `close`.

        Returns:
            Seconds for which it waited. The report of the refit has them too.

        Raises:
            XferError: The refit failed before its weights were free, as `refit` raises it; if it fails later, the next call
                raises. If the error has `drained=False`, weights may still be read.
        """
        return self._session.fence()

    def fence_before(self, optimizer: object) -> None:
        """Call `fence` at the beginning of each `step` of an optimizer, from now on, and wherever else the trainer's framework changes
        what is exported: Megatron-Core updates the biases of routers in `finalize_model_grads_func`, which has to be set before.

        From now on Megatron-Core's distributed optimizer also marks what it changes, for `delta`: where all bytes of a rank are pulled,
        the rank keeps no copies of what the optimizer writes.

        Args:
            optimizer: A torch optimizer, a layer-wise one (`xfer.layerwise`), or one of Megatron-Core's or Accelerate's, which keeps
                torch optimizers in `optimizer` or `chained_optimizers`. Their steps must not be captured in a CUDA graph, which
                would repeat them without the fence: such a step then raises Unsupported.

        Raises:
            Unsupported: It is none of these: call `fence` before each step. Or Megatron-Core has biases of routers and
                `finalize_model_grads_func` is not set yet.
        """
        fence_before(optimizer, self.fence)
        if (also := getattr(self._session.source, "fence_before", None)) is not None:
            also(self.fence)
        if (marks := getattr(self._session.source, "mark_writes", None)) is not None:
            marks(optimizer)

    def prepare(self) -> None:
        """Pause the engines for the next refit now: for loops that know that no request will wait.

        If no rank calls `refit`, the engines serve again after `deadline_s` of `connect`. A refit ends by that time at the
        latest.
        """
        self._session.prepare()

    def release(self) -> None:
        """Release this rank's weights; call it before the rank frees, offloads or replaces them. Not collective.

        Returns when no engine has them mapped and xfer holds no reference to them. The next refit finds them again at their
        new addresses. Needed on GPUs only, where engines map the trainers' memory: to free mapped memory is undefined and
        does not return its pages.

        Raises:
            DeadlineExceeded: A transfer of this rank still runs, or a worker has not unmapped in time.
            PeerLost: The rendezvous is gone.
        """
        self._session.release()

    def explain(self) -> str:
        """Describe which bytes move by which route, per replica, for a person to read."""
        return self._session.explain()

    def close(self) -> None:
        """Leave the rendezvous. Engines keep serving their weights. If trainer rank 0 leaves, the session ends for all.

        After `wait="sources"` this first waits for the outcome of that refit, within its bound, and raises its error. A later
        call of this session raises Unsupported, except `close` and `fence`, which do nothing.
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
            logger.error("xfer: the last refit failed, too: %s", e)  # the error that is being raised says more


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
        trainer: This rank's weights: a `MegatronTrainer`, `TensorTrainer` or `LayerWiseTrainer`. Each open session needs one of its own.
        rendezvous: "tcp://HOST:PORT". Trainer rank 0 listens there; HOST must reach it from every trainer and engine host. An
            IPv6 address needs brackets.
        token: Secret of at least 8 characters, the same on all processes of the job. Default: $XFER_TOKEN.
        engines: Engines or URLs that trainer rank 0 itself controls, instead of `serve` calls elsewhere.
        replicas: Number of engine replicas that will join (each calls `serve`). Default: `len(engines)`, else 1.
        route: `Direct(...)` or `Packed(...)`. Engines use the trainers' route.
        drop: Globs of checkpoint tensors that engines do not take. They must not name all tensors that require grad.
        deadline_s: Seconds for connecting, and for each refit that has no deadline of its own. Every wait inside ends by it.
        wait: Return only when every replica has a plan. With False, this thread may call `serve` later.

    Returns:
        The session of this rank.

    Raises:
        LayoutError, CoverageError, Unsupported, HandshakeError, PlanMismatch, DeadlineExceeded, PeerLost: All ranks may then
            call it again, at once and with other arguments.
    """
    from xfer import arguments as check
    from xfer.coordinator.state import Options
    from xfer.engines.choose_handle import handle_for
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
    if (other := _readers.get(id(trainer))) is not None and not other.over:
        bad.append(
            f"trainer: an open session reads by it ({other!r}), and only one of two would see that storages have moved; close that "
            f"session, or make another {type(trainer).__name__} of the same model"
        )
    bad += check.wrong_trainer(trainer) + check.wrong_meeting(token, rendezvous)
    bad += check.wrong_seconds("deadline_s", deadline_s) + check.wrong_globs("drop", drop)
    if not isinstance(route, Route):
        bad.append(f"route={route!r}: xfer.Direct(...) or xfer.Packed(...)")
    else:
        bad += route.wrong(trainer if known else None, check.whole(count) or 0)
    number = check.whole(count)
    if bad or token is None or number is None:
        raise XferError("connect() was called with arguments that cannot work", bad)
    source = route.source(trainer)
    options = Options(source.world, number, float(deadline_s), 0, tuple(drop))
    session = TrainerSession(source, rendezvous, token, route.options(options, source), route.side(source, tuple(drop)))
    _readers[id(trainer)] = session
    controllers: list[Controller] = []
    try:
        for i, e in enumerate(engines if source.rank == 0 else ()):
            tell = partial(session.cannot_join, i, wait)
            try:
                made = Controller(handle_for(e), rendezvous, token, replica=i, deadline_s=options.deadline_s, tell=tell)
                controllers.append(made)
            except Exception as error:  # tell it first; the others would otherwise learn only that this rank has left
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
        engine: An in-process `LLM`, an `AsyncLLM`, a URL, or any object that forwards vLLM's weight-transfer calls. Start it
            with `weight_transfer_config={"backend": "xfer"}`. With an in-process `LLM` generate inside
            `with controller.serving() as llm:` only.
        rendezvous: As for `connect`.
        token: As for `connect`. Default: $XFER_TOKEN.
        replica: This engine's number, from 0. `connect(replicas=N)` waits for N of them.
        keep: Globs of engine parameters that stay as they are, by the names in vLLM's model ("*vision_model*"). If the
            trainers send a part of such a parameter (q of a fused qkv_proj), that part is written and the rest stays.
        engine_rendezvous: The rendezvous as the engine's workers reach it, if that differs from this process's.
        deadline_s: Seconds for joining.
        **handle_options: Options by kind of engine. Any engine: `name`, for errors and logs. `AsyncLLM` or URL: `pause_mode`,
            what a refit does with running requests, as in vLLM: "keep" (the default) freezes them and continues them with
            the new weights, "wait" finishes them first, "abort" ends them. "keep_cache", also of an `LLM`, continues them
            with the keys and values that they have, and drops no cache of an earlier whole version. `AsyncLLM`: `loop`, its
            event loop, not needed in a coroutine of that loop; for a wrapped one `in_order`, whether it carries out calls
            in the order in which they are made (engines/handles.py). URL: `headers` of every request, e.g.
            {"Authorization": "Bearer …"}. An object that forwards calls: `workers`, `pause`, `resume`,
            `reset_prefix_cache`, if it lacks them (`CallableEngine`).

    Returns:
        The replica's controller. `wait_ready()` raises the error of a replica that could not join; `wait_version()` waits for
        its first weights. It is a context manager that closes itself.

    Raises:
        XferError: Some arguments cannot work; it names all of them.
        Unsupported: xfer cannot reach an engine through such an object.
    """
    from xfer import arguments as check
    from xfer.engines.choose_handle import handle_for, wrong_options
    from xfer.participants.controller import Controller

    logs.show()
    token = token if token is not None else os.environ.get(TOKEN)
    seen = (rendezvous,) if engine_rendezvous is None else (rendezvous, engine_rendezvous)
    bad = check.wrong_meeting(token, *seen) + check.wrong_whole("replica", replica, 0)
    bad += check.wrong_seconds("deadline_s", deadline_s) + check.wrong_globs("keep", keep)
    modes = check.wrong_pause_mode(handle_options["pause_mode"]) if "pause_mode" in handle_options else []
    others = {k: v for k, v in handle_options.items() if not modes or k != "pause_mode"}
    bad += modes + wrong_options(engine, others)
    number = check.whole(replica)
    if bad or token is None or number is None:
        raise XferError("serve() was called with arguments that cannot work", bad)
    return Controller(
        handle_for(engine, **handle_options),
        rendezvous,
        token,
        replica=number,
        deadline_s=float(deadline_s),
        keep=tuple(keep),
        engine_rendezvous=engine_rendezvous,
    )


def fence_before(optimizer: object, fence: Callable[[], object]) -> None:
    """See `Session.fence_before`."""
    import torch

    inner = getattr(optimizer, "chained_optimizers", None)
    if inner is None and hasattr(optimizer, "optimizer"):
        inner = [optimizer.optimizer]  # Accelerate's is a torch optimizer, too, by its class alone: it has no hooks

    def hook(*_: object) -> None:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise Unsupported(
                "an optimizer's step is captured in a CUDA graph, which would change weights later without the fence",
                [
                    "refit() needs no fence; for publish(), keep steps out of graphs (Megatron-Core: optimizer_cuda_graph=False)"
                ],
            )
        fence()

    if inner is not None:
        for each in inner:
            if each is not None:  # Megatron-Core has none where nothing trains
                fence_before(each, fence)
    elif (before_step := getattr(optimizer, "register_step_pre_hook", None)) is not None:
        handle = before_step(hook)
        # First: hooks that are there may write weights, such as the biases of routers.
        handle.hooks_dict_ref().move_to_end(handle.id, last=False)
    else:
        raise Unsupported(
            f"{type(optimizer).__name__} is no torch optimizer and keeps none in `optimizer` or `chained_optimizers`",
            ["call session.fence() before each of its steps"],
        )


def nccl_xfer_refit(
    session: Session,
    *,
    version: int | str | None = None,
    verify: bool = False,
    wait: Literal["commit", "sources"] = "commit",
    min_replicas: int | None = None,
    deadline_s: float | None = None,
    delta: Literal["auto"] | None = None,
    at_once: int | None = None,
    stage: bool = False,
    stage_budget: int | None = None,
) -> RefitReport:
    """Call `session.refit(...)`, which documents the arguments, the result and the errors.

    Args:
        session: The session of this rank, from `connect`.
        version: See `Session.refit`, as for the others.
        verify: See there.
        wait: See there.
        min_replicas: See there.
        deadline_s: See there.
        delta: See there.
        at_once: See there.
        stage: See there.
        stage_budget: See there.
    """
    return session.refit(
        version=version,
        verify=verify,
        wait=wait,
        min_replicas=min_replicas,
        deadline_s=deadline_s,
        delta=delta,
        at_once=at_once,
        stage=stage,
        stage_budget=stage_budget,
    )
