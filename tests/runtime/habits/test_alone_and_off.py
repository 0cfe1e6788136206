"""A script's habits alone and with `OUTLAST=off`: the same bits, or the same sentence.

With two microbatches, of which a plain loop adds up the gradients in the order of the tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.habits import here

from outlast.errors import OutlastError

SLOW = "compiled", "lora_of_peft", "language", "under_hydra"
"""Held by fleets alone: what they need takes long to import or to compile."""
MOVED_OFTENER = "images", "images_converted"
"""Running statistics, which the plain loop moves with each microbatch (reference/loop)."""
NEAR = "gpt", "gpt_in_bfloat16"
"""Clipped by a norm that a fleet adds up block by block, so it may have another last bit."""

AVERAGES = {
    "average_by_hand": "the loop keeps an average of ",
    "average_by_hand_late": "the loop keeps an average of ",
    "average_made_anew": "the loop keeps an average of ",
    "average_of_a_copy": "the loop keeps an average of ",
    "average_late": "the loop updates an AveragedModel that is not registered",
}


@pytest.fixture(autouse=True)
def _here(training_here: None) -> Iterator[None]:
    return


def trained(habit: str, out: Path) -> tuple[dict[str, Any], str]:
    """What it ended with, and how."""
    found, said = dict[str, Any](), ""
    try:
        found = here.trained(habit, out, "--steps", "8", "--microbatches", "2")
    except OutlastError as error:
        said = str(error)
    unlike = {"state"} if habit in MOVED_OFTENER else {"state", "fingerprint"} if habit in NEAR else set()
    return {key: "there" if key in unlike else value for key, value in found.items()}, said


@pytest.mark.parametrize("habit", [habit for habit in here.HABITS if habit not in SLOW])
def test_the_plain_loop_does_and_says_what_a_fleet_of_one_does(
    habit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = trained(habit, tmp_path / "alone"), capsys.readouterr().err
    monkeypatch.setenv("OUTLAST", "off")
    off = trained(habit, tmp_path / "off"), capsys.readouterr().err
    assert off == alone
    assert bool(alone[0][0]) is not bool(alone[0][1])


@pytest.mark.parametrize("habit", AVERAGES)
def test_an_average_is_named_in_the_first_steps(habit: str, tmp_path: Path) -> None:
    """Of an update or two, by whoever is alone, before any fault."""
    found, said = trained(habit, tmp_path / "out")
    assert found == {}
    assert AVERAGES[habit] in said
