"""Known answers: a right device is never reported, a seeded fault in any kind of unit is found."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outlast.errors import ConfigError
from outlast.health import Answers, _collectives, ask_device, device_of
from outlast.health._collectives import collectives
from outlast.health._kernels import cases
from outlast.runtime.faults.flips import flip_bit

CPU, SIZE = torch.device("cpu"), 32
QUESTIONS = [case.name for case in (*cases(CPU, SIZE), *collectives(CPU, SIZE))]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def ticking(rounds: int) -> Any:
    """A clock that lets this many rounds pass in as many seconds."""
    times = iter(range(10**6))
    return lambda: float(next(times))


def always(case: str, bit: int) -> Any:
    """Flips one bit in each answer to a case."""
    return lambda name, out: flip_bit(out, 5, bit) if name == case else None


def test_a_right_device_passes_round_after_round(tmp_path: Path) -> None:
    answers = Answers(tmp_path / "answers.json")
    first = ask_device(CPU, seconds=4, size=SIZE, answers=answers, clock=ticking(4))
    assert (first.passed, first.wrong) == (True, [])
    assert first.rounds >= 3
    assert first.learned == len(QUESTIONS)
    again = ask_device(CPU, size=SIZE, answers=Answers(tmp_path / "answers.json"))
    assert (again.passed, again.learned, again.rounds) == (True, 0, 1)


@pytest.mark.parametrize("case", QUESTIONS)
def test_one_flip_in_any_unit_is_found_and_called_transient(case: str) -> None:
    done = []

    def strike(name: str, out: Tensor) -> None:
        if name == case and len(done) == 0:
            done.append(name)
            flip_bit(out, out.numel() // 2, 3)

    found = ask_device(CPU, size=SIZE, strike=strike)
    assert [(w.case, w.kind) for w in found.wrong] == [(case, "transient")]


@pytest.mark.parametrize(
    "case", ["matmul bfloat16", "exp float16", "memory checker", "copy turned", "sort", "all-reduce float32"]
)
def test_a_unit_that_is_stuck_is_called_persistent(case: str, tmp_path: Path) -> None:
    answers = Answers(tmp_path / "answers.json")
    ask_device(CPU, size=SIZE, answers=answers)

    def strike(name: str, out: Tensor) -> None:
        if name == case:
            flip_bit(out, 5, 8 * out.element_size() - 2)

    found = ask_device(CPU, size=SIZE, strike=strike, answers=answers)
    assert [(w.case, w.kind) for w in found.wrong] == [(case, "persistent")]
    assert "again" in found.wrong[0].evidence


def test_a_stuck_unit_without_answers_of_its_kind_is_seen_where_it_is_far_off() -> None:
    found = ask_device(CPU, size=SIZE, strike=lambda name, out: flip_bit(out, 5, 30) if name == "exp float32" else None)
    assert [(w.case, w.kind) for w in found.wrong] == [("exp float32", "persistent")]


def test_other_bits_than_the_rest_of_its_kind_are_called_that(tmp_path: Path) -> None:
    answers = Answers(tmp_path / "answers.json")
    ask_device(CPU, size=SIZE, answers=answers)
    found = ask_device(CPU, size=SIZE, answers=answers, strike=always("exp float32", 0))
    assert [(w.case, w.kind) for w in found.wrong] == [("exp float32", "unlike")]


def test_faults_by_chance_are_found_in_time() -> None:
    """One answer in two hundred is wrong: found within as many rounds as that takes, never a wrong case named."""
    draw, struck = random.Random(1), []

    def strike(name: str, out: Tensor) -> None:
        if draw.random() < 0.005:
            struck.append(name)
            flip_bit(out, draw.randrange(out.numel()), draw.randrange(8 * out.element_size()))

    found = ask_device(CPU, seconds=20, size=SIZE, strike=strike, clock=ticking(20))
    assert found.num_wrong >= len(struck) * 0.8 > 3
    assert {w.case for w in found.wrong} <= set(struck)


def test_answers_that_were_wrong_are_not_learned(tmp_path: Path) -> None:
    answers = Answers(tmp_path / "answers.json")
    ask_device(
        CPU, size=SIZE, answers=answers, strike=lambda name, out: flip_bit(out, 5, 6) if name == "copy" else None
    )
    assert not (tmp_path / "answers.json").exists()


@pytest.mark.parametrize(
    "text", [b"", b"{", b'{"version": 9, "kinds": {}}', b'{"version": 1, "kinds": 3}', b"\xff\x00"]
)
def test_answers_that_cannot_be_read_are_learned_again(
    text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "answers.json").write_bytes(text)
    answers = Answers(tmp_path / "answers.json")
    assert answers.of("cpu", SIZE) == {}
    assert capsys.readouterr().err.count("are not used") == 1
    answers.keep("cpu", SIZE, {"a": 1})
    assert Answers(tmp_path / "answers.json").of("cpu", SIZE) == {"a": 1}


def test_answers_that_cannot_be_kept_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    Answers(tmp_path / "file" / "answers.json").keep("cpu", SIZE, {"a": 1})
    assert "cannot be kept" in capsys.readouterr().err


def test_devices_that_are_not_there_are_refused() -> None:
    assert device_of("cpu") == CPU
    for name in ("cpuu", "cuda:77", ""):
        with pytest.raises(ConfigError, match="cannot be used"):
            device_of(name)


def test_a_collective_that_comes_to_no_end_costs_its_own_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Hanging:
        def wait(self) -> None:
            raise RuntimeError("Timed out waiting 20000ms for recv operation to complete")

    done = _collectives._done
    monkeypatch.setattr(_collectives, "_done", lambda works, out: done([Hanging()], out))
    found = ask_device(CPU, seconds=2, size=SIZE, clock=ticking(2))
    assert (found.passed, found.num_asked) == (True, found.rounds * len(list(cases(CPU, SIZE))))
    assert capsys.readouterr().err.count("no collectives are asked for any more: all-reduce float32") == 1
