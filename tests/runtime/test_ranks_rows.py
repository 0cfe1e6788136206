"""Robust rules with replicas of several ranks: a row is of a replica, and so is what becomes of it."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.core import events as ev
from outlast.prove._process_tree import of_run
from outlast.runtime.faults.liars import Lie
from outlast.runtime.settings.fault_points import Fault

pytestmark = [pytest.mark.process, pytest.mark.campaign]
SCRIPT = Path(__file__).with_name("sharded.py")
STEPS = 6
# Momentum of each row, the last result, and matrices of two groups; trimming alone measures no distance.
MOVED = {"aggregation": {"0.*": "centered_clipping", "*": {"rule": "trimmed_mean", "pre": "nnm"}}, "f": 1, "rows": 3,
         "row_momentum": 0.9}  # fmt: skip
MIXED = {"aggregation": {"0.*": "krum_all_honest", "1.*": "geometric_median", "*": "median"}, "f": 1, "rows": 3}
TRIMMED = {"aggregation": "trimmed_mean", "f": 1, "rows": 3}


def script(rule: dict[str, Any]) -> list[Any]:
    return [SCRIPT, "--rule", json.dumps(rule)]


@functools.cache
def alone(rule: str, steps: int = STEPS) -> dict[str, Any]:
    """By one rank in a process of its own, its model sharded over itself."""
    with tempfile.TemporaryDirectory() as out:
        words = [sys.executable, SCRIPT, "--steps", str(steps), "--out", out, "--rule", rule]
        subprocess.run(words, check=True, timeout=300)
        (file,) = Path(out).glob("*.json")
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def ended(run: Any, survivors: set[str], ranks: int = 2) -> dict[str, dict[str, Any]]:
    """What each rank of each survivor found, when the run had ended well."""
    assert run.finish() == 0, run.logs()
    assert of_run(run.driven.run_dir) == []
    results: dict[str, dict[str, Any]] = run.results()
    assert set(results) == {f"{name}-{place}" for name in survivors for place in range(ranks)}, run.logs()
    return results


@pytest.mark.parametrize("rule", [MOVED, MIXED])
def test_every_width_has_the_bits_of_one(fleet: Callable[..., Any], rule: dict[str, Any]) -> None:
    """A rank dies as its lane is reduced: two replicas then own the three rows, and the next dies at the verdict."""
    run = fleet(
        Fault(replica="r1/1.1", phase="reduce", step=2, bucket=1, action="SIGKILL"),
        Fault(replica="r0.1", phase="verdict", step=4, action="SIGKILL"),
        replicas=3, ranks=2, steps=STEPS, script=script(rule), max_restarts=0, tolerated=0,
    )  # fmt: skip
    for name, found in ended(run, {"r2.1"}).items():
        assert found == alone(json.dumps(rule)), f"{name}\n{run.logs()}"
    assert all(recovery.lost_steps == 0 for recovery in run.driven.recoveries())


def test_who_joins_is_given_what_rules_remember_lane_by_lane(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """Over torch.distributed; then replicas of one rank go on from what those of two have saved."""
    shape = {"script": script(MOVED), "checkpoint_dir": str(tmp_path / "saved"), "checkpoint_every": 100}
    run = fleet(
        Fault(replica="r1/1.1", phase="gather", step=2, bucket=0, action="SIGKILL"),
        replicas=3, ranks=2, steps=14, gates=(4, 8, 12), on_shortfall="lower", exchange="c10d", **shape,
    )  # fmt: skip
    run.gate(4, "a new replica was served", lambda: run.served("r1.2"))
    run.gate(8, "it had caught up", lambda: run.caught_up("r1.2"))
    run.gate(12, "it trained again", lambda: len(run.driven.members) == 3)
    want = alone(json.dumps(MOVED), 14)
    for name, found in ended(run, {"r0.1", "r1.2", "r2.1"}).items():
        assert found["fingerprint"] == want["fingerprint"], f"{name}\n{run.logs()}"
        assert found["losses"].items() <= want["losses"].items()
    later = fleet(replicas=2, ranks=1, steps=18, on_shortfall="lower", **shape)
    for found in ended(later, {"r0.1", "r1.1"}, 1).values():
        assert found["fingerprint"] == alone(json.dumps(MOVED), 18)["fingerprint"], later.logs()
        assert min(map(int, found["losses"])) == 14


def test_a_row_that_one_rank_spoils_counts_nowhere(fleet: Callable[..., Any]) -> None:
    """NaN in the shards of one rank: all ranks leave the row out, as replicas of one rank leave out a liar's. What is
    then taken of the other two depends on no last bit of a distance, which is another one without the NaN."""
    rule = MIXED | {"aggregation": {"0.*": "krum_all_honest", "*": {"rule": "median", "pre": "nnm"}}}
    found = []
    for ranks, liar in ((2, "r1/1"), (1, "r1")):
        lies = [Lie(replicas=(liar,), attack="nan", first_step=2)]
        run = fleet(replicas=3, ranks=ranks, steps=4, script=script(rule), lies=lies)
        found += ended(run, {"r0.1", "r1.1", "r2.1"}, ranks).values()
    assert all(each == found[0] for each in found)
    assert found[0]["fingerprint"] != alone(json.dumps(rule), 4)["fingerprint"]


def test_more_bad_rows_than_the_rule_tolerates_are_told_by_replica(fleet: Callable[..., Any]) -> None:
    """Each in a lane of its own: neither lane by itself sees too many. The first to fail may leave before the others
    have judged: they do the step again, without it, and fail likewise."""
    lies = [Lie(replicas=("r1/1", "r2/0"), attack="nan", first_step=2)]
    run = fleet(replicas=3, ranks=2, steps=4, script=script(TRIMMED), lies=lies)
    assert run.finish() == 5, run.logs()
    first = next(e for e in run.driven.events if isinstance(e, ev.ReplicaExited))
    assert "rows 1, 2, computed by r1.1, r2.1" in first.detail, run.logs()
    end = next(e for e in run.driven.events if isinstance(e, ev.RunFinished))
    assert end.detail.startswith("two replicas failed in step 2:\n[TRAINING] 2 of 3 rows are not finite"), run.logs()


def test_a_rank_that_reduces_falsely_costs_its_replica(fleet: Callable[..., Any]) -> None:
    run = fleet(
        replicas=3, ranks=2, steps=5, script=script(TRIMMED | {"check_reducers": 1.0}), tolerated=0,
        lies=[Lie(replicas=("r2/1",), attack="lying_reducer", first_step=2)], max_restarts=0,
    )  # fmt: skip
    want = alone(json.dumps(TRIMMED), 5)
    for name, found in ended(run, {"r0.1", "r1.1"}).items():
        assert found == want, f"{name}\n{run.logs()}"
    (accused,) = [e for e in run.driven.events if isinstance(e, ev.ReducerAccused)]
    assert (accused.replica, accused.reducer, accused.rank, accused.step) == ("r2.1", "r2.1", 1, 2)
    assert accused.decision == "evict"
    assert {"r0.1", "r1.1"} & {*accused.votes}, "not its own word alone"
