"""The campaign of lies: what it orders, what it refuses, and one of it for real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outlast import tensors
from outlast.cli import main
from outlast.errors import ConfigError
from outlast.prove.attacks import ATTACKS, Attacks, Unmasked


def campaign(base: Path, **changes: Any) -> Attacks:
    settings = {"attacks": ATTACKS, "rule": "trimmed_mean", "pre": ["nnm"], "steps": 5, "watch": print}
    return Attacks(base, **settings | changes)


def test_every_attack_that_there_is_strikes_the_rule_and_the_mean_and_only_its_own_networks(tmp_path: Path) -> None:
    assert {*tensors.ATTACKS, "inconsistent", "label_flip", "lying_reducer"} == {*ATTACKS}
    tried = campaign(tmp_path)
    told = [attack for attack in ATTACKS if attack != "lying_reducer"]
    cases, lies = tried._cases(told), tried._lies(told)
    assert {lie.pattern for lie in lies} == {
        f"nets.{name}" for name in cases if not name.endswith(("_none", "_label_flip"))
    }
    assert all(lie.pattern.endswith(f"_{lie.attack}") for lie in lies)
    assert {name for name, case in cases.items() if case["flipped"]} == {"rule_label_flip", "mean_label_flip"}
    assert cases["rule_label_flip"]["flipped"] == tried._lying
    assert len(tried._lying) == tried.f == 3


def test_a_rule_that_does_not_allow_the_liars_is_refused_with_what_would(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most f = 2, not 3"):
        campaign(tmp_path, rule="bulyan")


def test_the_liar_and_nobody_else_must_be_named_in_the_step_in_which_it_began() -> None:
    good = Unmasked(liar="r3.1", step=2, named=[("r3.1", 2)], equal=True)
    assert good.right
    for named, equal in (([], True), ([("r1.1", 2)], True), ([("r3.1", 3)], True), ([("r3.1", 2)], False)):
        assert not Unmasked(liar="r3.1", step=2, named=named, equal=equal).right


@pytest.mark.parametrize(
    ("args", "what", "remedy"),
    [
        (["--attacks", "imp"], "'imp' is none", "did you mean 'ipm'?"),
        (["--steps", "0"], "--steps 0", "--steps 1 or more"),
        (["--points", "-1"], "--points -1", "from 0 to 100"),
        (["--rule", "krumm"], "no rule 'krumm'", "did you mean 'krum'?"),
        (["--pre", "nmn"], "no step in front of a rule 'nmn'", "did you mean 'nnm'?"),
        (["--dir", "/"], "/ exists", "a new directory"),
    ],
)
def test_wrong_arguments_are_refused(
    args: list[str], what: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prove", "attacks", *args]) == 2
    said = capsys.readouterr().err
    assert what in said.splitlines()[0]
    assert remedy in said.split("remedy: ")[1]


@pytest.mark.process
@pytest.mark.campaign
@pytest.mark.timeout(420)
def test_the_rule_holds_where_the_mean_does_not_and_the_reducer_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outlast", "prove", "attacks", "--attacks", "ipm,nan,label_flip,lying_reducer",
               "--steps", "40", "--json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    told = {each["attack"]: each for each in found["attacks"]}
    assert found["clean"] > 80.0
    assert all(each["lost"] <= 10.0 for each in told.values())
    assert told["nan"]["mean"] == 0.0
    assert told["ipm"]["mean"] < told["ipm"]["rule"] - 30.0
    assert found["reducer"]["named"] == [["r3.1", 2]]
    assert found["reducer"]["equal"]
