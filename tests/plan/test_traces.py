"""Traces: every format, every row accounted for, fits that recover what was put in, a real log's held-out end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.core import events as ev
from outlast.errors import ConfigError
from outlast.plan import traces as tr
from outlast.plan._model import job_from_mapping
from outlast.plan._simulate import simulate
from outlast.plan._traced import job_data_from_fit, replay
from outlast.plan.designs import fit_log, generate_like
from outlast.plan.run_journal import RunJournal
from outlast.plan.traces._fit import BLOCK_H
from outlast.plan.traces._parse import expand_nodes, parse
from outlast.plan.traces._records import RawEvent


def _data(name: str) -> Path:
    root = os.environ.get("OUTLAST_DATA")
    places = [Path(root)] if root else [p / "shared" / "data" for p in Path(__file__).resolve().parents]
    for folder in places:
        if (folder / name).is_file():
            return folder / name
    pytest.skip(f"{name} is not here (set OUTLAST_DATA)")


def _file(tmp_path: Path, text: str, name: str = "log.csv") -> str:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


CSV = (
    "time_h,node,event,level,class\n1,a,down,HW,GPU\n3,a,up,HW,GPU\n4,b,down,HW,NIC\n5,b,down,HW,NIC\n"
    "x,c,down,HW,GPU\n9,,down,HW,GPU\n"
)


def test_each_row_is_used_skipped_or_named(tmp_path: Path) -> None:
    trace = tr.read_trace(_file(tmp_path, CSV), preset_name="infinitehbd")
    assert (trace.rows_read, trace.rows_used, trace.rows_skipped) == (6, 3, 0)
    said = [str(p) for p in trace.problems]
    assert said[0].startswith("row 5: b is down already")
    assert said[1] == "row 6, column 'time_h': 'x' is not a number"
    assert said[2] == "row 7, column 'node': names no machine"
    first, second = trace.failures
    assert (first.down_h, first.up_h, first.kind) == (1.0, 3.0, "HW / GPU")
    assert second.up_h is None
    assert trace.num_nodes == 400


@given(
    st.lists(
        st.tuples(st.floats(0, 99), st.sampled_from("abc"), st.sampled_from(["down", "up", "odd"])),
        min_size=1,
        max_size=30,
    )
)
@settings(max_examples=80)
def test_no_row_goes_missing(rows: list[tuple[float, str, str]]) -> None:
    text = "time,node,event\n" + "".join(f"{t},{n},{e}\n" for t, n, e in rows)
    try:
        trace = tr.trace_from_events("any", parse(text, tr.Mapping(event="event")))
    except ConfigError:  # more problems than usable rows
        return
    assert trace.rows_read == len(rows) == trace.rows_used + trace.rows_skipped + len(trace.problems)
    assert all(f.up_h is None or f.up_h >= f.down_h for f in trace.failures)


def test_mapping_from_toml_and_its_refusals(tmp_path: Path) -> None:
    mapping = _file(
        tmp_path,
        'format = "jsonl"\ntime = "when.start"\nunit = "min"\nnode = "host"\nend = "when.end"\nkind = ["why"]\n',
        "m.toml",
    )
    lines = [
        {"when": {"start": 60, "end": 120}, "host": "a", "why": "disk"},
        {"when": {"start": 90, "end": 30}, "host": "b", "why": "disk"},
        {"when": {"start": 180}, "host": "c"},
        {"when": {"start": 200, "end": 260}, "host": "a", "why": "net"},
    ]
    trace = tr.read_trace(_file(tmp_path, "\n".join(map(json.dumps, lines)), "log.jsonl"), mapping_path=mapping)
    assert [(f.down_h, f.up_h, f.kind) for f in trace.failures][:2] == [(1.0, 2.0, "disk"), (3.0, None, "unknown")]
    assert "ends before it starts" in str(trace.problems[0])
    for text, hint in (
        ('tiem = "x"', "time"),
        ('unit = "fortnight"', "unit"),
        ("nodes = -1", "negative"),
        ("a = = b", "TOML"),
    ):
        with pytest.raises(ConfigError, match=hint):
            tr.load_mapping(_file(tmp_path, text, "bad.toml"))
    with pytest.raises(ConfigError, match="bamboo"):
        tr.preset("bambo")
    with pytest.raises(ConfigError, match="no column"):
        tr.read_trace(_file(tmp_path, "a,b\n1,2\n"), preset_name="infinitehbd")
    with pytest.raises(ConfigError, match="description of its columns"):
        tr.read_trace(_file(tmp_path, CSV))


def test_slurm(tmp_path: Path) -> None:
    text = (
        "JobID|State|End|NodeList\n1|NODE_FAIL|2026-01-02T00:00:00|gpu[003-004,09]\n"
        "2|COMPLETED|2026-01-03T00:00:00|gpu001\n"
        "3|FAILED by 1000|2026-01-03T12:00:00|gpu010\n4|NODE_FAIL|Unknown|gpu011\n"
        "5|NODE_FAIL|2026-01-04T00:00:00|None assigned\n"
        "6|NODE_FAIL|2026-01-05T00:00:00|gpu003\n"
    )
    trace = tr.read_trace(_file(tmp_path, text), preset_name="slurm", nodes=40)
    assert [(f.node, round(f.down_h)) for f in trace.failures] == [("gpu003", 0), ("gpu010", 36), ("gpu003", 72)]
    assert (trace.rows_skipped, len(trace.problems), trace.num_nodes) == (1, 2, 40)
    assert expand_nodes("a[1-3,07],b,c[10]d") == ["a1", "a2", "a3", "a07", "b", "c10d"]
    with pytest.raises(ValueError, match="brackets"):
        expand_nodes("a[1-2")


def test_kubernetes(tmp_path: Path) -> None:
    def item(reason: str, kind: str, name: str, at: str, **more: object) -> dict[str, object]:
        return {"reason": reason, "involvedObject": {"kind": kind, "name": name}, "lastTimestamp": at, **more}

    items = [
        item("NodeNotReady", "Node", "n1", "2026-01-01T00:00:00Z"),
        item("Scheduled", "Pod", "p", "2026-01-01T00:10:00Z"),
        item("NodeReady", "Node", "n1", "2026-01-01T02:00:00Z"),
        item("OOMKilling", "Pod", "p", "2026-01-01T03:00:00Z", source={"host": "n2"}),
        item("NodeNotReady", "Node", "n3", "yesterday"),
    ]
    trace = tr.read_trace(_file(tmp_path, json.dumps({"items": items}), "events.json"), preset_name="k8s")
    assert [(f.node, f.down_h, f.up_h, f.kind) for f in trace.failures] == [
        ("n1", 0, 2, "NodeNotReady"),
        ("n2", 3, None, "OOMKilling"),
    ]
    assert (trace.rows_skipped, len(trace.problems)) == (1, 1)
    lines = tr.read_trace(
        _file(tmp_path, "\n".join(map(json.dumps, items[:4])) + "\n{", "events.jsonl"), preset_name="k8s"
    )
    assert len(lines.failures) == 2
    assert "not JSON" in str(lines.problems[0])


def test_xid(tmp_path: Path) -> None:
    text = (
        "2026-01-01T00:00:00+0000 host7 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
        "2026-01-01T00:01:00+0000 host7 kernel: usb 1-1: new device\n"
        "2026-01-01T06:00:00.5+0000 host8 kernel: NVRM: Xid (PCI:0000:86:00): 94, pid=2, Contained\n"
        "NVRM: Xid (PCI:0000:86:00): 13\n"
    )
    trace = tr.read_trace(_file(tmp_path, text, "kern.log"), preset_name="xid", nodes=16)
    assert [(f.node, round(f.down_h, 2), f.kind) for f in trace.failures] == [
        ("host7", 0.0, "xid 79 fallen off the bus"), ("host8", 6.0, "xid 94 contained ECC error"),
    ]  # fmt: skip
    assert (trace.rows_skipped, len(trace.problems)) == (1, 1)
    raw = tr.read_trace(_file(tmp_path, "[ 7200.5] NVRM: Xid (PCI:0000:3b:00): 48, DBE\n", "dmesg"), preset_name="xid")
    assert raw.failures[0].down_h == pytest.approx(2.0, abs=1e-3)
    human = tr.read_trace(
        _file(tmp_path, "[Thu Jan  1 01:00:00 2026] NVRM: Xid (0000:3b:00): 48\n", "t"), preset_name="xid"
    )
    assert human.failures[0].kind == "xid 48 double-bit ECC"


def test_a_run_s_journal() -> None:
    entries = [
        ev.RunStarted(at_s=100.0, run_id="r", command=[], num_replicas=4, num_spares=0, signature={}, config={}),
        *(ev.ReplicaStarted(at_s=101.0, replica=f"r{i}.0", agent="host", pid=i) for i in range(4)),
        ev.ReplicaExited(at_s=200.0, replica="r2.0", cause="signal", detail="9", noticed_by="agent"),
        ev.Recovery(at_s=200.1, cause="signal", replica="r2.0", noticed_by="agent", detect_s=0.01, downtime_s=0.05,
                    microbatches_recomputed=2, lost_steps=0, step=5, view=[1, 2]),
        ev.ReplicaStarted(at_s=210.0, replica="r2.1", agent="host", pid=9),
        ev.ReplicaExited(at_s=300.0, replica="r1.0", cause="exception", detail="", noticed_by="agent"),
        ev.ReplicaExited(at_s=500.0, replica="r0.0", cause="finished", detail="", noticed_by="agent"),
    ]  # fmt: skip
    journal = RunJournal(list(entries))
    assert journal.failures() == [(100.0, "host/r2", "signal", 10.0), (200.0, "host/r1", "exception", None)]
    trace = tr.trace_from_journal("run", journal)
    assert trace.num_nodes == 4
    assert trace.hours == pytest.approx(400 / 3600)
    with pytest.raises(ConfigError, match="no event"):
        RunJournal([])


def _synthetic(seed: int, *, weeks: int = 60, shape: float = 2.0, spread: float = 1.0) -> tr.Trace:
    rng = np.random.default_rng(seed)
    rates = rng.gamma(shape, 12 / shape, weeks)
    times = np.sort(np.concatenate([w * 168 + rng.uniform(0, 168, rng.poisson(r)) for w, r in enumerate(rates)]))
    weights = rng.gamma(1 / spread, spread, 300)
    nodes = rng.choice(300, len(times), p=weights / weights.sum())
    repairs = rng.lognormal(2.5, 1.4, len(times))
    failures = tuple(
        tr.Failure(down_h=float(t), up_h=float(t + r) if t + r < weeks * 168 else None, node=f"n{n}", kind="hw")
        for t, r, n in zip(times, repairs, nodes, strict=True)
    )
    return tr.Trace(name="made", hours=weeks * 168.0, num_nodes=300, failures=failures, rows_read=0)


def test_a_fit_recovers_what_was_put_in() -> None:
    fit = tr.fit_trace(_synthetic(1), rounds=0)
    assert 1 / fit.node_rate_h.mean == pytest.approx(300 * 168 / 12, rel=0.15)
    assert fit.weekly.shape_interval[0] < 2.0 < fit.weekly.shape_interval[1] * 1.3
    assert fit.lemons.shape_interval[0] < 1.0 < fit.lemons.shape_interval[1] * 1.3
    assert fit.repair_fits[0].family == "lognormal"
    assert fit.repair is not None
    assert fit.repair.level == pytest.approx(2.5, abs=0.4)
    with pytest.raises(ConfigError, match="too few"):
        tr.fit_trace(_synthetic(1).cut(0, 20.0))


def test_generated_traces_are_reproducible_and_like_their_log() -> None:
    source = _synthetic(2, weeks=26)
    fit = tr.fit_trace(source, rounds=0)
    one, again = (tr.generate(fit, np.random.default_rng(7)) for _ in range(2))
    assert one == again
    inside = tr.predictive_check(fit, source, rounds=100, level=0.99)
    assert all(check.inside for check in inside), inside
    back = parse(tr.to_csv(one), tr.Mapping(time="time_h", node="node", event="event", kind=("class",)))
    read = tr.trace_from_events("back", back, nodes=300, hours=one.hours)
    assert len(read.failures) == len(one.failures)
    assert not read.problems


def test_infinitehbd_s_facts() -> None:
    trace = tr.read_trace(str(_data("infinitehbd_fault_events.csv")), preset_name="infinitehbd")
    found = tr.statistics(trace)
    assert (trace.rows_read, len(trace.problems)) == (1168, 2)
    fit = tr.fit_trace(trace, rounds=0)
    assert 1 / fit.node_rate_h.mean == pytest.approx(5720, rel=0.005)
    assert found.gap_cv == pytest.approx(1.76, abs=0.01)
    assert found.weekly_dispersion == pytest.approx(5.0, abs=0.2)
    assert found.worst_tenth_share == pytest.approx(0.41, abs=0.005)
    assert found.repair_median_h == pytest.approx(20.4, abs=0.05)
    spans, seen, _ = trace.repairs_h()
    assert spans[seen].mean() == pytest.approx(
        132.8, rel=0.03
    )  # 129.3 by strict pairing; two rows contradict the others


def test_the_generator_reproduces_the_held_out_end_and_poisson_does_not() -> None:
    trace = tr.read_trace(str(_data("infinitehbd_fault_events.csv")), preset_name="infinitehbd")
    cut = 0.7 * trace.hours
    fit, held = tr.fit_trace(trace.cut(0, cut), rounds=0), trace.cut(cut, trace.hours)
    checks = {c.name: c for c in tr.predictive_check(fit, held, rounds=250)}
    for name in ("gap_cv", "weekly_dispersion", "worst_tenth_share", "repair_median_h"):
        assert checks[name].inside, checks[name]
    # In these 70 % the drift of repairs is not significant, and is not followed; it went on all the same.
    assert fit.repair is not None
    assert (fit.repair.slope, round(fit.repair.drift_p, 2)) == (0.0, 0.42)
    wider = {c.name: c for c in tr.predictive_check(fit, held, rounds=250, level=0.99)}
    assert wider["repair_p90_h"].inside, wider
    poisson = {c.name: c for c in tr.predictive_check(fit, held, rounds=250, poisson=True)}
    failed = {name for name, check in poisson.items() if not check.inside}
    assert {"gap_cv", "weekly_dispersion", "worst_tenth_share", "repair_median_h"} <= failed


def test_fleet_ettr_from_the_fit_beside_replaying_the_trace() -> None:
    trace = tr.read_trace(str(_data("infinitehbd_fault_events.csv")), preset_name="infinitehbd")
    fit = tr.fit_trace(trace, rounds=0)
    base = {"accelerators": 3200, "days": 348.0, "spares": 60, "interval": "fixed", "interval_s": 3600.0}
    job = job_from_mapping({**job_data_from_fit(fit), **base})
    predicted, replayed = simulate(job, 300).ettr(), replay(job, trace).ettr().mean
    assert predicted.run_low < replayed < predicted.run_high
    assert replayed == pytest.approx(predicted.mean, abs=0.03)


def test_spot_traces() -> None:
    trace = tr.read_trace(str(_data("bamboo_oobleck_node_events.csv")), preset_name="bamboo", only={"trace": ("p3",)})
    assert (len(trace.failures), trace.rows_skipped) == (167, 423)
    assert trace.machine_hours / trace.hours == pytest.approx(24.0, abs=0.1)
    fit = tr.fit_trace(trace, rounds=0)
    assert fit.mean_incident > 3  # preemptions come in batches


def test_raw_events_sort_by_time_and_keep_the_log_s_order() -> None:
    rows = [RawEvent(row=i, time_h=5.0, node="a", what=w) for i, w in enumerate(("down", "up", "down"))]
    trace = tr.trace_from_events("ties", rows)
    assert [f.up_h for f in trace.failures] == [5.0, None]


def _drifting(seed: int, slope: float) -> tr.Trace:
    """A year of failures whose repairs take e^slope times as long each four weeks."""
    rng = np.random.default_rng(seed)
    times = np.sort(rng.uniform(0, 52 * 168, 600))
    repairs = rng.lognormal(0.5 + slope * times / BLOCK_H, 1.2)
    failures = tuple(
        tr.Failure(down_h=float(t), up_h=float(t + r), node=f"n{n}", kind="hw")
        for t, r, n in zip(times, repairs, rng.integers(0, 200, 600), strict=True)
    )
    return tr.Trace(name="made", hours=52 * 168.0 + 500, num_nodes=200, failures=failures, rows_read=0)


def test_a_drift_is_followed_where_it_is_significant_and_only_there(tmp_path: Path) -> None:
    steady, shrinking = (tr.fit_trace(_drifting(4, slope), rounds=0).repair for slope in (0.0, -0.15))
    assert steady is not None
    assert shrinking is not None
    assert (steady.slope, steady.drift_p >= 0.05) == (0.0, True)
    assert steady.level == pytest.approx(0.5, abs=0.15)
    assert shrinking.slope == pytest.approx(-0.15, abs=0.03)
    log = _file(tmp_path, tr.to_csv(_drifting(4, -0.15)))
    again = generate_like(
        log, str(tmp_path / "new.csv"), preset="", mapping=_file(tmp_path, MAPPING, "m.toml"), days=0, nodes=0,
        log_nodes=200, seed=3,
    )  # fmt: skip
    medians = [again.data[which]["repair_median_h"] for which in ("log", "generated")]
    assert medians[1] == pytest.approx(medians[0], rel=0.35), "a trace like the log drifts in the log's own time"


MAPPING = 'time = "time_h"\nnode = "node"\nevent = "event"\nkind = ["class"]\n'


def test_fitted_laws_are_told_with_their_parameters_and_as_many_rounds_as_asked(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    times = np.cumsum(6.0 * rng.weibull(0.7, 250))
    failures = tuple(
        tr.Failure(down_h=float(t), up_h=float(t) + 1, node=f"n{i % 40}", kind="hw") for i, t in enumerate(times)
    )
    made = tr.Trace(name="made", hours=float(times[-1]) + 2, num_nodes=40, failures=failures, rows_read=0)
    mapping = _file(tmp_path, MAPPING, "m.toml")
    answer = fit_log(
        _file(tmp_path, tr.to_csv(made)), preset="", mapping=mapping, only=[], nodes=40, rounds=40, seed=1
    )  # fmt: skip
    weibull = answer.data["gaps_laws"]["weibull"]
    shape = weibull["parameters"]["shape"]
    assert shape["estimate"] == pytest.approx(0.7, abs=0.1)
    assert shape["interval_95"][0] < 0.7 < shape["interval_95"][1]
    assert weibull["fit_test"][1] > 0.05
    assert answer.data["gaps_laws"]["exponential"]["fit_test"][1] == pytest.approx(1 / 41)
    assert "p < 0.024" in answer.text()
    assert f"shape {shape['estimate']:.3f} (" in answer.text()
    json.loads(answer.json())


@pytest.mark.parametrize("wrong", [{"nodes": -5}, {"rounds": -1}])
def test_nonsense_is_refused_by_the_option_s_name(tmp_path: Path, wrong: dict[str, int]) -> None:
    options = {"nodes": 0, "rounds": 0, **wrong}
    with pytest.raises(ConfigError, match=f"--{next(iter(wrong))} = -"):
        fit_log(_file(tmp_path, CSV), preset="infinitehbd", mapping="", only=[], seed=0, **options)  # type: ignore[arg-type]
