"""Forward pre-hooks that finish a bucket just before a module reads it, and what notices a module that no hook warned us of.

In the first forward nothing is stale yet, so it is watched: which bucket is used when (the order in which later gathers are
started), and which parameters a module reads although they are registered elsewhere (a tied head, an absorbed
projection): its hook then waits for those too. Afterwards a parameter that gets a gradient although no hook asked for it is
an error in the backward, before the optimizer can step on it. A read without a gradient, or of a parameter that its own module
asks for too, is none: so with `guard="nan"`, the default, the gather leaves NaNs where old values would be, and `guard="always"`
goes on watching every operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from xfer.errors import StaleWeights
from xfer.layerwise.gather import Bucket, ParamGather, State

Guard = Literal["first", "always", "nan"]


class Hooks:
    """Hooks on all modules of `roots` (each a tree whose forward is called; stages of a pipeline, for example).

    params: (canonical name, parameter) of all that is gathered. bucket_of: id(parameter) -> its bucket. masters: id(parameter) ->
    the fp32 copy that is stepped for it.

    The modules hold this object, and it all that a gather needs: what is on its way arrives also without the optimizer.
    """

    def __init__(
        self,
        roots: Sequence[torch.nn.Module],
        params: Sequence[tuple[str, torch.nn.Parameter]],
        bucket_of: dict[int, Bucket],
        gather: ParamGather,
        guard: Guard = "first",
        masters: Mapping[int, torch.Tensor] | None = None,
    ):
        self.gather, self.guard, self.named = gather, guard, params
        self._masters = dict(masters or {})
        self.used: list[int] = []  # indices of buckets, in the order of first use
        self.learning = True
        self._bucket_of, self._name = bucket_of, {id(p): name for name, p in params}
        self._covered: dict[int, int] = {}  # id(parameter) -> last version for which a hook finished it
        self._all_covered = 0  # the last version that was finished as a whole, on purpose
        self._reads: dict[int, list[int]] = {}  # id(module) -> ids of the parameters that it reads
        self._running: list[torch.nn.Module] = []
        self._modes: list[_OperandWatch] = []
        self._handles = []
        self._of_module: dict[int, list] = {}
        for root in roots:
            for module in root.modules():
                if id(module) in self._reads:  # roots share it
                    continue
                self._reads[id(module)] = [id(p) for p in module._parameters.values() if id(p) in bucket_of]
                # Of any of them may somebody ask for the state.
                self._handles.append(module.register_state_dict_pre_hook(self._before_state))
                self._handles.append(module.register_load_state_dict_pre_hook(self._before_load))
                self._handles.append(module.register_load_state_dict_post_hook(self._after_load))
                self._of_module[id(module)] = [
                    module.register_forward_pre_hook(self._before, prepend=True),
                    module.register_forward_hook(self._after, always_call=True),
                ]
            self._handles.append(root.register_forward_pre_hook(self._enter, prepend=True))
            self._handles.append(root.register_forward_hook(self._leave, always_call=True))
        for _, p in params:
            if id(p) in bucket_of:
                self._handles.append(p.register_post_accumulate_grad_hook(self._after_gradient))

    def remove(self) -> None:
        """Drop every hook. What is in flight stays so: drain before."""
        for h in (*self._handles, *(h for pair in self._of_module.values() for h in pair)):
            h.remove()
        self._handles.clear()
        self._of_module.clear()

    def drain(self, to_write: bool = False) -> None:
        """Finish everything; whoever reads parameters outside of hooked modules may do so until the next step. to_write: they
        are to be changed, on all ranks."""
        self.gather.drain()
        if to_write:
            self.gather.meet()
        self._all_covered = self.gather.version

    def written(self, params: Iterable[torch.Tensor | None]) -> None:
        """Somebody may have written these: the masters of those that are no longer their masters, rounded, become what they are."""
        for p in params:
            master = self._masters.get(id(p))
            if master is not None and not torch.equal(master.detach().to(p.dtype), p.detach()):
                with torch.no_grad():
                    master.copy_(p)

    def __deepcopy__(self, memo: dict) -> Hooks:
        """A copy of a module is an ordinary module: nobody owns its parameters, so these hooks have nothing to do there."""
        self.gather.check()
        if not self.gather.settled:
            raise StaleWeights(
                "a module was copied while parameters of other ranks are on their way",
                ["call drain() on all ranks first; the copy then has no owners, and no hooks that do anything"],
                where=self.gather.label,
            )
        idle = Hooks([], [], {}, ParamGather([]))
        idle.learning = False
        return idle

    def stop_learning(self) -> None:
        """The first step has come: buckets have their order, and modules without a parameter need no hook any more."""
        self.learning = False
        if self.guard == "always":
            return
        for key, pair in self._of_module.items():
            for h in pair if not self._reads[key] else pair[1:]:
                h.remove()

    # ---- hooks

    def _before_state(self, *_) -> None:
        self.drain()

    def _before_load(self, *_) -> None:
        self.drain(to_write=True)

    def _after_load(self, module: torch.nn.Module, _) -> None:
        self.written(module._parameters.values())

    def _before(self, module: torch.nn.Module, args) -> None:
        if self.learning or self.guard == "always":
            self._running.append(module)
        self.need(self._reads.get(id(module), ()))

    def _after(self, module: torch.nn.Module, args, output) -> None:
        if self._running and self._running[-1] is module:
            self._running.pop()

    def _enter(self, root: torch.nn.Module, args) -> None:
        if (self.learning or self.guard == "always") and not self._modes:
            mode = _OperandWatch(self._read_unannounced)
            mode.__enter__()
            self._modes.append(mode)
            self._owner = root

    def _leave(self, root: torch.nn.Module, args, output) -> None:
        if self._modes and self._owner is root:
            self._modes.pop().__exit__(None, None, None)
            self._running.clear()

    def need(self, params: Iterable[int]) -> None:
        """Finish the buckets of these parameters (by id) and remember that somebody asked for them."""
        gather, version = self.gather, self.gather.version
        gather.check()
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        for p in params:
            bucket = self._bucket_of[p]
            if self.learning and bucket.index not in self.used:
                self.used.append(bucket.index)
            if bucket.state is not State.CURRENT:
                if capturing:
                    raise StaleWeights(
                        "a CUDA graph is being captured over parameters that are not here yet",
                        [f"{self._name[p]}: call drain() before capturing"],
                        where=gather.label,
                    )
                gather.finish_param_sync(bucket)
            else:
                gather.follow(bucket)  # modules run beside each other, on streams of their own
            self._covered[p] = version

    def _after_gradient(self, p: torch.nn.Parameter) -> None:
        """In the backward: was the forward that used `p` one that had asked for it?"""
        self.gather.check()
        version = self.gather.version
        if version == self._all_covered or self._covered.get(id(p)) == version or not self.gather.overlap:
            return
        raise StaleWeights(
            "a forward used parameters that no hook had asked for since the last step: they may have been old",
            [
                f"{self._name[id(p)]}: call the module and not its forward(), or drain() before reading parameters outside "
                "of their modules; a module that starts to do so after the first step is not learned"
            ],
            where=self.gather.label,
        )

    # ---- watching

    def _read_unannounced(self, tensor: torch.Tensor) -> None:
        """An operation reads `tensor` in a watched forward."""
        key = id(tensor)
        if key not in self._bucket_of:
            return
        if self.learning:
            if self._running and key not in self._reads[id(self._running[-1])]:
                self._reads[id(self._running[-1])].append(key)
            if self._covered.get(key) != self.gather.version:
                self.need([key])
        elif self._bucket_of[key].state is not State.CURRENT:
            self.need([key])  # late, and yet in time: the operation has not run
        else:
            self.gather.follow(self._bucket_of[key])


class _OperandWatch(TorchDispatchMode):
    """Calls `read` with every tensor that an operation is given."""

    def __init__(self, read: Callable[[torch.Tensor], None]):
        super().__init__()
        self._read = read

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for x in args:
            if isinstance(x, torch.Tensor):
                self._read(x)
            elif isinstance(x, list | tuple):
                for y in x:
                    if isinstance(y, torch.Tensor):
                        self._read(y)
        for x in (kwargs or {}).values():
            if isinstance(x, torch.Tensor):
                self._read(x)
        return func(*args, **(kwargs or {}))
