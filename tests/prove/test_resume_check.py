"""`outlast ckpt resume-check`: a loop that resumes to the bit, one that does not, and what is named then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outlast.cli import main
from outlast.errors import ConfigError
from outlast.prove.resuming import first_value, resume_check

LOOP = str(Path(__file__).parents[1] / "runtime" / "forgetful.py")


@pytest.mark.process
def test_what_nobody_registered_is_found_by_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "resume-check", "--steps", "5", "--stop-at", "2", "--json", LOOP]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["same"], found["resumed"], found["step"]) == (False, True, 3), "the first step after resuming"
    assert found["first"] in ("model.weight", "model.bias")


@pytest.mark.process
def test_registered_it_is_the_same_to_the_bit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "resume-check", "--steps", "5", "--stop-at", "2", "--json", LOOP, "--registered"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same"]
    assert found["compared"][-1] == 5


def test_nothing_to_compare_and_no_script(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a stop after 4 of 4 steps"):
        resume_check([LOOP], tmp_path, steps=4, stop_at=4)
    with pytest.raises(ConfigError, match="no script"):
        resume_check([str(tmp_path / "none.py")], tmp_path)
    (tmp_path / "earlier").write_text("")
    with pytest.raises(ConfigError, match="not an empty directory"):
        resume_check([LOOP], tmp_path)


@pytest.mark.parametrize(
    ("a", "b", "place"),
    [
        ({"d": [["x", 1], ["y", 2]]}, {"d": [["y", 2], ["x", 1]]}, None),
        ({"d": [["x", {"l": [1, 2]}]]}, {"d": [["x", {"l": [1, 3]}]]}, "x.1"),
        ({"d": [["x", 1]]}, {"d": [["x", 1], ["z", 2]]}, '"z"'),
        ({"d": [["x", {"T": "w"}]]}, {"d": [["x", {"T": "v"}]]}, "x"),
        (1, 2, "the state"),
    ],
)
def test_the_first_value_that_differs(a: Any, b: Any, place: str | None) -> None:
    found = first_value(a, b)
    assert (found[0] if found else None) == place
