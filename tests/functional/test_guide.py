"""What the pages print as code: it runs as printed, or at least every name and argument in it exists."""

import ast
import builtins
import inspect
import queue
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
from tokenizers import Tokenizer, models

import xfer
from examples.common import toy
from tests.functional.test_session_controller import ToyLLM
from tests.support import forge
from tests.support.marks import BOTH
from tests.support.proc import PATIENCE, ROOT, Family, environment
from tests.support.world import TOKEN, ToyEngine, ToySource, free_port
from xfer.kernels.marks import places

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/integrations").glob("*.md"))]
YOURS = {
    *"model_chunks other_chunks bridge batches train_step loss_of loss log folder net model matrices others optimizer".split(),
    *"trainer session policy policy_generation prompts".split(),
}
"""What a reader has already, under names that say so."""


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)


def filled(page: Path, **values: str) -> list[str]:
    """The first two blocks of a page, of a trainer and of an engine, with values in place of what they leave open."""
    text = "\0".join(blocks(page)[:2])
    for mark, value in values.items():
        open_, times = OPEN[mark]
        assert text.count(open_) == times, open_
        text = text.replace(open_, value)
    return text.split("\0")


OPEN = {"at": ("tcp://10.0.0.1:29600", 2), "model": ("model=...", 1), "asks": ("generate(...)", 1)}
PRINTED = [pytest.param(b, id=f"{p.name}-{i}") for p in PAGES for i, b in enumerate(blocks(p))]


@pytest.mark.parametrize("block", PRINTED)
def test_printed_code_binds_every_name_and_gives_xfer_arguments_that_exist(block):
    nodes = list(ast.walk(ast.parse(block)))
    names = [n for n in nodes if isinstance(n, ast.Name)]
    made = {n.id for n in names if not isinstance(n.ctx, ast.Load)} | {n.arg for n in nodes if isinstance(n, ast.arg)}
    made |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    for n in nodes:
        if isinstance(n, ast.Import | ast.ImportFrom):
            made |= {(a.asname or a.name).split(".")[0] for a in n.names}
    assert {n.id for n in names} <= made | YOURS | set(dir(builtins))
    for call in (n for n in nodes if isinstance(n, ast.Call)):
        if name := re.fullmatch(r"xfer\.(\w+)", ast.unparse(call.func)):
            takes = inspect.signature(getattr(xfer, name[1]))
            takes.bind(*call.args, **{k.arg: None for k in call.keywords})


def test_the_page_of_modes_says_how_much_memory_marks_take():
    share = places([2**30])[-1] / 2**30
    text = " ".join((ROOT / "docs/modes.md").read_text().split())
    assert f"The marks take {100 * share:.1f} % of the weights in the trainer's memory" in text


def test_the_ten_lines_run_in_a_loop_whose_batches_the_engines_sample(monkeypatch):
    """Engines without weights, and a trainer that waits for what they sample: nobody may wait for the other."""
    trainer, engine = filled(ROOT / "docs/guide.md", at=f"tcp://127.0.0.1:{free_port()}")
    sampled, source, toys, wrong = queue.Queue(), ToySource(0, 1), [], []

    class RandomLLM(ToyLLM):
        def __init__(self, **options):
            assert options["load_format"] == "dummy" and options["weight_transfer_config"] == {"backend": "xfer"}
            toy = ToyEngine(1)
            toy.takers[0].began_with = "nothing"
            toys.append(toy)
            super().__init__(toy)

        def generate(self, *prompts):
            wrong.extend(self.toy.takers[0].wrong(0))
            sampled.put("a sample")

    vllm = ModuleType("vllm")
    vllm.LLM = RandomLLM
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(xfer, "MegatronTrainer", lambda chunks, bridge: source)
    monkeypatch.setenv("XFER_TOKEN", TOKEN)

    def batches():
        yield [sampled.get(timeout=20) for _ in range(2)]  # one of each engine
        yield "more"

    left = {"model_chunks": [], "bridge": None, "batches": batches(), "train_step": lambda batch: source.set(1)}
    spaces = [left, {}, {}]
    texts = (trainer, engine, engine.replace("replica=0", "replica=1"))
    pool = ThreadPoolExecutor(3)
    try:
        for ran in [pool.submit(exec, *both) for both in zip(texts, spaces)]:
            ran.result(40)
        assert left["report"].version == 2 and left["report"].committed == 2 and not wrong
        assert [t.takers[0].wrong(1) for t in toys] == [[], []]
    finally:
        pool.shutdown(wait=False)
        for space in spaces:
            for name in {"controller", "refit"} & space.keys():
                space[name].close()


@BOTH
def test_the_ten_lines_and_the_five_of_the_readme_meet(tmp_path):
    """As printed, but for the address and what `...` stands for. Real Megatron-Core on two ranks, real vLLM."""
    folder, out = tmp_path / "model", tmp_path / "trained"
    toy.write_checkpoint("qwen3", folder)
    words = {str(i): i for i in range(toy.config("qwen3")["vocab_size"])}
    Tokenizer(models.WordLevel(words, unk_token="0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    values = dict(at=f"tcp://127.0.0.1:{free_port()}", model=f"model={str(folder)!r}", asks="generate('5')")
    trainer, engine = filled(ROOT / "README.md", **values)
    with Family(tmp_path) as family:
        ranks = family.ranks("megatron_main", 2, "trainer", XFER_TOKEN=TOKEN)
        serving = family.start("engine", "engine", "vllm_main", XFER_TOKEN=TOKEN)
        serving.say(do="printed", lines=engine)
        first, _ = ranks.ask("printed", lines=trainer, folder=str(folder), out=str(out), steps=2)
        assert [report["xfer/committed"] for report in first["logged"]] == [1, 1]
        serving.expect("printed")
        live, untrained, trained = serving.ask("reloaded", version=3, folders=[str(folder), str(out)])["sums"]
        assert live == trained != untrained


FUSED_EXPERTS = r"""
import os, re, sys
import torch, torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
import xfer
page, folder = sys.argv[1:]
code = next(b for b in re.findall(r"```python\n(.*?)```", open(page).read(), re.S) if "def tensors()" in b)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(
    hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, num_experts=5, vocab_size=64, head_dim=8, tie_word_embeddings=False))
assert any(n.endswith("experts.gate_up_proj") for n, _ in model.named_parameters())
if dist.get_rank() == 0:
    model.save_pretrained(folder)
dist.barrier()
for layer in model.model.layers:
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
space = {"model": model, "FSDPModule": FSDPModule}
exec(code, space)
for module in (model, model.model.layers[0]):
    module.unshard()  # as a forward may leave it
mine, saved = space["tensors"](), load_file(folder + "/model.safetensors")
held = {n for n in mine if ".experts." in n}
assert all(v.untyped_storage().data_ptr() for v in (mine[n] for n in held)) and len(held) == 2 * 3 * (3, 2)[dist.get_rank()]
for name, value in mine.items():
    assert torch.equal(value if name in held else value.full_tensor(), saved[name]), name
names = [None, None]
dist.all_gather_object(names, sorted(mine))
assert {*names[0], *names[1]} == {*saved} and not held & {n for n in names[1 - dist.get_rank()]}
layout = xfer.TensorTrainer(space["tensors"]).read()
pointers = {p.to_local().untyped_storage().data_ptr() for p in model.parameters()}
assert {t.untyped_storage().data_ptr() for t in layout.tensors.values()} <= pointers, "something was copied"
"""


@pytest.mark.engine
@pytest.mark.slow
def test_fused_experts_of_an_fsdp2_model_are_given_under_the_checkpoints_names(tmp_path):
    """transformers 5 is the engines' here. Five experts over two ranks, against what transformers itself saves."""
    (tmp_path / "rank.py").write_text(FUSED_EXPERTS)
    run = [str(tmp_path / "rank.py"), str(ROOT / "docs/guide.md"), str(tmp_path / "model")]
    job = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    with open(tmp_path / "log", "w") as log:
        envs = [environment(RANK=r, LOCAL_RANK=r, **job) for r in "01"]
        ranks = [forge.start(sys.executable, run, env, ROOT, log, log) for env in envs]
        try:
            codes = [p.wait(120 * PATIENCE) for p in ranks]
        finally:
            for p in ranks:
                p.kill()
    assert codes == [0, 0], (tmp_path / "log").read_text()[-3000:]
