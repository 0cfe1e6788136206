"""One curve: each step once and none missing, whoever wrote it, wherever it was cut off."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import outlast
from outlast.errors import ConfigError, StepMisuse

STEPS = 12


class Member:
    """What a log knows of its run."""

    def __init__(self, leads: bool = True) -> None:
        self.leads = self.is_writer = leads


def step(number: int) -> Any:
    return SimpleNamespace(number=number)


def told(log: Any, *numbers: int) -> None:
    for number in numbers:
        log(step(number), loss=1.0 / (number + 1), norm=float(number))


def whole(path: Path) -> list[int]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(row["loss"] == 1.0 / (row["step"] + 1) for row in rows)
    return [row["step"] for row in rows]


@pytest.mark.parametrize("died_at", [3, 5, STEPS - 1])
@pytest.mark.parametrize("cut", [0, 1, 40, 1000])
@pytest.mark.parametrize("joined", [0, 3])
def test_who_follows_writes_on_and_over(tmp_path: Path, joined: int, cut: int, died_at: int) -> None:
    """The writer dies at step `died_at`, with `cut` bytes of its newest rows not on the disk; the other was there from
    the step `joined` on."""
    path, one, two = tmp_path / "log.jsonl", Member(), Member(False)
    first, second = outlast.Log(one, path), outlast.Log(two, path)
    for number in range(STEPS):
        if number <= died_at:
            told(first, number)
        if number >= joined:
            told(second, number)
        if number == died_at:
            data = path.read_bytes()
            seen = data.index(b'{"step": %d' % joined)  # what was there before the other came is long on the disk
            path.write_bytes(data[: max(seen, len(data) - cut)])
            two.leads = number < STEPS - 1  # no view follows the last step
            two.is_writer = True
    second.close()
    assert whole(path) == list(range(STEPS))


def test_a_run_that_goes_on_from_a_checkpoint_writes_over_what_it_computes_again(tmp_path: Path) -> None:
    told(outlast.Log(Member(), tmp_path / "log.jsonl"), *range(9))
    told(outlast.Log(Member(), str(tmp_path / "log.jsonl")), *range(6, 12))
    assert whole(tmp_path / "log.jsonl") == list(range(12))


def test_a_disk_that_fails_costs_no_step_and_no_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "in the way"
    place.write_text("")
    log = outlast.Log(Member(), place / "log.jsonl")
    told(log, 0, 1, 2)
    assert capsys.readouterr().err.count("the log is not written") == 1
    place.unlink()
    told(log, 3)
    assert whole(place / "log.jsonl") == [0, 1, 2, 3]


def test_who_does_not_write_touches_nothing(tmp_path: Path) -> None:
    with outlast.Log(Member(False), tmp_path / "log.jsonl") as log:
        told(log, 0, 1)
    assert not (tmp_path / "log.jsonl").exists()


class Board:
    def __init__(self, seen: list[Any], first: int) -> None:
        self.seen = seen
        seen.append(first)

    def add_scalar(self, name: str, value: float, number: int) -> None:
        self.seen.append((number, {name: value}))

    def close(self) -> None:
        self.seen.append("closed")


class Bias:
    def __init__(self, seen: list[Any], first: int) -> None:
        self.seen = seen
        seen.append(first)

    def log(self, values: dict[str, float], step: int) -> None:
        self.seen.append((step, values))

    def finish(self) -> None:
        self.seen.append("closed")


@pytest.mark.parametrize("kind", [Board, Bias])
def test_writers_of_other_packages(kind: Any) -> None:
    """They are told of the oldest step that follows, so that what they have of it can be purged."""
    seen: list[Any] = []
    with outlast.Log(member := Member(False), lambda first: kind(seen, first)) as log:
        for number in range(4):
            member.leads = number > 1
            log(step(number), {"loss": number})
    assert seen == [0, *((n, {"loss": float(n)}) for n in range(4)), "closed"]


def test_a_function_of_step_and_values() -> None:
    seen: list[Any] = []
    outlast.Log(Member(), lambda first: lambda number, values: seen.append((number, values)))(step(3), loss=1)
    assert seen == [(3, {"loss": 1.0})]


def test_what_is_no_log_is_told() -> None:
    with pytest.raises(ConfigError, match="to=7 is no place"):
        outlast.Log(Member(), 7)
    with pytest.raises(ConfigError, match="keep=0"):
        outlast.Log(Member(), "x", keep=0)
    with pytest.raises(ConfigError, match="function gave a str"):
        outlast.Log(Member(), lambda first: "x")(step(0), loss=1.0)
    with pytest.raises(StepMisuse, match="log: 'loss' is a str"):
        outlast.Log(Member(), "x")(step(0), loss="low")


def test_another_package_that_fails_ends_no_training(capsys: pytest.CaptureFixture[str]) -> None:
    def failing(name: str, value: float, number: int) -> None:
        raise RuntimeError("the service is down")

    for _ in range(2):  # one who leads, and the next
        log = outlast.Log(Member(), lambda first: SimpleNamespace(add_scalar=failing))
        told(log, 0, 1)
        assert capsys.readouterr().err.count("RuntimeError: the service is down") == 1
