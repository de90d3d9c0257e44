"""Refits as Prometheus metrics and OpenTelemetry spans, made from what reports and controllers say.

    import xfer.metrics

    xfer.metrics.serve(port=9400)      # once per process: on trainer rank 0, and where `xfer.serve` is called
    xfer.metrics.trace_spans()         # if the process has an OpenTelemetry tracer provider

`pip install "xfer-refit[metrics]"` installs both clients; xfer itself needs neither. docs/metrics.md lists the metrics, and
deploy/grafana/xfer.json shows them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from xfer.errors import NAMES, Unsupported
from xfer.observers import EngineFinished, TrainerFinished
from xfer.observers import observe as observe

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

    from xfer.coordinator.messages import ReplicaOutcome

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)
"""Upper bounds of the histograms' buckets, in seconds: from a pull on one host to a missed deadline."""
OUTCOMES = ("committed", "partial", "failed")
REPLICA_STATES = ("current", "behind", "torn", "away")
"""State of a replica after a refit: it serves the new version; an earlier one; it holds bytes that must not be served; it serves
nothing."""
END, RATE = "_s", "_per_s"
ROUTE = "route/"


def state(outcome: ReplicaOutcome) -> str:
    """Return which of `REPLICA_STATES` a replica is in after a refit."""
    if outcome.dirty:
        return "torn"
    return "away" if not outcome.serving else "current" if outcome.committed else "behind"


def observe_prometheus(registry: CollectorRegistry | None = None) -> Callable[[], None]:
    """Keep Prometheus metrics of this process's refits from now on.

    Args:
        registry: Where the metrics are registered. Default: prometheus_client's own, which `serve` and most servers show.

    Returns:
        A function that ends it and takes the metrics out of the registry.

    Raises:
        Unsupported: prometheus_client is not installed.
        ValueError: The registry has these metrics already.
    """
    prometheus = _imported("prometheus_client")
    registry = registry or prometheus.REGISTRY
    made: list[Any] = []

    def metric(kind: str, name: str, text: str, *labels: str, **options: Any) -> Any:
        made.append(getattr(prometheus, kind)(name, text, labels, registry=registry, **options))
        return made[-1]

    refits = metric("Counter", "xfer_refits", "Refits that ended on this trainer rank", "rank", "outcome")
    errors = metric("Counter", "xfer_refit_errors", "Errors of refits, by class", "rank", "error")
    seconds = metric(
        "Histogram", "xfer_refit_seconds", "Seconds of a refit by phase", "rank", "phase", buckets=BUCKETS_S
    )
    received = metric("Counter", "xfer_received_bytes", "Bytes that all replicas received", "rank", "route")
    sent = metric("Counter", "xfer_sent_bytes", "Bytes that this rank sent, or that others read from it", "rank")
    version = metric("Gauge", "xfer_version", "Last version that a replica committed, if it is a number", "rank")
    replicas = metric("Gauge", "xfer_replicas", "Replicas by state after the last refit", "rank", "state")
    engine_refits = metric("Counter", "xfer_engine_refits", "Refits that ended on this engine", "replica", "outcome")
    outage = metric("Histogram", "xfer_engine_outage_seconds", "From pause to resume", "replica", buckets=BUCKETS_S)
    calls = metric("Histogram", "xfer_engine_call_seconds", "Calls to the engine", "replica", "call", buckets=BUCKETS_S)
    serves = metric("Gauge", "xfer_engine_serving", "1 if the engine serves, else 0", "replica")
    torn = metric("Gauge", "xfer_engine_torn", "1 if the engine holds bytes that must not be served, else 0", "replica")
    engine_version = metric("Gauge", "xfer_engine_version", "Version that the engine serves, if a number", "replica")

    def trainer(ended: TrainerFinished) -> None:
        rank, report = str(ended.rank), ended.report
        begin_at_zero(refits, rank, OUTCOMES)
        begin_at_zero(errors, rank, NAMES)
        refits.labels(rank, outcome_of(ended)).inc()
        if ended.error is not None:
            errors.labels(rank, type(ended.error).__name__).inc()
        if report is None:
            return
        found = report.flatten("")
        for name, value in found.items():
            # Those of `before/` were told with its own outcome.
            if name.endswith(END) and not name.endswith(RATE) and "/" not in name:
                seconds.labels(rank, name.removesuffix(END)).observe(value)
            if name.startswith(ROUTE) and name.endswith("_bytes"):
                received.labels(rank, name.removeprefix(ROUTE).removesuffix("_bytes")).inc(value)
        sent.labels(rank).inc(report.bytes_sent)
        if report.committed:
            _set_number(version.labels(rank), report.version)
        states = Counter(map(state, report.outcomes))
        for s in REPLICA_STATES:
            replicas.labels(rank, s).set(states[s])

    def engine(ended: EngineFinished) -> None:
        replica = str(ended.replica)
        begin_at_zero(engine_refits, replica, ("committed", "failed"))
        engine_refits.labels(replica, "committed" if ended.committed else "failed").inc()
        if ended.serving:
            outage.labels(replica).observe(ended.outage_s)
        for name, value in ended.phases:
            calls.labels(replica, name).observe(value)
        serves.labels(replica).set(ended.serving)
        torn.labels(replica).set(ended.torn)
        if ended.version is not None:
            _set_number(engine_version.labels(replica), ended.version)

    end = observe(lambda ended: trainer(ended) if isinstance(ended, TrainerFinished) else engine(ended))

    def stop() -> None:
        end()
        for m in made:
            registry.unregister(m)

    return stop


def serve(port: int, host: str = "0.0.0.0") -> Callable[[], None]:
    """Keep Prometheus metrics and serve them at http://HOST:PORT/metrics, with the process's other metrics.

    Args:
        port: A free port.
        host: The address at which to listen. Whoever reaches it can read the metrics.

    Returns:
        A function that ends it.

    Raises:
        Unsupported: prometheus_client is not installed.
        OSError: The port cannot be used.
    """
    prometheus = _imported("prometheus_client")
    stop = observe_prometheus()
    try:
        server, thread = prometheus.start_http_server(port, host)
    except OSError:
        stop()
        raise

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()
        stop()

    return end


def trace_spans(provider: Any = None) -> Callable[[], None]:
    """Make OpenTelemetry spans of this process's refits from now on.

    A trainer rank gets a span `xfer.refit` per refit, a child of the span that is current where it is called. An engine's process gets
    `xfer.outage`, with a child per call to the engine. `xfer.session` and `xfer.attempt` are the same in all spans of a refit.

    Args:
        provider: A tracer provider. Default: the process's own.

    Returns:
        A function that ends it.

    Raises:
        Unsupported: opentelemetry-api is not installed.
    """
    api = _imported("opentelemetry.trace")
    tracer = api.get_tracer("xfer", tracer_provider=provider)

    def span(name: str, begin: float, end: float, attributes: dict[str, Any], children: Iterable[Any] = ()) -> None:
        made = tracer.start_span(name, start_time=int(begin * 1e9), attributes=attributes)
        if "error.type" in attributes:
            made.set_status(api.StatusCode.ERROR, attributes["xfer.error"])
        inside = api.set_span_in_context(made)
        for child, since, until in children:
            tracer.start_span(child, context=inside, start_time=int(since * 1e9)).end(int(until * 1e9))
        made.end(int(end * 1e9))

    def told(ended: TrainerFinished | EngineFinished) -> None:
        now = time.time()
        attributes: dict[str, Any] = {"xfer.session": ended.session, "xfer.attempt": ended.attempt}
        if ended.error is not None:
            attributes |= {"error.type": type(ended.error).__name__, "xfer.error": ended.error.line()}
        if isinstance(ended, EngineFinished):
            began = now - sum(s for _, s in ended.phases)
            attributes |= {
                "xfer.replica": ended.replica,
                "xfer.committed": ended.committed,
                "xfer.version": str(ended.version),
            }
            return span("xfer.outage", began, now, attributes, _in_a_row(began, ended.phases))
        attributes |= {"xfer.rank": ended.rank}
        if ended.report is not None:
            attributes |= {"xfer.version": str(ended.report.version), **ended.report.flatten("xfer.")}
        span("xfer.refit", now - ended.seconds, now, attributes)

    return observe(told)


def begin_at_zero(counter: Any, of: str, values: Iterable[str]) -> None:
    """Show the series of a rank or replica before they count: Prometheus sees no increase in a series that begins at 1."""
    for value in values:
        counter.labels(of, value)


def outcome_of(ended: TrainerFinished) -> str:
    """ "committed": by all replicas; "partial": by some of them; "failed": by none, or not known."""
    report = ended.report
    if report is None or not report.committed:
        return "failed"
    return "committed" if report.committed == len(report.outcomes) else "partial"


def _in_a_row(began: float, phases: Iterable[tuple[str, float]]) -> Iterator[tuple[str, float, float]]:
    for name, seconds in phases:
        yield f"xfer.{name}", began, began + seconds
        began += seconds


def _set_number(gauge: Any, version: int | str | None) -> None:
    """Show a version. A label that is no number has none."""
    try:
        gauge.set(int(version) if version is not None else float("nan"))
    except ValueError:
        gauge.set(float("nan"))


def _imported(name: str) -> ModuleType:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise Unsupported(
            f"xfer.metrics needs {name.partition('.')[0]}, which is not installed here",
            ['pip install "xfer-refit[metrics]", in each environment whose refits are to be seen', str(e)],
        ) from None
