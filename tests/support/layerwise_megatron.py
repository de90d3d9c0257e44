"""One rank of a real Megatron-Core trainer under a layer-wise optimizer; does what the test says (proc.obey). `build` follows `build` in
one process, so that many layouts cost one start."""

from __future__ import annotations

import contextlib
import os

import torch

from examples.common import megatron_cpu
from tests.support import trainer_rank
from tests.support.gpu_job import nccl_host
from tests.support.proc import emit, methods, obey

megatron_cpu.install()
if torch.cuda.is_available():
    here, gpu = divmod(int(os.environ["RANK"]), torch.cuda.device_count())
    if int(os.environ["WORLD_SIZE"]) > torch.cuda.device_count():
        # NCCL refuses two ranks on one GPU of one host, so they are of several: it goes by its network between them.
        os.environ.update(nccl_host(f"host{here}"))
    torch.cuda.set_device(gpu)
    torch.use_deterministic_algorithms(True)  # or two runs differ by the order in which atomics add
megatron_cpu.init_world()

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from safetensors import safe_open  # noqa: E402

from examples.common.train_loop import Task, Trainer  # noqa: E402
from tests.support.layerwise_model import digest_of  # noqa: E402
from xfer.api import fence_before  # noqa: E402
from xfer.errors import DeadlineExceeded  # noqa: E402
from xfer.layerwise import checkpoint  # noqa: E402
from xfer.layerwise.megatron import MegatronLayerWise, muon_and_adam  # noqa: E402
from xfer.trainers.layerwise import LayerWiseTrainer  # noqa: E402
from xfer.trainers.megatron import MegatronTrainer  # noqa: E402

FASTEST_HZ = 2e9
"""No GPU's clock is faster."""


class LayerWise(Trainer):
    """The trainer of train_loop with another optimizer. `copies`: number of data-parallel ranks of which this one does the work.
    `options`: of MegatronLayerWise. `provider`: more keywords of Trainer. `sizes`: parallel sizes."""

    def __init__(self, folder: str, *, overlap: bool = True, copies: int = 1, options=None, provider=None, **sizes):
        # Sums overlap in any case: otherwise they are cut into other buckets, with other rounding.
        ddp = dict(overlap_grad_reduce=True, overlap_param_gather=overlap)
        options = {"clip_grad": 1.0, "bucket_bytes": 100_000, **(options or {})}
        owners = lambda chunks: MegatronLayerWise(chunks, muon_and_adam(chunks, lr=0.005, adam_lr=1e-3), **options)  # noqa: E731
        super().__init__(folder, distopt=False, ddp=ddp, optimizer=owners, **sizes, **(provider or {}))
        # The schedule sends activations of this many rows from stage to stage.
        self.task = ManyTask(vocab=self.task.vocab, micro_batch=2, micro_batches=2 * copies)

    def settle(self) -> None:
        self.optimizer.drain()


class ManyTask(Task):
    """The batches of several data-parallel ranks, one after the other: two micro batches of each."""

    def batches(self, step: int, dp_rank: int) -> torch.Tensor:
        each = Task(self.vocab, self.seq, self.micro_batch, micro_batches=2)
        copies = self.micro_batches // 2
        return torch.cat([each.batches(step, dp_rank * copies + i) for i in range(copies)])


class Rank(trainer_rank.Rank):
    sources = "owners"

    def _new(self, folder: str, layout: dict) -> LayerWise:
        old, self.trainer = self.trainer, None
        if old is not None:
            old.optimizer.close()
            old.close()
        self.trainer = LayerWise(folder, **layout)
        return self.trainer

    def train(self, folder: str, layout: dict, steps: int) -> None:
        """Losses, and a digest of all parameters of this rank at the end."""
        t = self._new(folder, layout)
        losses, stale = [], 0
        for _ in range(steps):
            losses.append(t.step())
            stale += not t.optimizer.gather.settled
        t.optimizer.drain()
        digest, gather = digest_of(p for _, p in t.optimizer.named), t.optimizer.gather
        norm = sum(x.double().norm().item() ** 2 for x in t.exported().values()) ** 0.5
        emit(
            "trained", losses=losses, digest=digest, stale=stale, buckets=len(gather.buckets), pulled=len(gather.pulls),
            groups=[p.size for p in t.optimizer._peers], norm=norm,
        )  # fmt: skip

    def build(self, folder: str, layout: dict) -> None:
        self._new(folder, layout)
        emit("built")

    def step(self, steps: int = 1, hold_s: float = 0.0) -> None:
        """hold_s: at least so long from now copies out of owners' memory are held up on the device."""
        for pulls in self.trainer.optimizer.gather.pulls.values() if hold_s else ():
            with torch.cuda.stream(pulls.stream):
                torch.cuda._sleep(int(hold_s * FASTEST_HZ))
        emit("stepped", losses=[self.trainer.step() for _ in range(steps)], coming=self._coming())

    def _coming(self) -> int:
        """Buckets whose copies have not ended."""
        works = [w for b in self.trainer.optimizer.gather.buckets for w in b.works]
        events = [e for e in (getattr(w, "_event", None) for w in works) if e is not None]
        return sum(not e.query() for e in events)

    def save(self, folder: str) -> None:
        checkpoint.save(self.trainer.optimizer, folder, self._source())
        emit("saved", settled=self.trainer.optimizer.gather.settled)

    def load(self, folder: str, steps: int) -> None:
        checkpoint.load(self.trainer.optimizer, folder, self._source())
        self.trainer.steps = steps
        emit("loaded")

    def _states(self) -> list[str]:
        return [b.state.value for b in self.trainer.optimizer.gather.buckets]

    def _source(self):
        return MegatronTrainer(self.trainer.chunks, self.trainer.bridge)

    def source(self) -> LayerWiseTrainer:
        return LayerWiseTrainer(self._source(), self.trainer.optimizer, self.sources)

    # ---- hazards, over two ranks

    def owners_offer_each_tensor_once_and_gather_nothing(self, folder: str) -> None:
        """Adapters that know no optimizer drain first."""
        self._new(folder, {})
        for _ in range(2):
            self.trainer.step()
        before, source = self._states(), self.source()
        source.drain()
        tensors = {f.tensor for f in source.read().traced.fragments}
        assert self._states() == before and "stale" in before
        self._source().drain()
        assert {*self._states()} == {"current"}
        both = [None, None]
        torch.distributed.all_gather_object(both, tensors)
        assert not both[0] & both[1] and all(len(x) > 5 for x in both)
        with safe_open(f"{folder}/model.safetensors", "pt") as f:
            assert {*f.keys()} == both[0] | both[1]

    def fences_come_before_each_step_and_one_that_fails_costs_only_that_step(self, folder: str) -> None:
        """Two fences in each of two steps, where routers' biases change and before the optimizer's step. The second one raises."""
        optimizer, same = self._new(folder, {}).optimizer, []
        mine = [o.param for o in optimizer.owned]
        old = [p.clone() for p in mine]

        def fence() -> None:
            same.append(all(map(torch.equal, old, mine)))
            if len(same) == 2:
                raise DeadlineExceeded("late")

        self.source().fence_before(fence)
        fence_before(optimizer, fence)
        for _ in range(2):
            with contextlib.suppress(DeadlineExceeded):
                self.trainer.step()
            same.append(all(map(torch.equal, old, mine)))
        assert same == [True] * 5 + [False]

    def megatrons_scheduler_leaves_each_group_its_own_rates_and_decay(self, folder: str) -> None:
        """The scheduler has one greatest rate and one weight decay, those of Adam. That rate is far too small for Muon's matrices."""
        optimizer = self._new(folder, {}).optimizer
        scheduler = OptimizerParamScheduler(
            optimizer, lr_decay_steps=10, init_lr=0.0, max_lr=1e-4, min_lr=1e-5, lr_warmup_steps=0, lr_decay_style="cosine",
            start_wd=0.1, end_wd=0.1, wd_incr_steps=10, wd_incr_style="constant",
        )  # fmt: skip
        for rates in ([(0.005, 0.1), (1e-3, 0.0)], [(0.0, 0.1), (0.0, 0.0)]):
            assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == rates
            scheduler.step(10)
        assert optimizer.get_loss_scale().tolist() == [1.0]

    def a_matrix_is_cut_where_its_shape_says_so_whatever_it_is_marked_as(self, folder: str) -> None:
        """TransformerEngine marks all weights of linear layers as cut, and experts' always along dim 0."""

        def cuts(**layout: int) -> tuple[dict, dict]:
            optimizer = self._new(folder, layout).optimizer
            dims = {n: optimizer._cut[id(p)][1] if id(p) in optimizer._cut else None for n, p in optimizer.named}
            return {n: p.shape for n, p in optimizer.named}, dims

        whole, dims = cuts()
        assert {*dims.values()} == {None}
        parts, dims = cuts(tp=2, etp=2)
        assert parts.keys() == whole.keys() and {*dims.values()} == {None, 0, 1}
        for n, part in parts.items():
            differ = [i for i, (a, b) in enumerate(zip(part, whole[n])) if a != b]
            assert dims[n] == (differ[0] if differ else None)

    # ---- refits

    def connect(self, sources: str = "owners", **where) -> None:
        self.sources = sources
        super().connect(**{"deadline_s": 60.0, **where})

    def refit(self, **options) -> None:
        before, told = self._states(), self.refitted(**options)
        emit("refitted", before=before, after=self._states(), coming=self._coming(), **told)


if __name__ == "__main__":
    obey(*methods(Rank()))
    os._exit(0)  # gloo's threads would wait for peers that are gone
