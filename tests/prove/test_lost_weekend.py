"""`outlast prove lost-weekend`: what an error costs with a checkpoint every six hours, and mended."""

from __future__ import annotations

import json

import pytest

from outlast.cli import main
from outlast.prove.lost_weekend import Weekend, WeekendForm


def test_what_was_lost_is_what_was_done_twice_and_what_was_slept_through() -> None:
    form = WeekendForm(checkpoint_every=60, spares=0, by_itself=False, twice=58, still_s=9.0, fingerprint="f")
    assert Weekend(before=form, after=form, steps=150, error_at=118, asleep_h=8.0).lost_h == pytest.approx(13.8)


def test_nobody_sleeps_for_less_than_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for hours in ("-1", "nan"):
        assert main(["prove", "lost-weekend", "--asleep", hours]) == 2
    assert "hours, from 0 to 10000" in capsys.readouterr().err


@pytest.mark.soak
@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.timeout(600)
def test_the_old_form_loses_nearly_six_hours_and_the_mended_one_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "lost-weekend", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["before"]["twice"], found["after"]["twice"]) == (58, 0), (
        "from the save of step 60 to the error in 118"
    )
    assert found["before"]["fingerprint"] == found["after"]["fingerprint"]
    assert found["lost_h"] == pytest.approx(13.8)
