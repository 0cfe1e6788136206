"""Public logs, as they were published: what comes out is what their papers say. And intervals that hold the truth.

The logs are no part of outlast. They are read where OUTLAST_DATA names a folder that holds them (how-to/plan-traces).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from outlast.cli import main
from outlast.core import reliability as rel
from outlast.errors import ConfigError
from outlast.plan import traces as tr


def published(name: str) -> str:
    """Where a log is, under $OUTLAST_DATA or in `shared/data` beside the repository."""
    root = os.environ.get("OUTLAST_DATA")
    places = [Path(root)] if root else [p / "shared" / "data" for p in Path(__file__).resolve().parents]
    for folder in places:
        if (folder / name).is_file():
            return str(folder / name)
    pytest.skip(f"{name} is not here (set OUTLAST_DATA)")


def law(name: str, fits: Sequence[rel.Fit]) -> rel.Fit:
    return next(fit for fit in fits if fit.family == name)


LANL = "LA-UR-05-7318-failure-data-1996-2005.csv"


def test_lanl_fails_and_is_mended_as_schroeder_and_gibson_say() -> None:
    """DSN 2006, sections 5.3 and 6: the system of 49 nodes and 6,152 processors, before 2000 and since. Weibull shapes
    0.7 of node 22 and 0.78 of the whole since 2000; squared coefficients of variation 3.9 and 1.9 of the node; more
    than 30 % of the early gaps of the whole are zero; repairs of all systems are lognormal, 355 minutes on average,
    half of them within 54."""
    log = published(LANL)
    trace = tr.read_trace(log, preset_name="lanl", only={"System": ("2",)})
    assert (trace.num_nodes, trace.problems) == (49, ())
    cut = (datetime(2000, 1, 1, tzinfo=UTC) - datetime(1997, 1, 23, 7, 15, tzinfo=UTC)).total_seconds() / 3600
    early, late = (np.diff(part.times_h()) for part in (trace.cut(0, cut), trace.cut(cut, trace.hours)))
    assert (early == 0).mean() > 0.3
    whole = law("weibull", rel.compare_fits(np.maximum(late, 1e-3))).parameters["shape"]
    assert whole[1] < 0.78 < whole[2]
    node = np.array([f.down_h for f in trace.failures if f.node == "22"])
    before, since = (gaps[gaps > 0] for gaps in (np.diff(node[node < cut]), np.diff(node[node >= cut])))
    fits = rel.compare_fits(since)
    shape = law("weibull", fits).parameters["shape"]
    assert (fits[0].family, shape[1] < 0.7 < shape[2]) == ("weibull", True)
    assert rel.compare_fits(before)[0].family == "lognormal"
    variation = [float(gaps.var() / gaps.mean() ** 2) for gaps in (before, since)]
    assert variation == pytest.approx([3.9, 1.9], rel=0.06)
    every = tr.read_trace(log, preset_name="lanl")
    spans, seen, _ = every.repairs_h()
    assert spans[seen].mean() * 60 == pytest.approx(355, rel=0.01)
    assert np.median(spans[seen]) * 60 == pytest.approx(54, abs=6)  # of 23,000 rows then, of 23,613 in the file
    assert rel.compare_fits(np.maximum(spans, 1e-3), seen)[0].family == "lognormal"


def test_titan_s_gpus_live_as_its_study_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Ostrouchov et al., SC 2020, and the analysis published with it: over 100,000 years of lifetimes, 5,089 dead; the
    old batch wears out, the new one hardly dies."""
    path = published("gc_summary_loc.csv")
    words = [
        "plan",
        "lifetimes",
        path,
        "--age",
        "years",
        "--dead",
        "dead",
        "--group",
        "batch",
        "--years",
        "3",
        "--json",
    ]
    assert main(words) == 0
    groups = json.loads(capsys.readouterr().out)["groups"]
    assert sum(found["deaths"] for found in groups.values()) == 5089
    assert sum(found["deaths"] * found["unit_years_a_death"] for found in groups.values()) > 100_000
    shape = groups["old"]["laws"]["weibull"]["parameters"]["shape"]
    assert 1 < shape[1] < shape[0] < shape[2]
    assert groups["new"]["unit_years_a_death"] > 20 * groups["old"]["unit_years_a_death"]
    events = Counter(f.kind for f in tr.read_trace(published("gc_full.csv"), preset_name="titan").failures)
    assert events["DBE"] > 3 * events["OTB"], "double-bit errors are the more frequent of the two"


def test_disks_of_summit_fail_as_was_published(tmp_path: Path) -> None:
    """FTXS 2024: 3,766 failures in 4 years, 11 months and 18 days; 41,585 s from one to the next on average. Its own
    Weibull shape, 0.52, rests on gaps of zero taken as a microsecond; here they are as long as four seconds."""
    log, mapping = published("alpine_formatted_data.csv"), tmp_path / "m.toml"
    mapping.write_text('time = "Timestamp"\nunit = "iso"\nnode = "Unique enclosure"\n')
    trace = tr.read_trace(log, mapping_path=str(mapping))
    gaps = np.diff(trace.times_h())
    assert (len(trace.failures), len(trace.problems)) == (3766, 0)
    assert gaps.mean() * 3600 == pytest.approx(41_585, abs=0.5)
    fits = rel.compare_fits(np.maximum(gaps, 1e-3))
    assert law("weibull", fits).parameters["shape"][0] == pytest.approx(0.52, abs=0.035)
    assert [fit.family for fit in fits][-2:] == ["lognormal", "exponential"], "as their likelihoods are ordered"
    zero = rel.fit_lifetime("weibull", gaps + 1e-6 / 3600)
    assert zero.parameters["shape"][0] == pytest.approx(0.5193, abs=5e-4)
    assert zero.parameters["scale"][0] * 3600 == pytest.approx(23_743, rel=0.002)


def log(tmp_path: Path, text: str) -> str:
    path = tmp_path / "log"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_layouts_are_read_as_they_were_published(tmp_path: Path) -> None:
    lanl = (
        "System,nodenumz,Prob Started,Prob Fixed,Down Time,Facilities,Hardware,Human Error,Network,Undetermined,"
        "Software\n"
        "2,0,6/21/2005 10:54,6/21/2005 11:00,6,,Graphics Accel Hdwr,,,,\n"
        "20,0,6/21/2005 10:54,6/21/2005 11:00,6,,,,,,DST\n"
        "2,7,9/6/2005 9:13,,6,,,,,,\n2,7,yesterday,9/6/2005 9:19,6,,,,,,\n"
    )
    trace = tr.read_trace(log(tmp_path, lanl), preset_name="lanl", only={"System": ("2",)}, nodes=49)
    assert [(f.node, f.kind, f.up_h) for f in trace.failures] == [
        ("0", "Graphics Accel Hdwr", pytest.approx(0.1)), ("7", "unknown", None)
    ]  # fmt: skip
    assert trace.rows_skipped == 1, "system 20 is not system 2"
    assert str(trace.problems[0]).endswith("'yesterday' is not a time as %m/%d/%Y %H:%M")
    titan = (
        "SN,location,insert,remove,duration,out,event\n"
        "032,c13-5c2s2n1,2017-04-09 21:36:19,2018-03-03 10:04:58,28301319,FALSE,DBE\n"
        "032,c11-2c1s4n1,2017-04-09 21:36:19,2019-08-01 20:07:33,72916274,FALSE,\n"
    )
    trace = tr.read_trace(log(tmp_path, titan), preset_name="titan")
    assert ([f.node for f in trace.failures], trace.rows_skipped, trace.num_nodes) == (["c13-5c2s2n1"], 1, 18_688)
    ends = ("Terminated,100.0,3600.0,m1", "Failed,100.0,7200.0,m2", "Failed,9.0,,m2")
    pai = "".join(f"j,worker,i,w,d,{end}\n" for end in ends)
    trace = tr.read_trace(log(tmp_path, pai), preset_name="pai")
    assert ([(f.node, f.kind, f.down_h) for f in trace.failures], trace.rows_skipped) == ([("m2", "worker", 2.0)], 1)
    assert str(trace.problems[0]) == "row 3, column 'end_time': is empty"
    when = ["2017-10-05 14:50:06", "2017-10-06 14:50:06", "2017-10-07 14:50:06"]
    attempts = [
        {"start_time": at, "end_time": at, "detail": [{"ip": f"m{i}", "gpus": ["gpu0"]}, {"ip": "m9", "gpus": []}]}
        for i, at in enumerate(when)
    ]
    jobs = [{"status": "Pass", "vc": "v", "jobid": "a", "attempts": attempts},
            {"status": "Failed", "vc": "v", "jobid": "b", "attempts": attempts[:1]},
            {"status": "Killed", "vc": "v", "jobid": "c", "attempts": []}]  # fmt: skip
    trace = tr.read_trace(log(tmp_path, json.dumps(jobs)), preset_name="philly")
    assert [(f.node, f.down_h) for f in trace.failures] == [("m0", 0.0), ("m0", 0.0), ("m1", 24.0)]
    assert (trace.rows_skipped, trace.num_nodes) == (1, 552)
    with pytest.raises(ConfigError, match="no list of jobs"):
        tr.read_trace(log(tmp_path, "{}"), preset_name="philly")


LAWS = {
    "weibull": (rel.Weibull(shape=0.7, scale=3.0), {"shape": 0.7, "scale": 3.0}),
    "lognormal": (rel.LogNormal(mu=1.0, sigma=1.4), {"mu": 1.0, "sigma": 1.4}),
    "exponential": (rel.Exponential(rate=0.5), {"rate": 0.5}),
}


@pytest.mark.parametrize("family", LAWS)
def test_intervals_of_laws_hold_the_truth_in_95_of_100(family: str) -> None:
    """Sixty lives, a quarter of them censored, four hundred times."""
    life, truth = LAWS[family]
    rng, rounds = np.random.default_rng(5), 400
    held = dict.fromkeys(truth, 0)
    for _ in range(rounds):
        lives, watched = life.sample(rng, 60), rng.uniform(0, 2 * float(life.quantile(0.98)), 60)
        found = rel.fit_lifetime(family, np.minimum(lives, watched), lives <= watched).parameters
        for name, value in truth.items():
            held[name] += found[name][1] <= value <= found[name][2]
    assert all(0.93 <= number / rounds <= 0.97 for number in held.values()), held


def test_a_gamma_is_fitted_where_its_tail_is_below_the_smallest_float() -> None:
    """A life of thousands of means made the likelihood of every gamma nought, and the first guess the best."""
    lives = np.append(rel.Gamma(shape=0.4, rate=1.0).sample(np.random.default_rng(3), 2000), [0.0001, 4000.0])
    fit = rel.fit_lifetime("gamma", np.maximum(lives, 1e-6))
    assert np.isfinite(fit.aic)
    assert fit.parameters["shape"][0] < 0.4
    far = rel.Gamma(shape=0.4, rate=1.0)
    times = np.array([600.0, 640.0, 650.0, 5000.0])
    slope = np.diff(far.cumhazard(times)) / np.diff(times)
    assert slope == pytest.approx([1 + 0.6 / 620, 1 + 0.6 / 645, 1 + 0.6 * np.log(5000 / 650) / 4350], abs=1e-5)
    assert far.logpdf(times) == pytest.approx(np.log(far.hazard(times)) - far.cumhazard(times))


def bursty(seed: int, weeks: int = 52, nodes: int = 200) -> tr.Trace:
    """Ten failures a week on average, at a rate of its own each week."""
    rng = np.random.default_rng(seed)
    times = [w * 168 + rng.uniform(0, 168, rng.poisson(r)) for w, r in enumerate(rng.gamma(2.0, 5.0, weeks))]
    failures = tuple(
        tr.Failure(down_h=float(t), up_h=float(t) + 1, node=f"n{rng.integers(nodes)}", kind="x")
        for t in np.sort(np.concatenate(times))
    )
    return tr.Trace(name="made", hours=weeks * 168.0, num_nodes=nodes, failures=failures)


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_a_fleet_s_rate_is_in_its_interval_in_95_of_100_bursty_fleets() -> None:
    """The interval of independent failures is there in far fewer."""
    truth, rounds = 10 / 168 / 200, 200
    held = alone = 0
    for seed in range(rounds):
        trace = bursty(seed)
        found = tr.node_rate(trace)
        counted = rel.gamma_poisson(len(trace.failures), trace.exposure_h)
        held += found.low <= truth <= found.high
        alone += counted.low <= truth <= counted.high
    assert 0.93 <= held / rounds <= 0.97, held
    assert alone / rounds < 0.75, alone
