"""Optimizers that step only the parameters that this rank owns. The other ranks receive them while the next forward runs.

`LayerWise` has the owners, the inner optimizers and the gather. `LayerWiseOptimizer` makes a torch optimizer of it, for plain torch
modules with or without DDP. megatron.py makes an optimizer for Megatron-Core's training loop, whose `step` returns other
values. checkpoint.py writes and reads the state of both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import torch
import torch.distributed as dist

from xfer.errors import LayoutError, Unsupported
from xfer.kernels import written
from xfer.layerwise.gather import Bucket, ParamGather, Peers
from xfer.layerwise.gradients import reduce_to_owners, squares
from xfer.layerwise.groups import Cost, Owned, ParamGroup, Trains, named
from xfer.layerwise.hooks import Guard, Hooks
from xfer.layerwise.ownership import Item, Ownership, assign, bytes_cost, cut, elementwise_cost, newton_schulz_cost
from xfer.layerwise.pulls import Pulls, open_pulls
from xfer.layerwise.shares import known_elsewhere, movable, overlapping, settle_in
from xfer.pending import announce, forget

if TYPE_CHECKING:
    from xfer.layerwise.checkpoint import ParameterBox

Reduce = Literal["done", "to_owners"]
Route = Literal["auto", "broadcast", "pull"]


class LayerWise:
    """Gives each parameter to one data-parallel rank, which steps it, and gathers the others asynchronously after every step.

    See `LayerWiseOptimizer` for the arguments. A subclass adds `step`.
    """

    param_groups: list[dict[str, Any]]
    """The groups of all inner optimizers, for learning-rate schedulers."""

    def __init__(
        self,
        module: torch.nn.Module | Sequence[torch.nn.Module],
        groups: Sequence[ParamGroup],
        *,
        process_group: dist.ProcessGroup | None = None,
        group_of: Callable[[str, torch.nn.Parameter], dist.ProcessGroup | None] | None = None,
        overlap: bool = True,
        prefetch_depth: int = 1,
        bucket_bytes: int = 64 << 20,
        reduce: Reduce | None = None,
        masters: bool = True,
        clip_grad: float | None = None,
        memory_cap: int | None = None,
        rehome: bool = True,
        guard: Guard = "nan",
        deadline_s: float = 600.0,
        max_ctas: int | None = None,
        route: Route = "auto",
    ):
        self.modules = [module] if isinstance(module, torch.nn.Module) else list(module)
        self.clip_grad, self.skipped = clip_grad, False
        self.grad_norm: float | None = None
        live = dist.is_available() and dist.is_initialized()
        self.label = f"rank {dist.get_rank()}" if live else "rank 0"
        under_ddp = [isinstance(m, torch.nn.parallel.DistributedDataParallel) for m in self.modules]
        self._reduce = reduce or ("done" if all(under_ddp) else "to_owners")
        self._groups = [ParamGroup(tuple(g.params), g.optimizer, g.options, g.cost) for g in groups]
        self._group_at = {id(p): i for i, g in enumerate(self._groups) for p in g.params}
        self.named = list(named(self.modules))
        self._trained = [(name, p) for name, p in self.named if p.requires_grad]
        self._refuse(("reduce", self._reduce, Reduce), ("guard", guard, Guard), ("route", route, Route))
        self._device = self._trained[0][1].device
        self._peers: list[Peers] = []
        self._opened: list[Pulls] = []
        with ExitStack() as undo:
            undo.callback(self._let_go)
            like = partial(Peers.like, device=self._device, deadline_s=deadline_s, max_ctas=max_ctas)
            peers = self._meet(process_group, group_of, like if live else None)
            self.ownership: dict[str, Ownership] = {}
            self.owner: dict[str, tuple[Peers, int]] = {}
            self._own(peers, memory_cap)
            buckets = self._buckets(peers, bucket_bytes, rehome)
            self._init_base()
            self.owned: list[Owned] = []
            self.inner: list[torch.optim.Optimizer] = []
            self._build(masters)
            pulled = route == "pull" or route == "auto" and self._device.type == "cuda"
            self.gather = ParamGather(
                buckets,
                overlap=overlap,
                prefetch_depth=prefetch_depth,
                deadline_s=deadline_s,
                label=self.label,
                blank=guard == "nan" and overlap,  # without overlap, all is here before any read
                pulls=self._pulls(buckets, deadline_s) if pulled else None,
                wires=[who.wire for who in self._peers if who.wire is not None],
            )
            bucket_of = {id(m.param): b for b in buckets for s in b.shares for m in s.members}
            copies = {id(o.param): o.target for o in self.owned if o.target is not o.param}
            self.hooks = Hooks(self.modules, self._trained, bucket_of, self.gather, guard, copies)
            self._trains = Trains.now(self.modules, self.inner, self.param_groups)
            self._stepped: torch.cuda.Event | None = None  # behind the last write of this rank's parameters
            announce(self.hooks)  # adapters finish these gathers before a refit reads
            written.announce(self)
            undo.pop_all()

    # ---- the step

    @torch.no_grad()
    def _take_step(self, closure: Callable[[], float] | None, grad_scale: float) -> float | None:
        """See `LayerWiseOptimizer.step`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._trains.refuse_other(Trains.now(self.modules, self.inner, self.param_groups), self.label)
        self._refuse_sparse()
        self.gather.refuse_astray()
        self._settle_order()
        self.gather.drain()  # owners must not write bytes that are still being sent
        self.gather.guarded(lambda: self._step(grad_scale), "the step of the parameters of this rank")
        return loss

    def _step(self, grad_scale: float) -> None:
        """The step itself. If it fails anywhere (out of memory, Muon's own gathers), other ranks may be ahead."""
        self._collect()
        self.skipped = not self._scale_and_clip(grad_scale)
        if not self.skipped:
            self._update()
            self._begin()
        self._after_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does what torch's `zero_grad` does, for all parameters and not only those of this rank."""
        for _, p in self._trained:
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                if p.grad.grad_fn is not None:
                    p.grad.detach_()
                p.grad.requires_grad_(False).zero_()  # a view of DDP's buckets cannot be detached

    def drain(self, to_write: bool = True) -> None:
        """Brings all parameters here now. Call it before you read, save or change them outside of a forward.

        Collective: with broadcasts no rank returns before all ranks have called it, or stepped.

        Args:
            to_write: Also wait until no other rank copies out of this rank's memory. Not needed to read.
        """
        self.hooks.drain(to_write)

    def synchronize(self, masters: bool = True) -> None:
        """Sends the owners' parameters to the other ranks, after code outside of this optimizer wrote them. Collective.

        Args:
            masters: Copy parameters that were written into their fp32 masters. False if the masters were written too.
        """
        self.gather.drain()
        if masters:
            self.hooks.written(o.param for o in self.owned)
        self._begin()
        self.drain(to_write=False)

    def wait_for_owned(self) -> None:
        """Returns when the parameters of this rank have the bytes of the last step, on whatever stream it was queued.

        Gathers go on meanwhile, since they only read these parameters. The next write is that of the next `step()`. Raises the
        error that made the gather unusable, if there is one.
        """
        self.gather.check()
        if self._stepped is not None:
            self._stepped.synchronize()

    def owns(self, name: str) -> bool:
        """Whether this rank steps the parameter of that name."""
        peers, owner = self.owner[name]
        return peers.rank == owner

    def grouped(self) -> Iterator[tuple[str, int]]:
        """Yield (name, index of its ParamGroup) of every trained parameter, of all owners."""
        yield from ((name, self._group_at[id(p)]) for name, p in self._trained)

    def writes(self) -> Iterator[torch.Tensor]:
        """Yield the parameters that this rank writes from fp32 masters; see `kernels.written.Writer`."""
        yield from (o.param for o in self.owned if o.target is not o.param)

    def close(self) -> None:
        """Drains, removes all hooks and closes the connections. The module is an ordinary one again. Collective.

        After a gather that failed, or without a rank that is gone, it closes the connections and raises the failure. The hooks
        stay then, so that every use of the module, and every refit from it, raises the failure too.
        """
        with ExitStack() as ends:
            ends.callback(self._let_go)
            for pulls in self._opened:
                ends.callback(self._part, pulls)
            self.drain()
            forget(self.hooks)
            written.forget(self)
            self.hooks.remove()

    def _part(self, pulls: Pulls) -> None:
        pulls.unmap()
        if self.gather.broken is None:
            self.gather.guarded(pulls.part, "the sign that all ranks have unmapped")

    def _let_go(self) -> None:
        """Closes everything that was opened, also if one of them raises."""
        with ExitStack() as ends:
            for peers in self._peers:
                if peers.wire is not None:
                    ends.callback(peers.wire.close)
            for pulls in self._opened:
                ends.callback(pulls.unmap)
        self._opened.clear()

    def state_dict(self) -> dict:
        """Raises Unsupported; see `xfer.layerwise.checkpoint`."""
        raise Unsupported(
            "state_dict() of a layer-wise optimizer would hold this rank's part only",
            ["use xfer.layerwise.checkpoint.save and load, which write by parameter and load at any layout"],
            where=self.label,
        )

    def load_state_dict(self, state_dict: dict) -> None:
        """Raises Unsupported; see `xfer.layerwise.checkpoint`."""
        self.state_dict()

    # ---- overridden by subclasses

    def _init_base(self) -> None:
        """Initializes the framework's own base class of optimizers."""

    def _collect(self) -> None:
        """Puts the owners' gradients where the inner optimizers read them."""
        if self._reduce == "to_owners":
            self.gather.guarded(lambda: reduce_to_owners(self.gather.buckets), "gradients on their way to their owners")
        for o in self.owned:
            if o.target is not o.param:
                o.target.grad = None if o.param.grad is None else o.param.grad.to(o.target.dtype)

    def _total(self, mine: torch.Tensor) -> torch.Tensor:
        """Sums `mine`, a value that each rank computes from the gradients that it owns, over all ranks. Every gradient counts once."""
        dense = self._peers[0]
        mine = mine.to(dense.device)
        if dense.wire is not None:
            dense.wire.all_reduce(mine)
        return mine

    def _counts(self, o: Owned) -> bool:
        """Whether this rank counts the gradient in the norm."""
        return True

    def padding(self, pieces: Mapping[str, tuple[ParameterBox, ...]]) -> dict[str, ParameterBox]:
        """The rows that pad a vocabulary, by name of the parameter. Collective. pieces: see `copied`."""
        return {}

    def copied(self, pieces: Mapping[str, tuple[ParameterBox, ...]]) -> dict[str, tuple[ParameterBox, ...]]:
        """The boxes of parameters that no adapter on this rank finds in the checkpoint, by name. Collective.

        Args:
            pieces: The boxes that are known here, by name of the parameter.
        """
        return {}

    def _after_step(self) -> None:
        """Frees gradients that only the inner optimizers needed."""
        for o in self.owned:
            if o.target is not o.param:
                o.target.grad = None

    # ---- details

    def _update(self) -> None:
        """Steps the inner optimizers, in the module's order of their parameters. The order is the same on all ranks, since steps may
        gather among ranks (Muon's pieces). Buckets that a forward uses first travel while other parameters are stepped."""
        left = list(self._turns)
        while left:
            i = left.pop(0)
            self.inner[i].step()
            written.write((o.param, o.target) for o in self.owned if o.group == i and o.target is not o.param)
            if left:
                self.gather.begin_ahead(
                    lambda b: all(self._group_at[id(m.param)] not in left for s in b.shares for m in s.members)
                )

    def _begin(self) -> None:
        """Starts the gathers, after the parameters of this rank were written on the current stream."""
        if self._device.type == "cuda":
            self._stepped = torch.cuda.current_stream(self._device).record_event()
        self.gather.begin()

    def _refuse(self, *options: tuple[str, object, object]) -> None:
        """Raises a LayoutError that lists everything that does not fit. options: (name, given value, Literal of the possible values)."""
        costs = [(f"group {i}: cost", g.cost, Cost) for i, g in enumerate(self._groups) if not callable(g.cost)]
        bad = [
            f"{what}={given!r}: there is {', '.join(map(repr, get_args(known)))}"
            for what, given, known in (*options, *costs)
            if given not in get_args(known)
        ]
        at = self._group_at
        bad += [
            f"{name}: in no ParamGroup; put it into one, or freeze it" for name, p in self._trained if id(p) not in at
        ]
        mine = {id(p) for _, p in self.named}
        for i, g in enumerate(self._groups):
            for p in g.params:
                if id(p) not in mine:
                    bad.append(f"group {i}: a parameter of shape {tuple(p.shape)} is not in the module; leave it out")
                elif at[id(p)] != i:
                    bad.append(
                        f"group {i}: a parameter of shape {tuple(p.shape)} is in group {at[id(p)]} too; keep one"
                    )
            if hasattr(g.optimizer, "refuses"):
                bad += g.optimizer.refuses([(name, p) for name, p in self._trained if at.get(id(p)) == i])
        for name, p in self.named:
            if type(p) not in (torch.nn.Parameter, torch.Tensor) or p.layout != torch.strided:
                bad.append(f"{name}: is a {type(p).__name__} ({p.layout}); only plain dense parameters have owners")
            elif p.device.type == "meta":
                bad.append(f"{name}: has no bytes; materialize the module first")
        kinds = sorted({p.device.type for _, p in self._trained})
        if len(kinds) != 1:
            bad.append(
                f"trained parameters lie on {kinds or 'no device'}; put all on one kind of device, or freeze some"
            )
        if not bad:
            bad = overlapping(self.named)
        if bad:
            raise LayoutError("this module cannot have a layer-wise optimizer", bad, where=self.label)

    def _refuse_sparse(self) -> None:
        """Raises Unsupported for gradients that are no plain tensors. Otherwise only their owners would raise, in the norm."""
        kinds = ((name, p.grad.layout) for name, p in self._trained if p.grad is not None)
        if bad := [
            f"{name}: {kind}; make its module with sparse=False" for name, kind in kinds if kind != torch.strided
        ]:
            raise Unsupported("gradients are sparse; owners step dense ones only", bad, where=self.label)

    def _meet(self, process_group, group_of, like: Callable[..., Peers] | None) -> dict[str, Peers]:
        """The peers of every trained parameter, by name. like: makes peers from a name and a group; None without a process group."""
        if like is None:
            self._peers.append(Peers.alone("dense"))
            return {name: self._peers[0] for name, _ in self._trained}
        chosen = {name: group_of(name, p) if group_of is not None else None for name, p in self._trained}
        ranks = lambda g: tuple(dist.get_process_group_ranks(g if g is not None else dist.group.WORLD))  # noqa: E731
        made: dict[tuple[int, ...], Peers] = {}

        def make(name: str, group) -> None:
            self._peers.append(like(name, group))  # at once, so that it is closed if the next one fails
            made[ranks(group)] = self._peers[-1]

        make("dense", process_group)
        # Larger groups first: all ranks of a group make the same groups in the same order.
        others = {ranks(g): g for g in chosen.values() if g is not None}
        for key in sorted(others, key=lambda k: (-len(k), k)):
            if key not in made:
                make(f"group {len(made)} of {len(key)} ranks", others[key])
        self._refuse_outside(self._peers[0], self._peers[1:])
        return {name: made[ranks(g if g is not None else process_group)] for name, g in chosen.items()}

    def _refuse_outside(self, dense: Peers, rest: Sequence[Peers]) -> None:
        outside = [
            f"{p.name}: ranks {sorted(set(p.ranks) - set(dense.ranks))}"
            for p in rest
            if set(p.ranks) - set(dense.ranks)
        ]
        if outside:
            raise LayoutError(
                "group_of names groups with ranks outside of process_group, over which norms are summed",
                [f"{line} are not in process_group; give a process_group that has them" for line in outside],
                where=self.label,
            )

    def _own(self, peers: dict[str, Peers], memory_cap: int | None) -> None:
        for who in self._peers:
            items = [
                Item(name, p.numel() * p.element_size(), self._cost(p))
                for name, p in self._trained
                if peers[name] is who
            ]
            table = self.ownership[who.name] = assign(items, who.size, memory_cap=memory_cap)
            layout = [f"{self._reduce} {self.clip_grad}"]
            for n, p in self._trained:
                if peers[n] is who:
                    i = self._group_at[id(p)]
                    kind = getattr(self._groups[i].optimizer, "__qualname__", "")
                    layout.append(f"{n} {tuple(p.shape)} {p.dtype} {i} {kind}")
            digest = hashlib.sha256(table.digest() + "\n".join(layout).encode()).digest()
            who.agree(digest, "their parameters, groups or options", "build the same model and groups")
            self.owner |= {name: (who, r) for name, r in table.owner}

    def _cost(self, p: torch.nn.Parameter) -> float:
        cost, shape = self._groups[self._group_at[id(p)]].cost, tuple(p.shape)
        if callable(cost):
            return cost(shape)
        if cost == "bytes":
            return bytes_cost(p.numel() * p.element_size())
        return newton_schulz_cost(shape) if cost == "newton_schulz" else elementwise_cost(shape)

    def _buckets(self, peers: dict[str, Peers], bucket_bytes: int, rehome: bool) -> list[Bucket]:
        fixed = known_elsewhere(self.modules, [p for _, p in self.named])
        found = []
        for who in self._peers:
            if who.size == 1:
                continue
            those = [(i, name, p) for i, (name, p) in enumerate(self._trained) if peers[name] is who]
            parts = cut([p.numel() * p.element_size() for _, _, p in those], bucket_bytes)
            lie = f"{parts} {[movable(p, rehome, fixed) for _, _, p in those]}"  # gloo ends a process that receives too many bytes
            who.agree(
                hashlib.sha256(lie.encode()).digest(),
                "which parameters lie together",
                "give the same bucket_bytes and rehome, and strides and views of parameters in the same modules,",
            )
            for part in parts:
                owned: dict[int, list] = {}
                for i in part:
                    _, name, p = those[i]
                    owned.setdefault(self.owner[name][1], []).append((name, p))
                found.append((those[part.start][0], who, owned))
        found.sort(key=lambda f: f[0])  # in the order of the module, across groups
        return [
            Bucket(i, who, tuple(settle_in(owned, move=rehome, fixed=fixed))) for i, (_, who, owned) in enumerate(found)
        ]

    def _pulls(self, buckets: Sequence[Bucket], deadline_s: float) -> dict[str, Pulls]:
        found: dict[str, Pulls] = {}
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        for who in self._peers:
            if who.wire is not None:
                shares = [s for b in buckets if b.peers is who for s in b.shares]
                if (pulls := open_pulls(who.wire, shares, deadline_s, stream)) is not None:
                    self._opened.append(pulls)
                    found[who.name] = pulls
        return found

    def _build(self, masters: bool) -> None:
        for i, g in enumerate(self._groups):
            targets = []
            for name, p in self._trained:
                if self._group_at[id(p)] != i or not self.owns(name):
                    continue
                narrow = masters and p.dtype.itemsize < 4
                target = torch.nn.Parameter(p.detach().float()) if narrow else p
                if narrow and hasattr(g.optimizer, "targets"):
                    g.optimizer.targets(target, p)
                self.owned.append(Owned(name, p, target, i))
                targets.append(target)
            self.inner.append(g.optimizer([{"params": targets}], **g.options))
        self.param_groups = [group for optimizer in self.inner for group in optimizer.param_groups]
        self._turns = tuple(
            dict.fromkeys([*(self._group_at[id(p)] for _, p in self._trained), *range(len(self.inner))])
        )

    def _scale_and_clip(self, grad_scale: float) -> bool:
        """Unscales and clips the gradients. Returns whether those of all ranks are finite. `grad_norm` is their norm before clipping."""
        grads = [o.target.grad for o in self.owned if o.target.grad is not None]
        if grad_scale != 1.0 and grads:
            torch._foreach_mul_(grads, 1.0 / grad_scale)
        device = grads[0].device if grads else self._peers[0].device
        mine = squares((o.target.grad for o in self.owned if o.target.grad is not None and self._counts(o)), device)
        holder: list[torch.Tensor] = []
        self.gather.guarded(lambda: holder.append(self._total(mine)), "the norm of all gradients")
        self.grad_norm = norm = holder[0].sqrt().item()
        self.gather.check()  # no step uses a sum that was aborted
        if not torch.isfinite(holder[0]).item():
            return False
        if self.clip_grad is not None and norm > self.clip_grad:
            if grads:
                torch._foreach_mul_(grads, self.clip_grad / (norm + 1e-6))
        return True

    def _settle_order(self) -> None:
        if self.hooks.learning:
            self.hooks.stop_learning()
            self.gather.learn(self.hooks.used)


class LayerWiseOptimizer(LayerWise, torch.optim.Optimizer):
    """Gives each parameter to one data-parallel rank, which steps it, and gathers the others asynchronously after every step.

    `param_groups` are those of the inner optimizers, for learning-rate schedulers. Parameters that need no gradient have no
    owner and are never sent. Between `step()` and a forward, parameters of other owners are old: read them inside
    forwards, or call `drain()` first, on all ranks. `state_dict()` of a module drains, so after a step all ranks must call it, like a
    forward.

    Args:
        module: Any module, plain or under DistributedDataParallel, or several, such as the stages of a pipeline.
        groups: Every trainable parameter in exactly one group. Groups step in the order of their parameters in the module.
        process_group: All its ranks hold the same parameters, with equal values. Default: all ranks.
        group_of: (name, parameter) -> the process group over which that parameter is replicated (experts), None for
            `process_group`. Only ranks of such groups need to pass it.
        overlap: If False, `step()` gathers at its end, with the same results.
        prefetch_depth: Buckets fetched ahead of the one in use.
        bucket_bytes: Size of a bucket.
        reduce: "done" if gradients are equal on all ranks before `step()` (DDP does that); "to_owners" to average them, which
            sends each gradient to one rank only. Default: "done" if all modules are under DDP, else "to_owners".
        masters: Owners keep fp32 copies of 16-bit parameters, and step those.
        clip_grad: Greatest norm of all gradients together.
        memory_cap: Most bytes of parameters per owner.
        rehome: Move parameters into runs of memory by owner, so that gathers need no copies. Objects, shapes and values stay;
            views that were taken before go stale. Parameters of which a module holds a view are not moved.
        guard: The value of a read that no hook announces (see hooks.py). "nan": NaN, because each step overwrites the old values of
            other owners by NaNs; "first": the old value, at no cost; "always": the new value, because every operation is watched.
        deadline_s: Seconds of every wait for peers. Over NCCL, where no wait blocks, a thread aborts late collectives:
            parameters that were to be received become NaNs, the device goes on, and every later call raises DeadlineExceeded.
        max_ctas: Most thread blocks that NCCL may take from the GPU for one gather.
        route: "pull" copies parameters out of their owners' memory if all ranks of a group are on one host and can map it (see
            pulls.py), and broadcasts otherwise. "auto" is "pull" on GPUs, where copies take nothing from computing, and
            "broadcast" on CPUs, where they do.

    Raises:
        LayoutError, Unsupported: Lists everything that does not fit, before any parameter is changed.
    """

    found_inf: torch.Tensor
    grad_scale: torch.Tensor
    """Both are set by torch's GradScaler, before it calls `step`."""
    _step_supports_amp_scaling = True
    """Makes torch's GradScaler call `step` on every rank, which then refuses it. A GradScaler checks and unscales only
    the gradients that a rank owns."""

    def _init_base(self) -> None:
        torch.optim.Optimizer.__init__(self, [{"params": [p for _, p in self._trained]}], {})

    @overload
    def step(self, closure: None = None, *, grad_scale: float = 1.0) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], *, grad_scale: float = 1.0) -> float: ...
    def step(self, closure: Callable[[], float] | None = None, *, grad_scale: float = 1.0) -> float | None:
        """Steps the parameters that this rank owns, and starts the first gathers. Collective.

        If a gradient of any rank is not finite, no rank steps, `skipped` is True, and parameters stay.

        Args:
            closure: Called first, with gradients enabled; computes the loss and the gradients.
            grad_scale: The factor by which the loss was multiplied (fp16).

        Returns:
            The result of `closure`.
        """
        self._refuse_scaler()
        return self._take_step(closure, grad_scale)

    def add_param_group(self, param_group: dict) -> None:
        """Raises Unsupported once the optimizer is built."""
        if hasattr(self, "gather"):
            raise Unsupported(
                "a parameter group was added to a layer-wise optimizer",
                ["owners are chosen once: drain(), close() and build a new optimizer, on all ranks"],
                where=self.label,
            )
        super().add_param_group(param_group)

    def _refuse_scaler(self) -> None:
        """Refuses torch's GradScaler, which sets two attributes before it calls `step`."""
        if getattr(self, "found_inf", None) is not None:
            del self.found_inf, self.grad_scale  # the scaler removes them only after a step that returns
            raise Unsupported(
                "a GradScaler steps a layer-wise optimizer: ranks would not skip the same steps, and gradients of other owners stay scaled",
                [
                    "multiply the loss yourself and pass grad_scale= to step(); `skipped` then says, on all ranks, that a "
                    "gradient was not finite"
                ],
                where=self.label,
            )
