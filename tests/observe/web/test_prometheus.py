"""A real Prometheus (Debian's package): it scrapes a run and loads the rules, and the alerts fire when they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")

from tests.ports import free_ports

from outlast.journal import Journal
from outlast.observe.web import Board, Serving, listen

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
RULES = Path(__file__).parents[3] / "docs" / "monitoring" / "rules.yml"
PATIENCE_S = 90.0
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")

CASES = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: 'outlast_run_state{{run="a",state="stalled"}}', values: '0x2 1x20'}}
      - {{series: 'outlast_run_state{{run="b",state="failed"}}', values: '0x5 1x20'}}
      - {{series: 'outlast_run_state{{run="c",state="training"}}', values: '1x90'}}
      - {{series: 'outlast_run_state{{run="d",state="training"}}', values: '1x90'}}
      - {{series: 'outlast_wall_seconds{{run="c"}}', values: '0+60x90'}}
      - {{series: 'outlast_time_seconds{{run="c",use="productive"}}', values: '0+12x90'}}
      - {{series: 'outlast_wall_seconds{{run="d"}}', values: '0+60x90'}}
      - {{series: 'outlast_time_seconds{{run="d",use="productive"}}', values: '0+59x90'}}
      - {{series: 'outlast_run_state{{run="mended",state="training"}}', values: '1x90'}}
      - {{series: 'outlast_wall_seconds{{run="mended"}}', values: '0+60x90'}}
      - {{series: 'outlast_time_seconds{{run="mended",use="productive"}}', values: '0x75 60+60x15'}}
      - {{series: 'outlast_audit_mismatches_total{{run="a"}}', values: '0x5 1x20'}}
    alert_rule_test:
      - {{eval_time: 4m, alertname: OutlastStalled, exp_alerts: []}}
      - eval_time: 12m
        alertname: OutlastStalled
        exp_alerts:
          - exp_labels: {{run: a, state: stalled, severity: page}}
            exp_annotations:
              summary: "a has not committed a step for minutes"
              remedy: "outlast status names who is silent"
      - {{eval_time: 3m, alertname: OutlastEndedBadly, exp_alerts: []}}
      - eval_time: 8m
        alertname: OutlastEndedBadly
        exp_alerts:
          - exp_labels: {{run: b, state: failed, severity: page}}
            exp_annotations: {{summary: "b ended: failed", remedy: "outlast why"}}
      - eval_time: 85m
        alertname: OutlastUsefulTimeBurnsFast
        exp_alerts:
          - &burning
            exp_labels: {{run: c, severity: page}}
            exp_annotations:
              summary: "c used 80% of the last hour for nothing"
              remedy: "outlast why, and the part 'Where the time went' of the page"
      - eval_time: 70m
        alertname: OutlastUsefulTimeBurnsFast
        exp_alerts:
          - *burning
          - exp_labels: {{run: mended, severity: page}}
            exp_annotations:
              summary: "mended used 100% of the last hour for nothing"
              remedy: "outlast why, and the part 'Where the time went' of the page"
      - {{eval_time: 2m, alertname: OutlastAuditMismatch, exp_alerts: []}}
      - eval_time: 10m
        alertname: OutlastAuditMismatch
        exp_alerts:
          - exp_labels: {{run: a, severity: ticket}}
            exp_annotations:
              summary: "a replica of a computed another gradient"
              remedy: "outlast why names host and device; take it out of service and test it"
  - interval: 5m
    input_series:
      - {{series: 'outlast_run_state{{run="slow",state="training"}}', values: '1x100'}}
      - {{series: 'outlast_wall_seconds{{run="slow"}}', values: '0+300x100'}}
      - {{series: 'outlast_time_seconds{{run="slow",use="productive"}}', values: '0+210x100'}}
      - {{series: 'outlast_run_state{{run="well",state="training"}}', values: '1x100'}}
      - {{series: 'outlast_wall_seconds{{run="well"}}', values: '0+300x100'}}
      - {{series: 'outlast_time_seconds{{run="well",use="productive"}}', values: '0+255x100'}}
      - {{series: 'outlast_checkpoints_failed_total{{run="full"}}', values: '0x5 1 2 3 4x90'}}
      - {{series: 'outlast_checkpoints_failed_total{{run="once"}}', values: '0x5 1x95'}}
    alert_rule_test:
      - {{eval_time: 400m, alertname: OutlastUsefulTimeBurnsFast, exp_alerts: []}}
      - eval_time: 450m
        alertname: OutlastUsefulTimeBurnsSlowly
        exp_alerts:
          - exp_labels: {{run: slow, severity: ticket}}
            exp_annotations: {{summary: "slow used 30% of the last six hours for nothing", remedy: "outlast why"}}
      - {{eval_time: 20m, alertname: OutlastSavesFail, exp_alerts: []}}
      - eval_time: 60m
        alertname: OutlastSavesFail
        exp_alerts:
          - exp_labels: {{run: full, severity: ticket}}
            exp_annotations:
              summary: "saves of full fail"
              remedy: "outlast why names the cause; free space, rights, the store"
"""


def test_each_alert_is_seen_to_fire() -> None:
    alerts = set(re.findall(r"alert: (\w+)", RULES.read_text()))
    assert alerts == set(re.findall(r"alertname: (\w+)\n +exp_alerts:\n", CASES))


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    (tmp_path / "cases.yml").write_text(CASES.format(rules=RULES))
    command = [str(PROMTOOL), "test", "rules", str(tmp_path / "cases.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_a_rule_that_is_wrong_is_noticed_by_that_test(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(RULES.read_text().replace('state="stalled"} == 1', 'state="stalled"} == 2'))
    (tmp_path / "cases.yml").write_text(CASES.format(rules=tmp_path / "rules.yml"))
    command = [str(PROMTOOL), "test", "rules", str(tmp_path / "cases.yml")]
    assert subprocess.run(command, capture_output=True, check=False, timeout=60).returncode != 0


@needs_promtool
def test_every_query_of_the_dashboard_is_one(tmp_path: Path) -> None:
    panels = json.loads((RULES.parent / "dashboard.json").read_text())["panels"]
    queries = [target["expr"].replace("$run", ".*") for panel in panels for target in panel["targets"]]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "queries.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    command = [str(PROMTOOL), "check", "rules", str(tmp_path / "queries.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(rules) > 10


@pytest.fixture
def served(tmp_path: Path, story: Any) -> Iterator[Serving]:
    with Journal.create(tmp_path / "brave") as journal:
        journal.append_many(story.whole)
    serving = Serving(Board([tmp_path / "brave"]), listen(0))
    thread = threading.Thread(target=serving.run)
    thread.start()
    yield serving
    serving.stop()
    thread.join(30)
    assert not thread.is_alive()


def until(test: Callable[[], bool], what: str) -> None:
    end_s, turn = time.monotonic() + PATIENCE_S, threading.Event()
    while not test():
        assert time.monotonic() < end_s, f"not in time: {what}"
        turn.wait(0.1)


def asked(port: int, path: str) -> Any:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return json.load(answer)["data"]
    except (urllib.error.URLError, OSError, ValueError):
        return None


@pytest.mark.process
@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (Debian: prometheus)")
def test_a_real_prometheus_scrapes_a_run_and_loads_the_rules(served: Serving, tmp_path: Path) -> None:
    [port] = free_ports(1)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": [str(RULES)],
        "scrape_configs": [
            {"job_name": "outlast", "static_configs": [{"targets": [served.url.removeprefix("http://")]}]}
        ],
    }  # fmt: skip
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    command = [
        str(PROMETHEUS), f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
    ]  # fmt: skip
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:

        def value(query: str) -> float | None:
            found = asked(port, f"/api/v1/query?query={urllib.parse.quote(query)}")
            return float(found["result"][0]["value"][1]) if found and found["result"] else None

        until(lambda: value("up") == 1, "a scrape that succeeded")
        until(lambda: value('outlast_run_step{run="brave"}') == 91, "the step that the journal has")
        assert value('sum(outlast_recoveries_total{run="brave"})') == 2
        groups = asked(port, "/api/v1/rules")["groups"]
        assert {rule["health"] for group in groups for rule in group["rules"]} <= {"ok", "unknown"}
        assert {rule["name"] for group in groups for rule in group["rules"]} >= {"OutlastStalled", "OutlastSavesFail"}
    finally:
        child.terminate()
        child.wait(60)
