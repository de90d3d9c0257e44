"""Writes the model that the loop starts from: random weights, and a vocabulary of 32 tokens, the task's.

    python -m examples.grpo.model dense|moe|0.6b FOLDER [float32|bfloat16] [KEY=NUMBER …]

KEY is one of the config's: num_hidden_layers=2. "0.6b" has the layers of Qwen3-0.6B, all of them at their true size. Its true
vocabulary is vocab_size=151936; random weights then never draw a token that means something here, so nothing is learned.
"""

import sys

from examples.common import toy
from examples.grpo.task import VOCAB

SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
QWEN3_06B = dict(
    vocab_size=VOCAB,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    rope_theta=1e6,
    max_position_embeddings=40960,
)
KINDS = {
    "dense": ("qwen3", SIZES),
    "moe": ("qwen3_moe", {**SIZES, "num_experts": 4, "moe_intermediate_size": 64}),
    "0.6b": ("qwen3_tied", QWEN3_06B),
}


def write(kind: str, folder: str, dtype: str = "float32", *changes: str) -> None:
    family, sizes = KINDS[kind]
    changed = {key: int(value) for key, _, value in (c.partition("=") for c in changes)}
    made = toy.write_checkpoint(family, folder, **{**sizes, **changed}, torch_dtype=dtype)
    print(f"{kind}: {sum(t.numel() for t in made.values()):,} parameters in {folder}", file=sys.stderr)


if __name__ == "__main__":
    write(*sys.argv[1:])
