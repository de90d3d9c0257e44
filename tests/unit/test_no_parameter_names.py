"""Nothing in xfer decides by what a parameter is called: layouts are read from the frameworks' own code.

Every string in the package's code is looked at, except docstrings, sentences (messages for people) and
xfer/trainers/gpu_packages.py, which declares the layers of packages that `xfer plan` has to do without.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "xfer"
PART = re.compile(
    r"proj|norm|embed|lm_?head|expert|qkv|gate|mlp|attn|attention|linear|a_log|conv1d|(^|[._])(weight|bias|scale)$|router"
    r"|mixer|w13|kv_[ab]|q_[ab]|layers?\b|decoder|backbone|output_layer",
    re.I,
)
"""Parts of the names of all families in docs/architectures.md, in Hugging Face's, vLLM's and Megatron's spelling."""
ALLOWED = {
    ("cli/describe.py", "expert_model_parallel_size"),  # options of Megatron-Core and vLLM
    ("cli/describe.py", "expert_tensor_parallel_size"),
    ("cli/describe.py", "enable_expert_parallel"),
    ("cli/doctor/look.py", "link_layer"),  # of an RDMA port, in sysfs
    ("engines/meta_model.py", "static_all_moe_layers"),  # a field of vLLM's compilation config
    ("engines/processed.py", "UnquantizedLinearMethod"),  # classes of vLLM
    ("engines/processed.py", "UnquantizedEmbeddingMethod"),
    ("engines/processed.py", "Fp8LinearMethod"),
    ("engines/processed.py", "CompressedTensorsLinearMethod"),
    ("engines/processed.py", "BlockWiseTorchFP8ScaledMMLinearKernel"),
    ("engines/vllm_cpu.py", "CPUExpertsFp8"),
    ("engines/vllm_layout.py", "word_embeddings_untied_by_checkpoint"),  # flags of configs
    ("engines/vllm_layout.py", "base_layer"),  # where vLLM's wrappers for adapters keep what they wrap
    ("sglang/settings.py", "ep_num_redundant_experts"),  # a field of SGLang's ServerArgs
    ("trainers/megatron.py", "share_embeddings_and_output_weights"),
    ("trainers/megatron.py", "moe_mlp_glu_interleave_size"),  # settings of Megatron-Core, which are refused
    ("trainers/megatron.py", "moe_shared_expert_glu_interleave_size"),
    ("trainers/megatron.py", "moe_single_grouped_weight"),
    ("trainers/megatron.py", "moe_single_grouped_bias"),
    ("trainers/megatron.py", "expert_gtp_weight_remat_size"),
    ("trainers/megatron.py", "moe_router_enable_expert_bias"),  # a setting of Megatron-Core
    ("trainers/bridge_export.py", "_should_skip_mtp_duplicate_embedding_export"),  # a method of Bridge
    ("trainers/megatron.py", "output_layer"),  # the module of a Megatron model, to cut a padded vocabulary
}


def strings(source: str) -> list[tuple[int, str]]:
    """(line, text) of string constants that are code: no docstrings, nothing with a space in it."""
    tree = ast.parse(source)
    alone = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [(n.lineno, n.value) for n in found if id(n) not in alone and " " not in n.value]


def suspects(path: Path) -> list[tuple[int, str]]:
    return [(line, text) for line, text in strings(path.read_text()) if PART.search(text)]


FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if p.name != "gpu_packages.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_name_of_a_parameter_is_in_the_code(path):
    name = str(path.relative_to(PACKAGE))
    bad = [f"{name}:{line}: {text!r}" for line, text in suspects(path) if (name, text) not in ALLOWED]
    assert not bad, "read it from the framework instead, or say in ALLOWED why it is no parameter's name"


def test_what_is_allowed_is_still_needed():
    there = {(str(p.relative_to(PACKAGE)), text) for p in FILES for _, text in suspects(p)}
    assert sorted(ALLOWED - there) == []


def test_the_search_finds_lists_of_names():
    seeded = 'SUFFIXES = ("q_proj.weight", "experts.", "A_log")\nif name.endswith("lm_head.weight"): pass'
    assert all(PART.search(text) for _, text in strings(seeded)) and len(strings(seeded)) == 4
