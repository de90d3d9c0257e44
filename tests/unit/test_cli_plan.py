"""`xfer plan` without a framework: descriptions and their mistakes, the numbers, the page, kept layouts, child processes."""

import contextlib
import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.lib.layouts import Model, engine, trainer
from benchmarks.plan_predictions import ranks
from xfer.cli import app, children
from xfer.cli import plan as plan_command
from xfer.cli.describe import ASSUMED, describe
from xfer.cli.examples import FOLDER
from xfer.cli.html import page, seconds, ticks
from xfer.cli.layouts import processes as tracing
from xfer.cli.layouts.child import TraceTask
from xfer.cli.layouts.processes import Framework, Tracer, _Processes, classes, look
from xfer.cli.plan_report import Header, KeptTotal, Report, make_report
from xfer.errors import DeadlineExceeded, XferError
from xfer.mesh.parallel import EngineParallel, TrainerParallel
from xfer.plan.explain import size
from xfer.plan.fabric import Fabric, Site
from xfer.plan.planner import plan_replicas
from xfer.plan.predict import predict
from xfer.plan.program import Op, row_wire_bytes

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


@pytest.fixture
def config(tmp_path) -> Path:
    folder = tmp_path / "Toy-1B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


# ---- descriptions

TWO_HOSTS = '[[host]]\nnames = ["a", "b"]\ngpus = 4\nnvlink = 1e11\nnic = 1e10\n'
FILES = {
    "odd.toml": "[[host]]\ngpus = 8\ncount = 1\nnvlnk = 1e9\n",
    "hosts.toml": TWO_HOSTS,
    "ranks.toml": TWO_HOSTS + '[ranks]\ntrainers = ["a:0-2"]\nreplicas = [["b:0-1"]]\n',
    "j.json": '{"trainer": [1], "engine": {"config": 3}, "fabrik": {}}',
    "list.json": "[1]",
    "half.json": "{",
    "none.json": '{"a": 1}',
}
T = "Toy-1B"


@pytest.mark.parametrize(
    "trainer_text, engine_text, more, said",
    [
        (None, None, {}, ['give --trainer "CONFIG', 'give --engine "CONFIG', "no config"]),
        ("world=8 provider=3", "args=x", {}, ["no config: begin a description", "provider: names and values", "args: names and"]),
        (T, "tp=16384 replicas=16384", {}, ["world=… is needed", "at most 16384 ranks"]),
        (f"{T} world=8 dp=3", "tp=2 keep=3", {}, ["tp*cp*dp*pp = 1*1*3*1 = 3, world is 8", "keep=3: a list of names"]),
        (f"{T} world=8 order=pp-tp", f"{T}/x.json tp=2", {}, ["order 'pp-tp' must name each", "x.json cannot be read"]),
        (f"{T} world=99999999", "half.json tp=1", {}, ["world=99999999: an integer from 1 to 16384", "half.json cannot be read as JSON"]),
        (f"{T} world='8", "tp=2", {}, ["No closing quotation", "no config"]),
        ("qwen3-5b world=2", "list.json tp=2", {}, ["qwen3-5b cannot be read", "no model_type"]),
        ("none.json world=1", "tp=1", {}, ["no model_type; a Hugging Face config.json, its folder, or one of deepseek-v3, "]),
        ("none world=5 tp=2 ppp=2 vpp=x tp=4", f"{T} tp=0 ep=3 replicas=true", {"fabric": "odd.toml"},
         ["none cannot be read: No such file", "trainer: unknown key 'ppp'", "trainer: vpp=x", "tp is given twice",
          "world 5 is not a multiple of tp*cp*pp", "engine: tp=0", "engine: ep=3", "engine: replicas=True", "unknown key 'nvlnk'",
          "world 5 is not a multiple of etp*ep*pp", "host[0].nvlink: None"]),
        (f"{T} world=8 tp=2 tensor_model_parallel_size=4 provider.pipeline_model_parallel_size=2 tensor_parallel_size=2",
         "tp=2 args.enable_expert_parallel=true", {},
         ["tp=2 and tensor_model_parallel_size=4 mean the same", "provider.pipeline_model_parallel_size: write pipeline_",
          "unknown key 'tensor_parallel_size'; known: config, world, tp, ", "args.enable_expert_parallel: write enable_expert_"]),
        (None, None, {"file": "j.json"}, ["unknown key 'fabrik'", "trainer: a table is needed", "engine: config=3"]),
        (f"{T} world=4", "tp=2 replicas=2", {"fabric": "ranks.toml"},
         ["places 3 trainers, there are world=4", "places replicas of [2] workers, there are 2 of 2"]),
        (f"{T} world=8", "tp=2", {"fabric": "hosts.toml"}, ["the fabric has GPUs 0..7"]),
    ],
)  # fmt: skip
def test_all_mistakes_of_both_sides_and_the_fabric_come_at_once(
    config, monkeypatch, trainer_text, engine_text, more, said
):
    monkeypatch.chdir(config.parent)
    for name, text in FILES.items():
        Path(name).write_text(text)
    with pytest.raises(XferError) as e:
        describe(trainer_text, engine_text, **more)
    bad = e.value.violations
    assert len(bad) <= len(said) and all(sum(words in v for v in bad) == 1 for words in said), bad


def test_the_frameworks_own_names_are_known(config):
    """As fields and as options."""
    ours = describe(f"{config} world=32 tp=2 pp=2 vpp=2 cp=2 dp=4 ep=2 etp=1", "tp=2 pp=2 dp=2 ep=true")
    theirs = describe(
        f"{config} world_size=32 tensor_model_parallel_size=2 --pipeline-model-parallel-size=2 "
        "virtual_pipeline_model_parallel_size=2 context-parallel-size=2 data_parallel_size=4 expert_model_parallel_size=2 "
        "expert_tensor_parallel_size=1",
        "tensor_parallel_size=2 pipeline_parallel_size=2 --data-parallel-size=2 enable_expert_parallel=true",
    )
    assert (theirs.trainer, theirs.engine) == (ours.trainer, ours.engine)


def test_models_that_come_with_xfer_are_known_by_name_and_a_path_goes_before_them(config, monkeypatch):
    monkeypatch.chdir(config.parent)
    assert describe("qwen3-4b world=2", "tp=2").trainer.config.title == "qwen3-4b (Qwen3ForCausalLM)"
    config.rename(config.parent / "qwen3-4b")
    assert describe("qwen3-4b world=2", "tp=2").trainer.config.content == CONFIG
    page = (ROOT / "docs/plan.md").read_text()
    assert [p.stem for p in FOLDER.glob("*.json") if f"`{p.stem}`" not in page] == []


@pytest.mark.parametrize("name", ["fabric.toml", "job.toml"])
def test_the_examples_that_come_with_xfer_are_those_of_the_page_and_work(name):
    page = (ROOT / "docs/plan.md").read_text()
    assert f"```toml\n{(FOLDER / name).read_text()}```" in page
    told = describe(file=str(FOLDER / "job.toml"))
    assert len(told.site.fabric.hosts) == 2 and told.engine.replicas == 2 and told.fabric == "fabric.toml"


def test_text_and_a_file_say_the_same(config, tmp_path):
    """Paths count from the file, whose fabric may be a path or tables; options replace its parts."""
    fabric = "[[host]]\ncount = 3\ngpus = 8\nnvlink = 396e9\nnic = 48.5e9\n"
    (tmp_path / "f.toml").write_text(fabric)
    job = (
        '{}\n[trainer]\nconfig = "Toy-1B"\nworld = 8\ntp = 2\n[trainer.provider]\na_field = 3\n'
        '[engine]\ntp = 4\nreplicas = 3\nkeep = ["x", "y"]\n{}'
    )
    (tmp_path / "path.toml").write_text(job.format('fabric = "f.toml"', ""))
    (tmp_path / "inside.toml").write_text(job.format("", fabric.replace("[[host]]", "[[fabric.host]]")))
    text = describe(f"{config} world=8 tp=2 provider.a_field=3", "tp=4 replicas=3 keep=x,y", str(tmp_path / "f.toml"))
    for file in ("path.toml", "inside.toml"):
        told = describe(file=str(tmp_path / file))
        assert (told.trainer.parallel, told.trainer.provider) == (text.trainer.parallel, {"a_field": 3})
        assert (told.engine.parallel, told.engine.replicas, told.engine.keep) == (EngineParallel(tp=4), 3, ("x", "y"))
        assert told.site == text.site and told.engine.config.content == CONFIG
    assert describe(engine="tp=8", file=str(tmp_path / "path.toml")).engine.parallel.tp == 8
    assert text.engine.config == text.trainer.config and text.trainer.config.title == "Toy-1B (Qwen3ForCausalLM)"


def test_without_a_fabric_one_is_assumed_and_names_come_from_an_index(config):
    told = describe(f"{config} world=12", "tp=4 replicas=3")
    assert told.fabric == ASSUMED and len(told.site.fabric.hosts) == 4 and told.trainer.config.names is None
    assert told.site.replicas == ((16, 17, 18, 19), (20, 21, 22, 23), (24, 25, 26, 27))
    (config / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"b": "x", "a": "x"}}))
    assert describe(f"{config} world=1", "tp=1").trainer.config.names == ("a", "b")


def test_help_is_quick_and_imports_nothing_heavy():
    code = "import sys, xfer.cli; print([m for m in ('torch', 'numpy', 'msgspec', 'megatron', 'vllm') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"
    told = CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "200"}).output
    assert not [part for part in ("scripts/", "docs/", ".venvs") if part in told], "only a checkout has these"


# ---- numbers


def reported(
    world: int = 8, workers: int = 2, replicas: int = 2, gpus: int = 4, **sizes: int
) -> tuple[Report, list, Site]:
    """A report of a small declared mapping, its plans and site."""
    model = Model.named("qwen3-30b-a3b", num_hidden_layers=1, num_experts=8, vocab_size=6400)
    catalog, sources, destinations = ranks(model, TrainerParallel(world=world, **sizes), workers)
    hosts = -(-world // gpus) + -(-workers * replicas // gpus)
    site = Site.packed(
        Fabric.uniform(hosts, gpus, nvlink=396 * 10**9, nic=48 * 10**9, local=10**12), world, replicas, workers
    )
    plans = plan_replicas(catalog, sources, destinations, site, bucket_bytes=4 << 20)
    return make_report(Header("a model", "TP2", "TP2", "a fabric", ("a note",)), catalog, plans, site), plans, site


@pytest.fixture(scope="module")
def small() -> tuple[Report, list, Site]:
    return reported(tp=2, ep=4, etp=1)


def test_ranks_of_one_class_hold_the_same_and_others_do_not():
    of = TrainerParallel(world=16, tp=2, pp=2, ep=4, etp=1)
    model = Model.named("qwen3-30b-a3b", num_hidden_layers=2, num_experts=8, vocab_size=640)
    catalog = model.catalog()
    digests = [trainer(model, of, r).trainer(catalog, r).digest() for r in range(16)]
    found = classes(of, 16)
    assert len(set(found)) == 8 == len(set(digests))
    assert all((found[i] == found[j]) == (digests[i] == digests[j]) for i in range(16) for j in range(16))
    assert all(classes(EngineParallel(tp=2, **more), 4) == [0, 1, 2, 3] for more in ({"dp": 2}, {"pp": 2}))


def test_numbers_are_those_of_all_rows(small):
    """Rows, not summaries: every sub-plan is expanded and added up by hand."""
    r, plans, site = small
    table = np.zeros((8, 4), np.int64)
    fills = 0
    for k, plan in enumerate(plans):
        for rows in plan.rows():
            fills += int((rows["op"] == Op.FILL).sum())
            rows = rows[rows["op"] != Op.FILL]
            np.add.at(table, (rows["src"], rows["dst"] - 8 + 2 * k), row_wire_bytes(rows))
    assert r.matrix.unit == "rank" and np.array_equal(r.matrix.nbytes, table)
    assert r.nbytes == table.sum() and r.bytes_per_replica == tuple(table.reshape(8, 2, 2).sum(axis=(0, 2)).tolist())
    assert (r.most_out.nbytes, r.most_in.nbytes) == (table.sum(axis=1).max(), table.sum(axis=0).max())
    assert r.most_out.rank == f"trainer {table.sum(axis=1).argmax()}" and r.most_out.mean == r.nbytes / 8
    assert r.fills == fills and r.byte_classes["written"] == r.nbytes and r.broadcast_bytes == 4 * r.model_bytes
    p = predict(plans, site)
    assert (r.transfer_s, r.floor_s, r.phases) == (p.transfer_s, p.floor_s, p.phases())
    assert sum(w.nbytes for w in r.timeline) + r.pulled_bytes == r.nbytes == r.between_hosts
    by_kind = [(n, s) for k in r.kinds for n, s in zip(k.nbytes, k.seconds)]
    assert sum(n for n, _ in by_kind) == p.link_bytes.sum() and max(s for _, s in by_kind) == r.busiest[0].seconds
    nics = {k.name: sum(k.nbytes) for k in r.kinds if k.name.startswith("NIC")}
    assert nics == {"NIC out": r.nbytes, "NIC in": r.nbytes}
    assert all(n.endswith(k.name.split()[-1]) for k in r.kinds if k.name.startswith("NIC") for n in k.links)


def printed(r: Report) -> str:
    with pytest.MonkeyPatch.context() as m, contextlib.redirect_stdout(io.StringIO()) as out:
        m.setenv("COLUMNS", "160")
        plan_command.show(r)
    return out.getvalue()


def test_what_is_printed_is_what_was_computed(small):
    r, plans, _ = small
    text, s = re.sub(" +", " ", printed(r)), plans[0].summary
    for part in (
        f"a replica │ {size(s.nbytes)}", f"all replicas │ {size(2 * s.nbytes)}", f"a full broadcast │ {size(2 * s.broadcast_bytes)}",
        f"transfer │ {seconds(r.transfer_s)}", f"floor │ {seconds(r.floor_s)}", f"{r.fills:,} constant regions",
        f"{sum(p.summary.direct for p in plans):,} pieces", "a note",
        *(f"{b.name} │ {seconds(b.seconds)} │ {size(b.nbytes)}" for b in r.busiest[:8]),
    ):  # fmt: skip
        assert part in text, part
    assert json.loads(msgspec.json.encode(r))["nbytes"] == r.nbytes


# ---- the page


class Parsed(HTMLParser):
    """Tags, attributes and texts of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.attributes, self.words = [], [], []
        self.handle_data = self.words.append
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs


TAGS = set("html head meta title style body main h1 h2 p div b em i u span table tr td th".split())


@pytest.mark.parametrize("times", [1, 200])
def test_waves_keep_their_numbers_when_some_have_no_bytes_on_the_wire(small, times):
    """Bytes that are pulled inside an island are on no wire. Each wave keeps its number in the plan, alone or in a run of waves."""
    wave = small[0].timeline[0]
    waves = tuple(replace(wave, nbytes=n) for n in [0] * 40 + [5, 0, 7, 7, 0, 0, 0, 3] * times)
    runs = re.findall(r"waves? (\d+)(?: to (\d+))?: ", page(replace(small[0], timeline=waves)))
    told = [range(int(a), int(b or a) + 1) for a, b in runs]
    assert {i for r in told for i in r} >= {i for i, w in enumerate(waves) if w.nbytes}
    assert all(any(waves[i].nbytes for i in r) for r in told)
    assert len({i for r in told for i in r}) == sum(map(len, told))


def test_the_page_stands_alone_and_a_hostile_name_is_only_text(small):
    r = small[0]
    evil = "\"><script>alert(1)</script><img src=x onerror='x'>&lt;\x00"
    link = replace(r.busiest[0], name=evil)
    matrix = replace(r.matrix, rows=(evil, *r.matrix.rows[1:]), columns=(evil, *r.matrix.columns[1:]))
    kinds = tuple(replace(k, links=(evil, *k.links[1:])) for k in r.kinds)
    kept = (KeptTotal(evil, 1, 1, evil),)
    more = dict(matrix=matrix, kinds=kinds, kept=kept, casts=(evil,), dropped=(evil,))
    hostile = replace(r, header=Header(evil, evil, evil, evil, (evil,)), busiest=(link,), **more)
    for text in map(page, (r, hostile)):
        parsed = Parsed(text)
        assert set(parsed.tags) <= TAGS and parsed.attributes.count(("class", "chart")) == 3 and len(text) < 400_000
        given = {n for n, _ in parsed.attributes}
        assert not given & {"src", "href", "srcset", "xlink:href", "action", "data"}
        assert not [n for n in given if n.startswith("on")]
        assert "://" not in text and "url(" not in text and "@import" not in text
        assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in parsed.attributes
    assert sum(w == evil.replace("\x00", " ") for w in parsed.words) >= 3  # nothing of it is lost either
    told = "a\x1b[31mb [red]c[/red]\x07"
    text = printed(replace(r, header=replace(r.header, model=told), busiest=(replace(link, name=told),)))
    assert "\x1b" not in text and "\x07" not in text and text.count("[red]c[/red]") == 2, "a terminal obeys no name"


@pytest.mark.parametrize("gpus, unit", [(8, "host"), (1, "group of 2 hosts")])
def test_many_ranks_are_shown_by_host_and_many_hosts_in_groups(gpus, unit):
    r, _, _ = reported(world=72, workers=8, replicas=9, gpus=gpus, ep=8, etp=1)
    assert r.matrix.unit == unit and max(len(r.matrix.rows), len(r.matrix.columns)) <= 64
    assert sum(map(sum, r.matrix.nbytes)) == r.nbytes
    assert Parsed(page(r)).tags.count("i") < 7000


def test_numbers_on_axes():
    assert all(
        len(ticks(x)) <= 10 and 0 in ticks(x) and ticks(x)[-1] <= x * 1.0001 for x in (0, *np.geomspace(1e-7, 1e4, 200))
    )
    assert [seconds(x) for x in (0, 2e-7, 0.0005, 0.3181, 12.34)] == ["0 s", "0.2 us", "500 us", "318 ms", "12.3 s"]


# ---- what was traced before, and processes


def test_a_key_tells_apart_everything_that_a_layout_depends_on(monkeypatch):
    """Descriptions, classes of ranks, catalogs, versions, and the environment that the processes may read."""
    catalog = Model.named("qwen3-4b", num_hidden_layers=1).catalog()
    monkeypatch.setattr(tracing, "_python", lambda side, given: given)
    monkeypatch.setattr(tracing, "_versions", lambda python, side: {"vllm": python})

    def key(class_of=(0, 1), of=catalog, vllm="1", **more):
        found, _ = look({"engine": vllm})
        return Tracer({"engine": found["engine"]})._key(
            TraceTask("engine", CONFIG, {"tp": 2}, {}, **more), list(class_of), of
        )

    keys = [key()]
    monkeypatch.setenv("A_VARIABLE_OF_NOBODY", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")  # those processes get another value in any case
    assert key() == keys[0]
    keys += [key(of=None), key(keep=["x"]), key(class_of=(0, 0)), key(vllm="2")]
    for variable in ("VLLM_A=1", "VLLM_A=2", "VLLM_B=2", "NVTE_A=1", "XFER_CPU_RESIDENT=always"):
        monkeypatch.setenv(*variable.split("="))
        keys.append(key())
    monkeypatch.setitem(tracing.ENVIRONMENT, "OMP_NUM_THREADS", "77")
    keys.append(key())
    monkeypatch.setattr(tracing, "BOOT", tracing.BOOT + "\n")
    keys.append(key())
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "program, said",
    [
        (f'exec {sys.executable} -S "$@"', "has no megatron.bridge"),
        ("exit 1", "ended with code 1, and said nothing"),
        ("echo not this >&2; for i in 1 2 3 4 5; do echo .; done >&2; echo the reason >&2; exit 7", "ended with code 7: .*the reason$"),
        ('echo "$@"', "does not answer as Python does"),
        ("echo 3; echo the reason >&2", "does not answer as Python does: .*the reason$"),
        ("kill -9 $$", "ended with code -9"),
        ("exec sleep 60", "cannot be run: it gave no answer within 2 s"),
    ],
)  # fmt: skip
def test_an_interpreter_that_fails_is_told_by_its_code_and_last_words(tmp_path, monkeypatch, program, said):
    """And not by the program that it was to run."""
    monkeypatch.setattr(tracing, "ASKED_S", 2.0)
    for name, text in (("python", f"#!/bin/sh\n{program}\n"), ("none", "#!/no/such/program\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    found, missing = look({"trainer": str(tmp_path / "python"), "engine": str(tmp_path / "none")})
    mine, other = missing["trainer"], missing["engine"]
    assert not found
    assert mine.startswith(f"--trainer-python {tmp_path}/python ") and re.search(said, mine, re.S)
    assert "not this" not in mine and "json.dumps(" not in re.sub("(?s)does not answer.*", "", mine)
    assert other == f"--engine-python {tmp_path}/none cannot be run: No such file or directory"


def processes(folder: Path, side: str, ranks: int, text: str) -> _Processes:
    """Processes of a Python that runs `text` in place of the code that reads layouts, after a line that is no answer."""
    (folder / "fake.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nprint('chatter', flush=True)\n{text}"
    )
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {folder}/fake.py "$4"\n')
    python.chmod(0o755)
    return _Processes(
        partial(tracing._start, str(python)), TraceTask(side, CONFIG, {"tp": ranks}, {}), list(range(ranks))
    )


@pytest.mark.parametrize(
    "program, act, error, said",
    [
        ("print('the reason', file=sys.stderr); sys.exit(7)", lambda p: tracing._check([p]), XferError, "ended with code 7"),
        ("print('the reason', file=sys.stderr); sys.exit(7)", lambda p: Tracer({})._traced(p, None), XferError, "ended with code 7"),
        ("print('the reason', file=sys.stderr, flush=True); import os, time; os.fork(); time.sleep(600)",  # both hold its output
         lambda p: tracing._check([p]), DeadlineExceeded, "gave no answer within 2 s"),
    ],
)  # fmt: skip
def test_a_process_that_dies_or_says_nothing_is_an_error_with_its_last_words(
    tmp_path, monkeypatch, program, act, error, said
):
    monkeypatch.setattr(children, "ANSWER_S", 2.0 if error is DeadlineExceeded else 60.0)
    with processes(tmp_path, "trainer", 2, program) as p, pytest.raises(error, match=said) as e:
        act(p)
    assert "the reason" in e.value.violations


READS = """
from base64 import b64encode
from pathlib import Path
from xfer.cli.children import serve
from xfer.trace.catalog import Catalog
class Ranks:
    def read(self, rank, catalog):
        return b64encode(Catalog(()).to_bytes()).decode()
    def inventory(self, rank, catalog):
        return b64encode(Path({folder!r}, str(rank)).read_bytes()).decode()
serve("fake", Ranks)
"""


def test_processes_share_the_ranks_and_what_they_traced_is_kept(tmp_path):
    model = Model.named("qwen3-4b", num_hidden_layers=1)
    catalog = model.catalog()
    destinations = [engine(model, EngineParallel(tp=4), r).engine(catalog, r) for r in range(4)]
    for i in destinations:
        (tmp_path / str(i.rank)).write_bytes(i.to_bytes())
    said = []
    of = {"engine": Framework({}, lambda name, task: None)}
    tracer = Tracer(of, jobs=3, cache=tmp_path / "kept", progress=lambda side, done, of: said.append((side, done, of)))

    def layouts() -> tuple:
        said.clear()
        with processes(tmp_path, "engine", 4, READS.format(folder=str(tmp_path))) as p:
            found = tracer._layouts(p, catalog, [p])
        return found.catalog, [i.content() for i in found.ranks]

    traced, kept = [("engine", n, 4) for n in (0, 1, 2, 3, 4, 4)], [("engine", 4, 4)]
    whole = catalog, [i.content() for i in destinations]
    assert layouts() == whole and said == traced
    assert layouts() == whole and said == kept
    (file,) = (tmp_path / "kept").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert layouts() == whole and said == traced, "a damaged file is traced anew"


REFUSES = """
from xfer.cli.children import serve
from xfer.errors import Unsupported
def make():  # a trainer that is told to read has no such method, which is another error
    if b"engine" in open(sys.argv[1], "rb").read():
        raise Unsupported("no such size")
    return object()
serve("fake", make)
"""


def test_both_descriptions_are_checked_before_a_rank_is_traced(tmp_path, config):
    told = describe(f"{config} world=2 tp=2", "tp=2")
    with processes(tmp_path, "trainer", 1, REFUSES) as p:
        tracer = Tracer(dict.fromkeys(("trainer", "engine"), Framework({}, p.begin)))
    with pytest.raises(XferError, match="no such size"):
        tracer.trace(told.trainer, told.engine)
