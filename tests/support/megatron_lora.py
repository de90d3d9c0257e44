"""One rank of LoRA trainers under test: see megatron_worker.py."""

from __future__ import annotations

from examples.common import megatron_cpu

megatron_cpu.install()
megatron_cpu.import_bridge()

import torch  # noqa: E402
from megatron.bridge.models.conversion import model_bridge  # noqa: E402
from megatron.bridge.peft.canonical_lora import CanonicalLoRA  # noqa: E402
from megatron.bridge.peft.dora import DoRA  # noqa: E402
from megatron.core.utils import unwrap_model  # noqa: E402

from examples.common.train_loop import Trainer  # noqa: E402
from tests.support.megatron_worker import checkpoint, gathered, held, main, refusal, truth, wrong  # noqa: E402
from xfer.trainers.megatron import MegatronTrainer  # noqa: E402

ADAPTERS = dict(dim=4, alpha=6, lora_B_init_method="xavier")
PLAIN = dict(distopt=False, overlap=False)


def adapter(trainer: Trainer, **keywords) -> MegatronTrainer:
    return MegatronTrainer(trainer.chunks, trainer.bridge, **keywords)


def adapted(trainer: Trainer) -> list[torch.nn.Module]:
    return [m for c in trainer.chunks for m in c.modules() if hasattr(m, "linear_out")]


def merged(
    folder: str, family: str, tensors: int, changes: int, biases: int = 0, targets=None, canonical=False, **layout
) -> None:
    """Fragments, scratch included, are Bridge's own merged export after each of two steps.

    Args:
        tensors: Number of tensors that Bridge exports.
        changes: Number of those that a step changes. biases: those of them that balance experts, and are no weights.
    """
    how = ADAPTERS if targets is None else dict(ADAPTERS, target_modules=targets)
    checkpoint(folder, family)
    with Trainer(folder, lora=(lambda: CanonicalLoRA(**how)) if canonical else how, **layout) as trainer:
        source = adapter(trainer)
        layout, was = source.read(), {}
        for _ in range(2):
            trainer.step()
            source.drain()
            assert source.check() == "same"
            source.compute()
            now = truth(trainer)
            assert not (bad := wrong(held(layout), now)) and len(now) == tensors, bad
            changed = {n for n, t in now.items() if n in was and not torch.equal(t, was[n])}
            was = now
        assert len(changed) == changes, "training did not change what it should have, so the second look says little"
        trained = set().union(*gathered(layout.trained))
        assert len(trained) == changes - biases, "what requires grad, merged, is what changed"
        keeps_its_share(trainer, source)
        replaced_or_rescaled(trainer, source)


def keeps_its_share(trainer: Trainer, source: MegatronTrainer) -> None:
    """Bridge gathers every weight whole. What is computed here is no more than what this rank has of the weights."""
    computed, local = source.computed, sum(p.nbytes for c in trainer.chunks for p in c.parameters())
    assert 0 < computed.nbytes <= local * 1.02
    assert computed.gathered_bytes < local // 2, "factors, not weights"
    ops = {op for r in source.read().traced.recipes for op in r.ops}
    assert ops == {"aten.add.Tensor", "aten.mm.default", "aten.mul.Tensor"}
    need = computed.nbytes + computed.gathered_bytes
    refused = refusal(adapter(trainer, scratch_bytes=need - 1).read)
    assert refused.startswith("Unsupported") and f"takes {need} bytes" in refused
    assert not refusal(adapter(trainer, scratch_bytes=need).read)


def replaced_or_rescaled(trainer: Trainer, source: MegatronTrainer) -> None:
    """Either is noticed. The scale is a constant of the recipes; what is read after it was changed is again what Bridge merges."""
    first = adapted(trainer)[0]
    first.linear_out.weight = torch.nn.Parameter(first.linear_out.weight.detach().clone())
    assert source.check() in ("moved", "changed"), "in a storage of its own, or no longer in the optimizer's"
    source = adapter(trainer)
    source.read()
    for m in adapted(trainer):
        m.alpha *= 2
    assert source.check() == "changed"
    layout = source.read()
    source.compute()
    assert source.check() == "same" and not (bad := wrong(held(layout), truth(trainer))), bad


def regrouped(folder: str) -> None:
    """Factors are gathered over groups that Megatron has destroyed and made again. Not a parameter has changed, and every later refit
    would have failed; none may begin while there are no groups."""
    checkpoint(folder, "qwen3")
    with Trainer(folder, tp=2, pp=2, lora=ADAPTERS, **PLAIN) as trainer:
        source = adapter(trainer)
        source.read()
        source.compute()
        assert source.check() == "same"
        trainer.ungroup()
        without = refusal(source.check)
        assert without.startswith("RebindError") and "initialize_model_parallel()" in without
        trainer.regroup()
        with torch.no_grad():
            for p in (p for c in trainer.chunks for p in c.parameters()):
                p.mul_(0.5)
        assert refusal(source.compute).startswith("KeyError"), "without a look"
        assert source.check() == "changed"
        layout = source.read()
        source.compute()
        assert source.check() == "same" and not (bad := wrong(held(layout), truth(trainer))), bad
    with Trainer(folder, lora=ADAPTERS, **PLAIN) as trainer:  # whole factors on each rank: nothing is gathered
        source = adapter(trainer)
        source.read()
        trainer.ungroup()
        assert not refusal(source.compute) and source.check() == "same"
        trainer.regroup()


def ungrouped(folder: str) -> None:
    """Models with process groups of their own, while Megatron-Core has none. Bridge then merges no adapters."""
    checkpoint(folder, "qwen3_moe")
    with Trainer(folder, tp=2, pp=2, ep=2, etp=1, **PLAIN) as trainer:
        now = truth(trainer)
        trainer.close()
        if not hasattr(model_bridge, "_get_pg_collection_from_model"):  # Bridge 0.3 asks Megatron-Core alone
            assert "no process groups of Megatron" in refusal(lambda: adapter(trainer))
            return
        with torch.no_grad():
            unmerged = trainer.bridge.export_hf_weights(
                trainer.chunks, cpu=True, show_progress=False, merge_adapter_weights=False
            )
            assert all(torch.equal(t[: len(now[n])], now[n]) for n, t in unmerged), (
                "Bridge's own export needs no other groups"
            )
        assert not (bad := wrong(held(adapter(trainer).read()), now)), bad
        for chunk in map(unwrap_model, trainer.chunks):
            chunk.pg_collection = None
        assert "no process groups of Megatron" in refusal(lambda: adapter(trainer))
    with Trainer(folder, tp=2, lora=ADAPTERS, **PLAIN) as trainer:
        trainer.close()
        refused = refusal(adapter(trainer).read)
        assert refused.startswith("LayoutError") and "only after initialize_model_parallel()" in refused, refused


def dora(folder: str) -> None:
    """Bridge's export knows nothing of DoRA's magnitudes, and would leave them out without a word."""
    checkpoint(folder, "qwen3")
    with Trainer(folder, tp=2, pp=2, lora=lambda: DoRA(dim=4, alpha=6)) as trainer:
        refused = refusal(adapter(trainer).read)
        assert "trained tensors that would never reach an engine" in refused and "weight_magnitude" in refused


if __name__ == "__main__":
    main(merged, regrouped, ungrouped, dora)
