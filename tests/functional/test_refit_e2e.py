"""Real Megatron-Core + Bridge trainers refit a real vLLM, bit for bit, after the first and after a second optimizer step, on both
routes.

The truth is a fresh vLLM that loads what Megatron-Bridge exported at that step: every parameter digest, every greedy token and
its logprob must be equal. Between the two refits every live byte but the kept ones is overwritten with noise, so a refit that
left anything out cannot pass; and prompts are asked before and after, so a stale prefix cache cannot either.

One launch of four trainer ranks serves all cases, one after the other, since imports cost more than a toy's work. A case
that fails leaves ranks in the middle of a collective, so the next one gets new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import pytest
from safetensors.torch import save_file

from examples.common import toy
from examples.common.ports import free_port
from tests.support import block_fp8
from tests.support.marks import BOTH
from tests.support.proc import Children, cause
from tests.support.refit_stage import Stage, differ, stage_of, two_refits_are_fresh_loads

pytestmark = BOTH


@dataclass(frozen=True)
class Case:
    """`layout`: of the trainer (4 ranks); `engines`: one dict per replica; `model`: overrides of the family's config;
    `frozen`: engine parameters that this training does not touch; `connect`: more arguments of `xfer.connect`; `fp8`: engines serve
    block FP8 of this quant_method, and fresh ones load what the oracle in numpy makes of Bridge's export. `mbridge`: mbridge builds,
    loads and exports the model in Bridge's place."""

    family: str
    layout: dict
    engines: tuple[dict, ...]
    model: dict = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    connect: dict = field(default_factory=dict)
    fp8: str = ""
    delta: bool = False
    stage: bool = False
    mbridge: bool = False

    @property
    def name(self) -> str:
        def flat(d: dict, keys=("tp", "pp", "vpp", "ep", "etp", "cp", "distopt")) -> str:
            return "-".join(k if d[k] is True else f"{k}{d[k]}" for k in keys if d.get(k))

        lora = "-lora" if "lora" in self.layout else ""
        to = " > " if self.connect.get("relay") else " + "
        how = (
            f" in FP8 ({self.fp8})" * bool(self.fp8)
            + ", packed" * ("route" in self.connect)
            + ", mapped" * self.connect.get("colocated", False)
            + ", what changed" * self.delta
            + ", marked" * self.connect.get("fenced", False)
            + ", staged" * self.stage
            + ", of mbridge" * self.mbridge
        )
        return f"{self.family}: {flat(self.layout)}{lora} -> {to.join(flat(e) for e in self.engines)}{how}"


PLAIN = dict(distopt=False, overlap=False)
DENSE, MOE = dict(tp=2, pp=2, distopt=True), dict(tp=2, pp=2, ep=2, etp=1, distopt=True)
SHARDED, FLAT_MOE = dict(tp=2, ep=2, etp=2, distopt=True), dict(tp=2, ep=2, etp=1, distopt=True)
UNEVEN_STAGES = dict(
    tp=1, pp=2, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=3, distopt=True
)
ONE, TWO, TWO_EP = (dict(tp=n, **ep) for n, ep in ((1, {}), (2, {}), (2, dict(ep=True))))
"""An engine."""
LORA = dict(lora=dict(dim=4, alpha=6, lora_B_init_method="xavier"))
"""Adapters on every linear layer. Bridge merges them while it exports; a refit must bring the very same bits."""
UNADAPTED = ("*norm.weight", "*embed_tokens.weight", "*lm_head.weight", "*mlp.gate.weight")
WIDE = dict(hidden_size=256, head_dim=128, num_attention_heads=4, num_key_value_heads=2, intermediate_size=512)
"""Sizes of each rank are multiples of 128."""
WIDE_MOE = dict(WIDE, moe_intermediate_size=256, num_experts=16)
WIDE_LATENT = dict(hidden_size=256, intermediate_size=256, moe_intermediate_size=256, n_routed_experts=16)
WIDE_LATENT |= dict(q_lora_rank=128, qk_nope_head_dim=64, v_head_dim=64)
PACKED = dict(connect=dict(route="packed", bucket_bytes=96 << 10, deadline_s=120.0, scramble=False))
"""Buckets so small that there are many."""
MAPPED = dict(connect=dict(PACKED["connect"], colocated=True))
SMALL_STEP = dict(lr=2e-6)
CHANGES = dict(frozen=("*norm.weight",), connect=dict(scramble=False), delta=True, stage=True)
"""So small a step leaves most of the bits as they are, and all of a norm's."""
PADDED = dict(tp=2, pp=2, vpp=2, distopt=True, should_pad_vocab=True, make_vocab_size_divisible_by=40, load=False)
UNEVEN = dict(num_key_value_heads=2, vocab_size=250)
CASES = [
    Case("qwen3_moe", MOE, (TWO,), WIDE_MOE, fp8="fp8"),
    Case(  # two replicas, the second of which reads from the first
        "qwen3_tied", UNEVEN_STAGES, (ONE, ONE), connect=dict(host_pull=True, relay=True)
    ),
    Case("qwen3", dict(DENSE, **PLAIN), (TWO,), **PACKED),
    # The optimizer marks what it changes, and there are no copies.
    Case(
        "qwen3",
        dict(DENSE, lr=SMALL_STEP["lr"] / 10),  # a granule has 16 elements
        (TWO,),
        WIDE,
        frozen=("*norm.weight",),
        connect=dict(scramble=False, host_pull=True, fenced=True),
        delta=True,
    ),
    # Two stages on each rank, and a vocabulary that each side pads to another size.
    Case("qwen3_moe", dict(PADDED, ep=2, etp=1, **SMALL_STEP), (TWO_EP, ONE), dict(vocab_size=250), **CHANGES),
]
SLOW = [
    Case("deepseek_v3", SHARDED, (TWO_EP,)),
    # TP above the number of KV heads.
    Case("qwen3", dict(PADDED, **SMALL_STEP), (dict(tp=4),), UNEVEN, **dict(CHANGES, stage=False)),
    Case("qwen3_moe", dict(MOE, **SMALL_STEP), (TWO_EP, ONE), **CHANGES),
    Case("qwen3", dict(tp=2, pp=2), (TWO,), mbridge=True),
    Case("qwen3_moe", dict(tp=2, ep=2, etp=1), (TWO_EP, ONE), mbridge=True),
    Case("qwen3", PADDED, (dict(tp=4),), UNEVEN),
    Case("qwen3", dict(PADDED, **SMALL_STEP), (dict(tp=4),), UNEVEN, **CHANGES),
    Case("qwen3_tied", dict(DENSE, **SMALL_STEP), (ONE, TWO), **CHANGES),
    Case("qwen3_moe", SHARDED, (TWO_EP, ONE), connect=dict(scramble=False), stage=True),
    Case("qwen3", DENSE, (TWO, TWO), connect=dict(relay=True)),
    Case("qwen3", DENSE, (TWO,), WIDE, fp8="fp8"),
    Case("qwen3_moe", MOE, (TWO_EP,), WIDE_MOE, fp8="fp8"),
    Case("qwen3_tied", dict(DENSE, **PLAIN), (ONE, TWO), WIDE, fp8="fp8"),
    Case("qwen3_moe", MOE, (TWO,), WIDE_MOE, fp8="compressed-tensors"),
    Case("qwen3", DENSE, (ONE,), WIDE, fp8="compressed-tensors"),
    # vLLM decodes with tensors that it computes of kv_b_proj in FP8.
    Case("deepseek_v3", FLAT_MOE, (TWO,), WIDE_LATENT, fp8="fp8"),
    Case(
        "deepseek_v3",
        dict(MOE, **SMALL_STEP),
        (ONE,),
        WIDE_LATENT,
        fp8="fp8",
        **dict(CHANGES, frozen=("*norm.weight", "*_scale_inv")),
    ),
    # Each worker quantizes whole tensors, and vLLM processes each layer again.
    Case("qwen3", dict(DENSE, **PLAIN), (TWO,), WIDE, fp8="fp8", **PACKED),
    Case("qwen3_moe", dict(SHARDED, **PLAIN), (TWO, ONE), WIDE_MOE, fp8="fp8", **PACKED),
    Case("qwen3", dict(DENSE, **PLAIN), (ONE,), WIDE, fp8="compressed-tensors", **MAPPED),
    Case("qwen3_moe", MOE, (TWO_EP,), WIDE_MOE, fp8="compressed-tensors", **PACKED),
    Case("deepseek_v3", FLAT_MOE, (TWO,), WIDE_LATENT, fp8="fp8", **PACKED),
    Case("deepseek_v3", MOE, (TWO,), **PACKED),
    Case("qwen3_tied", dict(DENSE, **PLAIN), (ONE,), **MAPPED),
    Case("qwen3_moe", dict(SHARDED, **PLAIN), (TWO, ONE), **PACKED),
    Case("qwen3_moe", dict(MOE, **PLAIN), (TWO_EP,), **MAPPED),
    Case("deepseek_v3", MOE, (TWO,)),
    Case("qwen3", dict(pp=2, cp=2, **PLAIN), (TWO,)),
    Case("qwen3", dict(DENSE, **LORA), (TWO,), frozen=UNADAPTED),
    Case("qwen3", dict(DENSE, **PLAIN), (TWO,)),
    Case("qwen3_tied", DENSE, (TWO,)),
    Case("qwen3_tied", UNEVEN_STAGES, (ONE,)),
    Case("qwen3_moe", dict(MOE, **PLAIN), (TWO,)),
    Case("qwen3_moe", dict(tp=1, pp=1, ep=4, distopt=True), (dict(tp=4, ep=True),)),
    Case("qwen3_moe", dict(tp=1, pp=2, vpp=2, ep=2, distopt=True), (TWO_EP,)),
    Case(
        "deepseek_v3",
        dict(tp=1, pp=4, distopt=True, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=1),
        (ONE,),
    ),
    Case("qwen3", dict(tp=2, pp=1, cp=2, distopt=True), (ONE, TWO)),
    Case("qwen3", dict(tp=4, pp=1, **PLAIN), (TWO,)),
    # No overlap: Megatron's buckets count the gradients of an adapter that several experts share wrongly.
    Case("qwen3_moe", dict(SHARDED, **PLAIN, **LORA), (TWO_EP, ONE), frozen=UNADAPTED),
]


stage = stage_of()


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=lambda c: c.name
)
def test_refit_equals_a_fresh_load_of_the_export(case, stage, tmp_path):
    model = tmp_path / "model"
    toy.write_checkpoint(case.family, model, **case.model)
    engines = tuple({**how, **block_fp8.ENGINES.get(case.fp8, {})} for how in case.engines)
    relay, marked, came = case.connect.get("relay"), case.connect.get("fenced"), []

    def watched(engines: Children, refit: Callable[..., list[dict]]) -> list[dict]:
        how: dict = {"stage": case.stage, **({"delta": "auto"} if case.delta else {})}
        reports = generating(stage, engines, partial(refit, **how)) if case.stage and came else refit(**how)
        came.append(reports[0]["bytes"])
        assert not marked or sum(r["extra"] for r in reports) < came[0] / 4, "copies are as large as the weights"
        assert not case.delta or len(came) == 1 or came[1] < came[0] / 3, came
        assert not relay or all("relay" in line for line in reports[0]["routes"].splitlines()[1:]), reports[0]
        return reports

    how = dict(
        build=dict(layout=case.layout, mbridge=case.mbridge),
        engines=engines,
        frozen=case.frozen,
        watched=watched,
        **case.connect,
    )
    as_served = partial(block_fp8.serialize, method=case.fp8) if case.fp8 else str
    two_refits_are_fresh_loads(stage, tmp_path, model=model, as_served=as_served, **how)


def generating(stage: Stage, engines: Children, refit: Callable[[], list[dict]]) -> list[dict]:
    """A staged refit during which a worker of each engine hangs with the last staged byte: the engine answers meanwhile. Not from
    noise, which would leave NaN in its KV cache."""
    cause(stage.faults, "worker:0:done:hang@1")
    with ThreadPoolExecutor() as pool:
        reports = pool.submit(refit)
        try:
            answered = [e for _ in range(2) for e in engines.ask("observe", "observed")]
            assert not reports.done() and all(e["version"] == 1 and e["outputs"] for e in answered)
        finally:
            cause(stage.faults, "")
    return reports.result()


def test_what_bridge_gets_wrong_is_refused_on_every_rank_before_a_byte_moves(stage, tmp_path):
    """megatron_hazards.py has each fault alone. Here the ranks that find it tell the other ranks and the engine."""
    with stage.case():
        serves = tmp_path / "served"
        toy.write_checkpoint("qwen3", serves)
        engine = stage.engine("refusing")
        try:
            engine.ask("start", "started", model=str(serves), load_format="auto")
            before = engine.ask("observe", "observed")
            lacks = [f"model.layers.{layer}.mlp.{name}.weight" for layer, name in ((2, "up_proj"), (3, "gate_proj"))]
            for family, layout, missing, said in (
                ("qwen3_moe", dict(tp=2, ep=2, moe_grouped_gemm=False), [], ["SequentialMLP"]),
                # Only the last stage, ranks 2 and 3, can see this.
                (
                    "qwen3",
                    dict(pp=2),
                    lacks,
                    [f"decoder.layers.{i}.mlp.linear_fc1.weight: Bridge has no" for i in (0, 1)],
                ),
            ):
                model = tmp_path / family
                tensors = toy.write_checkpoint(family, model)
                left = {n: t for n, t in tensors.items() if n not in missing}
                save_file(left, model / "model.safetensors", {"format": "pt"})
                stage.trainers.ask("build", "built", folder=str(model), layout=dict(load=False, **layout))
                rendezvous = f"tcp://127.0.0.1:{free_port()}"
                engine.say(do="serve", rendezvous=rendezvous, replica=0, deadline_s=5.0)
                refused = stage.trainers.ask("connect", "raised", rendezvous=rendezvous, replicas=1, deadline_s=60.0)
                for r in refused:
                    assert r["type"] in ("Unsupported", "LayoutError") and all(x in r["text"] for x in said), r
                late = engine.ask("ready", "raised")  # told why, or come too late to meet anyone
                assert late["type"] in (refused[0]["type"], "DeadlineExceeded", "PeerLost")
                assert differ(before, engine.ask("observe", "observed", force=True)) == []
        finally:
            engine.stop()
