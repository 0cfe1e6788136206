"""What an OpenTelemetry collector is sent, as a real HTTP server decodes it."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from outlast.cli import main
from outlast.errors import ConfigError, EnvironmentFault
from outlast.journal import Journal
from outlast.observe import MetricRow
from outlast.observe.otlp import OpenTelemetry


class Collector(http.server.ThreadingHTTPServer):
    """Answers with the codes it is given, then with 200; keeps what it took."""

    def __init__(self, *codes: int) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.codes, self.asked = list(codes), 0
        self.headers: list[dict[str, str]] = []
        self.figures: list[tuple[str, str, float, int, int]] = []
        self.spans: list[Any] = []
        self.resources: set[tuple[tuple[str, str], ...]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Receiver(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        """One export."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked += 1
        code = self.server.codes.pop(0) if self.server.codes else 200
        if code == 200:
            self.server.headers.append({name.lower(): text for name, text in self.headers.items()})
            self._keep(body)
        self.send_response(code)
        self.end_headers()

    def _keep(self, body: bytes) -> None:
        if self.path == "/v1/metrics":
            for of_run in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                told = tuple((a.key, a.value.string_value) for a in of_run.resource.attributes)
                self.server.resources.add(told)
                for metric in of_run.scope_metrics[0].metrics:
                    for point in metric.gauge.data_points:
                        step = point.attributes[0].value.int_value
                        row = (metric.name, metric.unit, point.as_double, point.time_unix_nano, step)
                        self.server.figures.append(row)
        else:
            assert self.path == "/v1/traces"
            for spans in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.server.spans += spans.scope_spans[0].spans

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextlib.contextmanager
def collecting(*codes: int) -> Iterator[Collector]:
    collector = Collector(*codes)
    thread = threading.Thread(target=collector.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield collector
    finally:
        collector.shutdown()
        thread.join()
        collector.server_close()


def test_figures_have_their_times_and_faults_are_spans_of_the_runs_trace(
    tmp_path: Path, story: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x,other=1")
    with Journal.create(tmp_path / "run") as journal:
        journal.append_many(story.whole)
    with collecting() as collector:
        for _ in range(2):
            assert main(["export", str(tmp_path / "run"), "--otlp", collector.url]) == 0
    losses = [(step, value) for name, _, value, _, step in collector.figures if name == "outlast.loss"]
    assert losses == [(19, 4.0), (20, 3.0), (60, 2.0), (90, 1.0)] * 2
    assert {unit for name, unit, *_ in collector.figures if name.endswith("seconds")} == {"s"}
    assert {unit for name, unit, *_ in collector.figures if name.endswith("bytes")} <= {"By"}
    assert collector.resources == {(("service.name", "outlast"), ("outlast.run", "run"))}
    assert {(h["authorization"], h["other"]) for h in collector.headers} == {("Bearer x", "1")}
    ids = [span.span_id for span in collector.spans]
    assert len(set(ids)) * 2 == len(ids), "exported twice it is the same trace"
    assert len({span.trace_id for span in collector.spans}) == 1
    (root,) = {span.span_id for span in collector.spans if span.name == "outlast.run"}
    recoveries = [span for span in collector.spans if span.name == "outlast.recovery"]
    assert {span.parent_span_id for span in recoveries} == {root}
    causes = [a.value.string_value for span in recoveries for a in span.attributes if a.key == "outlast.cause"]
    assert causes == ["r2.0: signal SIGKILL", "coordinator: coordinator SIGKILL"] * 2
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in collector.spans)


def test_a_busy_collector_is_asked_again_and_loses_nothing() -> None:
    with collecting(503, 429) as collector:
        sender = OpenTelemetry(collector.url, "a run", pause_s=0.0)
        sender.write(MetricRow(at_s=2.5, step=7, values={"loss": 1.5}))
        sender.close()
    assert collector.figures == [("outlast.loss", "1", 1.5, 2_500_000_000, 7)]
    assert collector.asked == 4


@pytest.mark.parametrize(("codes", "asked"), [((400,), 1), ((503,) * 5, 5)])
def test_a_collector_that_refuses_is_told_of(codes: tuple[int, ...], asked: int) -> None:
    with collecting(*codes) as collector:
        sender = OpenTelemetry(collector.url, "a run", pause_s=0.0)
        sender.write(MetricRow(at_s=2.5, step=7, values={"loss": 1.5}))
        with pytest.raises(EnvironmentFault, match=rf"v1/metrics answered {codes[0]}"):
            sender.close()
    assert collector.asked == asked


def test_no_collector_and_no_address_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as gone:
        url = gone.url
    sender = OpenTelemetry(url, "a run", pause_s=0.0)
    sender.write(MetricRow(at_s=1.0, step=0, values={"loss": 1.0}))
    with pytest.raises(EnvironmentFault, match="cannot be reached"):
        sender.close()
    with pytest.raises(ConfigError, match="no address of a collector"):
        OpenTelemetry("collector:4318", "a run")
