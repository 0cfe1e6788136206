"""`outlast prove run`: how a script's fleets are struck, what a witness writes, and what is named as the script's own
fault, on three scripts that look like what strangers write (`scripts/`)."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from outlast.cli import main
from outlast.errors import ConfigError
from outlast.prove._leaks import LeakWatch, Sample, leaks
from outlast.prove._script_findings import (
    Witnessed,
    carried_over,
    microbatch_findings,
    script_findings,
    witnessed,
)
from outlast.prove.script_plan import KINDS, Shape, drawn, paced, read_schedule, schedule_of
from outlast.runtime.settings.witness_files import Computed, StateSeen

SCRIPTS = Path(__file__).parent / "scripts"
CLEAN = {"nanogpt": [], "hf_manner": [], "cnn": ["--workers", "0"]}


# --- what is drawn, and said -----------------------------------------------------------------------------------------
def test_a_schedule_says_all_that_was_drawn() -> None:
    fleets = [drawn(number, 3, Shape(), list(KINDS)) for number in range(150)]
    assert fleets == [drawn(number, 3, Shape(), list(KINDS)) for number in range(150)]
    for fleet in fleets:
        assert read_schedule(schedule_of(fleet)) == (fleet.strikes, fleet.faults)
        assert fleet.strikes or fleet.faults
    struck = {strike.named for fleet in fleets for strike in fleet.strikes}
    assert struck == set(KINDS) - {"phase"}
    assert any(fleet.faults for fleet in fleets)
    assert all(strike.roles[0] in KINDS[strike.named].roles for fleet in fleets for strike in fleet.strikes)


def test_ranks_are_struck_by_themselves_where_there_are_several() -> None:
    fleets = [drawn(number, 3, Shape(ranks=2), list(KINDS)) for number in range(100)]
    struck = [(s.named, s.roles[0]) for fleet in fleets for s in fleet.strikes]
    assert {"kill", "stop", "pause", "slow", "memory"} <= {kind for kind, role in struck if role == "rank"}
    assert {"replica", "spare", "agent", "coordinator", "nursery"} <= {role for _, role in struck}
    assert all(read_schedule(schedule_of(fleet)) == (fleet.strikes, fleet.faults) for fleet in fleets)
    alone = [drawn(number, 3, Shape(), list(KINDS)) for number in range(100)]
    assert not any(strike.roles[0] == "rank" for fleet in alone for strike in fleet.strikes)


def test_strikes_are_drawn_for_runs_as_short_as_any_was() -> None:
    """The undisturbed ones may have met a busy machine."""
    slow = Shape(length_s=50.0, begin_s=25.0)
    assert paced(slow, []) == slow
    assert paced(slow, [90.0]) == slow
    quick = paced(slow, [20.0, 90.0])
    assert (quick.length_s, quick.begin_s, quick.steps) == (20.0, 10.0, slow.steps)
    first = [fleet.strikes[0].wait_s for fleet in (drawn(n, 3, quick, ["kill"]) for n in range(50))]
    assert max(first) <= 10.0


def test_only_what_was_asked_for_is_drawn() -> None:
    fleets = [drawn(number, 3, Shape(), ["pause"]) for number in range(20)]
    assert {strike.named for fleet in fleets for strike in fleet.strikes} == {"pause"}
    assert not any(fleet.faults for fleet in fleets)


@pytest.mark.parametrize(
    "text",
    [
        "kill", "1:kil:replica:0.1", "1:kill:replcia:0.1", "-1:kill:replica:0.1", "1:kill:replica:1",
        "x:kill:replica:0",
        "1:pause:replica:0", "1:kill~2:replica:0", "1:memory:agent:0", "phase:backward:SIGKILL:r0.1",
        "phase:backwards:SIGKILL:r0.1:3", "phase:backward:SIGFOO:r0.1:3", "phase:backward:SIGKILL:r0.1:soon",
    ],
)  # fmt: skip
def test_what_is_no_schedule_is_refused_with_the_item(text: str) -> None:
    with pytest.raises(ConfigError, match="is no strike"):
        read_schedule(text)


def test_the_command_refuses_what_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = str(SCRIPTS / "cnn.py")
    assert main(["prove", "run"]) == 2
    assert main(["prove", "run", str(tmp_path / "none.py")]) == 2
    assert main(["prove", "run", "--runs", "0", script]) == 2
    assert main(["prove", "run", "--ranks", "3", script]) == 2
    assert main(["prove", "run", "--faults", "kil", script]) == 2
    assert "did you mean 'kill'" in capsys.readouterr().err
    assert main(["prove", "run", "--schedule", "1:kill:nobody:0", script]) == 2
    (tmp_path / "kept").write_text("")
    assert main(["prove", "run", "--keep", str(tmp_path), script]) == 2


# --- what a witness writes -------------------------------------------------------------------------------------------
def witness(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, *args: str) -> Witnessed:
    """The script as a run of one, in this process."""
    monkeypatch.setenv("OUTLAST_WITNESS", str(folder))
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *CLEAN[script], *args])
    runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")
    return witnessed(folder, None)


@pytest.mark.parametrize("script", CLEAN)
def test_a_script_that_can_be_repeated_has_no_fault(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (witness(tmp_path / name, monkeypatch, script) for name in "ab")
    steps = max(seen.steps for seen in first.ends.values())
    assert len(first.computed) == 4 * steps
    assert len({(c.step, c.microbatch) for c in first.computed}) == 4 * steps
    assert script_findings(first, second) == []
    assert carried_over(first, first, second) == ([], [])
    assert list(microbatch_findings(second, steps, set(range(steps)))) == []


def test_a_loader_that_shuffles_by_the_time_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (witness(tmp_path / name, monkeypatch, "cnn", "--plant", "time") for name in "ab")
    (found,) = script_findings(first, second)
    assert found.check == "data"
    assert "microbatch 0 of step 0 held other samples" in found.detail


def test_a_model_with_randomness_of_its_own_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST_BITWISE", "false")  # else the first microbatch is refused, which two runs show as well
    first, second = (witness(tmp_path / name, monkeypatch, "hf_manner", "--plant", "randomness") for name in "ab")
    (found,) = script_findings(first, second)
    assert found.check == "randomness"
    assert "microbatch 0 of step 0 is another one from the same samples" in found.detail


def test_weights_that_nobody_seeds_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    first = witness(tmp_path / "a", monkeypatch, "nanogpt")
    monkeypatch.setattr(torch, "manual_seed", lambda seed: torch.default_generator.manual_seed(seed + 1))
    second = witness(tmp_path / "b", monkeypatch, "nanogpt")
    (found,) = script_findings(first, second)
    assert found.check == "weights"
    assert "torch.manual_seed" in found.detail


def test_state_that_nobody_registered_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one who joined has it: it was not there for the first updates."""
    whole = witness(tmp_path / "a", monkeypatch, "nanogpt", "--plant", "peaks")
    import torch

    grow, calls = torch._foreach_maximum_, []

    def late(*args: object) -> None:
        calls.append(args)
        if len(calls) > 6:
            grow(*args)

    monkeypatch.setattr(torch, "_foreach_maximum_", late)
    joined = witness(tmp_path / "b", monkeypatch, "nanogpt", "--plant", "peaks")
    assert script_findings(whole, joined, struck=True) == []
    (found,), _ = carried_over(whole, whole, joined)
    assert found.check == "unregistered state"
    assert "protect(state={'kept': kept})" in found.detail


# --- what is concluded -----------------------------------------------------------------------------------------------
def computed(step: int, leaf: int, digest: str = "d", loss: str = "0x1p0", who: str = "r0.1") -> Computed:
    return Computed(step, leaf, digest, loss, who)


def seen(*rows: Computed, loop: dict[str, tuple[str, str]] | None = None) -> Witnessed:
    state = StateSeen(steps=2, fingerprint="f", parts={"/model/w": "1"}, loop=loop or {})
    return Witnessed(rows, {"r0.1.7": state}, {"r0.1.7": state})


def test_the_first_cause_is_told_and_not_what_follows_from_it() -> None:
    right = seen(computed(0, 0), computed(0, 1), computed(1, 0))
    wrong = seen(computed(0, 0), computed(0, 1, loss="0x1p1"), computed(1, 0, digest="e", loss="0x1p2"))
    (found,) = script_findings(right, wrong)
    assert found.check == "data", "samples are what everything else follows from"
    wrong = seen(computed(0, 0), computed(0, 1, loss="0x1p1", who="r0.2"), computed(1, 0, loss="0x1p2"))
    (found,) = script_findings(right, wrong)
    assert found.check == "randomness"
    assert "microbatch 1 of step 0" in found.detail
    assert "r0.2 computed it" in script_findings(right, wrong, struck=True)[0].detail


def test_a_loss_that_differs_points_to_the_loop_s_variables() -> None:
    right = seen(computed(0, 0), loop={"temperature": ("value", "1"), "x": ("tensor", "2")})
    wrong = seen(computed(0, 0, loss="0x1p1"), loop={"temperature": ("value", "9"), "x": ("tensor", "2")})
    assert [f.check for f in script_findings(right, wrong, struck=True)] == ["randomness", "unregistered state"]
    assert "temperature" in script_findings(right, wrong, struck=True)[1].detail


def test_an_end_that_differs_names_the_tensor() -> None:
    right, wrong = seen(computed(0, 0)), seen(computed(0, 0))
    (who,) = wrong.ends
    other = msgspec.structs.replace(wrong.ends[who], parts={"/model/w": "2"})
    (found,) = script_findings(right, wrong._replace(ends={who: other}))
    assert (found.check, found.detail.split()[0]) == ("state", "w")


def test_numbers_of_the_loop_are_notes_and_what_differs_undisturbed_is_nothing() -> None:
    alone = seen(loop={"losses": ("value", "1"), "x": ("tensor", "1"), "g": ("random", "1")})
    fleet = seen(loop={"losses": ("value", "1"), "x": ("tensor", "2"), "g": ("random", "1")})
    struck = seen(loop={"losses": ("value", "3"), "x": ("tensor", "3"), "g": ("random", "3")})
    findings, notes = carried_over(alone, fleet, struck)
    assert [finding.detail.split()[0] for finding in findings] == ["g"]
    assert [note.split()[0] for note in notes] == ["losses"]


def test_a_step_without_a_microbatch_and_one_with_two_results() -> None:
    rows = [computed(0, 0), computed(0, 1), computed(1, 0)]
    assert [f.detail for f in microbatch_findings(seen(*rows), 2, {0, 1})] == [
        "step 1 was committed without microbatch 1"
    ]
    rows += [computed(1, 1), computed(1, 1, loss="0x1p1", who="r1.1")]
    assert [f.detail for f in microbatch_findings(seen(*rows), 2, {0, 1})] == [
        "microbatch 1 of step 1 was computed with two results"
    ]
    assert list(microbatch_findings(seen(*rows), 2, {0})) == []


def test_growth_that_no_sample_contradicts_is_a_leak() -> None:
    steady = [Sample(20 + n % 7, 50 << 20) for n in range(40)]
    assert list(leaks("coordinator", steady)) == []
    (found,) = leaks("coordinator", [Sample(20 + 3 * n, 50 << 20) for n in range(40)])
    assert found.detail.startswith("the coordinator held 56 descriptors at most at first, and 101 at least")
    (found,) = leaks("a0", [Sample(20, (50 + 10 * n) << 20) for n in range(40)])
    assert "MiB" in found.detail
    assert list(leaks("a0", [Sample(20 + 20 * n, 1 << 30) for n in range(11)])) == [], "too short to say"
    assert list(leaks("a0", [*steady, *(Sample(200, 1 << 30) for _ in range(8)), *steady])) == [], "it came down again"


def test_who_is_watched_for_leaks(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with (tmp_path / "logs" / "coordinator.log").open("w") as log:
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=log)
    try:
        watch = LeakWatch()
        watch.look()
        assert watch.samples == {}, "nothing was launched"
        watch.launcher = os.getpid()
        watch.look()
        watch.look()  # too soon after the first
        assert {name: len(samples) for (name, _), samples in watch.samples.items()} == {"launcher": 1, "coordinator": 1}
        assert watch.samples["coordinator", child.pid][0].descriptors >= 3
    finally:
        child.communicate()


# --- real fleets -----------------------------------------------------------------------------------------------------
@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_run_that_is_struck_from_inside_names_what_its_loop_forgets(capsys: pytest.CaptureFixture[str]) -> None:
    """One replica, which dies in step 9 and is replaced by one that goes on from a checkpoint: by construction nobody
    has seen all steps."""
    script = [str(SCRIPTS / "nanogpt.py"), "--max-iters", "16"]
    options = ["--replicas", "1", "--spares", "0", "--runs", "1", "--schedule", "phase:backward:SIGKILL:r0.1:9"]
    assert main(["prove", "run", *options, "--json", *script, "--plant", "peaks"]) == 8
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "failed"
    (failure,) = report["failures"]
    assert [finding["check"] for finding in failure["findings"]] == ["unregistered state"]
    assert "protect(state={'kept': kept})" in failure["findings"][0]["detail"]
    assert failure["command"].startswith("outlast prove run --schedule phase:backward:SIGKILL:r0.1:9")


@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_rank_that_is_struck_by_itself_changes_no_bit(capsys: pytest.CaptureFixture[str]) -> None:
    """One of a replica's two processes is stopped and continued, then killed, while its sibling lives."""
    script = ["-m", "outlast.examples.fsdp_gpt", "--steps", "60"]
    schedule = "0:pause~1:rank:0.1,2:kill:rank:0.1"
    options = ["--ranks", "2", "--spares", "0", "--runs", "1", "--shrink", "0", "--no-checkpoints"]
    options += ["--schedule", schedule]
    assert main(["prove", "run", *options, "--json", *script]) == 0
    report = json.loads(capsys.readouterr().out)
    assert ("pause", "rank") in {(row["kind"], row["target"]) for row in report["table"]}
    assert (report["same_bits"], report["microbatches"]) == (1, 8)
    assert "a rank that is not its replica's lead" not in dict(report["untested"])
