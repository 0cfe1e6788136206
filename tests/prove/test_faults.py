"""The campaign of real faults: what it draws, what it says of what it saw, and one fleet of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from outlast.checkpoint import CheckpointEngine
from outlast.cli import main
from outlast.core import events as ev
from outlast.core.phases import Phase
from outlast.prove import Campaign
from outlast.prove._campaign import _judge
from outlast.prove._generations import SAVED, wrong_generation
from outlast.prove._trials import SCENES, STEPS, Trial, _Draw, trial_of


def test_every_phase_has_its_scene_and_every_round_visits_it() -> None:
    assert set(SCENES) == set(Phase) - {Phase.IDLE}
    for turn in range(2):
        trials = [trial_of(turn * len(SCENES) + place, 5) for place in range(len(SCENES))]
        assert {trial.phase for trial in trials} == {phase.name.lower() for phase in SCENES}


def test_trials_are_drawn_by_their_numbers_alone_and_spread() -> None:
    trials = [trial_of(number, 3) for number in range(20 * len(SCENES))]
    assert trials == [trial_of(number, 3) for number in range(20 * len(SCENES))]
    assert trials[:40] != [trial_of(number, 4) for number in range(40)]
    assert {trial.replicas for trial in trials} == set(range(1, 9))
    assert {trial.dtype for trial in trials} == {"float32", "bfloat16"}
    assert {trial.exchange for trial in trials} == {"shm", "c10d"}
    assert {"SIGKILL", "SIGSTOP", "raise", "hang", "exit"} <= {trial.action for trial in trials}
    assert {trial.bucket for trial in trials if trial.phase == "reduce"} == {0, 1, 2}
    for trial in trials:
        last = trial.replicas + trial.spares
        slots = [fault.replica.partition(".")[0] for fault in trial.faults if fault.replica[0] == "r"]
        assert all(int(slot[1:]) < last for slot in slots), trial
        assert all(fault.step is None or fault.step <= STEPS for fault in trial.faults), trial


class Seen:
    """What `_judge` asks of a run that was followed."""

    def __init__(self, ends: int) -> None:
        gone = ev.ReplicaExited(at_s=0.0, replica="r1.1", cause="signal", detail="", noticed_by="agent")
        self.events: list[Any] = [gone] * ends


@pytest.mark.parametrize(
    ("code", "fingerprint", "loss", "ends", "verdict"),
    [
        (0, "f", 0.5, 1, "identical"), (0, "f", 0.5, 0, "missed"), (0, "g", 0.5, 1, "different"),
        (0, "f", 0.25, 1, "different"), (6, "f", 0.5, 1, "failed"), (0, "", 0.5, 1, "failed"),
    ],
)  # fmt: skip
def test_what_is_not_identical_is_not_called_so(
    code: int, fingerprint: str, loss: float, ends: int, verdict: str, tmp_path: Path
) -> None:
    if fingerprint:
        (tmp_path / "r0.1.json").write_text(json.dumps({"fingerprint": fingerprint, "losses": [[3, loss]]}))
    wanted = {"fingerprint": "f", "losses": [[3, 0.5]]}
    driven: Any = Seen(ends)
    assert (
        _judge(msgspec.structs.replace(trial_of(0, 0), loses=1, checkpoint_every=0), driven, code, tmp_path, wanted)[0]
        == verdict
    )


def test_the_command_refuses_what_cannot_be(tmp_path: Path) -> None:
    assert main(["prove", "faults", "--samples", "0"]) == 2
    (tmp_path / "file").touch()
    assert main(["prove", "faults", "--keep", str(tmp_path)]) == 2


def place_of(phase: Phase, replicas: int, **wanted: str) -> Trial:
    """The first trial that strikes there with so few replicas."""
    trials = (SCENES[phase](_Draw(number, 0, phase)) for number in range(10_000))
    fits = (trial for trial in trials if trial.replicas <= replicas)
    return next(trial for trial in fits if all(getattr(trial, key) == value for key, value in wanted.items()))


@pytest.mark.campaign
@pytest.mark.process
def test_one_fleet_survives_and_has_the_bits(tmp_path: Path) -> None:
    result = Campaign(tmp_path, 0).attempt(place_of(Phase.REDUCE, 3))
    assert (result.verdict, result.ended >= 1, result.recoveries >= 1) == ("identical", True, True), result


@pytest.fixture(scope="module")
def saving(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    """Its undisturbed run is made once."""
    return Campaign(tmp_path_factory.mktemp("saving"), 0)


ACTIONS = ("SIGKILL", "SIGSTOP", "raise")
SAVES = [phase for phase in Phase if phase.name.startswith(("SAVE", "PUBLISH"))]
ELSEWHERE = Phase.SAVE_DATA_DURABLE, Phase.PUBLISH_BEGAN
"""Where CI kills in `runtime/test_saves_faults.py`, and here it would do nothing else."""
STRUCK = [
    pytest.param(
        phase, action, id=f"{phase.name}-{action}",
        marks=[] if (number + turn) % 3 == 0 and phase not in ELSEWHERE else pytest.mark.soak,
    )
    for number, phase in enumerate(SAVES)
    for turn, action in enumerate(ACTIONS)
]  # fmt: skip


@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.parametrize(("phase", "action"), STRUCK)
def test_what_is_saved_under_faults_is_right(saving: Campaign, phase: Phase, action: str) -> None:
    """Killed, stopped, an error: at every point of a save and of its publication. The end is saved all the same."""
    trial = place_of(phase, 3, action=action, dtype="float32")
    own = list(Phase).index(phase) * len(ACTIONS) + ACTIONS.index(action)  # a folder that no other trial has
    result = saving.attempt(msgspec.structs.replace(trial, number=own))
    assert result.verdict == "identical", result


def saved(place: Path, values: dict[int, float]) -> Path:
    """Generations of these steps, as the campaign finds them."""
    engine = CheckpointEngine(str(place / SAVED), num_slots=1)
    for step, value in values.items():
        handle = engine.save(step, {"w": torch.full((9,), value), "count": step})
        assert handle is not None
        engine.commit(handle)
    engine.close()
    return place / SAVED


def test_a_generation_that_is_wrong_is_told(tmp_path: Path) -> None:
    right = saved(tmp_path / "a", {3: 1.0, 6: 2.0})
    assert wrong_generation(saved(tmp_path / "b", {2: 9.0, 3: 1.0, 6: 2.0}), right) == "", "nobody can tell of step 2"
    assert "of step 6: w differs" in wrong_generation(saved(tmp_path / "c", {3: 1.0, 6: 2.5}), right)
    assert "did not save" in wrong_generation(saved(tmp_path / "d", {3: 1.0, 7: 2.0}), right)
    assert "nothing was saved" in wrong_generation(tmp_path / "none" / SAVED, right)
    torn = saved(tmp_path / "e", {3: 1.0})
    data = next((torn / "data").glob("*.bin"))
    data.write_bytes(b"x" + data.read_bytes()[1:])
    assert "is damaged" in wrong_generation(torn, right)
    (torn / "manifests" / "g0000000000.json").write_text("{}")
    assert "generation 0: " in wrong_generation(torn, right)


@pytest.mark.campaign
@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_sample_of_all_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "faults", "--samples", "12", "--seed", "2", "--keep", str(tmp_path / "runs"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["identical"] >= 11, report
