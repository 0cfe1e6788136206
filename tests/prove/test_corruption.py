"""The campaign of flipped bits: its plan, its bookkeeping, and one fleet of it for real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outlast.cli import main
from outlast.core import events as ev
from outlast.prove.corruption import _AUDITED, Seen, match, planned, tally
from outlast.runtime.faults.flips import Flip, flip_bit, read_bit


def verdict(step: int, replica: str = "", action: str = "replace") -> Seen:
    return Seen(step=step, action=action, evidence="e", replica=replica)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_flip_changes_one_bit_and_flips_back(dtype: torch.dtype) -> None:
    values = torch.linspace(-3, 3, 12).to(dtype).reshape(3, 4)
    before = values.clone()
    for bit in range(values.element_size() * 8):
        flip_bit(values, 17, bit)
        same = (values.view(-1) == before.view(-1)).tolist()
        assert [i for i, equal in enumerate(same) if not equal] in ([5], [])  # -0.0 equals 0.0
        assert read_bit(values, 17, bit) != read_bit(before, 17, bit)
        flip_bit(values, 17, bit)
        assert torch.equal(values, before)
    with pytest.raises(ValueError, match="is not among"):
        flip_bit(values, 0, values.element_size() * 8)


def test_the_plan_covers_every_target_and_many_bits_and_repeats_itself() -> None:
    plan = planned(60, 3, ["float32", "bfloat16"], ["a", "b"])
    assert planned(60, 3, ["float32", "bfloat16"], ["a", "b"]) == plan
    flips = [(dtype, flip) for dtype, some in plan for flip in some]
    assert len(flips) == 60
    assert {flip.target for _, flip in flips} == {"parameter", "moment", "gradient"}
    for dtype, bits in (("float32", 32), ("bfloat16", 16)):
        mine = [flip for name, flip in flips if name == dtype]
        assert all(0 <= flip.bit < bits for flip in mine)
        assert len({flip.bit for flip in mine if flip.target == "parameter"}) >= 6
    for _, some in plan:
        assert len({flip.replica for flip in some}) == len(some)
        assert "r0.1" not in {flip.replica for flip in some}


def test_a_verdict_belongs_to_the_flip_it_names_and_what_belongs_to_none_is_an_alarm() -> None:
    flips = [
        Flip(replica="r1.1", target="parameter", step=10, bit=3),
        Flip(replica="r2.1", target="gradient", step=20, bit=30),
        Flip(replica="r3.1", target="moment", step=30, bit=5),
    ]
    rows, stray = match(flips, [verdict(4), verdict(10, "r1.1"), verdict(20, action="skip_step"), verdict(27)], "f", 0)
    assert [(r.detected, r.right, r.after_steps) for r in rows] == [
        (True, True, 0),
        (True, False, 0),
        (False, False, -1),
    ]
    assert stray == 2
    found = tally(rows, "full", 0.0, 300, stray, 1, 0, 0)
    assert found.recall == {
        "parameter": {"found": 1, "of": 1}, "gradient": {"found": 1, "of": 1}, "moment": {"found": 0, "of": 1},
    }  # fmt: skip
    assert (found.wrong_culprits, found.false_alarms, found.false_alarm_bound) == (1, 2, 0.01)


def test_with_audits_sums_and_reductions_are_struck_too_once_and_for_ever() -> None:
    flips = [flip for _, some in planned(60, 3, ["bfloat16"], ["a"], audited=True, first_step=4) for flip in some]
    kinds = {(flip.target, flip.persistent) for flip in flips}
    assert kinds >= {(what, again) for what in _AUDITED for again in (False, True)}
    assert {flip.times for flip in flips if flip.persistent} == {0}
    assert {flip.parameter for flip in flips if flip.target in ("reducer", "sum")} == {-1}
    assert max(flip.bit for flip in flips if flip.target == "reducer") >= 16, "sums are in float32"


def test_what_audits_and_guards_say_counts_as_noticed() -> None:
    found = ev.AuditMismatch(
        at_s=0.0, step=7, microbatch=-1, culprit="r1.1", host="a0", device="cpu", verdict="transient", evidence="e",
        confidence=1.0, remedy="none", bucket=0,
    )  # fmt: skip
    assert Seen.of(found) == Seen(step=7, action="transient", replica="r1.1", evidence="e")
    assert Seen.of(ev.Notice(at_s=0.0, level="info", text="t")) is None


@pytest.mark.process
@pytest.mark.campaign
def test_with_every_microbatch_redundant_every_flip_is_caught_before_commit(tmp_path: Path) -> None:
    """Gradients, reductions and sums, once and by a broken device; the guilty replica is named, no bit changes."""
    command = [sys.executable, "-m", "outlast", "prove", "corruption", "--flips", "6", "--dtype", "float32",
               "--audit", "1", "--guards", "default", "--json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(found["recall"][what]["found"] == found["recall"][what]["of"] for what in ("gradient", "reducer", "sum"))
    assert {found["latest"][what] for what in ("gradient", "reducer", "sum")} == {0}
    assert (found["false_alarms"], found["wrong_culprits"], found["equal_runs"]) == (0, 0, found["runs"])


@pytest.mark.process
@pytest.mark.campaign
def test_a_fleet_of_the_campaign(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outlast", "prove", "corruption", "--flips", "3", "--dtype", "float32", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["recall"]["parameter"] == {"found": 1, "of": 1}
    assert found["recall"]["moment"] == {"found": 1, "of": 1}
    assert (found["false_alarms"], found["wrong_culprits"], found["unequal_without_a_miss"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("args", "what", "remedy"),
    [
        (["--audit", "nonsense"], "--audit nonsense is no share", "0 (none) to 1"),
        (["--audit", "auto"], "--audit auto is no share", "0 (none) to 1"),
        (["--audit", "1.5"], "--audit 1.5 is no share", "0 (none) to 1"),
        (["--audit", "nan"], "--audit nan is no share", "0 (none) to 1"),
        (["--flips", "0"], "nothing to flip", "--flips 1 or more"),
        (["--seed", "-1"], "--seed -1", "--seed 0 or more"),
        (["--dtype", "float33"], "'float33'", "did you mean 'float32'?"),
        (["--dtype", "float32,"], "''", "float32, bfloat16"),
        (["--guards", "ful"], "'ful'", "did you mean 'full'?"),
    ],
)
def test_wrong_arguments_are_refused_with_their_range(
    args: list[str], what: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prove", "corruption", *args]) == 2
    said = capsys.readouterr().err
    assert said.startswith("outlast: [CONFIG] ")
    assert what in said.splitlines()[0]
    assert remedy in said.split("remedy: ")[1]
