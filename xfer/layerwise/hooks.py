"""Forward pre-hooks that finish a bucket just before a module reads it, and checks that find reads without a hook.

In the first forward nothing is stale yet, so it is watched. It shows the order in which buckets are used, and later gathers start in
that order. It also shows parameters that a module reads although they are registered elsewhere (a tied head, an absorbed projection):
the module's hook then waits for those too. Afterwards, a parameter that gets a gradient although no hook asked for it is an error in the
backward, before the optimizer can step on it. A read without a gradient, or of a parameter that its own module asks for too, is
not found that way. So with `guard="nan"`, the default, the gather leaves NaNs in place of old values, and `guard="always"` watches
every operation of every forward.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import torch

from xfer.errors import StaleWeights
from xfer.layerwise.gather import Bucket, ParamGather, State
from xfer.pending import OperandWatch

Guard = Literal["first", "always", "nan"]


class Hooks:
    """Hooks on all modules of some trees.

    The modules hold this object, and this object holds all that a gather needs. So gathers that have started end also without the
    optimizer.

    Args:
        roots: Modules whose forward is called, the stages of a pipeline, for example.
        params: (name, parameter) of all trained parameters.
        bucket_of: id(parameter) -> its bucket.
        gather: Finishes the buckets.
        guard: See `LayerWiseOptimizer`.
        masters: id(parameter) -> the fp32 copy that is stepped for it.
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
        self._all_covered = 0  # the last version that `drain` finished
        self._reads: dict[int, list[int]] = {}  # id(module) -> ids of the parameters that it reads
        self._running: list[torch.nn.Module] = []
        self._modes: list[OperandWatch] = []
        self._handles = []
        self._of_module: dict[int, list] = {}
        # By id(module), while a state is loaded: ids of the parameters that the state has.
        self._loading: dict[int, list[int]] = {}
        for root in roots:
            for module in root.modules():
                if id(module) in self._reads:  # roots share it
                    continue
                self._reads[id(module)] = [id(p) for p in module._parameters.values() if id(p) in bucket_of]
                # state_dict() may be called on any module.
                self._handles.append(module.register_state_dict_pre_hook(self._before_state))
                self._handles.append(module.register_load_state_dict_pre_hook(self._before_load))
                self._handles.append(module.register_load_state_dict_post_hook(self._after_load))
                self._of_module[id(module)] = [
                    module.register_forward_pre_hook(self._before, prepend=True),
                    module.register_forward_hook(self._after, always_call=True),
                ]
            self._handles.append(root.register_forward_pre_hook(self._enter, prepend=True))
            self._handles.append(root.register_forward_hook(self._leave, always_call=True))
        if bucket_of and "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # code that was compiled before would go on without these hooks
        for _, p in params:
            if id(p) in bucket_of:
                self._handles.append(p.register_post_accumulate_grad_hook(self._after_gradient))

    def remove(self) -> None:
        """Removes every hook. Does not finish gathers: call `drain` first."""
        for h in (*self._handles, *(h for pair in self._of_module.values() for h in pair)):
            h.remove()
        self._handles.clear()
        self._of_module.clear()

    def drain(self, to_write: bool = False) -> None:
        """Finishes all gathers. Until the next step, parameters may be read outside of hooked modules.

        Args:
            to_write: Also wait until the parameters may be changed, on all ranks.
        """
        self.gather.drain()
        if to_write:
            self.gather.meet()
        self._all_covered = self.gather.version

    def written(self, params: Iterable[torch.Tensor | None], surely: Collection[int] = ()) -> None:
        """Copies parameters that code may have written into their fp32 masters, where they differ from the rounded masters.

        Args:
            params: The parameters.
            surely: Ids of those that were written. Their masters lose their low bits in any case.
        """
        for p in params:
            master = self._masters.get(id(p))
            if p is None or master is None:
                continue
            if id(p) in surely or not torch.equal(master.detach().to(p.dtype), p.detach()):
                with torch.no_grad():
                    master.copy_(p)

    def __deepcopy__(self, memo: dict) -> Hooks:
        """Hooks that do nothing. A copy of a module is an ordinary module, whose parameters have no owners."""
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
        """Ends the watched forward, at the first step. Buckets have their order now, and modules without a parameter need no hook."""
        self.learning = False
        if self.guard == "always":
            return
        for key, pair in self._of_module.items():
            for h in pair if not self._reads[key] else pair[1:]:
                h.remove()

    # ---- hooks

    def _before_state(self, *_) -> None:
        self.drain()

    def _before_load(self, module: torch.nn.Module, state: Mapping[str, object], prefix: str, *_) -> None:
        self.drain(to_write=True)
        self._loading[id(module)] = [id(p) for key, p in module._parameters.items() if prefix + key in state]

    def _after_load(self, module: torch.nn.Module, _) -> None:
        self.written(module._parameters.values(), self._loading.pop(id(module), ()))

    def _before(self, module: torch.nn.Module, args) -> None:
        if self.learning or self.guard == "always":
            self._running.append(module)
        self.need(self._reads.get(id(module), ()))

    def _after(self, module: torch.nn.Module, args, output) -> None:
        if self._running and self._running[-1] is module:
            self._running.pop()

    def _enter(self, root: torch.nn.Module, args) -> None:
        if (self.learning or self.guard == "always") and not self._modes:
            mode = OperandWatch(self._read_unannounced)
            mode.__enter__()
            self._modes.append(mode)
            self._owner = root

    def _leave(self, root: torch.nn.Module, args, output) -> None:
        if self._modes and self._owner is root:
            self._modes.pop().__exit__(None, None, None)
            self._running.clear()

    def need(self, params: Iterable[int]) -> None:
        """Finishes the buckets of these parameters (by id), and notes that a hook asked for them."""
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
                gather.follow(bucket)  # another module may have finished it on another stream
            self._covered[p] = version

    def _after_gradient(self, p: torch.nn.Parameter) -> None:
        """Runs in the backward. Raises StaleWeights if the forward used `p` and no hook had asked for it."""
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
        """Called for each tensor that an operation reads in a watched forward."""
        key = id(tensor)
        if key not in self._bucket_of:
            return
        if self.learning:
            if self._running and key not in self._reads[id(self._running[-1])]:
                self._reads[id(self._running[-1])].append(key)
            if self._covered.get(key) != self.gather.version:
                self.need([key])
        elif self._bucket_of[key].state is not State.CURRENT:
            self.need([key])  # in time: the operation has not run yet
        else:
            self.gather.follow(self._bucket_of[key])
