"""Plain command lines mean the same whether typer reads them or not."""

from __future__ import annotations

import gc
import importlib
import inspect
import itertools
from typing import Any

import click
import pytest

from outlast.cli import command_of, main
from outlast.cli._plain_words import PLAIN, read_plainly, run_plainly
from outlast.errors import ConfigError


def by_typer(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command's function is called with when typer has read the words."""
    module, function = importlib.import_module(f"outlast.cli._{name}"), PLAIN[name].function
    called: list[inspect.BoundArguments] = []
    signature = inspect.signature(getattr(importlib.import_module(PLAIN[name].module), function))
    monkeypatch.setattr(module, function, lambda *args, **more: called.append(signature.bind(*args, **more)) or 0)
    assert command_of(name)(words, standalone_mode=False) == 0
    called[0].apply_defaults()
    return dict(called[0].arguments)


def by_plain_words(name: str, words: list[str]) -> dict[str, Any]:
    given = read_plainly([name, *words])
    assert given is not None
    plain = PLAIN[name]
    bound = inspect.signature(getattr(importlib.import_module(plain.module), plain.function)).bind(**given)
    bound.apply_defaults()
    return dict(bound.arguments)


def lines() -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    for name, plain in PLAIN.items():
        for count in range(len(plain.switches) + 1):
            found += [(name, list(words)) for words in itertools.combinations(plain.switches, count)]
    named = [(name, [*words[:1], "runs/it", *words[1:]]) for name, words in found if PLAIN[name].takes_run]
    return found + named


@pytest.mark.parametrize(("name", "words"), lines(), ids=[" ".join([name, *words]) for name, words in lines()])
def test_a_plain_line_is_read_as_typer_reads_it(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_plain_words(name, words) == by_typer(name, words, monkeypatch)


def test_every_switch_is_one_of_the_command_s_and_sets_what_it_is_said_to() -> None:
    for name, plain in PLAIN.items():
        options = {word: option for option in command_of(name).params for word in option.opts}
        for word, argument in plain.switches.items():
            option = options[word]
            assert isinstance(option, click.Option)
            assert option.is_flag
            assert option.name == argument


@pytest.mark.parametrize(
    "line", ["status --follow", "status a b", "status --bogus", "status -j", "status --every 3", "status -- run",
             "why --price 2", "why --all=yes", "doctor run", "doctor --quick --model m", "status --help", "watch run"],
)  # fmt: skip
def test_any_other_line_is_left_to_typer(line: str) -> None:
    assert read_plainly(line.split()) is None


def test_the_collector_is_as_it_was_whatever_the_command_did(tmp_path: Any) -> None:
    assert gc.isenabled()
    with pytest.raises(ConfigError):
        run_plainly("status", {"run": tmp_path / "nowhere"})
    assert gc.isenabled()


def test_ctrl_c_is_told_and_ends_a_plain_command_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(**_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("outlast.cli._show_status.show_status", interrupted)
    assert main(["status"]) == 130
    assert capsys.readouterr().err == "outlast: stopped\n"
