"""Replicas that are pipelines: one fingerprint for any number of them and of stages, whatever is killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.core import events as ev
from outlast.prove._process_tree import of_run
from outlast.runtime.settings.fault_points import Fault

pytestmark = [pytest.mark.process, pytest.mark.campaign]
SCRIPT = Path(__file__).with_name("staged.py")


def ended(run: Any, survivors: set[str], ranks: int) -> dict[str, dict[str, Any]]:
    """What each rank of each survivor found, when the run had ended well."""
    assert run.finish() == 0, run.logs()
    assert of_run(run.driven.run_dir) == []
    results: dict[str, dict[str, Any]] = run.results()
    assert set(results) == {f"{name}-{place}" for name in survivors for place in range(ranks)}, run.logs()
    return results


def test_replicas_have_one_fingerprint_by_whichever_schedule(fleet: Callable[..., Any]) -> None:
    """With dropout, which stages draw apart."""
    script = [SCRIPT, "--dropout", "0.1"]
    want = ended(fleet(replicas=1, ranks=2, steps=6, script=script, max_restarts=0), {"r0.1"}, 2)["r0.1-0"]
    for replicas, kind in ((2, "1f1b"), (3, "gpipe")):
        run = fleet(replicas=replicas, ranks=2, steps=6, script=[*script, "--kind", kind], max_restarts=0)
        for name, found in ended(run, {f"r{slot}.1" for slot in range(replicas)}, 2).items():
            assert found == want, f"{name}\n{run.logs()}"


def test_stages_do_not_show_in_the_result(fleet: Callable[..., Any]) -> None:
    """Four stages have the bits of a process that has the whole model; the norm is that of the whole, and has the same
    bits with two."""
    script = [SCRIPT, "--how", "{}"]
    want = ended(fleet(replicas=1, ranks=1, steps=6, script=[*script, "--stages", "1"]), {"r0.1"}, 1)["r0.1-0"]
    found = ended(fleet(replicas=1, ranks=4, steps=6, script=[*script, "--stages", "4"]), {"r0.1"}, 4)
    assert [found[f"r0.1-{place}"]["losses"] for place in range(4)] == [want["losses"]] * 4
    assert {each["fingerprint"] for each in found.values()} == {want["fingerprint"]}
    norms = found["r0.1-3"]["norms"]
    assert list(norms.values()) == pytest.approx(list(want["norms"].values()), rel=1e-6)
    two = ended(fleet(replicas=1, ranks=2, steps=6, script=script), {"r0.1"}, 2)
    assert {json.dumps(each["norms"]) for each in two.values()} == {json.dumps(norms)}


def test_a_spare_takes_the_place_of_one_whose_rank_is_killed(fleet: Callable[..., Any]) -> None:
    """In the middle of a backward, while the stage before it waits; the spare is fed stage by stage."""
    steps = 40
    want = ended(fleet(replicas=1, ranks=2, steps=steps, script=[SCRIPT], max_restarts=0), {"r0.1"}, 2)["r0.1-0"]
    run = fleet(
        Fault(replica="r1/1.1", phase="backward", step=10, action="SIGKILL"),
        replicas=2, spares=1, ranks=2, steps=steps, script=[SCRIPT], gates=(9, 13, 34), max_restarts=0,
    )  # fmt: skip
    run.gate(9, "the spare had caught up", lambda: run.caught_up("r2.1"))
    run.gate(13, "the spare took its place", lambda: run.exited("r1.1") and run.placed("r2.1"))
    run.gate(34, "it trained", lambda: len(run.driven.members) == 2)
    for name, found in ended(run, {"r0.1", "r2.1"}, 2).items():
        assert found["fingerprint"] == want["fingerprint"], f"{name}\n{run.logs()}"
        assert found["losses"].items() <= want["losses"].items(), f"{name}\n{run.logs()}"
        assert str(steps - 1) in found["losses"]
    assert [recovery.lost_steps for recovery in run.driven.recoveries()] == [0]


def test_who_joins_and_who_goes_on_have_it_too(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """A replica that died is fed stage by stage. What two replicas saved three go on from."""
    keep = {"checkpoint_dir": str(tmp_path / "kept"), "checkpoint_every": 100}
    run = fleet(
        Fault(replica="r1/1.1", phase="reduce", step=2, bucket=1, action="SIGKILL"),
        replicas=2, ranks=2, steps=14, script=[SCRIPT, "--how", "{}"], gates=(4, 8, 12), **keep,
    )  # fmt: skip
    run.gate(4, "a new replica was served", lambda: run.served("r1.2"))
    run.gate(8, "it had caught up", lambda: run.caught_up("r1.2"))
    run.gate(12, "it trained again", lambda: len(run.driven.members) == 2)
    results = ended(run, {"r0.1", "r1.2"}, 2)
    assert len({found["fingerprint"] for found in results.values()}) == 1, run.logs()
    script = [SCRIPT, "--how", "{}"]
    later = ended(fleet(replicas=3, ranks=2, steps=16, script=script, **keep), {"r0.1", "r1.1", "r2.1"}, 2)
    whole = ended(fleet(replicas=1, ranks=1, steps=16, script=[*script, "--stages", "1"]), {"r0.1"}, 1)["r0.1-0"]
    assert {found["fingerprint"] for found in later.values()} == {whole["fingerprint"]}
    assert later["r0.1-1"]["losses"].items() <= whole["losses"].items()


@pytest.mark.soak
def test_a_checkpoint_knows_no_number_of_stages(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """Two stages save, four go on, and then a process that has the whole model."""
    keep = {"checkpoint_dir": str(tmp_path / "kept"), "checkpoint_every": 100}
    for stages, steps in ((2, 3), (4, 5), (1, 7)):
        script = [SCRIPT, "--how", "{}", "--stages", str(stages)]
        run = fleet(replicas=1, ranks=stages, steps=steps, script=script, **keep)
        found = ended(run, {"r0.1"}, stages)["r0.1-0"]
        assert list(found["losses"]) == [str(step) for step in range(max(0, steps - 2), steps)] or stages == 2
    want = ended(fleet(replicas=1, ranks=1, steps=7, script=[SCRIPT, "--how", "{}", "--stages", "1"]), {"r0.1"}, 1)
    assert found["fingerprint"] == want["r0.1-0"]["fingerprint"]


@pytest.mark.soak
def test_what_is_no_number_is_skipped_by_all_stages(fleet: Callable[..., Any]) -> None:
    """The first stage has the sample, the last one the loss. Another sample takes its place from then on, for torch's
    stages take batches of one size."""
    script, steps = [SCRIPT, "--bad", "21", "--how", "{}"], 6
    want = ended(fleet(replicas=1, ranks=2, steps=steps, script=script), {"r0.1"}, 2)["r0.1-0"]
    run = fleet(replicas=2, ranks=2, steps=steps, script=script)
    for name, found in ended(run, {"r0.1", "r1.1"}, 2).items():
        assert found["fingerprint"] == want["fingerprint"], f"{name}\n{run.logs()}"
    told = {event.action: event for event in run.driven.events if isinstance(event, ev.VerdictReached)}
    assert list(told) == ["skip_batch"], told
    assert told["skip_batch"].samples == [21], told


@pytest.mark.soak
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("names", "two stages of the pipeline have a tensor 0.0.weight: ranks 0 and 1"),
        ("statistics", "a microbatch changed layers.0.1.running_mean, a buffer of a stage of the pipeline"),
        ("backward", "step.backward(loss) was called in a pipeline"),
        ("frozen", "some parts of the model require a gradient and others do not"),
    ],
)
def test_what_cannot_be_had_is_told(fleet: Callable[..., Any], wrong: str, says: str) -> None:
    run = fleet(replicas=1, ranks=2, steps=4, script=[SCRIPT, "--wrong", wrong], max_restarts=0)
    assert run.finish() != 0
    assert says in run.logs()
