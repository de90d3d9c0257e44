"""What the pages print as code: it runs as printed, or at least every name and argument in it exists.

The ten lines run against toys for model and engine (tests/support/world.py); between them everything is real.
"""

import ast
import builtins
import inspect
import queue
import re
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

import xfer
from tests.functional.test_session_controller import ToyLLM
from tests.support.world import TOKEN, ToyEngine, ToySource, free_port

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
YOURS = {*"model_chunks other_chunks bridge batches train_step loss_of log folder net matrices others optimizer".split()}
"""What a reader has already, under names that say so."""


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)


PRINTED = [pytest.param(b, id=f"{p.name}-{i}") for p in PAGES for i, b in enumerate(blocks(p))]


@pytest.mark.parametrize("block", PRINTED)
def test_printed_code_binds_every_name_that_it_uses(block):
    nodes = list(ast.walk(ast.parse(block)))
    names = [n for n in nodes if isinstance(n, ast.Name)]
    made = {n.id for n in names if not isinstance(n.ctx, ast.Load)} | {n.arg for n in nodes if isinstance(n, ast.arg)}
    made |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    for n in nodes:
        if isinstance(n, ast.Import | ast.ImportFrom):
            made |= {(a.asname or a.name).split(".")[0] for a in n.names}
    assert {n.id for n in names} <= made | YOURS | set(dir(builtins))


@pytest.mark.parametrize("block", PRINTED)
def test_printed_calls_of_xfer_have_arguments_that_exist(block):
    for call in (n for n in ast.walk(ast.parse(block)) if isinstance(n, ast.Call)):
        where = ast.unparse(call.func)
        if not re.fullmatch(r"xfer\.\w+", where):
            continue
        takes = inspect.signature(getattr(xfer, where.removeprefix("xfer.")))
        takes.bind(*call.args, **{k.arg: None for k in call.keywords})


def test_the_ten_lines_run_in_a_loop_whose_batches_the_engines_sample(monkeypatch):
    """Engines without weights, and a trainer that waits for what they sample: nobody may wait for the other."""
    trainer, engine = blocks(ROOT / "docs/guide.md")[:2]
    at = f"tcp://127.0.0.1:{free_port()}"
    assert trainer.count("tcp://10.0.0.1:29600") == engine.count("tcp://10.0.0.1:29600") == 1
    trainer, engine = (text.replace("tcp://10.0.0.1:29600", at) for text in (trainer, engine))
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
    spaces, raised = [left, {}, {}], []

    def run(text, space):
        try:
            exec(text, space)
        except BaseException as e:
            raised.append(e)

    second = engine.replace("replica=0", "replica=1")
    assert second != engine
    threads = [threading.Thread(target=run, args=a, daemon=True) for a in zip((trainer, engine, second), spaces)]
    try:
        [t.start() for t in threads]
        [t.join(40) for t in threads]
        assert not raised and not any(t.is_alive() for t in threads), raised
        assert left["report"].version == "2" and left["report"].committed == 2 and not wrong
        assert [t.takers[0].wrong(1) for t in toys] == [[], []]
    finally:
        for space in spaces:
            for name in ("controller", "refit"):
                if name in space:
                    space[name].close()
