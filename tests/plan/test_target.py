"""The 1.5T target table, all eight numbers, and what it honestly cannot show."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from benchmarks.target import due, mixtures, rows_of

from outlast.core import events as ev
from outlast.core.reliability import count_interval
from outlast.plan.target_study import PUBLISHED, target_answer, target_rows


def test_all_eight_numbers() -> None:
    for row in target_rows(1200, seed=11):
        assert row.mtbf_h == pytest.approx(row.mtbf_published_h, rel=0.02), row.name
        assert row.efficiency == pytest.approx(row.efficiency_published, abs=0.01), row.name
        assert row.mtbf_interval_h[0] < row.mtbf_h < row.mtbf_interval_h[1]
        assert row.efficiency_interval[0] < row.efficiency < row.efficiency_interval[1]


def test_what_one_run_shows_matches_the_facts() -> None:
    spans = [(720 / count_interval(720 / mtbf)[1], 720 / count_interval(720 / mtbf)[0]) for _, mtbf, _ in PUBLISHED[1:]]
    for (low, high), (want_low, want_high) in zip(spans, [(19.5, 44), (26, 72), (33, 107)], strict=True):
        assert low == pytest.approx(want_low, abs=0.5)
        assert high == pytest.approx(want_high, abs=0.6)


def test_the_answer_has_rows_parameters_and_the_remark() -> None:
    answer = target_answer(60, seed=1)
    assert {"mtbf_h", "efficiency"} <= set(answer.data["rows"][0])
    assert len(answer.data["parameters"]) >= 8
    assert "cannot tell" in answer.notes[0]
    assert len(answer.data["unfitted"]) == 4
    assert "Llama 3" in answer.text()


# --- measured fleets -------------------------------------------------------------------------------------------------
def test_fleets_are_spread_over_all_and_run_once(tmp_path: Path) -> None:
    """Whatever has been run when time is up, every configuration has as many fleets as any other, but for one."""
    wanted = due(tmp_path, 2, 3)
    assert len(wanted) == 2 * 3 * 4
    assert {(mixture, configuration) for _, mixture, configuration, _ in wanted[:8]} == {
        (mixture, configuration) for mixture in range(2) for configuration in range(4)
    }
    assert [number for *_, number in wanted] == sorted(number for *_, number in wanted)
    for path, *_ in wanted[:5]:
        path.write_text("[]")
    assert due(tmp_path, 2, 3) == wanted[5:]


def test_costs_are_learnt_from_the_fleets_that_ran_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (path, *_) in enumerate(due(tmp_path, 2, 2, [1])):
        event = ev.RunEnded(at_s=float(number), exit_code=0)
        path.write_bytes(msgspec.json.encode({"events": [event], "strikes": []}))
    monkeypatch.setattr("outlast.plan.fleet_costs.fleet_costs", lambda fleets: [e.at_s for f in fleets for e in f])
    monkeypatch.setattr("benchmarks.target._foreseen", lambda shape, fleet, costs: (fleet.events[0].at_s, costs))
    monkeypatch.setattr("benchmarks.target._row", lambda name, told: {"name": name, "told": told})
    assert rows_of(tmp_path, mixtures("20/90,6/60")) == [
        {"name": "+ redundant gradients, 20 s / 90 s", "told": [(0.0, [1.0]), (2.0, [1.0, 3.0])]},
        {"name": "+ redundant gradients, 6 s / 60 s", "told": [(1.0, [0.0, 2.0]), (3.0, [2.0])]},
    ]


def test_a_mixture_that_is_none_is_refused() -> None:
    assert mixtures("20/90, 60/1e9") == [{"one": 0.05, "all": 1 / 90}, {"one": 1 / 60, "all": 1e-9}]
    for text in ("20", "20/0", "a/b", "20/90,", "-1/5"):
        with pytest.raises(SystemExit, match="is none"):
            mixtures(text)
