"""TRL's GRPOTrainer with a vLLM server that xfer refits, at toy size, on CPUs.

    python -m examples.integrations.trl_grpo --work .trl

TRL 1.16, vLLM and xfer are in one environment. It trains some steps, and compares what the server held in each with a new vLLM that
loads what the trainer saved.
"""

from __future__ import annotations

import argparse
import os
import secrets
from pathlib import Path

from examples.common.ports import free_port
from examples.integrations.exact import ON_CPU, checksums, held, require_equal, start_server
from examples.integrations.toy_model import DIGITS, write_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path(".trl"))
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    os.environ.update(ON_CPU)
    os.environ.setdefault("XFER_TOKEN", secrets.token_hex(16))
    folder, port = args.work.absolute() / "model", free_port()
    write_model(folder)
    with start_server(folder, port, "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1") as url:
        saved = train(args, folder, url)
    if saved[0][1] == saved[-1][1]:
        raise RuntimeError("training changed nothing, so the later refits prove nothing")
    for step, (at, sums) in enumerate(saved):
        require_equal(sums, checksums(at), f"refit {step + 1}")


def train(args: argparse.Namespace, folder: Path, url: str) -> list[tuple[Path, dict[str, str]]]:
    """Per step, where the trainer saved the weights that it sampled with, and what the server held meanwhile."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from xfer.integrations.trl import refits

    saved: list[tuple[Path, dict[str, str]]] = []

    def reward(completions, **_) -> list[float]:
        """TRL calls it after the server has sampled, before the optimizer steps: the moment to look at both sides."""
        at = args.work.absolute() / f"step{len(saved)}"
        trainer.model.save_pretrained(at)
        saved.append((at, held(url)))
        return [float(sum(word in DIGITS for word in c.split())) for c in completions]

    config = GRPOConfig(
        output_dir=str(args.work / "out"), use_vllm=True, vllm_mode="server", vllm_server_base_url=url, max_steps=args.steps,
        per_device_train_batch_size=4, num_generations=4, max_completion_length=8, learning_rate=0.02, use_cpu=True, bf16=False,
        gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to=[],
    )  # fmt: skip
    prompts = Dataset.from_dict({"prompt": [f"{a} {b}" for a in DIGITS for b in DIGITS]})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16")
    with refits(f"tcp://127.0.0.1:{free_port()}"):
        trainer = GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=prompts,
                              processing_class=_tokenizer(folder))  # fmt: skip
    trainer.train()
    trainer.vllm_generation.xfer.close()
    return saved


def _tokenizer(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, padding_side="left")


if __name__ == "__main__":
    main()
