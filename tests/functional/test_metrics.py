"""Metrics and spans of real refits on loopback: what a scrape shows is what the reports say, and the dashboard asks for nothing else."""

import contextlib
import json
import math
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import torch

from examples.common.ports import free_port
from tests.functional import test_elastic as elastic
from tests.support.tiny_engine import Engine
from xfer import errors, metrics
from xfer.coordinator.messages import ReplicaOutcome
from xfer.observers import EngineFinished, TrainerFinished, observe, tell

pytestmark = pytest.mark.engine
DASHBOARD = json.loads((Path(__file__).resolve().parents[2] / "deploy/grafana/xfer.json").read_text())


class Breakable(Engine):
    broken = False

    def pause_generation(self) -> None:
        if self.broken:
            raise RuntimeError("no pause")


class Job(elastic.Job):
    """One trainer and two engines. `told`: what observers heard, in order. `ends`: what ends with the job."""

    def __init__(self):
        super().__init__(2)
        for replica in (0, 1):
            self.joins(replica, Breakable())
        self.told: list[TrainerFinished | EngineFinished] = []
        self.ends, self._heard = contextlib.ExitStack(), threading.Condition()

    def watch(self, *ends) -> None:
        """Hear of each refit from now on, after the observers that `ends` end."""
        for end in (*ends, observe(self._hear)):
            self.ends.callback(end)

    def _hear(self, ended) -> None:
        with self._heard:
            self.told.append(ended)
            self._heard.notify_all()

    def hears(self, count: int) -> None:
        with self._heard:
            assert self._heard.wait_for(lambda: len(self.told) == count, 20), self.told

    def refit(self, *broken: int, **how):
        """Refit with some engines that cannot be paused. Return the report or the error after the trainer and both controllers told."""
        for replica, (engine, _) in self.engines.items():
            engine.broken = replica in broken
        count = len(self.told) + 3
        try:
            result = self.session.refit(**how)
        except errors.XferError as e:
            result = e
        self.hears(count)
        return result

    def __exit__(self, *_):
        self.ends.close()
        super().__exit__()


@pytest.fixture
def job():
    with Job() as j:
        yield j


class Scrape(dict):
    """Values of one scrape, by name and labels."""

    def of(self, name: str, **labels: object) -> float:
        return self[f"xfer_{name}", frozenset((k, str(v)) for k, v in labels.items())]

    def all_of(self, name: str) -> list[float]:
        return [v for (n, _), v in self.items() if n == f"xfer_{name}"]


def scraped(port: int) -> Scrape:
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    samples = [s for f in families for s in f.samples if s.name.startswith("xfer_")]
    return Scrape({(s.name, frozenset(s.labels.items())): s.value for s in samples})


def asked() -> set[str]:
    """Names of metrics in the dashboard's queries."""
    texts = [t["expr"] for p in DASHBOARD["panels"] for t in p["targets"]]
    texts += [v["definition"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    return {name for text in texts for name in re.findall(r"\bxfer_\w+", text)}


def test_a_scrape_shows_what_the_reports_say_and_the_dashboard_asks_for(job):
    port = free_port()
    job.watch(metrics.serve(port, "127.0.0.1"))
    reports = [job.refit(verify=True), job.refit(version=7)]
    found = scraped(port)
    assert sum(found.all_of("received_bytes_total")) == sum(r.bytes for r in reports)
    assert found.of("sent_bytes_total", rank=0) == sum(r.bytes_sent for r in reports)
    assert found.of("refits_total", rank=0, outcome="committed") == 2
    for phase in ("call", "transfer", "outage", "drain", "wire", "pause", "resume"):
        seconds = sum(r.flatten("")[f"{phase}_s"] for r in reports)
        assert found.of("refit_seconds_count", rank=0, phase=phase) == 2
        assert found.of("refit_seconds_sum", rank=0, phase=phase) == pytest.approx(seconds), phase
    assert "gb_per" not in {dict(labels).get("phase") for _, labels in found}, "a rate is no phase"
    for i in (0, 1):
        outages = sum(r.outcomes[i].outage_s for r in reports)
        assert found.of("engine_outage_seconds_sum", replica=i) == pytest.approx(outages)
    assert {*found.all_of("version"), *found.all_of("engine_version")} == {7}
    states = {state: found.of("replicas", rank=0, state=state) for state in metrics.REPLICA_STATES}
    assert states == {"current": 2, "behind": 0, "torn": 0, "away": 0}

    job.refit(1, min_replicas=1)
    found = scraped(port)
    assert found.of("refits_total", rank=0, outcome="partial") == 1
    assert found.of("replicas", rank=0, state="behind") == 1
    assert [found.of("engine_version", replica=i) for i in (0, 1)] == [8, 7]
    assert found.of("engine_refits_total", replica=1, outcome="failed") == 1
    assert found.of("engine_serving", replica=1) == 1

    error = job.refit(0, 1)
    found = scraped(port)
    assert found.of("refits_total", rank=0, outcome="failed") == 1
    assert found.of("refit_errors_total", rank=0, error=type(error).__name__) == 1
    assert found.of("version", rank=0) == 8, "a label that no replica committed"
    names = {name for name, _ in found}
    assert asked() <= names and {n for n in names if n.endswith("_total")} <= asked(), "not shown"
    job.ends.close()
    with pytest.raises(OSError):
        scraped(port)


def test_a_torn_engine_is_told_apart_and_adds_no_outage():
    """What an alert looks at. The engine serves nothing until a refit repairs it, so its outage has not ended."""
    from prometheus_client import CollectorRegistry

    registry, phases = CollectorRegistry(), (("pause", 0.1), ("update", 0.2))
    end = metrics.observe_prometheus(registry)
    tell(EngineFinished("session", 1, 0, False, False, True, None, 0.0, phases, errors.PeerLost("a worker died")))
    names = ("torn", "serving", "outage_seconds_count")
    assert [registry.get_sample_value(f"xfer_engine_{n}", {"replica": "0"}) for n in names] == [1, 0, None]
    end()
    outcomes = {"torn": (False, None, True), "away": (False, None, False), "behind": (True, "1", False)}
    for state, (serving, version, dirty) in outcomes.items():
        assert metrics.state(ReplicaOutcome(0, False, serving, version, dirty=dirty)) == state


def test_every_panel_of_the_dashboard_has_a_description_a_place_and_colors_of_its_own():
    """A stat without them is red from 80 on, by Grafana's default: so would be the 80th version."""
    panels = DASHBOARD["panels"]
    at = [p["gridPos"] for p in panels]
    cells = [(p["x"] + x, p["y"] + y) for p in at for x in range(p["w"]) for y in range(p["h"])]
    assert all(p["title"] and p["description"] for p in panels)
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert all({"color", "thresholds"} & p["fieldConfig"]["defaults"].keys() for p in panels if p["type"] == "stat")


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no Prometheus server on this machine")
def test_prometheus_answers_every_query_of_the_dashboard_without_nan(job, tmp_path):
    """Refits are rarer than the rate interval, as in training, and the only failures are the first of their series."""
    port, at, second = free_port(), f"127.0.0.1:{free_port()}", 1.0
    target = {"job_name": "xfer", "scrape_interval": "1s", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    (tmp_path / "prometheus.yml").write_text(json.dumps({"scrape_configs": [target]}))

    def answers(query: str, **span: float) -> list[float]:
        query = query.replace("$job", ".*").replace("$__rate_interval", "3s").replace("$__interval_ms", "1000")
        where = f"http://{at}/api/v1/query_range?" + urllib.parse.urlencode({"query": query, "step": second, **span})
        with urllib.request.urlopen(where, timeout=10) as page:
            return [float(v) for series in json.load(page)["data"]["result"] for _, v in series["values"]]

    job.watch(metrics.serve(port, "127.0.0.1"))
    flags = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    server = subprocess.Popen(["prometheus", *flags, f"--web.listen-address={at}"], stderr=subprocess.DEVNULL)
    try:
        began = time.time()
        for broken in ((), (), (1,), (0, 1)):
            job.refit(*broken, min_replicas=1)
            time.sleep(5 * second)
        span = {"start": began, "end": time.time()}
        for panel in DASHBOARD["panels"]:
            for t in panel["targets"]:
                found = answers(t["expr"], **span)
                assert found and not any(map(math.isnan, found)), (panel["title"], t["expr"], found)
            if "last hour" in panel["title"]:
                assert found[0] == 0 and found[-1] > 1.5, "both refits that were not whole are seen"
    finally:
        server.kill()
        server.wait()


def test_spans_of_one_refit_have_its_attempt_and_an_outage_is_its_calls_in_a_row(job):
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    job.watch(metrics.trace_spans(provider))
    with provider.get_tracer("the user's").start_as_current_span("step") as step:
        report = job.refit()
    error = job.refit(1)
    spans = kept.get_finished_spans()
    refits = [s for s in spans if s.name == "xfer.refit"]
    outages = [s for s in spans if s.name == "xfer.outage"]
    assert [s.attributes["xfer.attempt"] for s in refits] == [1, 2] and len(outages) == 4
    assert len({s.attributes["xfer.session"] for s in refits + outages}) == 1
    assert refits[0].parent.span_id == step.get_span_context().span_id
    assert refits[0].attributes["xfer.bytes"] == report.bytes
    assert refits[0].end_time - refits[0].start_time == pytest.approx(report.seconds * 1e9, abs=2000)
    assert not refits[1].status.is_ok and refits[1].attributes["error.type"] == type(error).__name__
    for s in outages[:2]:
        calls = [c for c in spans if c.parent is not None and c.parent.span_id == s.context.span_id]
        steps = "pause start update finish reset_caches resume".split()
        assert [c.name for c in calls] == [f"xfer.{n}" for n in steps]
        ends = [s.start_time, *(c.end_time for c in calls)]
        assert [*(c.start_time for c in calls), s.end_time] == pytest.approx(ends, rel=0, abs=2000), "nanoseconds"


def test_a_call_that_returns_early_is_told_once_with_its_own_seconds_also_behind_an_observer_that_raises(job, caplog):
    def broken(_):
        raise ValueError("a user's mistake")

    job.watch(observe(broken))
    early = job.session.refit(wait="sources")
    assert not any(isinstance(x, TrainerFinished) for x in job.told)
    later = job.session.refit()
    job.hears(6)
    first, second = (x for x in job.told if isinstance(x, TrainerFinished))
    assert (first.attempt, second.attempt) == (1, 2) and first.error is None and second.report.committed == 2
    assert first.report == later.before and first.seconds == first.report.seconds == early.seconds
    assert "an observer of refits failed" in caplog.text and "a user's mistake" in caplog.text


def test_a_profiler_sees_the_call_the_moves_and_the_updates_as_nvtx_ranges(job, monkeypatch):
    """Where torch has CUDA; here a recorder takes the place of its NVTX."""
    seen: list[str] = []

    @contextlib.contextmanager
    def record(name: str):
        seen.append(name.removeprefix("xfer: "))
        yield

    job.session.refit()
    assert not seen
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nvtx, "range", record)
    job.session.refit()
    workers = [f"replica {r} worker {w}" for r in (0, 1) for w in (0, 1)]
    moves = [f"move, {who}" for who in ("trainer 0, replica 0", "trainer 0, replica 1", *workers)]
    assert sorted(seen) == sorted(["refit, trainer 0", *moves, *(f"update, {w}" for w in workers)])


def test_metrics_are_served_at_the_address_that_was_given():
    """docs/metrics.md: 127.0.0.1 keeps them on the host."""
    with socket.socket() as mine:  # bound, so that nobody else listens there
        mine.bind(("127.0.0.1", 0))
        port = mine.getsockname()[1]
        end = metrics.serve(port, "127.0.0.2")  # loopback has it, and 127.0.0.1 does not listen for it
        for host, answers in (("127.0.0.2", True), ("127.0.0.1", False)):
            with socket.socket() as s:
                assert (s.connect_ex((host, port)) == 0) == answers, host
        end()


def test_without_a_client_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(errors.Unsupported, match="needs prometheus_client") as caught:
        metrics.serve(free_port())
    assert "xfer-refit[metrics]" in str(caught.value)
