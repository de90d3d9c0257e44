"""The layout of xfer: imports go one way, names mean one thing, and nothing decides by what a parameter is called. ruff holds the size of
functions (pyproject.toml).

`python -m tests.support.house` prints the figures. A list of exceptions here says of each why it is there; one that is no longer
needed fails its test too, so that the lists only shrink.
"""

from __future__ import annotations

import ast
import re
import textwrap

import pytest

from tests.support import house

AGAINST_THE_FLOW: set[str] = set()
CIRCLES = 3
"""Sets of modules that import each other. At most 3 is the goal."""
INHERITED_ACROSS_PACKAGES: dict[str, str] = {}
REPEATED_NAMES = {
    "Export": "one interface for GPUs (peer) and for host memory (peer_host); transport/routes.py takes the module",
    "Mapping": "as Export",
    "Pull": "as Export",
    "Layout": "a message, and one side of an xferdtensor call: to be renamed with its rewrite",
}
"""Names of several classes, and why each is right."""
NAME_PART = re.compile(
    r"proj|norm|embed|lm_?head|expert|qkv|gate|mlp|attn|attention|linear|a_log|conv1d|(^|[._])(weight|bias|scale)$|router"
    r"|mixer|w13|kv_[ab]|q_[ab]|layers?\b|decoder|backbone|output_layer",
    re.I,
)
"""Parts of the names of all families in docs/architectures.md, in Hugging Face's, vLLM's and Megatron's spelling."""
NO_PARAMETERS = {
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


def test_every_package_has_its_place():
    homeless = sorted({p for m in house.modules() if house.level(p := house.package_of(m)) < 0})
    assert homeless == [], "give it a place in LAYERS (tests/support/house.py)"


def test_imports_go_one_way_but_for_some_circles():
    """Those inside functions count too. Those for type checkers do not: a lower package may name the type of what it is handed."""
    assert {f"{i.source} {i.target}" for i in house.against_the_flow()} == AGAINST_THE_FLOW
    assert len(house.circles()) <= CIRCLES, house.circles()


def test_the_coordinator_has_no_io():
    """No socket, thread, clock or torch: tests drive it with a fake clock through any order of events."""
    banned = {"socket", "threading", "time", "asyncio", "select", "torch", "queue", "concurrent", "multiprocessing"}
    for name, (_, tree) in house.modules().items():
        if house.package_of(name) == "coordinator":
            nodes = list(ast.walk(tree))
            imported = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
            imported |= {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}
            assert not banned & {module.split(".")[0] for module in imported}, name


def test_no_class_inherits_from_another_package():
    """Except from a Protocol, an ABC or an exception, which are made for it."""
    assert house.inherited_across_packages() == INHERITED_ACROSS_PACKAGES


def test_a_class_name_means_one_thing():
    """A leading underscore does not count: whoever greps for a name finds both."""
    assert house.repeated_names().keys() == REPEATED_NAMES.keys(), "rename all but one"


def parameter_names(tree: ast.AST) -> set[str]:
    """String constants that may be parts of parameters' names: code, not docstrings or sentences for people."""
    alone = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    found = [
        n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in alone
    ]
    return {n.value for n in found if " " not in n.value and NAME_PART.search(n.value)}


def test_no_name_of_a_parameter_is_in_the_code():
    """Layouts are read from the frameworks' own code. gpu_packages.py declares layers of packages that `xfer plan` has to do without."""
    files = {str(path.relative_to(house.ROOT / "xfer")): tree for path, tree in house.modules().values()}
    files.pop("trainers/gpu_packages.py")
    found = {(file, text) for file, tree in files.items() for text in parameter_names(tree)}
    assert found == NO_PARAMETERS, (
        "read it from the framework instead, or say in NO_PARAMETERS why it is no parameter's name"
    )


# ---- the measures themselves


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Writes a package `xfer` of some modules, which the measures then read."""

    def write(**files: str) -> None:
        for name, text in files.items():
            path = tmp_path / "xfer" / (name.replace("__in__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))

    monkeypatch.setattr(house, "ROOT", tmp_path)
    cached = (house.modules, house.imports, house.imported_names)
    for function in cached:
        function.cache_clear()
    yield write
    for function in cached:
        function.cache_clear()


def test_the_measures_find_what_is_wrong(sources):
    sources(
        plan__in__a="from xfer.plan import b\nclass Box: pass\nclass Base: pass\n",
        plan__in__b="def f():\n    import xfer.plan.a\n    from xfer.trace.c import C\n",
        trace__in__c="""
            from typing import TYPE_CHECKING, Protocol
            from xfer.plan.a import Base as B, Box
            if TYPE_CHECKING:
                from xfer.engines.e import E
            class C(B): pass
            class _Box: pass
            class P(Protocol): pass
        """,
        engines__in__e="from xfer.trace.c import P\nclass E(P): pass\n",
    )
    assert [str(i) for i in house.against_the_flow()] == ["xfer.trace.c:3 imports xfer.plan.a"]
    assert house.circles() == [["xfer.plan.a", "xfer.plan.b", "xfer.trace.c"]]
    assert house.inherited_across_packages() == {"xfer.trace.c.C": "xfer.plan.a.Base"}
    assert house.repeated_names() == {"Box": ["xfer.plan.a", "xfer.trace.c"]}
    seeded = (
        'SUFFIXES = ("q_proj.weight", "experts.", "A_log", "of A_log")\nif name.endswith("lm_head.weight"): "q_proj"'
    )
    assert parameter_names(ast.parse(seeded)) == {"q_proj.weight", "experts.", "A_log", "lm_head.weight"}
