"""The example's arithmetic without models: advantages, packing, the loss against finite differences, gate and versions;
its clients and scripts."""

import asyncio
import importlib
import json
import math
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common.ports import free_port
from examples.grpo import gate, grpo, in_flight, summary
from examples.grpo.client import RolloutClient, ServeClient
from examples.grpo.replicas import wait_healthy
from examples.grpo.samples import Sample, Span, require_version
from examples.grpo.task import SortDigits
from tests.support.http import serving
from tests.support.proc import PATIENCE, ROOT
from xfer.errors import DeadlineExceeded, EngineLost, LayoutError, Unsupported, XferError
from xfer.tested import TRAINERS


def sample(prompt, tokens, logprobs=None, spans=None):
    logprobs, spans = logprobs or [-1.0] * len(tokens), spans or [Span("3", 0, len(tokens))]
    return Sample(*map(tuple, (prompt, tokens, logprobs, spans)))


def test_a_right_answer_has_reward_one_and_each_place_counts():
    task = SortDigits(3)
    assert task.prompts(5, 4) == task.prompts(5, 4) != task.prompts(6, 4)
    (prompt,) = task.prompts(0, 1)
    right = sorted(prompt[1:4])
    assert task.reward(prompt, right) == 1
    assert task.reward(prompt, [31, *right[1:]]) == pytest.approx(2 / 3)
    assert task.reward(prompt, [31, 31, 31]) == 0


@given(st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=5))
def test_advantages_have_no_mean_and_equal_rewards_teach_nothing(rewards):
    got = grpo.advantages(torch.tensor(rewards, dtype=torch.float64))
    assert got.sum(1).abs().max() < 1e-6
    for row, r in zip(got, rewards):
        assert (row == 0).all() or len(set(r)) > 1
        assert row.abs().max() <= math.sqrt(3) + 1e-9


@given(st.integers(1, 5), st.integers(1, 8), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 4))
def test_ranks_get_equal_micro_batches_with_every_row_once_or_are_refused(prompts, answers, multiple, ranks, count):
    """What the model reads of a row is padded to a multiple."""
    groups = [[sample([10, g, 11], [i, g, 7, i]) for i in range(answers)] for g in range(prompts)]
    rewards = torch.arange(prompts * answers, dtype=torch.float32).reshape(prompts, answers)
    batch = grpo.pack(groups, rewards, multiple)
    assert (batch.tokens.shape[1] - 1) % multiple == 0
    assert {t.dtype for t in (batch.logprobs, batch.advantages)} == {torch.float64}  # what `shared` receives into
    each, rest = divmod(prompts * answers, ranks * count)
    with pytest.raises(LayoutError, match="evenly") if rest else nullcontext():
        pieces = [batch.pieces(r, ranks, count) for r in range(ranks)]
        assert [[len(p.tokens) for p in mine] for mine in pieces] == [[each] * count] * ranks
        rows = [row for mine in pieces for p in mine for row in p.tokens[:, :7].tolist()]
        assert sorted(rows) == sorted([*s.prompt, *s.tokens] for g in groups for s in g)


@given(ranks=st.integers(1, 8), tp=st.integers(1, 8), pp=st.integers(1, 8))
def test_ranks_are_cut_by_the_layout_or_refused(ranks, tp, pp):
    text = f"{ranks} trainer ranks cannot be cut by tp {tp} times pp {pp}\n.*--tp"
    with pytest.raises(LayoutError, match=text) if ranks % (tp * pp) else nullcontext():
        assert grpo.data_parallel(ranks, tp, pp) * tp * pp == ranks


def test_the_loss_has_the_gradient_of_the_clipped_ratio():
    torch.manual_seed(0)
    engine = torch.randn(6, 3, dtype=torch.float64) - 2
    gain = torch.randn(6, dtype=torch.float64)
    b = grpo.Batch(torch.zeros(6, 8, dtype=torch.int64), engine, gain, prompt=4)
    out = torch.zeros(6, 7)
    out[:, 3:6] = -(engine + 0.4 * torch.randn(6, 3)).float()
    out.requires_grad_()
    loss, said = grpo._loss(0.2, b, out)
    loss.backward()
    ratio = (-out[:, 3:6].detach().double() - engine).exp()
    held = ((gain[:, None] > 0) & (ratio > 1.2)) | ((gain[:, None] < 0) & (ratio < 0.8))
    want = torch.where(held, 0.0, ratio * gain[:, None]) / ratio.numel()
    torch.testing.assert_close(out.grad[:, 3:6].double(), want, rtol=1e-4, atol=1e-7)
    assert held.any() and not held.all() and out.grad[:, :3].abs().sum() + out.grad[:, 6:].abs().sum() == 0
    assert said["gap"][0] == 18


@given(st.lists(st.floats(-3, 0), min_size=1, max_size=20), st.floats(-0.1, 0.1), st.integers(1, 4))
def test_the_gap_does_not_depend_on_how_tokens_are_cut(logprobs, shift, parts):
    t = torch.tensor(logprobs, dtype=torch.float64)
    whole = gate.gap(gate.sums(t + shift, t))
    cut = gate.gap(gate.added([gate.sums(p + shift, p) for p in t.chunk(parts)]))
    for a, b in ((whole.error, cut.error), (whole.kl, cut.kl), (whole.worst, cut.worst)):
        assert a == pytest.approx(b, abs=1e-12)
    assert whole.error == pytest.approx(math.exp(abs(shift))) and whole.kl >= -1e-15


@pytest.mark.parametrize("error", [1.0, 1.05, 1.0501, float("nan"), float("inf")])
def test_the_gate_fires_above_its_limit_and_on_nan(error):
    with nullcontext() if error <= 1.05 else pytest.raises(gate.GateFired, match="step 3"):
        gate.Gate(1.05, None).judge(3, gate.Gap(10, error, 0.0, 0.0))


def test_the_summary_has_the_share_of_refits_without_the_first_step(tmp_path, monkeypatch, capsys):
    curve, out = tmp_path / "curve", tmp_path / "out"
    times = [(1.5, 5.0, 9.0), (1.1, 0.1, 4.0), (1.2, 0.3, 6.0)]
    rows = [gate.Row(i, str(i), i / 2, error, 0.1 * i, 0.2, *both) for i, (error, *both) in enumerate(times)]
    for row in rows:
        gate.Gate(2, curve).keep(row)
    assert gate.read_curve(curve) == rows
    monkeypatch.setattr(sys, "argv", ["summary", str(curve), "--table", "--out", str(out), "--note", "device=cpu x=1"])
    summary.main()
    said = capsys.readouterr().out
    whole = json.loads(out.read_text())
    assert whole["notes"] == {"device": "cpu x=1"} and len(whole["rows"]) == 3
    got = whole["totals"]
    assert got["refit-share"] == pytest.approx(0.4 / 10) and got["refit-ms"] == pytest.approx(200)
    assert got["mean(exp|d|)-1"] == pytest.approx(0.5) and got["reward"] == pytest.approx(0.5)
    assert "| 2 | 1.000 | 2.00e-01 |" in said and "refit-share 0.04" in said
    assert summary.totals(rows[:1])["refit-share"] == pytest.approx(5 / 9)  # one step is all there is
    monkeypatch.setattr(sys, "argv", ["summary", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="no step was made"):
        summary.main()


def executable(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """Runs a copy of a script, apart from this checkout's environments: one that goes wrong must not reach those."""
    for name in ("CUDA_VISIBLE_DEVICES", "SERVE"):
        monkeypatch.delenv(name, raising=False)

    def run(script: str, *words: str, **env: str) -> subprocess.CompletedProcess:
        how = dict(cwd=run.folder, env={**os.environ, **env}, capture_output=True, text=True, timeout=60 * PATIENCE)
        return subprocess.run([run.folder / script, *words], **how)

    run.folder = tmp_path / "copy"
    more = (ROOT / "pyproject.toml", ROOT / "xfer/tested.py")
    for script in (*ROOT.glob("scripts/*.sh"), *ROOT.glob("examples/grpo/*.sh"), *more):
        to = run.folder / script.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(script, to)
    return run


STAND_IN = """#!/usr/bin/env bash
# A Python that says how many GPUs it has, and what it is started with.
case "$*" in
  *device_count*) echo "$(cat "$0.gpus")" ;;
  *free_port*) echo $((20000 + RANDOM % 10000)) ;;
  *"torch.distributed.run"* | *vllm.entrypoints* | *examples.grpo.rollout*)
    echo "$0 ${CUDA_VISIBLE_DEVICES-unset}" >>started
    case "$*" in *torch.distributed.run*) ;; *) exec sleep 60 ;; esac
    for i in {1..100}; do
      [ "$(wc -l <started)" != "$STARTS" ] || exit 0
      sleep 0.1
    done
    exit 1 ;;
esac
"""


@pytest.mark.parametrize("serve", [None, 2])
@pytest.mark.parametrize("trainers, engines", [(4, 4), (4, 0), (0, 0), (3, 4)])
def test_each_process_has_gpus_of_its_own_or_none_has_any(copy, serve, trainers, engines):
    """Two trainer ranks, and a vLLM of two ranks or servers of one. GPUs are used where both sides' torch can use enough of them."""
    env = {"STARTS": str(1 + (serve or 1)), **({"SERVE": str(serve)} if serve else {})}
    for side, gpus in (("trainer", trainers), ("engine", engines)):
        env[f"{side.upper()}_PYTHON"] = executable(copy.folder / side, STAND_IN)
        (copy.folder / f"{side}.gpus").write_text(str(gpus))
    done = copy("examples/grpo/run.sh", "0.6b", **env)
    assert done.returncode == 0, done.stderr
    said = [x.split(" ", 1) for x in (copy.folder / "started").read_text().splitlines()]
    seen = {side: [gpus for who, gpus in said if who.endswith(side)] for side in ("trainer", "engine")}
    assert len(seen["trainer"]) == 1 and len(seen["engine"]) == (serve or 1)
    if min(trainers, engines) < 2 + (serve or 2):
        assert {gpus for _, gpus in said} == {""}
        done = copy("examples/grpo/run.sh", "0.6b", "--device", "cuda", **env)
        assert done.returncode == 2 and "2 trainer ranks and " in done.stderr, done.stderr
        return
    every = {str(i) for i in range(min(trainers, engines))}
    assert all(set(gpus.split(",")) == every for _, gpus in said), "a process maps the memory of GPUs that it sees"
    own = seen["trainer"][0].split(",")[:2]
    for gpus in seen["engine"]:
        own += gpus.split(",")[: 1 if serve else 2]
    assert len(own) == len(set(own)), said


USAGE = "scripts/setup.sh [all | trainer engine rl docs]"


@pytest.mark.parametrize(
    "script, words, code, says",
    [
        ("scripts/setup.sh", ["engines"], 2, USAGE),
        ("scripts/setup.sh", ["trainer", "all"], 2, USAGE),
        ("scripts/demo.sh", ["--steps", "2", "--help"], 0, "scripts/demo.sh [--steps N]"),
        ("scripts/demo.sh", ["--step", "2"], 2, "no option --step\n"),
        ("scripts/demo.sh", ["--plan", "--steps", "two"], 2, "--steps two: a whole number"),
        ("scripts/demo.sh", ["--svg"], 2, "--svg needs a value"),
        ("scripts/test.sh", ["-k", "plan", "--help"], 0, "scripts/test.sh --unit       unit tests only"),
        ("scripts/test.sh", ["-k", "plan", "--units"], 2, "no option --units; options of pytest go behind a --"),
        ("scripts/architectures.sh", ["--slow"], 2, "Takes no options"),
        ("examples/grpo/serve.sh", ["--help"], 0, "examples/grpo/serve.sh MODEL PORT"),
    ],
)
def test_scripts_tell_their_usage_and_do_nothing(copy, script, words, code, says):
    done = copy(script, *words, PYTHON="/nonexistent", WORK="work")
    assert done.returncode == code and says in done.stdout + done.stderr
    assert not (copy.folder / "work").exists() and not (copy.folder / ".venvs").exists()


def test_an_environment_that_cannot_be_made_is_not_installed_into(copy, tmp_path):
    """Where an older one lies in its place: pip would change that one, and the stamp would call it new."""
    for side in ("trainer", "engine"):
        executable(copy.folder / f".venvs/{side}/bin/pip", f"#!/bin/sh\necho {side} $* >>{tmp_path}/installed\n")
    mine = ".".join(map(str, sys.version_info[:2]))
    core = next(t.core for t in TRAINERS if t.python == mine)
    done = copy("scripts/setup.sh", "all", PYTHON=python_without_venv(tmp_path), TRAINER=core)
    assert done.returncode and all(f"setting up .venvs/{side} failed" in done.stdout for side in ("trainer", "engine"))
    assert not (tmp_path / "installed").exists() and not list(copy.folder.glob(".venvs/*/.stamp"))


def test_the_environment_of_rl_frameworks_comes_with_the_engines(copy, tmp_path):
    """It sees the engine's packages, torch among them. The pages of frameworks begin with `scripts/setup.sh rl` alone."""
    done = copy("scripts/setup.sh", "rl", PYTHON=python_without_venv(tmp_path))
    begun = {f"setting up .venvs/{name} (a few minutes, once)" for name in ("rl", "engine")}
    assert begun <= {*done.stdout.splitlines()}
    assert ".venvs/trainer" not in done.stdout and ".venvs/docs" not in done.stdout


def test_a_trainer_that_is_not_tested_is_refused_with_those_that_are(copy):
    done = copy("scripts/setup.sh", PYTHON=sys.executable, TRAINER="0.1")
    assert done.returncode == 1 and "TRAINER=0.1" in done.stderr and not list(copy.folder.glob(".venvs/*"))
    assert all(f"  {t.core}, Python {t.python}\n" in done.stderr for t in TRAINERS if "+" not in t.torch)


def python_without_venv(tmp_path: Path) -> str:
    """A Python that makes no environment."""
    return executable(tmp_path / "python", f'#!/bin/sh\n[ "$1" != -m ] || exit 1\nexec {sys.executable} "$@"\n')


def test_a_token_of_another_version_is_named():
    good, mixed = sample([1], [2, 3]), sample([1], [2, 3, 4], spans=[Span("2", 0, 1), Span("3", 1, 3)])
    require_version([good], "3")
    with pytest.raises(XferError, match="version '3'") as e:
        require_version([good, mixed], "3")
    assert "1 tokens were made by version '2'" in str(e.value)


@pytest.mark.parametrize(
    "broken", [{"logprobs": [-1.0]}, {"spans": []}, {"spans": [["3", 0, 1]]}, {"spans": [["3", 0, 2], ["4", 1, 2]]}]
)
def test_a_sample_whose_parts_do_not_fit_is_refused(broken):
    whole = {"prompt": [1], "tokens": [2, 3], "logprobs": [-1.0, -2.0], "spans": [["3", 0, 2]]}
    assert Sample.read(json.loads(json.dumps(whole))).versions == ("3",)
    with pytest.raises(XferError, match="cannot be used"):
        Sample.read(whole | broken)


@pytest.mark.parametrize("code", [500, 503, 403, 404])
def test_a_replica_that_says_it_failed_is_not_asked_again_and_a_wrong_request_is_an_error(code):
    good = {"prompt": [1], "tokens": [2], "logprobs": [-1.0], "spans": [["3", 0, 1]]}
    with serving(
        lambda *_: (code, "out of memory"),
        lambda method, path, body: (200, {"groups": [[good] for _ in json.loads(body)["prompts"]]}),
    ) as urls:
        both, first = (RolloutClient(some, "token", 60.0 * PATIENCE) for some in (urls, urls[:1]))
        if code >= 500:
            got = both.sample([[1]] * 4, n=1, tokens=1, seed=0)
            assert [[s.tokens for s in g] for g in got] == [[(2,)]] * 4
            with pytest.raises(EngineLost, match="no replica is left") as e:
                first.sample([[1]], n=1, tokens=1, seed=0)
            assert "out of memory" in e.value.violations[0]
        else:
            with pytest.raises(XferError, match=f"answered {code}") as e:
                both.sample([[1]] * 4, n=1, tokens=1, seed=0)
            assert type(e.value) is XferError
    with pytest.raises(EngineLost) as e:  # it has answered before, and does not listen any more
        both.sample([[1]], n=1, tokens=1, seed=0, replicas=[1])
    assert "cannot be reached" in e.value.violations[0]


def in_flight_of(monkeypatch, *chunks: list[int], then, policy: str = "drain", **more) -> in_flight.InFlight:
    """Whose AsyncLLM answers each request with these chunks of tokens. `then`: what is awaited after each chunk."""

    async def generate(prompt, params, name):
        for tokens in chunks:
            logprobs = [{t: SimpleNamespace(logprob=-1.0)} for t in tokens]
            one = SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason="length", **more)
            yield SimpleNamespace(outputs=[one])
            await then()

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    flight = in_flight.InFlight.__new__(in_flight.InFlight)  # its own __init__ serves a real engine
    engine, controller = SimpleNamespace(generate=generate), SimpleNamespace(version="3")
    vars(flight).update(engine=engine, controller=controller, policy=policy, under_way={}, again=0, _names=iter("abc"))
    return flight


@pytest.mark.parametrize(
    "how, seen", [("ends", Sample), ("fails", RuntimeError), ("is cancelled", asyncio.CancelledError)]
)
def test_nothing_is_under_way_once_a_request_has_ended_however_it_did(monkeypatch, how, seen):
    begun = asyncio.Event()

    async def then():
        begun.set()
        if how == "fails":
            raise RuntimeError("the engine is dead")
        if how == "is cancelled":
            await asyncio.Event().wait()

    async def ask():
        asked = asyncio.ensure_future(flight.sample([1], tokens=1))
        await begun.wait()
        if how == "is cancelled":
            asked.cancel()
        return (await asyncio.gather(asked, return_exceptions=True))[0]

    spans = [SimpleNamespace(version="3", start=0, end=1)]
    flight = in_flight_of(monkeypatch, [5], then=then, weight_versions=spans)
    assert isinstance(asyncio.run(ask()), seen) and not flight.under_way


@pytest.mark.parametrize("policy", ["drain", "abort", "continue", "keep_cache"])
@pytest.mark.parametrize("changes", [False, True])
def test_where_vllm_names_no_weights_an_answer_is_of_one_version_or_asked_again(monkeypatch, policy, changes):
    """As 0.25 does not. A refit comes during the first request, if `changes`."""

    async def then():
        flight.controller.version = "4" if changes else "3"

    flight = in_flight_of(monkeypatch, [5], [5, 6], then=then, policy=policy)
    if policy in ("continue", "keep_cache"):
        with pytest.raises(Unsupported, match="which weights made a token"):
            asyncio.run(flight.sample([1], tokens=2))
        return
    got = asyncio.run(flight.sample([1], tokens=2))
    assert got.spans == (Span("4" if changes else "3", 0, 2),) and flight.again == changes


def test_samples_of_a_server_that_names_no_weights_are_of_what_its_controller_serves():
    """It gives one answer, however many are asked for."""
    one = {"token_ids": [7, 8], "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]}}
    with serving(*[lambda *_: (200, {"choices": [one]})] * 2) as urls:
        client = ServeClient(urls, "token", 60.0 * PATIENCE)
        with pytest.raises(XferError, match="cannot be used"):  # nobody says whose they are
            client.sample([[1]], n=1, tokens=2, seed=0)
        client.version_of = ["3", "4"].__getitem__
        got = client.sample([[1], [2]], n=1, tokens=2, seed=0)
        assert [[s.spans for s in g] for g in got] == [[(Span("3", 0, 2),)], [(Span("4", 0, 2),)]]
        with pytest.raises(XferError, match="1 of 2 answers"):
            client.sample([[1], [2]], n=2, tokens=2, seed=0)


def test_servers_are_waited_for_and_named_when_they_do_not_come():
    late, never = free_port(), f"http://127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_healthy, [f"http://127.0.0.1:{late}"], 60.0 * PATIENCE)
        with serving(lambda *_: (200, ""), port=late) as urls:
            waiting.result(90 * PATIENCE)
            with pytest.raises(DeadlineExceeded, match="not all servers answered") as e:
                wait_healthy([*urls, never], 0.1)
    assert e.value.violations == (f"{never}/health",)


@pytest.fixture
def ray_main(monkeypatch):
    """The module, with a Ray that says how it was started; as the real one, it joins no cluster and takes its CPUs, too."""
    started, found = [], []

    def init(address=None, **options):
        if address == "auto" and not (found or os.environ.get("RAY_ADDRESS")):
            raise ConnectionError("no cluster")
        if address != "local" and "num_cpus" in options:
            raise ValueError("num_cpus must not be given to a cluster that runs")
        started.append((address, options))

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    for name in ("placement_group", "scheduling_strategies"):
        monkeypatch.setitem(sys.modules, f"ray.util.{name}", MagicMock())
    monkeypatch.delitem(sys.modules, "examples.grpo.ray_main", raising=False)
    yield importlib.import_module("examples.grpo.ray_main"), started, found
    sys.modules.pop("examples.grpo.ray_main", None)


@pytest.mark.parametrize("address", [None, "local", "10.0.0.1:6379"])
@pytest.mark.parametrize("runs", [False, True])
def test_a_cluster_that_is_there_is_joined_and_else_one_is_started(ray_main, monkeypatch, address, runs):
    module, started, found = ray_main
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    found += [1] * runs
    module.start_ray(4)
    (where, options), own = started[0], address == "local" or address is None and not runs
    assert len(started) == 1 and (where, options.get("num_cpus")) == (("local", 4) if own else ("auto", None))
    assert options.get("log_to_driver", True), "what an actor raised would be seen nowhere"


@pytest.mark.parametrize("path, gpus", [(None, False), ("/elsewhere", True)])
def test_actors_find_this_repository_and_compile_where_there_are_gpus(ray_main, monkeypatch, path, gpus):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if path:
        monkeypatch.setenv("PYTHONPATH", path)
    given = ray_main[0].variables(gpus)
    assert given["PYTHONPATH"].split(os.pathsep) == [os.getcwd(), *([path] if path else [])]
    assert ("TORCHDYNAMO_DISABLE" in given) == ("XFER_CPU_RESIDENT" in given) == (not gpus)


def test_engines_with_another_version_of_python_are_refused(ray_main, tmp_path):
    ray_main[0].refuse_another_version(sys.executable)
    other = executable(tmp_path / "python", "#!/bin/sh\necho 3.9\n")
    with pytest.raises(SystemExit, match="Ray runs one version of Python: this one is 3.*python is 3.9"):
        ray_main[0].refuse_another_version(other)
