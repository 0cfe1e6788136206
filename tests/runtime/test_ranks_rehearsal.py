"""What a joiner could not repeat is found in the first steps with several ranks, too, and nothing else is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.test_ranks import fault

from outlast.core import events as ev

pytestmark = [pytest.mark.process, pytest.mark.campaign]
SCRIPT = Path(__file__).with_name("sharded_rehearsed.py")
PARALLEL = Path(__file__).with_name("tensor_parallel.py")
PAIR = Path(__file__).with_name("shard_rehearsals.py")
HONEST = ["adamw", "foreach", "each", "momentum", "muon", "normed"]


def test_shards_are_rehearsed_with_and_without_room_for_copies(tmp_path: Path) -> None:
    """By two processes, which agree: where one has no room, none tries a step whose collectives all must be in."""
    alone = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PAIR), str(place), str(tmp_path / "store")],
            stdout=subprocess.PIPE, text=True, env=os.environ | alone | {"OUTLAST_PLACE": str(place)},
        )
        for place in range(2)
    ]  # fmt: skip
    both: list[dict[str, Any]] = [json.loads(rank.communicate(timeout=600)[0]) for rank in ranks]
    for found in both:
        for what, row in found.items():
            assert row["alike"], what
            room = what.rsplit(", ", 1)[1]
            assert row["looked"] == [False, room != "one", room != "one"], what
            if what.split(",")[0] in HONEST or room == "one":
                assert not row["found"], what
    for what in both[0]:
        told = [found[what]["found"] for found in both]
        if what.startswith("counting,") and not what.endswith("one"):
            assert all("weight after step 1 is another one where the optimizer begins with" in text for text in told)
    assert not both[0]["counting on one, tp=1, mixed"]["found"]
    assert "up.weight after step 1" in both[1]["counting on one, tp=1, mixed"]["found"]


def told_by(run: Any) -> str:
    """The sentence that ended it, with exit code 5."""
    assert run.finish() == 5, run.logs()
    (end,) = [event for event in run.driven.events if isinstance(event, ev.RunFinished)]
    return end.detail


@pytest.mark.parametrize(("replicas", "optimizer"), [(1, "counting"), (2, "counting"), (2, "counting on one")])
def test_what_an_optimizer_counts_for_itself_ends_the_run(
    fleet: Callable[..., Any], replicas: int, optimizer: str
) -> None:
    """Found by the rank that is no lead alone, too: nothing is started again."""
    run = fleet(replicas=replicas, ranks=2, steps=40, script=[SCRIPT, "--optimizer", optimizer], max_restarts=3)
    said = told_by(run)
    assert "[LOOP] 0.up.weight after step 1 is another one where the optimizer begins with" in said, run.logs()
    assert run.driven.step <= 3
    assert {event.replica for event in run.exits()} <= {"r0.1", "r1.1"}


@pytest.mark.parametrize(("replicas", "loop"), [(1, "writes"), (2, "writes on one")])
def test_what_a_loop_writes_unseen_ends_the_run(fleet: Callable[..., Any], replicas: int, loop: str) -> None:
    run = fleet(replicas=replicas, ranks=2, steps=40, script=[SCRIPT, "--loop", loop], max_restarts=3)
    said = told_by(run)
    assert "[LOOP] the loop changed 0.up.weight before step 1" in said, run.logs()
    assert "not through .data or to_local()" in said


@pytest.mark.parametrize(
    ("replicas", "loop", "tp", "said"),
    [
        (1, "averages", 1, "keeps an average of "),
        (2, "averages", 1, "keeps an average of "),
        (2, "plain averages", 1, "keeps an average of "),
        (2, "averages", 2, "keeps an average of "),
        (2, "model of averages", 2, "updates an AveragedModel"),
    ],
)
def test_an_average_of_shards_that_nobody_registered_ends_the_run(
    fleet: Callable[..., Any], replicas: int, loop: str, tp: int, said: str
) -> None:
    script = [SCRIPT, "--loop", loop, "--tp", str(tp)]
    run = fleet(replicas=replicas, ranks=2, steps=40, script=script, max_restarts=3)
    told = told_by(run)
    assert f"[LOOP] the loop {said}" in told, run.logs()
    assert "that is not registered: a replica that joins would not have it" in told
    assert run.driven.step <= 4


@pytest.mark.parametrize(("replicas", "shard"), [(1, 1), (2, 1), (2, 2)])
def test_a_norm_that_is_given_a_part_of_the_sequence_and_is_left_whole_ends_the_run(
    fleet: Callable[..., Any], replicas: int, shard: int
) -> None:
    """Its ranks trained it apart in silence, each replica alike. That one with SequenceParallel is not named is seen in
    all fleets of `test_ranks_tensor_parallel.py`."""
    script = [PARALLEL, "--sequence", "--forgotten", "--shard", str(shard)]
    run = fleet(replicas=replicas, ranks=2 * shard, steps=40, script=script, max_restarts=3)
    told = told_by(run)
    assert '[LOOP] blocks.0.norm.weight and 3 more: whole on each rank along "tp", and since step 0 not' in told
    assert "SequenceParallel()" in told
    assert run.driven.step <= 3


def test_an_average_of_shards_that_is_registered_goes_on_with_who_joins(fleet: Callable[..., Any]) -> None:
    script = [SCRIPT, "--loop", "registered averages"]
    plain = fleet(replicas=1, ranks=2, steps=12, script=script)
    assert plain.finish() == 0, plain.logs()
    run = fleet(fault("r0/1.1", "backward", step=6), replicas=2, ranks=2, steps=12, script=script)
    assert run.finish() == 0, run.logs()
    want, results = plain.results()["r0.1-0"], run.results()
    assert set(results) >= {"r1.1-0", "r1.1-1"}
    assert {found["fingerprint"] for found in results.values()} == {want["fingerprint"]}, run.logs()


def test_ranks_of_the_last_replica_rehearse_and_have_the_bits_of_a_run_without(fleet: Callable[..., Any]) -> None:
    plain = fleet(replicas=1, ranks=2, steps=5, script=[SCRIPT], bitwise=False)
    assert plain.finish() == 0, plain.logs()
    want = plain.results()["r0.1-0"]
    assert want["rehearsed"] == []
    run = fleet(replicas=2, ranks=2, steps=5, script=[SCRIPT], max_restarts=0)
    assert run.finish() == 0, run.logs()
    results = run.results()
    assert {found["fingerprint"] for found in results.values()} == {want["fingerprint"]}, run.logs()
    tried = {name: found["rehearsed"] for name, found in results.items()}
    assert tried == {f"r{slot}.1-{place}": [False, slot == 1, slot == 1] for slot in range(2) for place in range(2)}


def test_a_rank_that_dies_in_a_rehearsal_costs_its_replica_alone(fleet: Callable[..., Any]) -> None:
    """While the other one is in a collective of the step that is tried. Who is left rehearses the next one."""
    run = fleet(replicas=2, ranks=2, steps=6, script=[SCRIPT, "--optimizer", "dying"], max_restarts=0)
    assert run.finish() == 0, run.logs()
    assert {exit.replica for exit in run.exits() if exit.cause == "signal"} == {"r1.1"}, run.logs()
    results = run.results()
    assert set(results) == {"r0.1-0", "r0.1-1"}, run.logs()
    assert results["r0.1-0"]["rehearsed"] == [False, False, True]
    assert all(recovery.lost_steps == 0 for recovery in run.driven.recoveries())


def test_stages_of_a_pipeline_rehearse_as_well(fleet: Callable[..., Any]) -> None:
    """The optimizer of the second stage alone keeps a count."""
    script = [SCRIPT.with_name("staged.py"), "--wrong", "counting"]
    run = fleet(replicas=2, ranks=2, steps=40, script=script, max_restarts=3)
    said = told_by(run)
    assert "[LOOP] layers.2.0.weight after step 1 is another one where the optimizer begins with" in said, run.logs()
