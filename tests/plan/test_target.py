"""The 1.5T target table, all eight numbers, and what it honestly cannot show."""

from __future__ import annotations

import pytest

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
