"""The toy model of these examples: a tiny Qwen3 with a tokenizer of digits, as a checkpoint on disk."""

from __future__ import annotations

from pathlib import Path

from examples.common import toy

DIGITS = [str(i) for i in range(10)]


def write_model(folder: Path, family: str = "qwen3") -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    toy.write_checkpoint(family, folder, num_hidden_layers=2)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {d: 3 + i for i, d in enumerate(DIGITS)}
    words |= {f"w{i}": i for i in range(len(words), toy.config(family)["vocab_size"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
