"""A Python or torch that cannot train is told before torch is loaded."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from outlast.errors import EnvironmentFault
from outlast.runtime.settings.versions import check_versions, installed

GOOD: dict[str, str | None] = {"torch": "2.13.0+cpu", "numpy": "2.0", "xxhash": "3.4"}


def test_this_environment_will_do() -> None:
    check_versions()
    assert installed().keys() == GOOD.keys()


@pytest.mark.parametrize(
    ("python", "found", "reason", "remedy"),
    [
        ((3, 10), GOOD, "needs Python 3.11 or newer, this is 3.10", "newer Python"),
        ((3, 12), GOOD | {"torch": "2.8.1"}, "needs torch 2.9 or newer, this is 2.8.1", "torch>=2.9"),
        ((3, 12), GOOD | {"torch": None, "xxhash": None}, "needs torch, xxhash", "outlast[train]"),
    ],
)
def test_others_are_refused(python: tuple[int, int], found: dict[str, str | None], reason: str, remedy: str) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        check_versions(python, found)
    assert reason in caught.value.message
    assert remedy in caught.value.remedy


def test_a_torch_of_an_unknown_kind_is_given_a_chance() -> None:
    check_versions((3, 13), GOOD | {"torch": "main-build"})


def test_versions_are_those_that_python_tells() -> None:
    assert installed() == {name: metadata.version(name) for name in GOOD}


def test_what_has_no_folder_of_its_own_or_two_is_asked_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder / "torch-9.9.dist-info").mkdir(parents=True)
    monkeypatch.setattr("sys.path", [str(tmp_path / "one"), str(tmp_path / "no.zip")])
    assert installed() == {"torch": "9.9", "numpy": None, "xxhash": None}
    (tmp_path / "one" / "torch-8.8.dist-info").mkdir()
    monkeypatch.setattr(metadata, "version", lambda name: f"{name} asked")
    assert installed() == {"torch": "torch asked", "numpy": "numpy asked", "xxhash": "xxhash asked"}
