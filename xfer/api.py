"""The public face: connect once per trainer rank, serve once per engine replica, refit after every optimizer step.

    refit = xfer.connect(trainer=xfer.MegatronTrainer(model_chunks, bridge), rendezvous="tcp://10.0.0.1:29600", token=TOKEN)
    for step in range(steps):
        train_step()
        report = xfer.nccl_xfer_refit(refit)

What happens underneath is in session/; this module only checks arguments.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from xfer import logs
from xfer.errors import XferError

if TYPE_CHECKING:
    from xfer.participants.controller import Controller
    from xfer.participants.report import RefitReport
    from xfer.participants.trainer import Source, TrainerSession
    from xfer.plan.fabric import Site

logger = logging.getLogger("xfer")
DEADLINE_S = 600.0
BUCKET_BYTES = {"cpu": 64 << 20, "cuda": 240 << 20}


def default_cache_dir() -> str:
    """$XFER_CACHE, else xfer/ under the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get("XFER_CACHE") or os.path.join(base, "xfer")


class Refit:
    """A connected trainer rank. Made by `connect`; pass it to `nccl_xfer_refit`. Also a context manager that closes itself."""

    def __init__(self, session: TrainerSession, controllers: Sequence[Controller]):
        self._session, self.controllers = session, tuple(controllers)

    def __repr__(self) -> str:
        return f"<Refit of {self._session!r}>"

    @property
    def version(self) -> int | str | None:
        """The last version that this rank saw committed, in the type that it was given; None before the first."""
        return self._session.version

    def prepare(self) -> None:
        """Arm the engines for the next refit now: for loops that know that no request will be waiting.

        They serve again at connect()'s deadline when no rank calls before. One that does has that deadline at most.
        """
        self._session.prepare()

    def release(self) -> None:
        """Before this rank frees, offloads or replaces its weights: returns when no engine has them mapped and xfer
        holds no reference to them. The next refit finds them again, wherever they are then. Not collective.

        Needed on GPUs only, where engines map the trainers' memory: freeing it under them is undefined, and keeps its
        pages. DeadlineExceeded, PeerLost.
        """
        self._session.release()

    def explain(self) -> str:
        """What moves where, per replica, for a person to read."""
        return self._session.explain()

    def close(self) -> None:
        """Leave the rendezvous. Engines keep serving what they have; trainer rank 0 leaving ends it for everyone.
        What is called after it is Unsupported; closing twice is not.

        After `wait="sources"` it first waits for what became of that refit, within its bound, and raises it.
        """
        try:
            self._session.settle()
        finally:
            for c in self.controllers:
                c.close()
            self._session.close()

    def __enter__(self) -> Refit:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self.close()
        except XferError as e:
            if error is None:
                raise
            logger.error("xfer: the last refit failed, too: %s", e)  # what is on its way says more


def connect(
    *,
    trainer: Source,
    rendezvous: str,
    token: str,
    replicas: int | None = None,
    engines: Sequence[Any] = (),
    deadline_s: float = DEADLINE_S,
    bucket_bytes: int | None = None,
    drop: Sequence[str] = (),
    narrow: Sequence[str] = (),
    cache_dir: str | None = "default",
    fabric: str | os.PathLike[str] | Site | None = None,
    wait: bool = True,
    route: Literal["direct", "packed"] = "direct",
    colocated: bool = False,
    host_pull: bool = False,
    relay: bool = False,
) -> Refit:
    """Join the rendezvous as one trainer rank; every rank of the trainer calls this with equal arguments.

    rendezvous: "tcp://HOST:PORT"; trainer rank 0 listens there, HOST must reach it from every trainer and engine host. An IPv6
    address stands in brackets.
    token: secret of at least 8 characters, the same on all processes of the job.
    replicas: how many engine replicas will join (each calls `serve`); default `len(engines)`, else 1.
    engines: handles or URLs that trainer rank 0 itself controls, in place of `serve` calls elsewhere.
    deadline_s: seconds for connecting and, unless given there, for each refit. Every wait inside ends by it.
    bucket_bytes: largest message that is sent. A rank that sends or receives messages keeps two buffers of about that size for
    each direction, beside the model; a rank whose takers read its memory keeps none. Default 64 MiB on CPUs, 240 MiB on GPUs.
    drop: canonical names (globs) that engines do not take. They must not name all tensors that require grad.
    narrow: canonical names (globs) that the engine may hold in a dtype that loses bits both of the trainer's and of the checkpoint's
    (fp32 as bf16, bf16 as fp16). cache_dir: where plans are kept between runs; None for nowhere.
    fabric: a file with hosts, links, rates and who sits where (plan/fabric_file.py), or the Site itself; senders are then
    chosen for time over links. Default: a sender on the taker's host goes first, by host name.
    wait: return only when every replica has a plan. With False, `serve` may come later in this same thread.
    route: "direct" moves each byte from where it lies to where it belongs. "packed" gathers whole checkpoint tensors in
    buckets of at most `bucket_bytes` (there 1 GiB by default), broadcasts each bucket from trainer rank 0, and lets the engine's
    own loader take it in: for engines that cannot be traced (docs/packed.md). Engines follow the trainers' choice.
    colocated: packed route only: the engines' workers are on trainer 0's host and map its two buffers (shared memory, CUDA
    IPC) instead of receiving them.
    host_pull: weights in host memory only: engine workers on a trainer's host read its memory themselves, where the kernel lets
    them (transport/peer_host.py), instead of having it sent. Weights on GPUs are read so wherever they can be.
    relay: replicas of one layout on one host stand in a row, and each reads from the one before it what it would read from the
    trainers, part by part as it arrives. For few trainers and many replicas, which otherwise share the trainers' outgoing links. A
    replica waits for the one before it, and fails if that one fails while both are moving bytes. Only what is read is relayed, not
    what is sent.

    Raises LayoutError, CoverageError, Unsupported, HandshakeError, PlanMismatch, DeadlineExceeded, PeerLost. All ranks may then call it
    again, at once and with other arguments.
    """
    from xfer.participants import arguments as check
    from xfer.participants.controller import Controller
    from xfer.participants.trainer import TrainerSession
    from xfer.plan.options import MAX_BUCKET

    logs.show()
    bad = check.wrong_engines(engines)
    count = replicas if replicas is not None else 1 if bad else max(1, len(engines))
    bad += check.wrong_whole("replicas", count, 1)
    if not bad and engines and len(engines) != count:
        bad.append(f"replicas={count} but {len(engines)} engines")
    bad += check.wrong_trainer(trainer)
    counted, device = not bad, getattr(getattr(trainer, "device", None), "type", "cpu")
    bad += check.wrong_meeting(token, rendezvous)
    bad += check.wrong_seconds("deadline_s", deadline_s)
    bad += check.wrong_globs("drop", drop) + check.wrong_globs("narrow", narrow)
    if cache_dir is not None and not isinstance(cache_dir, str | os.PathLike):
        bad.append(f"cache_dir={cache_dir!r}: a folder, or None for nowhere")
    if route not in ("direct", "packed"):
        bad.append(f'route={route!r}: "direct" or "packed"')
    if colocated and route != "packed":
        bad.append('colocated=True is for route="packed"; the direct route maps whatever can be mapped by itself')
    if relay and route != "direct":
        bad.append('relay=True is for route="direct"; the packed route broadcasts to all replicas at once')
    if relay and fabric is not None:
        bad.append(
            "relay=True and fabric=: senders of a fabric are chosen for each replica, and then no two plans are equal"
        )
    if relay and device == "cpu" and not host_pull:
        bad.append(
            "relay=True hands on what engines read; with weights in host memory they read with host_pull=True only"
        )
    if bucket_bytes is None and route == "packed":
        from xfer.packed import plan

        bucket_bytes = plan.BUCKET_BYTES
    elif bucket_bytes is None:
        bucket_bytes = BUCKET_BYTES.get(device, BUCKET_BYTES["cpu"])
    bad += check.wrong_whole("bucket_bytes", bucket_bytes, 1 << 12, MAX_BUCKET)
    try:
        site = _site(fabric, trainer.world, count) if counted else None
    except XferError as e:
        bad += [f"fabric: {e.message}", *e.violations]
    if bad:
        raise XferError("connect() was called with arguments that cannot work", bad)
    count, bucket_bytes, deadline_s = check.whole(count), check.whole(bucket_bytes), float(deadline_s)
    if route == "packed":
        from xfer.packed.source import packed_source

        trainer = packed_source(trainer, bucket_bytes, colocated=colocated)
    where = default_cache_dir() if cache_dir == "default" else cache_dir
    session = TrainerSession(
        trainer,
        rendezvous,
        token,
        replicas=count,
        deadline_s=deadline_s,
        bucket_bytes=bucket_bytes,
        drop=tuple(drop),
        narrow=tuple(narrow),
        cache_dir=where,
        site=site,
        route=route,
        host_pull=host_pull,
        relay=relay and count > 1,
    )
    controllers: list[Controller] = []
    try:
        for i, e in enumerate(engines if trainer.rank == 0 else ()):
            tell = partial(session.cannot_join, i, wait)
            try:
                controllers.append(Controller(e, rendezvous, token, replica=i, deadline_s=deadline_s, tell=tell))
            except Exception as error:  # told first, or the others would only hear that this rank has left
                session.cannot_join(i, True, error)
                raise
        session.open(wait)
    except BaseException:
        Refit(session, controllers).close()
        raise
    return Refit(session, controllers)


def _site(fabric: str | os.PathLike[str] | Site | None, trainers: int, replicas: int) -> Site | None:
    if fabric is None:
        return None
    from xfer.plan.fabric import Site
    from xfer.plan.fabric_file import read_site

    if not isinstance(fabric, str | os.PathLike | Site):
        raise XferError(f"{fabric!r} is neither a file nor a Site")
    site = fabric if isinstance(fabric, Site) else read_site(fabric)
    placed = len(site.trainers), len(site.replicas)
    if placed != (trainers, replicas):
        raise XferError(
            f"it places {placed[0]} trainers and {placed[1]} replicas; this job has {trainers} and {replicas}"
        )
    return site


def serve(
    engine: Any,
    *,
    rendezvous: str,
    token: str,
    replica: int = 0,
    deadline_s: float = DEADLINE_S,
    keep: Sequence[str] = (),
    engine_rendezvous: str | None = None,
    **handle_options: Any,
) -> Controller:
    """Put one engine replica under xfer's control and return at once; refits happen when the trainers call.

    engine: an in-process `LLM`, an `AsyncLLM`, a URL, or any object that forwards vLLM's weight-transfer calls;
    it must have been started with `weight_transfer_config={"backend": "xfer"}`. With an in-process `LLM` generate inside
    `with controller.serving() as llm:` only. replica: this engine's number, from 0; `connect(replicas=N)` waits for N of
    them. keep: engine parameters (globs over the names that vLLM's model gives them, e.g. "*vision_model*") that stay as they
    are. Of one that the trainers send in part (q of a fused qkv_proj), that part is written and only the rest stays.
    engine_rendezvous: the rendezvous as the engine's workers see it, where that differs from this process's view.

    handle_options, by kind of engine:
    name: of any, what errors and logs call it.
    pause_mode: of an `AsyncLLM` or a URL, what a refit does with requests under way, as in vLLM: "keep" (the default) freezes
    them and goes on under the new weights, "wait" lets them end before, "abort" ends them.
    loop: of an `AsyncLLM`, its event loop; not needed in a coroutine of that loop. in_order: of one that is wrapped, whether
    its calls are carried out in the order in which they were made (engines/handles.py).
    headers: of a URL, sent with every request, e.g. {"Authorization": "Bearer …"}.
    workers, pause, resume, reset_prefix_cache: of an object that forwards calls, what it lacks itself (`CallableEngine`).

    `controller.wait_ready()` raises what kept the replica from joining; `wait_version()` waits for its first weights.
    XferError with all arguments that cannot work; Unsupported for an object that no engine can be reached through.
    """
    from xfer.participants import arguments as check
    from xfer.participants.controller import Controller

    logs.show()
    seen = (rendezvous,) if engine_rendezvous is None else (rendezvous, engine_rendezvous)
    bad = check.wrong_meeting(token, *seen) + check.wrong_whole("replica", replica, 0)
    bad += check.wrong_seconds("deadline_s", deadline_s) + check.wrong_globs("keep", keep)
    modes = check.wrong_pause_mode(handle_options["pause_mode"]) if "pause_mode" in handle_options else []
    others = {k: v for k, v in handle_options.items() if not modes or k != "pause_mode"}
    bad += modes + check.wrong_handle_options(engine, others)
    if bad:
        raise XferError("serve() was called with arguments that cannot work", bad)
    return Controller(
        engine,
        rendezvous,
        token,
        replica=check.whole(replica),
        deadline_s=float(deadline_s),
        keep=tuple(keep),
        engine_rendezvous=engine_rendezvous,
        **handle_options,
    )


def nccl_xfer_refit(
    refit: Refit,
    *,
    version: int | str | None = None,
    verify: bool = False,
    wait: Literal["commit", "sources"] = "commit",
    min_replicas: int | None = None,
    deadline_s: float | None = None,
) -> RefitReport:
    """Move this trainer's current weights into every engine replica. Called by every trainer rank, right after `step()`.

    version: label that the engines report from then on; all ranks must pass the same. It comes back in the type that it has here:
    a number as int, a text as str. Engines keep it as text, so 1 and "1" are one label to them. Labels name one set of weights each:
    a number must be above all that this session has committed, a text must not be the last one again. A call that raised used no
    label up, even if some replicas committed it: make it again under the same label, before training on. Default: the number after
    the highest that a connected engine has had: 1, 2, 3, …, and none twice when trainers restart. verify: checksum what was sent
    against what lies in the engines, and compare all trainers that hold the same box of a tensor, before the commit. (Until the first
    commit of a session some bytes of each tensor are compared in any case.) wait: "commit" returns when the replicas serve the version;
    "sources" as soon as this rank's storage is no longer read (the next call raises the outcome, or has it in its report's `before`).
    min_replicas: raise only if fewer committed; default all. deadline_s: default connect()'s.

    From one thread at a time. Raises the typed error of what went wrong (`xfer.errors`) on every rank, at the latest
    `xfer.coordinator.deadlines.CALL_GRACE_S` seconds after the deadline; the trainer can go on, and a later refit repairs.
    """
    return refit._session.refit(
        version=version, verify=verify, wait=wait, min_replicas=min_replicas, deadline_s=deadline_s
    )
