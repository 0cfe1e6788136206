"""What loops do between steps works with joiners and spares, or is named in the first steps, alone as in a fleet."""

from __future__ import annotations

import functools
import itertools
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.habits.here import trained

from outlast.errors import OutlastError

pytestmark = pytest.mark.usefixtures("training_here")
LOOP, BUILT_SCRIPT = (Path(__file__).parent / "habits" / name for name in ("loop.py", "built.py"))
STEPS = 14

HELD = (
    "plain", "rate_before", "rate_after", "rate_follows", "scheduler_by_hand", "plateau_by_hand", "plateau_of_ones_own",
    "average", "average_by_hook", "teacher", "counter", "clamped", "frozen_then_thawed", "eval_mode", "adversaries",
    "average_that_follows", "measured", "stopped_by_one", "evaluates", "streams",
    "streams_by_loader", "average_in_the_model",
)  # fmt: skip
BUILT = (
    "gpt", "gpt_in_bfloat16", "compiled", "images", "images_converted", "optimizers", "lora", "functions_and_hooks",
    "double", "half", "subset", "sampled", "sparse_and_skipped", "epochs", "in_a_bar",
)  # fmt: skip
OF_LIBRARIES = {"language": "transformers", "lora_of_peft": "peft", "under_hydra": "hydra"}
"""Those with what another package has: left out where it is not. Each process takes long to import it."""
SLOW = pytest.mark.soak, pytest.mark.timeout(300)
HELD_TOO = (
    "in_turns", "schedule_free", "plateau_in_state", "thawed_in_stages", "hook_that_drifts", "group_at_a_time",
    "drawn_between", "drawn_from_ones_own", "read_before_but_weights", "decayed_before",
)  # fmt: skip
"""The same ways to a joiner as those above, from other habits."""
MIXED = "plateau_in_state", "thawed_in_stages", "hook_that_drifts"
"""Of these a joiner has each part by another habit too: `plateau_by_hand` and `plateau_of_ones_own`, `rate_before` and
`frozen_then_thawed`, `clamped` and `average_by_hook`. Their fleets are soaks."""
IN_THREES = "plain", "rate_after", "average", "evaluates", "streams"
"""Those of `HELD` whose fleets of three CI runs: one of each way to a joiner. Their fleets of two, which prove less,
are soaks, as the others' fleets of three are."""
HELD_BESIDES = "average_by_hand_registered", "copies_kept"
NAMED = {
    "rate_inside": "[LOOP] the loop changed lr from 0.01 to 0.0",
    "data_written": "[LOOP] the loop changed 0.weight and ",
    "counting_optimizer": "[LOOP] 0.weight after step 1 is another one where the optimizer begins with",
    "group_at_a_time_unseen": "[LOOP] 0.weight after step 1 is another one where the optimizer begins with",
    "drawing_dataset": "[LOOP] the samples of microbatch 0 of step 0 (indices ",
    "drawing_workers": "[LOOP] the samples of microbatch 0 of step 0 (indices ",
    "caching_dataset": "[LOOP] the samples of microbatch ",
    "caching_workers": "[LOOP] the samples of microbatch ",
    "thawed": "[LOOP] 0.weight began to train in step 2",
    "group_added": "[LOOP] 2.weight began to train in step 2",
    "group_added_inside": "[LOOP] 2.weight began to train in step 2",
    "clipped_by_hand": "[STEP] clip_grad_norm_ used .grad of a protected parameter",
    "scheduler_twice": "[STEP] the loop called step() of its StepLR",
    "average_unregistered": "[LOOP] the loop updates an AveragedModel that is not registered",
    "average_by_hand_late": "[LOOP] the loop keeps an average of ",
    "scaled": "[STEP] the loss was multiplied by a GradScaler",
    "reentrant": "activation checkpointing: use_reentrant=False",
    "twice": "[STEP] step.backward was given a tuple, no tensor",
    "closure": "[CONFIG] LBFGS.step needs 'closure'",
    "lazy": "[CONFIG] 0.weight of the model has no shape yet",
    "loader": "[CONFIG] the dataset is a DataLoader",
}
REFUSED = "reentrant", "twice", "closure", "lazy", "loader"
"""Named by `protect` and `backward`, with no look at what the loop does: `built.py` has them, and
`habits/test_in_the_loop.py` tries them alone."""
CODES = dict.fromkeys(("closure", "lazy", "loader"), 2)
"""What cannot be protected is an error of the arguments."""

ALIKE = "group_at_a_time_unseen", "scheduler_twice", "scaled"
"""Ends of a fleet that another habit shows already."""
ALIKE_TOO = "drawing_workers", "caching_workers", "group_added", "group_added_inside", "reentrant", "closure", "lazy"
"""The same, in soaks: CI has them alone, and others that are named at the same place in a fleet."""


def script(habit: str) -> tuple[Path, str]:
    """The program that has it, and its first argument."""
    return BUILT_SCRIPT if habit in (*BUILT, *OF_LIBRARIES, *REFUSED) else LOOP, habit


def needs(habit: str) -> None:
    if habit in OF_LIBRARIES:
        pytest.importorskip(OF_LIBRARIES[habit])


@functools.cache
def alone(habit: str, steps: int = STEPS) -> tuple[int, dict[str, Any], str]:
    """Exit code, what was found, and what was said by a fleet of one."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, *map(str, script(habit)), "--steps", str(steps), "--out", out]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        found = [json.loads(path.read_text()) for path in Path(out).glob("*.json")]
    return done.returncode, found[0] if found else {}, done.stderr


@functools.cache
def undisturbed(habit: str, steps: int) -> dict[str, Any]:
    """What it ends with in a fleet of one: in this process, but for what takes long to import or is compiled."""
    if habit in (*OF_LIBRARIES, "compiled"):
        code, found, said = alone(habit, steps)
        assert code == 0, said
        return found
    with tempfile.TemporaryDirectory() as folder:
        return trained(habit, Path(folder) / "out", "--steps", str(steps))


def assert_as_alone(run: Any, habit: str, steps: int) -> None:
    assert run.finish() == 0, run.logs()
    want, results = undisturbed(habit, steps), run.results()
    assert results, run.logs()
    for name, found in results.items():
        assert found == want, f"{name}\n{run.logs()}"


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("habit", "replicas"),
    [
        *((habit, 2) for habit in (*HELD, *HELD_TOO, *BUILT) if habit not in (*IN_THREES, *MIXED)),
        *((habit, 3) for habit in IN_THREES),
        *(pytest.param(habit, 2, marks=pytest.mark.soak) for habit in (*IN_THREES, *MIXED)),
        *(pytest.param(habit, 3, marks=pytest.mark.soak) for habit in (*HELD, *HELD_TOO) if habit not in IN_THREES),
        *(pytest.param(*both, marks=SLOW) for both in itertools.product(HELD_BESIDES, (2, 3))),
        *(pytest.param(habit, 3, marks=pytest.mark.soak) for habit in BUILT),
        *(pytest.param(*both, marks=SLOW) for both in itertools.product(OF_LIBRARIES, (2, 3))),
    ],
)
def test_a_joiner_goes_on_as_the_loop_does(fleet: Callable[..., Any], habit: str, replicas: int) -> None:
    """One is killed from outside, its successor joins, and then all that had been there from the start are killed."""
    needs(habit)
    gates = (4, 6, 7, 17)  # before any of them ends: `stopped_by_one` does after step 18
    run = fleet(script=script(habit), replicas=replicas, steps=24, gates=gates, max_restarts=1)
    run.until("training", lambda: run.driven.members != [])
    run.strike(run.pid("r1.1"))
    run.gate(4, "it was gone", lambda: run.exited("r1.1"))  # step 4 is of a view without it, which then can serve
    run.gate(6, "its successor was served", lambda: run.served("r1.2"))
    run.gate(7, "it had caught up", lambda: run.caught_up("r1.2"))
    run.until("it was a member", lambda: "r1.2" in run.driven.members)
    for slot in range(replicas):
        if slot != 1:
            run.strike(run.pid(f"r{slot}.1"))
    run.gate(17, "they were gone", lambda: all(run.exited(f"r{slot}.1") for slot in range(replicas)))
    assert_as_alone(run, habit, 24)
    assert set(run.results()) == {"r1.2"}


@pytest.mark.campaign
@pytest.mark.parametrize("habit", ["clamped", "average_that_follows"])
def test_a_joiner_goes_on_as_the_loop_does_under_a_robust_rule(fleet: Callable[..., Any], habit: str) -> None:
    """Outcomes are fed once they are applied. Before, what the loop had made of its state was copied then, too: each
    joiner lacked what the loop wrote to weights, or had its average updated twice, and was evicted for it."""
    run = fleet(
        script=script(habit), replicas=3, steps=24, gates=(4, 12), max_restarts=1, on_shortfall="lower",
        words=["--aggregation", "median", "--f", "1", "--rows", "3"],
    )  # fmt: skip
    run.until("all train", lambda: len(run.driven.members) == 3)
    run.strike(run.pid("r1.1"))
    run.gate(4, "it was gone, and its successor served", lambda: run.exited("r1.1") and run.served("r1.2"))
    run.gate(12, "it had caught up, and members are told", lambda: run.placed("r1.2"))
    assert run.finish() == 0, run.logs()
    results = run.results()
    assert set(results) == {"r0.1", "r1.2", "r2.1"}, run.logs()
    assert results["r1.2"] == results["r0.1"] == results["r2.1"]


@pytest.mark.campaign
def test_three_that_come_at_once_have_what_the_loop_made(fleet: Callable[..., Any]) -> None:
    """The first is let in while the others still catch up: these lack a step as they come, and are handed it. Before,
    they had an average of steps before, and were replaced, or nobody could tell who was right."""
    run = fleet(script=script("average"), replicas=4, steps=240, gates=(4, *range(10, 230, 5)), max_restarts=3)
    run.until("training", lambda: run.driven.members != [])
    for slot in (1, 2, 3):
        run.strike(run.pid(f"r{slot}.1"))
    run.gate(4, "they were gone", lambda: all(run.exited(f"r{slot}.1") for slot in (1, 2, 3)))
    run.step_on("their successors were members", lambda: len(run.driven.members) == 4)
    run.open_gates()
    assert_as_alone(run, "average", 240)
    assert set(run.results()) == {"r0.1", "r1.2", "r2.2", "r3.2"}


@pytest.mark.campaign
def test_a_replica_that_dies_in_an_evaluation_changes_no_number(fleet: Callable[..., Any]) -> None:
    """All three are inside it, each in its own batches, when one is killed; its successor joins."""
    run = fleet(script=script("evaluates"), replicas=3, steps=24, gates=(1005, 7, 8), max_restarts=1)
    run.until("all were started", lambda: all(run.started(f"r{slot}.1") for slot in range(3)))
    pids = {run.pid(f"r{slot}.1") for slot in range(3)}
    run.until("all evaluated", lambda: run.at_gates(pids))
    run.strike(run.pid("r1.1"))
    run.gate(1005, "it was gone", lambda: run.exited("r1.1"))
    run.gate(7, "its successor was served", lambda: run.served("r1.2"))
    run.gate(8, "it had caught up, and members are told", lambda: run.placed("r1.2"))
    assert_as_alone(run, "evaluates", 24)
    assert set(run.results()) == {"r0.1", "r1.2", "r2.1"}


@pytest.mark.campaign
@pytest.mark.parametrize("habit", ["drawn_from_ones_own", "read_before"])
def test_a_joiner_that_has_replayed_steps_goes_on_as_the_loop_does(fleet: Callable[..., Any], habit: str) -> None:
    """Eight steps go by between its snapshot and the gate before which it has caught up. Before, it was refused: what
    its lines before the inner loop drew from a registered generator was of its snapshot."""
    run = fleet(script=script(habit), replicas=2, steps=24, gates=(4, 12), max_restarts=1)
    run.until("all train", lambda: len(run.driven.members) == 2)
    run.strike(run.pid("r1.1"))
    run.gate(4, "it was gone, and its successor served", lambda: run.exited("r1.1") and run.served("r1.2"))
    run.gate(12, "it had caught up, and members are told", lambda: run.placed("r1.2"))
    assert_as_alone(run, habit, 24)
    assert set(run.results()) == {"r0.1", "r1.2"}


@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.parametrize("habit", ["scheduler_by_hand", "teacher", "drawn_from_ones_own", "read_before"])
def test_a_spare_takes_over_with_all_that_the_loop_made(fleet: Callable[..., Any], habit: str) -> None:
    """It has replayed outcomes, and goes through the newest one's step with what all loops had before that step."""
    run = fleet(script=script(habit), replicas=1, spares=1, steps=STEPS, gates=(1, 4, 9), max_restarts=0)
    run.gate(1, "the spare was served", lambda: run.served("r1.1"))
    run.gate(4, "it had caught up", lambda: run.caught_up("r1.1"))
    run.until("step 8 was committed", lambda: run.driven.step >= 7)
    run.strike(run.pid("r0.1"), signal.SIGKILL)
    run.gate(9, "it was gone", lambda: run.exited("r0.1"))
    assert_as_alone(run, habit, STEPS)


@pytest.mark.campaign
@pytest.mark.process
def test_a_spare_that_has_replayed_nothing_takes_over(fleet: Callable[..., Any]) -> None:
    """It goes through the step before its snapshot, and what the lines before that step's inner loop read is added up
    after it: nobody is left to compare with."""
    habit = "read_before_but_weights"
    run = fleet(script=script(habit), replicas=1, spares=1, steps=STEPS, gates=(0, 1), max_restarts=0)
    run.gate(0, "the spare was served", lambda: run.served("r1.1"))
    run.until("it had caught up", lambda: run.caught_up("r1.1"))
    run.strike(run.pid("r0.1"), signal.SIGKILL)
    run.gate(1, "it was gone", lambda: run.exited("r0.1"))
    assert_as_alone(run, habit, STEPS)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("habit", "step"), [("weighted_by_count", 7), ("hook_that_counts", 7)]
)  # fmt: skip
def test_what_a_loop_keeps_to_itself_is_found_as_a_spare_takes_over(
    fleet: Callable[..., Any], habit: str, step: int
) -> None:
    """Nobody is left to compare with: the loss of the last step is. Before, these ended well, with other bits."""
    run = fleet(script=script(habit), replicas=1, spares=1, steps=24, gates=(1, 4, step + 2), max_restarts=0)
    run.gate(1, "the spare was served", lambda: run.served("r1.1"))
    run.gate(4, "it had caught up", lambda: run.caught_up("r1.1"))
    run.until("the step was committed", lambda: run.driven.step >= step)
    run.strike(run.pid("r0.1"), signal.SIGKILL)
    run.gate(step + 2, "it was gone", lambda: run.exited("r0.1"))
    assert run.finish() == 5, run.logs()
    assert "[LOOP] on r1.1, which has just joined, the loss of step " in run.logs()
    assert run.results() == {}


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("habit", "said"),
    [
        ("unregistered", "replicas have set lr differently in step "),
        ("weighted_by_count", "which has just joined, the loss of step "),
        ("drawn_unregistered", "which has just joined, the loss of step "),
    ],
)
def test_what_a_loop_keeps_to_itself_is_found_as_a_replica_joins(
    fleet: Callable[..., Any], habit: str, said: str
) -> None:
    run = fleet(script=script(habit), replicas=2, steps=400, gates=(4, 6, 7), max_restarts=1)
    run.until("training", lambda: run.driven.members != [])
    run.strike(run.pid("r1.1"))
    run.gate(4, "it was gone", lambda: run.exited("r1.1"))  # step 4 is of a view without it, which then can serve
    run.gate(6, "its successor was served", lambda: run.served("r1.2"))
    run.gate(7, "it had caught up, and members are told", lambda: run.placed("r1.2"))
    assert run.finish() == 5, run.logs()
    assert f"[LOOP] {'' if habit == 'unregistered' else 'on r1.2, '}{said}" in run.logs()
    assert run.results() == {}


@pytest.mark.parametrize("habit", [habit for habit in NAMED if habit not in REFUSED])
def test_what_no_joiner_could_repeat_is_named_alone(habit: str, tmp_path: Path) -> None:
    with pytest.raises(OutlastError) as error:
        trained(habit, tmp_path / "out", "--steps", str(STEPS))
    assert NAMED[habit] in str(error.value)
    assert error.value.exit_code == CODES.get(habit, 5)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.process
@pytest.mark.parametrize("habit", ["rate_inside", "clipped_by_hand"])
def test_a_program_in_which_something_is_named_says_so_and_ends_with_its_code(habit: str) -> None:
    code, found, said = alone(habit)
    assert (code, found) == (CODES.get(habit, 5), {})
    assert NAMED[habit] in said


@pytest.mark.process
@pytest.mark.parametrize(("habit", "told"), [("average_of_writer", 1), ("average_by_copies", 0)])
def test_an_average_of_the_writer_s_or_one_that_is_registered_goes_on(habit: str, told: int) -> None:
    code, _, said = alone(habit)
    assert code == 0, said
    assert said.count("who writes after this replica would not have it") == told


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("habit", "replicas"),
    [
        pytest.param(habit, replicas, marks=[pytest.mark.soak] if replicas == 3 or habit in ALIKE_TOO else [])
        for habit, replicas in itertools.product([habit for habit in NAMED if habit not in ALIKE], (2, 3))
    ],
)
def test_what_no_joiner_could_repeat_is_named_in_a_fleet(fleet: Callable[..., Any], habit: str, replicas: int) -> None:
    run = fleet(script=script(habit), replicas=replicas, steps=STEPS)
    assert run.finish() == CODES.get(habit, 5), run.logs()
    assert NAMED[habit] in run.logs()
    assert run.results() == {}


def test_what_only_the_writer_remembers_is_named_before_any_fault(fleet: Callable[..., Any]) -> None:
    """Before, it was found at the first fault: who joined was unlike, or the survivors were, as by failing memory."""
    run = fleet(script=script("average_by_writer"), replicas=2, steps=STEPS)
    assert run.finish() == 5, run.logs()
    assert "[LOOP] replicas have made different things of 'ema', registered by state=, before step 1: r" in run.logs()
    assert "not only where run.is_writer holds" in run.logs()
    assert run.results() == {}
