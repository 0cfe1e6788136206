"""`outlast plan month`: a month of runs from their journals, with its budget, its causes and its price."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from outlast.cli import main
from outlast.core import events as ev
from outlast.journal import Journal
from outlast.journal._files import EVENTS_NAME
from outlast.plan.monthly_report import month_answer, run_of_month

NOVEMBER = 1_793_491_200.0  # 2026-11-01, 00:00 UTC
HOUR = 3600.0
PRICES: dict[str, Any] = {"objective": 0.9, "price": 3.0, "watts": 500.0, "carbon": 0.4, "accelerators": 8}


def started(at_s: float = NOVEMBER, replicas: int = 3, spares: int = 1) -> ev.AnyEvent:
    told = {"run_id": "1", "command": ["train.py"], "num_replicas": replicas, "num_spares": spares, "signature": {}}
    return ev.RunStarted(at_s=at_s, config={}, **told)  # type: ignore[arg-type]


def recovery(at_s: float, cause: str, downtime_s: float, lost_steps: int = 0, detect_s: float = 2.0) -> ev.AnyEvent:
    told = {"replica": "r0.1", "noticed_by": "a0", "microbatches_recomputed": 1, "step": 3, "view": [1, 1]}
    return ev.Recovery(
        at_s=at_s,
        cause=cause,
        downtime_s=downtime_s,
        lost_steps=lost_steps,
        detect_s=detect_s,
        **told,  # type: ignore[arg-type]
    )


def finished(at_s: float, steps: int = 100) -> ev.AnyEvent:
    return ev.RunFinished(at_s=at_s, outcome="finished", steps=steps, detail="", exit_code=0, seconds={})


def seconds(wall_h: float, productive_h: float) -> dict[str, float]:
    return {"wall": wall_h * HOUR, "productive": productive_h * HOUR, "recovery": (wall_h - productive_h) * HOUR}


RUNS = [
    run_of_month(
        "one",
        [
            started(),
            recovery(NOVEMBER + 9, "signal", 4.0),
            recovery(NOVEMBER + 99, "evicted", 0.0),
            finished(NOVEMBER + 10 * HOUR),
        ],
        seconds(10.0, 9.5),
    ),
    run_of_month(
        "two", [started(NOVEMBER + 9 * HOUR, 1, 0), recovery(NOVEMBER + 33000, "signal", 1.0, 7)], seconds(20.0, 15.0)
    ),
    run_of_month("old", [started(NOVEMBER - 5.0)], seconds(99.0, 1.0)),
]


def test_the_budget_is_of_replica_hours_and_the_old_run_is_not_in_it() -> None:
    answer = month_answer(RUNS, "", **PRICES)
    data = answer.data
    assert (data["month"], [run["run"] for run in data["runs"]]) == ("2026-11", ["one", "two"])
    assert data["replica_hours"] == pytest.approx(4 * 10 + 1 * 20)
    assert data["ettr"] == pytest.approx((4 * 9.5 + 15) / 60)
    assert (data["budget_h"], data["used_h"]) == (pytest.approx(6.0), pytest.approx(7.0))
    assert data["burn_rate"] == pytest.approx(7 / 6)
    assert data["left_share"] == pytest.approx(-1 / 6)
    assert data["lost"] == pytest.approx(
        {"accelerator_hours": 56.0, "money": 168.0, "energy_kwh": 28.0, "carbon_kg": 11.2}
    )
    assert sum(data["hours"].values()) == pytest.approx(data["replica_hours"])
    assert "1 of the runs named began in other months." in answer.notes


def test_causes_and_clocks_have_exact_intervals() -> None:
    data = month_answer(RUNS, "2026-11", **PRICES).data
    rows = {row["cause"]: row for row in data["causes"]}
    assert [row["cause"] for row in data["causes"]] == ["signal", "evicted"]
    assert (rows["signal"]["count"], rows["signal"]["downtime_s"], rows["signal"]["lost_steps"]) == (2, 5.0, 7)
    low, high = stats.chi2.ppf([0.025, 0.975], [4, 6]) / 2  # Garwood, of two failures
    assert rows["signal"]["mtbf_95_h"] == [pytest.approx(60 / high), pytest.approx(60 / low)]
    clocks = {row["clock"]: row for row in data["clocks"]}
    assert {name: row["count"] for name, row in clocks.items()} == {"MTBF": 3, "MTBI": 2, "MTBR": 0}
    assert clocks["MTBF"]["hours"] == pytest.approx(10.0)
    assert clocks["MTBR"]["hours"] is None
    assert clocks["MTBR"]["least_h"] == pytest.approx(30.0 / (stats.chi2.ppf(0.975, 2) / 2))


def test_journals_on_disk_are_read_one_by_one_or_by_their_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, start_s in (("a", NOVEMBER), ("b", NOVEMBER + 40 * HOUR)):
        journal = Journal.create(tmp_path / "runs" / name)
        for event in (started(start_s), recovery(start_s + 50.0, "signal", 4.0), finished(start_s + HOUR)):
            journal.append(event)
        journal.close()
    (tmp_path / "runs" / "no run").mkdir()
    words = ["plan", "month", str(tmp_path / "runs"), str(tmp_path / "runs" / "a"), "--json"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert [Path(run["run"]).name for run in told["runs"]] == ["a", "b"], "each once"
    assert told["causes"][0]["count"] == 2
    assert main(words[:-1]) == 0
    shown = capsys.readouterr().out
    assert "2026-11: 2 runs" in shown
    assert "burn rate" in shown


def test_replicas_that_were_asked_for_and_spares_that_were_chosen_are_paid_for_as_long_as_they_were() -> None:
    asked = {"what": "scale", "accepted": True, "text": "", "replicas": []}
    events = [
        started(),
        ev.Asked(at_s=NOVEMBER + 2 * HOUR, about="7", **asked),  # type: ignore[arg-type]
        ev.Asked(at_s=NOVEMBER + 3 * HOUR, about="99", **asked | {"accepted": False}),  # type: ignore[arg-type]
        ev.SparesHeld(at_s=NOVEMBER + 6 * HOUR, number=3, worth=3, reason="", replicas=[]),
        finished(NOVEMBER + 10 * HOUR),
    ]
    run = run_of_month("scaled", events, seconds(10.0, 9.0))
    assert run.replica_hours == pytest.approx(2 * 4 + 4 * 8 + 4 * 10)
    assert month_answer([run], "", **PRICES).data["replica_hours"] == pytest.approx(80.0)


def test_one_odd_journal_is_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stories: dict[str, list[ev.AnyEvent]] = {"a": [started(), finished(NOVEMBER + HOUR)], "b": [finished(NOVEMBER)]}
    for name in ("a", "b", "c"):
        with Journal.create(tmp_path / "runs" / name) as journal:
            journal.append_many(stories.get(name, stories["a"]))
    events = tmp_path / "runs" / "c" / EVENTS_NAME
    events.write_bytes(b"no journal" + events.read_bytes()[10:])
    assert main(["plan", "month", str(tmp_path / "runs"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert [Path(run["run"]).name for run in json.loads(out)["runs"]] == ["a"]
    assert "b is left out: " in err
    assert "c is left out: " in err
    assert main(["plan", "month", str(tmp_path / "runs" / "b")]) == 2, "alone it is an error"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--month", "2026-13"], "is no month"), (["--objective", "1"], "is no share of time"),
        (["--price", "-1"], "a negative price"), (["--month", "2031-01"], "no run began in 2031-01"),
    ],
)  # fmt: skip
def test_what_is_no_month_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal.create(tmp_path / "run")
    journal.append(started())
    journal.close()
    assert main(["plan", "month", str(tmp_path / "run"), *words]) == 2
    assert said in capsys.readouterr().err
    assert main(["plan", "month", str(tmp_path)]) == 0
    assert main(["plan", "month", str(tmp_path / "nothing")]) == 2
