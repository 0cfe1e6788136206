"""The chapter's arithmetic by command: numbers that are known, curves in the terminal and as SVG, nonsense refused."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from outlast.cli import main
from outlast.plan.answers import Answer
from outlast.plan.figures import Figure
from outlast.plan.prediction import prediction_answer
from outlast.plan.services import objectives_answer, price_answer, quorum_answer
from outlast.plan.small_answers import nines_answer


def plan(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["plan", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_the_collapse_has_the_known_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {r["nodes"]: r for r in plan(capsys, "collapse")["rows"]}
    assert len(rows) == 6
    assert rows[10]["any_fails"] == pytest.approx(0.095618, abs=5e-7)
    assert rows[100]["any_fails"] == pytest.approx(0.633968, abs=5e-7)
    assert rows[1000]["any_fails"] == pytest.approx(0.999957, abs=5e-7)
    assert rows[5000]["expected_failures"] == pytest.approx(50)
    assert (rows[1000]["first_failure_min"], rows[10_000]["first_failure_min"]) == pytest.approx((3000, 300))
    assert (rows[1000]["all_up"], rows[10_000]["all_up"]) == pytest.approx((0.960790, 0.670325), abs=5e-7)


def test_the_sweep_agrees_with_the_known_interval_and_each_form_pays(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {(r["nodes"], r["write_s"]): r for r in plan(capsys, "sweep")["rows"]}
    known = rows[512, 60.0]
    assert (known["young_s"] / 60, known["exact_s"] / 60) == pytest.approx((108.25, 107.59), abs=0.005)
    for row in rows.values():
        assert row["ettr"] >= row["ettr_young"]
        assert row["ettr_two_level"] > row["ettr"] > row["ettr_verified"]
    assert rows[100_000, 300.0]["young_s"] > 1.2 * rows[100_000, 300.0]["exact_s"], "the approximation leaves it"
    for write_s in (5.0, 60.0, 300.0):
        lengths = [rows[n, write_s]["exact_s"] for n in (512, 2048, 8192, 32_768, 100_000)]
        assert lengths == sorted(lengths, reverse=True)


def test_placements_are_exact_for_any_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    gemini = plan(capsys, "placement")["survive"]
    assert gemini["mixed x2"][1:] == pytest.approx([0.9333, 0.8], abs=5e-5)
    assert gemini["ring x2"][1:] == pytest.approx([0.8667, 0.6286], abs=5e-5)
    assert plan(capsys, "placement", "--nodes", 50, "--copies", 3)["survive"]["mixed x3"][2] == pytest.approx(
        0.99898, abs=5e-7
    )
    many = plan(capsys, "placement", "--nodes", 10_000, "--copies", 3, "--losses", "5,50")["survive"]
    assert 0.99 < many["mixed x3"][1] < many["mixed x3"][0] < 1
    racks = plan(capsys, "placement", "--group", 4, "--losses", "1,2")["survive"]
    assert racks["spread x2"][0] == 1.0
    assert racks["mixed x2"][0] == 0.0


def samples(path: Path) -> str:
    lines = ["latency,error,quality"]
    for i in range(1000):
        lines.append(f"{0.2 if i % 100 else 0.9},{1 if i in (3, 5) else 0},{0.5 if i % 50 == 1 else 0.9}")
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_a_bundle_of_objectives_beside_its_agreement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = samples(tmp_path / "s.csv")
    asked = ["latency<=0.3@0.98", "error<=0@0.999", "quality>=0.8@0.9"]
    told = plan(capsys, "objectives", path, *(w for text in asked for w in ("--objective", text)), "--sla", 0.98)
    good = [row["good"] for row in told["objectives"]]
    assert good == pytest.approx([0.99, 0.998, 0.98])
    assert [row["met"] for row in told["objectives"]] == [True, False, True]
    assert told["objectives"][1]["burn_rate"] == pytest.approx(2.0)
    assert told["objectives"][0]["budget_left"] == pytest.approx(0.5)
    assert told["all_good"] == pytest.approx(0.968)
    assert (told["sla_broken"], told["credit"]) == (True, 0.1)


def test_quorums_retries_and_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    strict = plan(capsys, "quorum", "--availability", 0.9, "--tries", 2)
    assert strict["strict"]
    assert strict["read_available"] == pytest.approx(0.9**3 + 3 * 0.9**2 * 0.1)
    assert strict["read_with_tries"] == pytest.approx(1 - (1 - strict["read_available"]) ** 2)
    loose = plan(capsys, "quorum", "--read", 1, "--write", 1)
    assert not loose["strict"]
    assert loose["read_available"] > strict["read_available"]


def test_burning_in_buys_fewer_failures_for_its_days(capsys: pytest.CaptureFixture[str]) -> None:
    told = plan(capsys, "burn-in", "--failure-days", 5000)
    failures = [row["failures"] for row in told["rows"]]
    assert failures == sorted(failures, reverse=True)
    assert told["best"]["burn_in_days"] > 1
    assert told["best"]["unit_days"] <= min(row["unit_days"] for row in told["rows"])
    assert plan(capsys, "burn-in", "--failure-days", 0)["best"]["burn_in_days"] == 0


def test_lost_work_has_a_price_and_spot_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--accelerators", 1024, "--params", 7e9, "--days", 10)
    told = plan(capsys, "price", *shape, "--spot-price", 0.8, "--price", 2)
    whole = plan(capsys, *shape, "--replications", 2)
    assert told["ettr"] == whole["ettr"]
    hours = 1024 * 240
    assert sum(row["hours"] for row in told["rows"]) == pytest.approx(hours)
    assert told["rows"][1]["money"] == pytest.approx(2 * hours * (1 - told["ettr"]))
    assert told["rows"][1]["kg_co2"] == pytest.approx(told["rows"][1]["hours"] * 0.4)
    assert told["useful_hour"]["spot"] > 0.8 / told["ettr"]


SHAPE = "--accelerators 1024 --params 7e9"
DRAWN = [
    "collapse", "sweep", "placement", "burn-in", "interval --mtbf-hours 97 --write-seconds 60", "quorum --tries 2",
    "nines", f"price {SHAPE}", "objectives SAMPLES --objective latency<=0.3@0.98 --objective error<=0@0.999",
    "system --params 7e9 --nodes 64,512", f"prediction {SHAPE} --share 0.4 --precision 0.8",
]  # fmt: skip


@pytest.mark.parametrize("command", DRAWN)
def test_curves_are_drawn_in_the_terminal_and_as_a_file(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "curve.svg"
    command = command.replace("SAMPLES", samples(tmp_path / "s.csv"))
    assert main(["plan", *command.split(), "--svg", str(path)]) == 0
    out = capsys.readouterr().out
    root = ET.fromstring(path.read_text(encoding="utf-8"))
    lines = root.findall(".//{http://www.w3.org/2000/svg}polyline")
    names = [text.text for text in root.findall(".//{http://www.w3.org/2000/svg}text")]
    assert lines
    assert all(line.get("points") for line in lines)
    assert sum(f" {name}" in out for name in names if name) >= len(lines), "the keys of both are the same"
    assert (tmp_path / "curve-2.svg").exists() == (command == "sweep")
    assert main(["plan", *command.split(), "--svg", str(tmp_path / "no" / "x.svg")]) != 0
    assert "cannot write" in capsys.readouterr().err


def test_curves_go_through_the_tables_numbers(tmp_path: Path) -> None:
    promises = ["latency<=0.3@0.98", "error<=0@0.999", "quality>=0.8@0.9"]
    told = objectives_answer(samples(tmp_path / "s.csv"), promises, 0.98, 0.1)
    ends = [points[-1] for _, points in told.figures[0].series]
    assert ends == [(1000, pytest.approx(row["budget_left"])) for row in told.data["objectives"]]
    priced = price_answer(
        profile="llama3", params=7e9, accelerators=1024, days=10.0, price=2.0, watts=1000.0, carbon=0.4,
        spot_price=None, spot_mtbf_h=200.0,
    )  # fmt: skip
    lost = dict(priced.figures[0].series[0][1])
    assert lost[1.0] == pytest.approx(priced.data["rows"][1]["money"])
    assert list(lost.values()) == sorted(lost.values())
    quorum = dict(quorum_answer(3, 2, 2, 0.9, 2, 0.0).figures[0].series)
    assert all(y == pytest.approx((3 * q**2 - 2 * q**3) ** 2) for q, y in quorum["read"])
    nines = nines_answer(1000.0, 1.0, None, cost_incidents=1.0, cost_repair=1.0, incidents=3.0, minutes=12.0)
    often, twice = (dict(points) for _, points in nines.figures[0].series)
    assert often[1.0] == pytest.approx(8766 / 1001, rel=1e-3)
    assert min(twice) == min(often)
    assert twice[min(often)] == pytest.approx(2 * often[min(often)], rel=1e-3)
    (alone, all_true) = (dict(points) for _, points in foretold(0.4).figures[0].series)
    assert alone[0.4] == pytest.approx(foretold(0.4).data["rows"][0]["worth_h"])
    assert all_true[0.0] == 0.0
    assert all_true[1.0] > alone[1.0] > 0


def foretold(told: float) -> Answer:
    return prediction_answer(
        shares=(told,) * 3, precisions=(0.8,) * 3, notice_s=3600.0, seen="", file="", profile="", params=7e9,
        accelerators=1024,
    )  # fmt: skip


def test_a_figure_leaves_out_what_a_logarithm_has_no_place_for() -> None:
    figure = Figure(
        title="t", x_label="x", y_label="y", series=(("a", [(0, 1), (1, 0), (10, 5)]),), log_x=True, log_y=True
    )
    assert figure.text().count("*") == 2  # one point, and the key
    assert "10.0" in figure.text()
    ET.fromstring(figure.svg())
    ET.fromstring(Figure(title="<&", x_label="x", y_label="y", series=()).svg())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("collapse --chance 2", "--chance = 2"), ("collapse --nodes ten", "list of numbers"),
        ("collapse --nodes 2.5", "--nodes = 2.5"),
        ("sweep --writes 0", "--writes = 0"), ("placement --copies 99", "--copies = 99"),
        ("placement --losses 17", "--losses = 17"), ("quorum --read 4", "--read = 4"),
        ("quorum --availability 1.5", "--availability = 1.5"), ("burn-in --days 0", "--days = 0"),
        ("price --price -1", "--price = -1"), ("objectives none.csv --objective a<=1@0.9", "cannot read"),
        ("objectives none.csv", "no objective"), ("objectives none.csv --objective latency", "is no objective"),
        ("objectives none.csv --objective a<=1@1.0", "allows no error"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_by_its_option(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_samples_without_numbers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.csv"
    for content, said in (("a,b\n1,2\n", "no numbers for 'c'"), ("c\nx\n", "no numbers"), ("c\n", "no samples")):
        path.write_text(content)
        assert main(["plan", "objectives", str(path), "--objective", "c<=1@0.9"]) == 2
        assert said in capsys.readouterr().err
