"""Refits of engines that serve requests meanwhile. Real vLLM, bit for bit. Truth: what the same engine computed from the checkpoint on
disk before anything was refitted; a refit of the same weights must bring exactly that back."""

import json
import re
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")

from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from vllm.distributed.weight_transfer import (  # noqa: E402
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    WeightSource,
    WeightTransferTrainerFactory,
)

from examples.common import toy  # noqa: E402
from examples.common.ports import free_port  # noqa: E402
from tests.support.proc import PATIENCE, Family  # noqa: E402
from tests.support.refit_job import Job, a_refit, good, until  # noqa: E402
from tests.support.vllm_main import PROMPTS  # noqa: E402
from xfer.engines.choose_handle import handle_for  # noqa: E402
from xfer.errors import EngineLost, Unsupported, XferError  # noqa: E402
from xfer.integrations import vllm_trainer  # noqa: E402
from xfer.integrations.vllm_trainer import XferTrainerInitInfo  # noqa: E402
from xfer.routes import Packed  # noqa: E402

LONG = 100
LONGER = 2
"""The number of a prompt that is longer than a block."""


class Asynchronous:
    """An AsyncLLM in a process of its own, which it controls itself."""

    def __init__(self, family: Family, model, token: str, **how):
        self.faults = family.work / "engine.fault"
        self.child = family.start("engine", "engine", "async_main", XFER_TOKEN=token, XFER_FAULT_FILE=str(self.faults))
        self.ask = self.child.ask
        self.ask("start", model=str(model), **how)

    def connect(self, job: Job, **how) -> None:
        rendezvous = f"tcp://127.0.0.1:{free_port()}"
        self.ask("serve", rendezvous=rendezvous, **how)
        job.trainers.build(job.config)
        good(job.trainers.connect(rendezvous))
        self.ask("ready")

    def __getattr__(self, command: str):
        return lambda **how: self.ask(command, **how)

    def paused(self) -> bool:
        return self.ask("state")["paused"]

    def ended(self) -> list:
        return self.ask("answer")["answer"]

    def broken(self, tokens: int) -> list[bool]:
        """Whether each logprob is NaN, of an answer to a prompt that is longer than a block of the prefix cache."""
        self.begin(tokens=tokens, prompt=LONGER)
        return [x != x for x in self.ended()[1]]


class Server:
    """`vllm serve`. Trainer 0 controls it: `connect(engines=[url])`; no process beside the server is xfer's."""

    def __init__(self, family: Family, model):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        flags = f"--model {model} --served-model-name toy --skip-tokenizer-init --enforce-eager --dtype bfloat16"
        flags += f" --max-model-len 192 --max-num-seqs 4 --block-size 32 --host 127.0.0.1 --port {port}"
        args = [*flags.split(), "--weight-transfer-config", '{"backend": "xfer"}']
        self.child = family.start("server", "engine", "server_main", *args, XFER_LOG_LEVEL="INFO")
        until(self._up, 240, "the server is up")

    def _up(self) -> bool:
        assert self.child.proc.poll() is None, self.child.tail()
        try:
            return bool(urllib.request.urlopen(f"{self.url}/health", timeout=2))
        except OSError:
            return False

    def get(self, path: str, body: dict | None = None) -> dict:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        return json.loads(urllib.request.urlopen(request, timeout=120).read())

    def connect(self, job: Job) -> None:
        job.trainers.build(job.config)
        how = dict(do="connect", rendezvous=f"tcp://127.0.0.1:{free_port()}", deadline_s=60.0)
        waiting = job.trainers.say([0], engines=[self.url], **how) + job.trainers.say([1], **how)
        good([c.expect("connected", "raised", timeout=90) for c in waiting])

    def complete(self, prompt: list[int], tokens: int = 6) -> list:
        how = dict(temperature=0, max_tokens=tokens, logprobs=1, detokenize=False, ignore_eos=True)
        how |= dict(model="toy", return_token_ids=True, return_tokens_as_token_ids=True)
        choice = self.get("/v1/completions", {"prompt": prompt, **how})["choices"][0]
        return [choice["token_ids"], choice["logprobs"]["token_logprobs"]]

    def observe(self) -> dict:
        sums = self.get("/weight_checker", {"action": "checksum"})
        version = self.get("/weight_info")["weight_version"]
        return dict(outputs=[self.complete(p) for p in PROMPTS], checksums=sums, version=version)

    def pause(self) -> None:
        self.get("/pause?mode=keep", {"by": "its owner"})

    def resume(self) -> None:
        self.get("/resume", {"by": "its owner"})

    def paused(self) -> bool:
        return self.get("/is_paused")["is_paused"]

    def begin(self, tokens: int) -> None:
        self.request = ThreadPoolExecutor(1).submit(self.complete, PROMPTS[0], tokens)
        time.sleep(0.2)

    def ended(self) -> list:
        return self.request.result(60)


def same(a: dict, b: dict) -> list[bool]:
    return [a[k] == b[k] for k in ("outputs", "checksums")]


def refits_while_it_serves(job: Job, engine: Asynchronous | Server) -> dict:
    """A request under way freezes, and ends under the new weights. An owner's pause outlasts a refit. Returns the truth."""
    truth = engine.observe()
    engine.connect(job)
    a_refit(job, 2)
    other = engine.observe()
    assert same(other, truth) == [False, False] and other["version"] == "1"
    engine.begin(tokens=LONG)
    a_refit(job, 1)
    assert len(engine.ended()[0]) == LONG and not engine.paused()
    again = engine.observe()
    assert same(again, truth) == [True, True] and again["version"] == "2"
    engine.pause()
    good(job.trainers.refit(2, verify=True))
    assert engine.paused()
    engine.resume()
    assert same(engine.observe(), other) == [True, True]
    a_refit(job, 1)
    assert not engine.paused()
    return truth


def test_async_llm(tmp_path):
    with Job(tmp_path, "qwen3", world=2) as job:
        engine = Asynchronous(job.family, job.model, job.token, max_model_len=192)
        truth = refits_while_it_serves(job, engine)
        # After a worker raised in the middle, no request is answered until the next refit has committed.
        engine.faults.write_text("worker:0:moving:raise@1")
        failed = job.trainers.refit(3, deadline_s=20.0)
        assert all(r["kind"] == "raised" and "injected fault" in r["text"] for r in failed), failed
        engine.begin(tokens=6)
        time.sleep(1.0)
        state = engine.ask("state")
        assert state["torn"] and "injected fault" in state["error"] and not state["answered"], state
        a_refit(job, 1)
        assert engine.ended() == truth["outputs"][0]
        assert same(engine.observe(), truth) == [True, True]
        engine.pause_in_refit()
        good(job.trainers.refit(1))
        assert engine.paused()
        engine.resume()
        a_refit(job, 1)
        assert not engine.paused() and same(engine.observe(), truth) == [True, True]
        engine.ask("close")


def test_keys_and_values_outlive_a_refit_if_they_are_of_whole_weights_and_the_owner_says_so(tmp_path):
    """Tokens are counted where the worker gets them to compute. A torn engine that is resumed by force puts NaN into its caches."""
    with Job(tmp_path, "qwen3", world=1) as job:
        engine = Asynchronous(job.family, job.model, job.token, max_model_len=192, load_format="dummy")
        for mode in ("keep_cache", "keep"):
            engine.connect(job, pause_mode=mode)
            if mode == "keep_cache":
                engine.resume()  # before the first weights
                assert all(engine.broken(2))
            a_refit(job, 1)
            assert not any(engine.broken(2))
            engine.ask("computed")
            engine.begin(tokens=LONG, slowly=True)
            a_refit(job, 2)
            said, tokens, once = engine.ask("answer"), engine.ask("computed")["tokens"], len(PROMPTS[0]) + LONG - 1
            assert len(said["answer"][0]) == LONG and len(said["versions"]) == 2, said
            assert tokens == once if mode == "keep_cache" else tokens > once + 4, tokens
            if mode == "keep_cache":
                stale = engine.observe()  # its prompts find keys and values of version 1
                engine.faults.write_text("worker:0:moving:raise@1")
                assert all(r["kind"] == "raised" for r in job.trainers.refit(3, deadline_s=20.0))
                engine.resume()
                assert all(engine.broken(2))
                engine.begin(tokens=LONG, prompt=LONGER, slowly=True)
                a_refit(job, 2)
                nan = [x != x for x in engine.ended()[1]]
                assert nan[0] and not nan[-1] and not any(engine.broken(2))
                truth = engine.observe()
                assert same(stale, truth) == [False, True]
            assert same(engine.observe(), truth) == [True, True]
            engine.ask("close")
            job.trainers.ask("close", "closed")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A job that has no engine of its own, and a server of its model."""
    with Job(tmp_path_factory.mktemp("served"), "qwen3", world=2) as job:
        yield job, Server(job.family, job.model)


def test_vllm_serve_by_its_url(served):
    job, server = served
    truth = refits_while_it_serves(job, server)
    job.trainers.ask("close", "closed")
    assert same(server.observe(), truth) == [True, True]  # without trainers it serves what it has
    said = server.child.log_path.read_text()
    joined = r"^\(Worker\S* pid=\d+\) INFO \d\d-\d\d [\d:]{8} \[.*\] xfer: replica 0 worker 0 has joined tcp://"
    assert re.search(joined, said, re.M), "the server's processes say what xfer does, as vLLM says it"
    lines = [x for x in job.trainers.ranks[0].log_path.read_text().splitlines() if " xfer: " in x]
    committed = r"\d\d-\d\d [\d:]{8} INFO xfer: version 2 committed by 1 of 1 replica: "
    assert any(re.match(committed, x) for x in lines), lines
    assert any("xfer: replica 0 serves version 1, outage" in x for x in lines), lines
    assert not [x for x in (*lines, *said.splitlines()) if " xfer: " in x and " INFO " not in x]


def test_vllms_own_trainer_calls(served, tmp_path, monkeypatch):
    """With xfer behind them, from a module of transformers. Their caller may pause the server. In the end the server is gone."""
    job, server = served
    truth, loaded = server.observe(), load_file(job.model / "model.safetensors")
    toy.write_checkpoint("qwen3", tmp_path / "other", seed=5)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "other", dtype=torch.bfloat16)
    monkeypatch.setenv("XFER_TOKEN", "the token of this job")
    engine = WeightTransferTrainerFactory.trainer_init(
        XferTrainerInitInfo(f"tcp://127.0.0.1:{free_port()}", deadline_s=60.0, rank=0),
        client=HTTPVLLMWeightSyncClient(server.url),
        source=ModuleSource(model),
    )
    server.pause()
    engine.send_weights()
    assert server.paused() and engine.report.committed == 1
    server.resume()
    assert same(server.observe(), truth) == [False, False]
    model.load_state_dict(loaded)
    engine.send_weights()
    assert not server.paused() and same(server.observe(), truth) == [True, True]
    engine.shutdown()
    assert same(server.observe(), truth) == [True, True]
    server.child.proc.terminate()
    server.child.proc.wait(60)
    with pytest.raises(EngineLost):
        handle_for(server.url).pause(30)


def test_vllms_own_trainer_calls_connect_as_their_init_info_says_or_are_refused_by_name(monkeypatch):
    class Gathered(WeightSource):
        metadata = __iter__ = None

    def init(client, source, rank=0, **more):
        info = XferTrainerInitInfo("tcp://h:1", rank=rank, **more)
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)

    seen = []
    monkeypatch.setattr(vllm_trainer, "connect", lambda trainer, *where, **options: seen.append((where, options)))
    http, source = HTTPVLLMWeightSyncClient("http://127.0.0.1:1"), ModuleSource(torch.nn.Linear(2, 2))
    options = {"route": Packed(), "drop": ("tower*",), "deadline_s": 5.0}
    init(http, source, token="a token", **options)
    assert seen == [(("tcp://h:1", "a token"), {"engines": ["http://127.0.0.1:1"], **options})]
    both = ["client=object: give an HTTPVLLMWeightSyncClient", "source=Gathered: gives whole tensors"]
    for client, given, words in ((object(), Gathered(), both), (http, None, ["source=NoneType"])):
        with pytest.raises(Unsupported) as e:
            init(client, given)
        assert len(e.value.violations) == len(words) and all(w in str(e.value) for w in words)
    with pytest.raises(XferError, match="rank=1, but the source is that of rank 0"):
        init(http, source, rank=1)


# ---- data-parallel ranks, which wait for one another in every step: calls that reach them in different steps can make
# them wait for good

SHARED_EXPERTS = dict(data_parallel_size=2, enable_expert_parallel=True)
SHARED_EXPERTS |= dict(worker_extension_cls="tests.support.live_main.Probe")


@pytest.mark.slow
def test_an_engine_that_its_owner_resumed_during_a_refit_is_not_resumed_again(tmp_path):
    """By the refit, or by its owner: the request that has begun on one rank meanwhile would never be answered."""
    with Job(tmp_path, "qwen3_moe", world=0) as job:
        engine = Asynchronous(job.family, job.model, job.token, **SHARED_EXPERTS)
        for who in ("refit", "owner"):
            answered = engine.ask("twice", timeout=60, who=who)
            assert (answered["tokens"], answered["paused"]) == (4, False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_refits_commit_whenever_the_owner_pauses_and_resumes(tmp_path, seed):
    with Job(tmp_path, "qwen3_moe", world=1) as job:
        engine = Asynchronous(job.family, job.model, job.token, **SHARED_EXPERTS)
        engine.connect(job)
        engine.ask("disturb", seed=seed)
        for n in range(100):
            a_refit(job, n % 2, deadline_s=60.0 * PATIENCE)
        end = engine.ask("disturbed")
        assert end["version"] == 100 and all(end["did"][kind] for kind in ("answers", "pauses", "resumes")), end
