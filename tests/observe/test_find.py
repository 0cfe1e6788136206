"""From what a person types to the run they mean."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outlast.errors import ConfigError
from outlast.journal import Journal
from outlast.observe import find_run


def test_a_run_or_the_newest_of_those_inside(tmp_path: Path) -> None:
    for name, started_at_s in (("old", 1_000), ("new", 3_000), ("middle", 2_000)):
        Journal.create(tmp_path / name).close()
        os.utime(tmp_path / name / "run.lock", (started_at_s, started_at_s))
    (tmp_path / "something else").mkdir()
    named = find_run(tmp_path / "old")
    assert named.run_dir.name == "old"
    assert named.note == ""
    found = find_run(tmp_path)
    assert found.run_dir.name == "new"
    assert "newest of 3" in found.note


@pytest.mark.parametrize(("path", "reason"), [("nowhere", "does not exist"), ("", "holds no run")])
def test_no_run_is_said_so(tmp_path: Path, path: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        find_run(tmp_path / path)
    for where in ("in the folder in which the run was started", "outlast-runs/NAME", "--run-dir"):
        assert where in caught.value.remedy
