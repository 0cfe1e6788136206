"""The plain twins train, deterministically, and what they publish can be compared."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.examples import digits, digits_plain, gpt, gpt_plain
from outlast.examples._fingerprint import state_fingerprint
from outlast.examples._script import parse, write_result
from outlast.examples.data import CONTEXT, HelpText
from outlast.runtime.training.state import State, digest_of

TWINS = {"gpt": (gpt_plain, gpt), "digits": (digits_plain, digits)}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, Any]:
    out = tmp_path / "result.json"
    monkeypatch.setattr("sys.argv", [f"{name}_plain.py", "--out", str(out), *options])
    TWINS[name][0].main()
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    result: dict[str, Any] = json.loads(out.read_text())
    return result


@pytest.mark.parametrize(("name", "steps"), [("gpt", 4), ("digits", 40)])
def test_a_seed_fixes_every_bit(name: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train(name, tmp_path, monkeypatch, "--steps", str(steps))
    torch.rand(3)
    assert train(name, tmp_path, monkeypatch, "--steps", str(steps)) == first
    other = train(name, tmp_path, monkeypatch, "--steps", str(steps), "--seed", "1")
    assert other["fingerprint"] != first["fingerprint"]
    assert first["steps"] == len(first["losses"]) == steps
    assert first["losses"][-1] < first["losses"][0]


def test_gpt_trains_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--steps", "1", "--microbatches", "32")
    narrow = train("gpt", tmp_path, monkeypatch, *options, "--dtype", "bfloat16")
    wide = train("gpt", tmp_path, monkeypatch, *options)
    assert narrow["fingerprint"] != wide["fingerprint"]
    assert narrow["losses"][0] == pytest.approx(wide["losses"][0], rel=0.01)


@pytest.mark.parametrize("name", TWINS)
def test_about_ten_lines_differ(name: str) -> None:
    plain, protected = (Path(str(module.__file__)).read_text().splitlines() for module in TWINS[name])
    changed = [line for line in difflib.ndiff(plain, protected) if line.startswith("+ ") and line[2:].strip()]
    assert 5 <= len(changed) <= 14, "\n".join(changed)


def trained(*, names: tuple[str, str] = ("left", "right")) -> tuple[torch.nn.ModuleDict, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3) for name in names})
    optimizer = torch.optim.AdamW(model.parameters())
    sum(layer(torch.ones(3)).sum() for layer in model.values()).backward()
    optimizer.step()
    return model, optimizer


def test_fingerprint_sees_one_bit_of_parameters_and_of_optimizer_state() -> None:
    model, optimizer = trained()
    whole = state_fingerprint(model, optimizer)
    assert whole == state_fingerprint(*trained())
    weight = model["left"].weight
    for tensor in (weight.detach(), optimizer.state[weight]["exp_avg"], optimizer.state[weight]["step"]):
        bits = tensor.view(torch.int32).view(-1)
        bits[0] ^= 1
        assert state_fingerprint(model, optimizer) != whole
        bits[0] ^= 1
    assert state_fingerprint(model, optimizer) == whole


def test_fingerprint_sees_names_and_swaps_but_not_order() -> None:
    whole = state_fingerprint(*trained())
    assert state_fingerprint(*trained(names=("left", "wrong"))) != whole
    model, optimizer = trained()
    left, right = model["left"].weight.data, model["right"].weight.data
    model["left"].weight.data, model["right"].weight.data = right, left
    assert state_fingerprint(model, optimizer) != whole
    model, optimizer = trained()
    turned = torch.nn.ModuleDict({name: model[name] for name in ("right", "left")})
    assert state_fingerprint(turned, optimizer) == whole


def test_the_twins_fingerprint_is_the_one_that_training_gives() -> None:
    model, optimizer = trained()
    assert digest_of(State(model, [optimizer], [], {})) == state_fingerprint(model, optimizer)


def test_windows_overlap_by_half_and_cover_the_text() -> None:
    text = HelpText()
    assert len(text) > 10_000
    assert text[0][CONTEXT // 2 :].tolist() == text[1][: CONTEXT // 2 + 1].tolist()
    assert text[len(text) - 1].shape == (CONTEXT + 1,)


def test_a_step_that_was_not_seen_is_null(tmp_path: Path) -> None:
    write_result(tmp_path / "r.json", fingerprint="f", losses={1: 0.5}, steps=2)
    assert json.loads((tmp_path / "r.json").read_text())["losses"] == [None, 0.5]


@pytest.mark.parametrize("options", [["--steps", "0"], ["--microbatches", "-1"], ["--step", "x"]])
def test_bad_options_are_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse("example", options, steps=1)
