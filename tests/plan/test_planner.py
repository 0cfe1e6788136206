"""The planner, its report and its commands: answers that hang together, pages that stand alone, nonsense refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from outlast.cli import main
from outlast.core import reliability as rel
from outlast.core.policy import Believed, ClassPrior, RunPrior
from outlast.errors import ConfigError
from outlast.plan._analytic import analyse
from outlast.plan._compiled import replace_job
from outlast.plan._model import FailureClass, Job, Tier, job_from_mapping, load_job
from outlast.plan._planner import make_plan, tell_apart_days
from outlast.plan._profiles import PROFILES, profile_data
from outlast.plan._simulate import simulate
from outlast.plan._source import Replayed
from outlast.plan.beliefs_beside import fold, observe_run, predicted_beside_observed
from outlast.plan.design_comparison import compare_answer, example_paths
from outlast.plan.designs import job_from_options
from outlast.plan.plan_report import _runs, html_page, plan_answer
from outlast.plan.run_journal import RunJournal


def _run(*args: str, capsys: pytest.CaptureFixture[str]) -> dict:  # type: ignore[type-arg]
    assert main(["plan", *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_design_beats_what_was_given_and_its_neighbours() -> None:
    job = job_from_mapping(
        {
            **profile_data("llama3"),
            "accelerators": 8192,
            "days": 20.0,
            "spares": 0,
            "interval_s": 9000.0,
            "interval": "fixed",
        }
    )
    plan = make_plan(job, replications=128)
    assert plan.outcome.ettr().mean > plan.outcome_given.ettr().mean + 0.02
    assert plan.analytic.chain == pytest.approx(plan.outcome.ettr().mean, abs=0.01)
    for factor in (0.6, 1.6):
        other = replace_job(plan.job, interval_s=plan.job.interval_s * factor)
        assert analyse(other).chain < plan.analytic.chain
    assert plan.mistakes[3].ettr == max(m.ettr for m in plan.mistakes)
    assert plan.sensitivity[0].swing >= plan.sensitivity[-1].swing
    rates = next(s for s in plan.sensitivity if s.name == "all rates")
    assert rates.low > plan.analytic.chain > rates.high
    losses = {p.name: p.losses_a_year or 0.0 for p in plan.placements}
    assert len(losses) == len(plan.placements) == 4
    assert losses["mixed x2"] < losses["ring x2"]
    assert losses["rs(4,2)"] < losses["ring x2"]


@pytest.mark.parametrize("name", list(PROFILES))
def test_every_profile_plans_and_cites(name: str) -> None:
    job = job_from_mapping(profile_data(name))
    assert all(item.source for item in job.classes)
    plan = make_plan(job, replications=16)
    page = html_page(plan, [PROFILES[name]])
    assert 0 < plan.outcome.ettr().mean <= 1
    assert "NaN" not in page
    json.loads(plan_answer(plan).json())


def test_the_page_stands_alone_and_reads_in_greyscale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.html"
    data = _run("--accelerators", "2000", "--replications", "32", "--report", str(out), capsys=capsys)
    page = out.read_text(encoding="utf-8")
    assert page.count("<svg") == page.count("</svg>") == 5
    assert not re.search(r"<script|src=|href=|url\((?!#)|@import", page)
    assert all(
        len(set(re.findall("..?", c))) == 1 or (len(c) == 3 and len(set(c)) == 1)
        for c in re.findall(r"#([0-9a-f]{3,6})\b", page)
    )
    assert f"{100 * data['designed']['ettr']:.2f} %" in page
    for word in ("MTBF", "MTBI", "MTBR", "Where the time goes", "mistaken rate", "Placement", "nine", "Assumptions"):
        assert word in page


def test_commands_answer_the_facts(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = _run("fleet", "--nodes", "1000", "--node-mtbf-hours", "50000", "--mttr-hours", "2", capsys=capsys)
    assert fleet["first_failure_min"] == pytest.approx(3000)
    assert fleet["node_availability"] == pytest.approx(0.999960, abs=5e-7)
    assert fleet["all_up"] == pytest.approx(0.960790, abs=5e-7)
    many = _run("fleet", "--nodes", "10000", "--node-mtbf-hours", "50000", capsys=capsys)
    assert (many["first_failure_min"], many["all_up"]) == (pytest.approx(300), pytest.approx(0.670325, abs=5e-7))
    found = _run("interval", "--mtbf-hours", str(50_000 / 512), "--write-seconds", "60", capsys=capsys)
    lengths = {c["name"]: c["interval_s"] / 60 for c in found["choices"]}
    assert (lengths["Young"], lengths["exact"]) == (pytest.approx(108.25, abs=0.005), pytest.approx(107.59, abs=0.005))
    assert found["choices"][0]["waste_first_order"] == pytest.approx(0.0185, abs=5e-5)
    nines = _run("nines", capsys=capsys)
    three, four = nines["budgets"][1], nines["budgets"][2]
    assert (three["year_h"], three["month_min"]) == (pytest.approx(8.76), pytest.approx(43.2))
    assert (four["year_h"] * 60, four["month_min"]) == (pytest.approx(52.56), pytest.approx(4.32))
    assert three["month_min"] - three["left_min"] == pytest.approx(36)
    assert nines["budgets"][3]["year_h"] * 60 == pytest.approx(5.256)
    rows = _run("target-study", "--replications", "200", capsys=capsys)["rows"]
    assert [round(r["mtbf_published_h"], 1) for r in rows] == [12.3, 28.7, 42.1, 56.4]


def test_llama_3_s_rhythm_and_the_research_clusters(capsys: pytest.CaptureFixture[str]) -> None:
    llama = job_from_mapping(profile_data("llama3"))
    assert sum(round(llama.fleet_rate_h(c) * 54 * 24) for c in llama.classes) == 419
    outcome = simulate(llama, 64)
    assert outcome.clocks_h()["mtbi_h"] == pytest.approx(54 * 24 / 419, rel=0.03)  # about every three hours
    assert outcome.ettr().mean > 0.90
    per_node_h = {name: 1 / profile_data(name)["classes"][0]["node_mtbf_h"] for name in ("rsc1", "rsc2")}
    assert per_node_h["rsc1"] * 24_000 == pytest.approx(6.50)
    # 1.8 h at 16,384 GPUs and 0.23 h at 131,072 by 1/(N r); 28.8 h at 1,024, where 7.9 were measured
    assert 1 / (2048 * per_node_h["rsc1"]) == pytest.approx(1.8, abs=0.01)
    assert 1 / (16_384 * per_node_h["rsc1"]) == pytest.approx(0.23, abs=0.005)
    assert 1 / (128 * per_node_h["rsc1"]) == pytest.approx(28.8, abs=0.1)
    assert 28.8 / 7.9 > 3  # the miss: small jobs fail for reasons that do not scale with nodes


def test_the_lost_weekend() -> None:
    answer = compare_answer(*example_paths(), replications=200)
    before, after = answer.data["designs"]
    assert answer.data["gain_95"][0] > 0.05
    assert before["one_rollback_h"] > 12 > after["one_rollback_h"] * 10
    # the next error cost eleven minutes: struck four minutes after a durable write, back five minutes after that
    job = load_job(example_paths()[1])
    at = 9 * 86400 + 4 * 60.0
    cycle = job.interval_s + job.tiers[0].write_s
    at = (at // cycle) * cycle + job.tiers[0].write_s + 6 * 60
    replayed = simulate(
        job, 1, source=lambda m, n, g: Replayed(np.array([at]), np.zeros(1, dtype=np.intp), np.array([3600.0]), n)
    )
    cost_min = float(replayed.accounts_s[[2, 3, 5]].sum()) / 60
    assert cost_min == pytest.approx(11.0, abs=0.1)


def test_placements_are_of_the_job_s_own_machines() -> None:
    """On 50 nodes, no multiple of the group of six: all three pairs of a triple are not independent."""
    job = job_from_mapping({**profile_data("llama3"), "accelerators": 400, "days": 1.0, "spares": 0})
    rows = {p.name: p for p in make_plan(job, replications=2).placements}
    assert rows["mixed x3"].survive[2] == pytest.approx(0.998980, abs=5e-7)
    assert rows["ring x2"].survive[1:] == pytest.approx((1 - 50 / 1225, rel.copies_survival(50, 2, 3, ring=True)))
    double = replace_job(job, classes=tuple(msgspec.structs.replace(c, repair=c.repair / 2) for c in job.classes))
    half = {p.name: p for p in make_plan(double, replications=2).placements}
    ratio = (rows["ring x2"].losses_a_year or 0) / (half["ring x2"].losses_a_year or 1)
    assert ratio == pytest.approx(4.0, rel=1e-3), "pairs of half as many lost machines"
    target = make_plan(job_from_mapping(profile_data("target")), replications=2)
    assert {p.losses_a_year for p in target.placements} == {None}
    assert "not known" in plan_answer(target).text()


def test_a_small_job_s_clocks_are_expected_and_its_runs_told_apart_from_perfect_ones() -> None:
    job = job_from_options(None, params=1e9, accelerators=4, days=1.0)[0]
    plan = make_plan(job, replications=32)
    text, data = plan_answer(plan).text(), plan_answer(plan).data
    half = sum(job.fleet_rate_h(c) for c in job.classes)  # four of a node's eight accelerators
    assert data["given"]["mtbf_h"] == pytest.approx(1 / half, rel=0.01)  # it is out for a while
    assert data["given"]["failures"]["faulty GPU"] == pytest.approx(24 * 148 / (54 * 24 * 4096))
    assert "never" not in text.split("Where the time goes")[0]
    assert "100.0-100.0" not in text
    assert _runs(plan.outcome).startswith("99.")
    assert _runs(plan.outcome).endswith("in all but the rarest")


def test_expected_clocks_are_those_that_the_simulator_counts() -> None:
    for name in PROFILES:
        job = job_from_mapping(profile_data(name))
        counted = simulate(job, 1024).clocks_h()  # some profiles fail a few times in a simulated course
        for clock, expected in analyse(job).clocks_h().items():
            assert counted[clock] == pytest.approx(expected, rel=0.08), (name, clock)


@given(st.sampled_from(["recovery_s", "write_s", "lag_s"]), st.booleans(), st.integers(1, 100))
@settings(max_examples=12)
def test_a_job_that_loses_no_time_has_a_plan(field: str, masked: bool, accelerators: int) -> None:
    """Zero is a value like others; what is refused is refused by a name that the user gave."""
    data = {**profile_data("rsc1"), "accelerators": accelerators, "spares": 0, "days": 2.0}
    data["tiers"] = [{**tier, field: 0.0} for tier in data["tiers"]]
    if masked:
        data["classes"] = [{**item, "masked": 1.0} for item in data["classes"]]
    plan = make_plan(job_from_mapping(data), replications=2)
    answer = plan_answer(plan)
    json.loads(answer.json())
    assert bool(plan.levers) == ("no price" not in answer.text())


def test_telling_designs_apart() -> None:
    job = job_from_mapping({**profile_data("target"), "interval_s": 1200.0})
    a, b = simulate(job, 64), simulate(replace_job(job, interval_s=6000.0), 64)
    assert 0 < tell_apart_days(a, b) < 365
    assert tell_apart_days(a, a) == float("inf")


_NONSENSE = [
    ({"accelerators": -8}, "accelerators"),
    ({"days": 0.0}, "days"),
    ({"spares": 10_000}, "spares"),
    ({"efficency": 0.9}, "efficiency"),
    ({"interval": "often"}, "interval"),
    ({"min_share": 1.5}, "min_share"),
    ({"tiers": [{"name": "t", "write_s": -1.0}]}, "write_s"),
    (
        {
            "tiers": [
                {"name": "t", "write_s": 1.0},
                {"name": "u", "write_s": 1.0, "every": 3},
                {"name": "v", "write_s": 1.0, "every": 4},
            ]
        },
        "multiple",
    ),
    ({"classes": [{"name": "x", "node_mtbf_h": -1.0}]}, "node_mtbf_h"),
    ({"classes": [{"name": "x", "node_mtbf_h": 10.0, "coverage": 1.2}]}, r"\[0, 1\]"),
    ({"classes": [{"name": "x", "node_mtbf_h": 10.0, "maskd": 0.5}]}, "masked"),
    ({"classes": [{"name": "x", "node_mtbf_h": 10.0, "severity": 3}]}, "tier"),
    ({"classes": [{"name": "x", "node_mtbf_h": float("nan")}]}, "node_mtbf_h"),
    ({"classes": []}, "at least one"),
    ({"hardware": [{"share": 0.4}]}, "add up"),
    ({"accelerators": "many"}, "int"),
]


@pytest.mark.parametrize(("change", "said"), _NONSENSE)
def test_nonsense_is_refused_with_reason_and_remedy(change: dict[str, object], said: str) -> None:
    base = {"classes": [{"name": "x", "node_mtbf_h": 1000.0}], "accelerators": 64}
    with pytest.raises(ConfigError, match=said) as caught:
        job_from_mapping({**base, **change})
    assert caught.value.remedy


def test_bad_options_exit_with_two(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("accelerators = 8\nspare = 1\n[[classes]]\nname='x'\nnode_mtbf_h=10.0\n")
    for args, said in (
        (["fleet", "--nodes", "-3", "--node-mtbf-hours", "10"], "remedy"),
        (["interval", "--mtbf-hours", "-1", "--write-seconds", "5"], "above zero"),
        (["nines", "--target", "1.0"], "finite price"),
        (["--profile", "lama3"], "did you mean 'llama3'"),
        (["--params", "-1"], "above zero"),
        ([str(tmp_path / "bad.toml")], "did you mean 'spares'"),
        ([str(tmp_path / "none.toml")], "no such file"),
        (["compare", str(tmp_path / "bad.toml")], "two job files"),
        (["fit", str(tmp_path / "bad.toml")], "--preset"),
        (["target-study", "--replications", "0"], "replications"),
        (["system", "--params", "big"], "list of numbers"),
    ):
        assert main(["plan", *args]) == 2, args
        assert said in capsys.readouterr().err, args


@given(
    st.floats(1e7, 1e14),
    st.integers(1, 200_000),
    st.floats(0.1, 400),
    st.sampled_from(["llama3", "rsc1", "rsc2", "infinitehbd"]),
)
@settings(max_examples=8)
def test_any_sensible_job_gets_a_plan(params: float, accelerators: int, days: float, profile: str) -> None:
    job, sources = job_from_options(None, profile=profile, params=params, accelerators=accelerators, days=days)
    plan = make_plan(replace_job(job, days=min(days, 2e5 / accelerators + 0.1)), replications=4)
    assert sources
    assert 0 <= plan.outcome.ettr().mean <= 1 + 1e-9
    json.loads(plan_answer(plan).json())


def test_help_is_instant_and_heavy_modules_stay_out() -> None:
    code = (
        "import sys; from outlast.cli import main; main(['plan', '--help'])\n"
        "sys.exit('numpy' in sys.modules or 'scipy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_replanning_from_a_run() -> None:
    from outlast.core import events as ev

    entries: list[ev.AnyEvent] = [
        ev.RunStarted(at_s=0.0, run_id="r", command=[], num_replicas=4, num_spares=0, signature={}, config={}),
        *(ev.ReplicaStarted(at_s=1.0, replica=f"r{i}.0", agent="h", pid=i) for i in range(4)),
    ]
    for k in range(6):
        entries.append(
            ev.ReplicaExited(at_s=600.0 * (k + 1), replica=f"r0.{k}", cause="signal", detail="", noticed_by="agent")
        )
        entries.append(ev.ReplicaStarted(at_s=600.0 * (k + 1) + 5, replica=f"r0.{k + 1}", agent="h", pid=9))
    entries.insert(5, ev.ViewFormed(at_s=2.0, epoch=1, n=1, step=0, roll_call_s=0.1))
    assert observe_run(RunJournal(entries)).failures == {"signal": 6}
    record = fold(entries)
    believed = record.believed(entries[-1].at_s)
    prior = RunPrior().replica
    assert believed.death_rate_s == pytest.approx((prior.weight + 6) / (prior.weight / prior.rate + believed.exposed_s))
    deaths, losses = predicted_beside_observed(believed)
    assert (deaths.name, deaths.seen, losses.seen) == ("a replica dies", 6, 0)
    assert deaths.predicted < 1
    assert not deaths.tells  # an hour of four machines: neither six failures nor none say anything of the prediction
    assert not deaths.surprise


def _seen(**changes: float) -> Believed:
    nothing = {"death_rate_s": 1.0, "mtbr_s": 1.0, "interval_s": 1.0, "num_spares": 0, "audit_share": 0.0}
    counts = {"exposed_s": 0.0, "watched_s": 0.0, "num_deaths": 0, "num_losses": 0}
    return Believed(**{**nothing, "reason": "", **counts, **changes})  # type: ignore[arg-type]


def test_a_long_run_can_be_surprising() -> None:
    month = 30 * 86_400.0
    calm, struck = (
        predicted_beside_observed(_seen(exposed_s=64 * month, watched_s=month, num_deaths=n)) for n in (10, 400)
    )
    assert [row.surprise for row in calm] == [False, False]
    assert [row.surprise for row in struck] == [True, False]
    assert predicted_beside_observed(_seen(watched_s=month, num_losses=900))[1].surprise


@given(st.floats(0.1, 1000), st.floats(1e-5, 1.0, exclude_max=True))
@settings(max_examples=150)
def test_the_prediction_s_quantiles_are_the_negative_binomial_s(weight: float, odds: float) -> None:
    rate = 1 / 3600
    prior = RunPrior(replica=ClassPrior(rate=rate, weight=weight))
    row = predicted_beside_observed(_seen(exposed_s=weight / rate * (1 / odds - 1)), prior)[0]
    assert row.predicted == pytest.approx(stats.nbinom.mean(weight, odds), rel=1e-6, abs=1e-9)
    wanted = stats.nbinom.ppf([0.025, 0.975], weight, odds)
    assert [row.low, row.high] == pytest.approx(wanted, abs=1e-6 * wanted[1])


def test_the_cost_of_spares_shows() -> None:
    job = Job(
        classes=(FailureClass(name="x", node_mtbf_h=300.0, repair=1.0, repair_median_h=10, repair_mean_h=20),),
        accelerators=256,
        tiers=(Tier(name="s", write_s=10.0),), days=20.0,
    )  # fmt: skip
    plan = make_plan(job, replications=64)
    assert plan.spares_99 > 0
    assert abs(plan.spares_policy - plan.spares_99) <= 2
    assert plan.outcome.breakdown()["idle"] < plan.outcome_given.breakdown()["idle"]
