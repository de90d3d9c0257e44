"""Writes the small model that the loop starts from: random weights, dense or with experts, vocabulary of 32 tokens.

python -m examples.grpo.model dense FOLDER [float32|bfloat16]
"""

import sys

from examples.grpo.task import VOCAB
from xfer.testing import toy

SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
KINDS = {"dense": ("qwen3", {}), "moe": ("qwen3_moe", dict(num_experts=4, moe_intermediate_size=64))}


def write(kind: str, folder: str, dtype: str = "float32") -> None:
    family, more = KINDS[kind]
    toy.write_checkpoint(family, folder, **SIZES, **more, torch_dtype=dtype)


if __name__ == "__main__":
    write(*sys.argv[1:])
