"""GRPO on Megatron-Core: advantages, the loss, one optimizer step. No rollout, no xfer.

`trainer` is anything with `chunks` (DDP-wrapped model chunks of this rank) and `optimizer` (Megatron's), as Megatron-Bridge
and Megatron-Core make them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from examples.grpo import gate
from examples.grpo.samples import Sample
from xfer.errors import LayoutError


@dataclass(frozen=True)
class Batch:
    """Rows are samples. tokens: int64 [B, S + 1], prompt, answer, padding; logprobs: float64 [B, A], the engine's;
    advantages: float64 [B]. The answer begins at column `prompt` of all rows."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor
    prompt: int

    def pieces(self, rank: int, ranks: int, count: int) -> list[Batch]:
        """The micro batches of one data-parallel rank. LayoutError as `refuse_uneven`."""
        refuse_uneven(len(self.tokens), ranks, count)
        cut = [t[rank::ranks].chunk(count) for t in (self.tokens, self.logprobs, self.advantages)]
        return [Batch(*x, self.prompt) for x in zip(*cut, strict=True)]


def data_parallel(ranks: int, tp: int, pp: int) -> int:
    """How many data-parallel ranks there are. LayoutError: tp times pp does not divide the trainer ranks."""
    if ranks % (tp * pp):
        raise LayoutError(
            f"{ranks} trainer ranks cannot be cut by tp {tp} times pp {pp}",
            [f"start a multiple of {tp * pp} ranks (run.sh --ranks), or pass --tp and --pp that fit"],
        )
    return ranks // (tp * pp)


def refuse_uneven(samples: int, ranks: int, micro_batches: int) -> None:
    """LayoutError: ranks would have micro batches of other sizes, or of other numbers, and wait for each other in the schedule."""
    if samples % (ranks * micro_batches):
        raise LayoutError(
            f"{samples} samples a step cannot be cut evenly",
            [
                f"{ranks} data-parallel ranks of {micro_batches} micro batches each: make prompts times answers a multiple of "
                f"{ranks * micro_batches}"
            ],
        )


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """[groups, answers per prompt] -> the same shape: how much better than its group an answer is, in the group's
    deviations. A group of equal rewards teaches nothing and gives 0."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True, unbiased=False) + 1e-4)


def pack(groups: Sequence[Sequence[Sample]], rewards: torch.Tensor, multiple: int) -> Batch:
    """All samples as one batch. Prompts have one length here, and answers too. What the model reads, one token less than
    a row has, is padded to a multiple of `multiple`: sequence parallel cuts it among the tensor-parallel ranks."""
    flat = [s for g in groups for s in g]
    rows = torch.tensor([[*s.prompt, *s.tokens] for s in flat])
    padding = -(rows.shape[1] - 1) % multiple
    logprobs = torch.tensor([s.logprobs for s in flat], dtype=torch.float64)
    rows = torch.nn.functional.pad(rows, (0, padding))
    return Batch(rows, logprobs, advantages(rewards.double()).flatten(), len(flat[0].prompt))


def shared(batch: Batch | None, prompt: int) -> Batch:
    """Rank 0's batch on every rank: three tensors, nothing pickled."""
    shapes = torch.zeros(4, dtype=torch.int64)
    if batch is not None:
        shapes = torch.tensor([*batch.tokens.shape, *batch.logprobs.shape])
    device = torch.cuda.current_device()
    shapes = shapes.to(device)
    dist.broadcast(shapes, 0)
    b, s, b2, a = shapes.tolist()
    empty = (
        torch.empty(b, s, dtype=torch.int64),
        torch.empty(b2, a, dtype=torch.float64),
        torch.empty(b, dtype=torch.float64),
    )
    tensors = [t.to(device) for t in (empty if batch is None else (batch.tokens, batch.logprobs, batch.advantages))]
    for t in tensors:
        dist.broadcast(t, 0)
    return Batch(*tensors, prompt)


def step(trainer, batch: Batch, *, micro_batches: int = 4, clip: float = 0.2) -> gate.Gap:
    """One optimizer step. Returns the gap between trainer and engine on the batch's tokens, the same on all ranks. The gap is
    that of the weights *before* the step, which made the tokens, and costs no forward pass of its own."""
    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel import get_forward_backward_func

    mine = batch.pieces(ps.get_data_parallel_rank(), ps.get_data_parallel_world_size(), micro_batches)
    for chunk in trainer.chunks:
        chunk.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    virtual = len(trainer.chunks) > 1
    said = get_forward_backward_func()(
        forward_step_func=partial(_forward, clip),
        data_iterator=[iter(mine) for _ in trainer.chunks] if virtual else iter(mine),
        model=trainer.chunks if virtual else trainer.chunks[0],
        num_microbatches=len(mine),
        seq_length=batch.tokens.shape[1] - 1,
        micro_batch_size=len(mine[0].tokens),
        forward_only=False,
    )
    updated, _, _ = trainer.optimizer.step()
    if not updated:
        raise RuntimeError("the optimizer skipped a step: gradients were not finite")
    # Ranks of the last stage have it, and those of one TP group have it alike.
    counts = said and ps.get_tensor_model_parallel_rank() == 0
    total = gate.added([x["gap"].cpu() for x in said] if counts else []).to(torch.cuda.current_device())
    everywhere = [torch.empty_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, total)
    return gate.gap(gate.added([t.cpu() for t in everywhere]))


def _forward(clip: float, batches, model):
    b: Batch = next(batches)
    length = b.tokens.shape[1] - 1
    positions = torch.arange(length, device=b.tokens.device).repeat(len(b.tokens), 1)
    causal = torch.ones(length, length, device=b.tokens.device).tril()[None, None] < 0.5
    # Given labels, a Megatron model returns minus their logprobs, whatever way the vocabulary is cut.
    out = model(b.tokens[:, :-1].contiguous(), positions, causal, labels=b.tokens[:, 1:].contiguous())
    return out, partial(_loss, clip, b)


def _loss(clip: float, b: Batch, out: torch.Tensor):
    answer = slice(b.prompt - 1, b.prompt - 1 + b.logprobs.shape[1])  # column i predicts token i + 1
    logprobs = -out[:, answer].float()
    # The denominator is what the engine says it drew from. A trainer that recomputed it would hide every gap.
    ratio = (logprobs - b.logprobs.float()).exp()
    gain = b.advantages.float()[:, None]
    loss = -torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain).mean()
    return loss, {"gap": gate.sums(logprobs.detach(), b.logprobs)}
