"""A run's figures and faults for an OpenTelemetry collector, over OTLP/HTTP.

Role: rows become data points of gauges at their own times; each recovery and each save becomes a span with the moments
at which it began and ended; the run is the trace that they belong to. What was exported twice is the same trace twice,
as its numbers are made of the run's name. The wire format is the package opentelemetry-proto's.
"""

from __future__ import annotations

import hashlib
import http.client
import importlib
import os
import threading
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from outlast.errors import ConfigError, EnvironmentFault
from outlast.observe._export import MetricRow

__all__ = ["OpenTelemetry"]

_AT_ONCE, _WITHIN_S = 500, 5.0  # rows sent together, and how far apart their moments may be
_TRIES, _PAUSE_S, _TIMEOUT_S = 5, 0.5, 10.0
_LATER = frozenset({429, 502, 503, 504})  # answers after which the specification has a sender try again
_SPANS = {"recovery/downtime_seconds": "recovery", "checkpoint/durable_seconds": "checkpoint"}
_UNITS = {"seconds": "s", "bytes": "By"}


class OpenTelemetry:
    """Sends to `endpoint` (`http://host:4318`); `run`: its name, for resource and trace. Headers, a token say, are read
    from `OTEL_EXPORTER_OTLP_HEADERS`.

    Raises ConfigError for what is no address, EnvironmentFault without the package, and for a collector that refuses or
    does not answer in five tries.
    """

    def __init__(self, endpoint: str, run: str, *, pause_s: float = _PAUSE_S) -> None:
        parts = urllib.parse.urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{endpoint!r} is no address of a collector", remedy="--otlp http://HOST:4318")
        self._metrics, self._traces = _service("metrics"), _service("trace")
        self._endpoint, self._run, self._pause_s = endpoint.rstrip("/"), run, pause_s
        self._headers = _headers(os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", ""))
        self._trace_id = hashlib.sha256(run.encode()).digest()[:16]
        self._rows: list[MetricRow] = []
        self._began_s = self._ended_s = 0.0

    def write(self, row: MetricRow) -> None:
        """Send it, with those before it, when there are enough or the first of them is old enough."""
        self._began_s, self._ended_s = self._began_s or row.at_s, max(self._ended_s, row.at_s)
        self._rows.append(row)
        if len(self._rows) >= _AT_ONCE or row.at_s - self._rows[0].at_s >= _WITHIN_S:
            self._send()

    def close(self) -> None:
        """Send what is left, and the span of the whole."""
        self._send(whole=True)

    def _send(self, *, whole: bool = False) -> None:
        rows, self._rows = self._rows, []
        if rows:
            self._post("metrics", self._of_figures(rows))
        spans = [span for row in rows for span in self._spans(row)]
        if whole and self._began_s:
            spans.append(self._span(self._run, "run", self._began_s, self._ended_s, {}))
        if spans:
            resource = {"resource": self._resource(), "scope_spans": [{"scope": _SCOPE, "spans": spans}]}
            self._post("traces", self._traces.ExportTraceServiceRequest(resource_spans=[resource]))

    def _of_figures(self, rows: list[MetricRow]) -> Any:
        points: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            for name, value in row.values.items():
                step = [_said("outlast.step", row.step)]
                point = {"time_unix_nano": _nano(row.at_s), "as_double": value, "attributes": step}
                points.setdefault(name, []).append(point)
        metrics = [
            {"name": f"outlast.{name.replace('/', '.')}", "unit": _unit(name), "gauge": {"data_points": found}}
            for name, found in points.items()
        ]
        resource = {"resource": self._resource(), "scope_metrics": [{"scope": _SCOPE, "metrics": metrics}]}
        return self._metrics.ExportMetricsServiceRequest(resource_metrics=[resource])

    def _resource(self) -> dict[str, Any]:
        return {"attributes": [_said("service.name", "outlast"), _said("outlast.run", self._run)]}

    def _spans(self, row: MetricRow) -> list[dict[str, Any]]:
        told: dict[str, int | str] = {"outlast.step": row.step}
        if row.text:
            told["outlast.cause"] = row.text
        return [
            self._span(f"{self._run}/{name}/{row.at_s}/{row.step}", name, row.at_s - row.values[key], row.at_s, told)
            for key, name in _SPANS.items()
            if key in row.values
        ]

    def _span(self, key: str, name: str, began_s: float, ended_s: float, told: dict[str, int | str]) -> dict[str, Any]:
        return {
            "trace_id": self._trace_id,
            "span_id": _span_id(key),
            "name": f"outlast.{name}",
            "parent_span_id": b"" if name == "run" else _span_id(self._run),
            "kind": 1,
            "start_time_unix_nano": _nano(began_s),
            "end_time_unix_nano": _nano(ended_s),
            "attributes": [_said(name, value) for name, value in told.items()],
        }

    def _post(self, what: str, message: Any) -> None:
        url, data = f"{self._endpoint}/v1/{what}", message.SerializeToString()
        headers = {"Content-Type": "application/x-protobuf", **self._headers}
        pause, said = threading.Event(), ""
        for attempt in range(_TRIES):
            try:
                with urllib.request.urlopen(
                    urllib.request.Request(url, data, headers, method="POST"), timeout=_TIMEOUT_S
                ):
                    return
            except urllib.error.HTTPError as error:
                said = f"answered {error.code} {error.reason}"
                if error.code not in _LATER:
                    break
            except (OSError, http.client.HTTPException) as error:
                said = f"cannot be reached: {getattr(error, 'reason', error)}"
            if attempt < _TRIES - 1:
                pause.wait(self._pause_s * 2**attempt)
        raise EnvironmentFault(
            f"{url} {said}",
            remedy="see that a collector with an OTLP/HTTP receiver listens there, and export again: "
            "what it has already is the same trace",
        )


_SCOPE = {"name": "outlast"}


def _service(what: str) -> Any:
    try:
        return importlib.import_module(f"opentelemetry.proto.collector.{what}.v1.{what}_service_pb2")
    except ImportError as error:
        raise EnvironmentFault(
            "opentelemetry-proto cannot be imported", remedy="pip install 'outlast[otel]'"
        ) from error


def _headers(text: str) -> dict[str, str]:
    pairs = [row.partition("=")[::2] for row in text.split(",") if "=" in row]
    return {name.strip(): urllib.parse.unquote(value.strip()) for name, value in pairs}


def _said(key: str, value: int | str) -> dict[str, Any]:
    kind = "string_value" if isinstance(value, str) else "int_value"
    return {"key": key, "value": {kind: value}}


def _unit(name: str) -> str:
    return "s" if name.startswith("seconds/") else _UNITS.get(name.rpartition("_")[2], "1")


def _nano(at_s: float) -> int:
    return max(0, round(at_s * 1e9))


def _span_id(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()[:8]
